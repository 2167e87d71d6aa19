"""`shadow=` for LangChain: the original's call in the background, and chains that must not be called twice."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.runnables.history import RunnableWithMessageHistory

from teola_plugin.adapters import comparison
from teola_plugin.adapters.comparison import Entries, Fields, difference, failure
from teola_plugin.adapters.langchain.composites import parts
from teola_plugin.adapters.langchain.prefetching import untraced
from teola_plugin.adapters.shadow import OriginalCall, Shadow, ShadowReport
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import WorkflowTemplate
from teola_plugin.runtime.call_limits import is_inside_prefetch
from teola_plugin.shims import langchain as shims

__all__ = ["difference", "failure", "snapshot"]


def snapshot(value: Any, depth: int = 60) -> Any:
    """Plain data that stands for the value; later changes of the value do not reach it.

    Of a message, what differs from call to call is left out: ids, token counts, what the provider says of the response.
    """
    return comparison.snapshot(value, depth, _fields_of_known_class)


def _fields_of_known_class(value: Any) -> Fields | None:
    return _message(value) if isinstance(value, BaseMessage) else None


def _message(message: BaseMessage) -> Fields:
    """Yield the fields of a message that are compared: content, name and tool calls, without ids."""
    yield "content", message.content
    yield "name", message.name
    for name in ("status", "artifact"):
        yield name, getattr(message, name, None)
    for name in ("tool_calls", "invalid_tool_calls"):
        calls = getattr(message, name, ())
        yield name, [{"name": call.get("name"), "args": call.get("args")} for call in calls]


__all__ = ["Shadow", "ShadowReport", "check_repeatable", "original_call", "shadow_of"]


def shadow_of(share: float) -> Shadow:
    """Return the shadow of a Runnable. Raises `RegistrationError` for what is no share."""
    return Shadow(share, snapshot)


def original_call(
    original: Runnable[Any, Any],
    input: Any,
    config: RunnableConfig | None,
    kwargs: Mapping[str, Any],
    *,
    is_async: bool,
) -> OriginalCall:
    """Return the `invoke` or `ainvoke` of the original, see `adapters/shadow.py`."""
    input = _without_volatile_fields(input)
    quiet: Any = {key: value for key, value in ensure_config(config).items() if key not in ("callbacks", "run_id")}

    def call() -> Any:
        with untraced():
            return original.invoke(input, quiet, **kwargs)

    async def acall() -> Any:
        with untraced():
            return await original.ainvoke(input, quiet, **kwargs)

    return OriginalCall.of(acall if is_async else call, _silence)


def _without_volatile_fields(value: Any, depth: int = 20) -> Any:
    """A copy of the containers; what they hold is shared."""
    if type(value) is dict and depth:
        return {key: _without_volatile_fields(inner, depth - 1) for key, inner in value.items()}
    return [_without_volatile_fields(inner, depth - 1) for inner in value] if type(value) is list and depth else value


def _silence() -> None:
    """Keep handlers from hearing of calls in this context."""
    is_inside_prefetch.set(False)
    var_child_runnable_config.set(None)
    shims.silence()


# ------------------------------------------------------------ where it must not be


def check_repeatable(chain: Runnable[Any, Any], template: WorkflowTemplate) -> None:
    """Raises `RegistrationError` for a chain that is known to write: running it twice would write twice.

    Also where a second run could not be kept from the user's handlers.
    """
    if not shims.listeners_are_known():
        raise shims.unknown_listeners("shadow=")
    written = next(itertools.chain(_writes(template), _histories(chain)), None)
    if written is not None:
        raise RegistrationError(
            f"shadow= would run the chain a second time, and it writes: {written}.",
            hint="use shadow= only for chains without side effects",
        )


def _writes(template: WorkflowTemplate) -> Iterator[str]:
    """Yield a phrase for each component of a template, also in its bodies, that writes to something."""
    for component in template.components:
        yield from (f"{component.name} to {effect.resource}" for effect in component.effects if effect.writes)
        for inner in (component.body, component.otherwise):
            if inner is not None:
                yield from _writes(inner)


def _histories(node: Runnable[Any, Any]) -> Iterator[str]:
    """Yield the reason for each part of a chain that keeps a message history, which a second call would write to."""
    if isinstance(node, RunnableWithMessageHistory):
        yield "it keeps a message history"
    elif isinstance(node, RunnableBindingBase):
        yield from _histories(node.bound)
    else:
        for _, part in parts(node):
            yield from _histories(part)


# ------------------------------------------------------------ how `teola compare` calls objects

PER_RUN = ("thread_id", "session_id")
"""Keys of a config that name what is remembered between calls."""


def entries_of(obj: Any) -> Entries:
    """Return the entries of a Runnable or a graph."""
    is_graph = any(cls.__module__.startswith("langgraph.") for cls in type(obj).__mro__)
    return _entries_of_graph(obj) if is_graph else _entries_of_runnable(obj)


def _entries_of_runnable(obj: Any) -> Entries:
    """Return how `teola compare` calls a Runnable: whole or streamed, with a fresh thread or session for each run."""
    config = _configs(obj)
    return Entries(
        "Runnable",
        "invoke, ainvoke, astream",
        lambda one, value: one.invoke(value, config()),
        lambda one, value: one.ainvoke(value, config()),
        lambda answer: snapshot(_without_interrupt_ids(answer)),
        lambda one, value: one.astream(value, config()),
    )


def _entries_of_graph(obj: Any) -> Entries:
    """Return how `teola compare` calls a graph: as a Runnable, but streamed by messages of its models."""
    config = _configs(obj)

    async def messages(graph: Any, value: Any) -> AsyncIterator[Any]:
        """Yield what the models write, as they write it; for a graph without models, what its nodes return."""
        async for _, piece in graph.astream(value, config(), stream_mode=["messages", "updates"]):
            yield piece[0] if isinstance(piece, tuple) else piece

    return replace(
        _entries_of_runnable(obj), kind="graph", names="invoke, ainvoke, astream of messages", pieces=messages
    )


def _configs(obj: Any) -> Callable[[], dict[str, Any] | None]:
    """Return a function that makes the config of a run, with a new thread or session if the object remembers by one."""
    if getattr(obj, "checkpointer", None) not in (None, False):
        keys = {"thread_id"}
    else:
        try:
            keys = {spec.id for spec in obj.config_specs}
        except Exception:  # a part of the user's that cannot tell
            keys = set()
    names = [key for key in PER_RUN if key in keys]
    return lambda: {"configurable": {key: uuid.uuid4().hex for key in names}} if names else None


def _without_interrupt_ids(answer: Any) -> Any:
    """Return the answer with the values of interrupts, whose ids belong to the thread."""
    interrupts = answer.get("__interrupt__") if isinstance(answer, dict) else None
    return {**answer, "__interrupt__": [getattr(one, "value", one) for one in interrupts]} if interrupts else answer
