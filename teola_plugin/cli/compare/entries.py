"""How an object is called: its sync, async and streaming entries, what they take, and what of their answer counts."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.errors import RegistrationError

Check = Callable[[Any], str]
Call = Callable[[Any, Any], Any]
PER_RUN = ("thread_id", "session_id")
"""Keys of a config that name what is remembered between calls."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Of one kind of objects. Each entry takes the object, plain or accelerated, and an input."""

    kind: str
    """For messages, e.g. `query engine`."""
    names: str
    """Of the methods that are called, for the report."""
    call: Call | None
    """None where the object has async entries only."""
    acall: Callable[[Any, Any], Awaitable[Any]]
    answer: Callable[[Any], Any]
    """What counts of what it gives, as plain data that later changes do not reach."""
    pieces: Callable[[Any, Any], AsyncIterator[Any]] | None = None
    """A stream of pieces; None for objects without one."""
    wrong: Check = lambda value: ""
    """What is wrong with an input, as text; empty for one that is taken."""
    fresh: Callable[[Any], None] = lambda obj: None
    """Forget what the object remembers of earlier calls."""


def entries_of(obj: Any, name: str) -> Entries:
    """Of an object that the user named. Raises `RegistrationError` for what is neither framework's."""
    homes = [cls.__module__ for cls in type(obj).__mro__]
    if any(home.startswith(("llama_index.core.", "workflows.")) for home in homes):
        from teola_plugin.cli.compare.llamaindex import entries

        found = entries(obj)
        if found is not None:
            return found
    if any(home.startswith("langchain_core.runnables.") for home in homes):
        return _of_graph(obj) if any(home.startswith("langgraph.") for home in homes) else _of_runnable(obj)
    raise RegistrationError(
        f"{name} is a {type(obj).__qualname__}, which cannot be compared.",
        hint="name a LangChain Runnable, a graph or agent, a LlamaIndex query engine, retriever, synthesizer, chat "
        "engine, workflow or agent, or a function without arguments that returns one",
    )


# ------------------------------------------------------------ LangChain, LangGraph


def _of_runnable(obj: Any) -> Entries:
    from teola_plugin.adapters.langchain.shadow import snapshot

    config = _configs(obj)
    return Entries(
        "Runnable",
        "invoke, ainvoke, astream",
        lambda one, value: one.invoke(value, config()),
        lambda one, value: one.ainvoke(value, config()),
        lambda made: snapshot(_answered(made)),
        lambda one, value: one.astream(value, config()),
    )


def _of_graph(obj: Any) -> Entries:
    config = _configs(obj)

    async def messages(graph: Any, value: Any) -> AsyncIterator[Any]:
        """What its models write, as they write it; of a graph without any, what its nodes give."""
        async for _, piece in graph.astream(value, config(), stream_mode=["messages", "updates"]):
            yield piece[0] if isinstance(piece, tuple) else piece

    return replace(_of_runnable(obj), kind="graph", names="invoke, ainvoke, astream of messages", pieces=messages)


def _configs(obj: Any) -> Callable[[], dict[str, Any] | None]:
    """Makes the config of a run: a thread or session that is new, where the object remembers by such a name."""
    if getattr(obj, "checkpointer", None) not in (None, False):
        known = {"thread_id"}
    else:
        try:
            known = {spec.id for spec in obj.config_specs}
        except Exception:  # a part of the user's that cannot tell
            known = set()
    names = [key for key in PER_RUN if key in known]
    return lambda: {"configurable": {key: uuid.uuid4().hex for key in names}} if names else None


def _answered(made: Any) -> Any:
    """Interrupts by what they say: their ids are those of the thread."""
    found = made.get("__interrupt__") if isinstance(made, dict) else None
    return made if not found else {**made, "__interrupt__": [getattr(one, "value", one) for one in found]}
