"""Graphs as apps: with checkpoints they go on where they were, and may stop to ask somebody."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.adapters import app_frameworks
from teola_plugin.server.errors import bad_request
from teola_plugin.server.models.app_inputs import (
    Asked,
    Pieces,
    Way,
    answer_of,
    check_messages,
    framework_messages,
    last_text,
    plain,
    text_in,
)
from teola_plugin.server.settings import AppSettings
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.requests import ChatRequest

WAITING = "waiting"
"""What an answer tells, beside its text, where the graph has stopped to ask somebody."""
_QUERY = "teola_query"
"""In the metadata of a checkpoint: the submitted query whose it is."""


def given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    key = settings.input or ("messages" if "messages" in fast.channels else "")
    if not key:
        raise bad_request(
            f"the app {body.model!r} takes a state without messages.",
            "give it as JSON in metadata.inputs, or say the key in the app's settings (input)",
            param="metadata",
        )
    return {key: framework_messages(body) if key == "messages" else last_text(body)}


async def whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    state = await fast.ainvoke(_input(asked), _config(asked), **_durably(fast, asked))
    return await _answer(fast, asked, state, settings)


async def stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    """The tokens of one node, if the settings name it; then the answer, whose text counts."""
    state: Any = None
    given: dict[str, Any] = {"stream_mode": ["messages", "values"], **_durably(fast, asked)}
    async with aclosing(fast.astream(_input(asked), _config(asked), **given)) as chunks:
        async for mode, chunk in chunks:
            if mode == "values":
                state = chunk
            elif app_frameworks.is_chunk_of(chunk[1], settings.stream_node) and (piece := text_in(chunk[0])):
                yield piece
    yield await _answer(fast, asked, state, settings)


def check_inputs(fast: Any, inputs: Any, settings: AppSettings) -> None:
    """Raise `HttpError` for inputs that are no state of the graph."""
    if not isinstance(inputs, Mapping):
        if set(fast.get_input_jsonschema()) & {"properties", "$ref"}:
            raise bad_request("metadata.inputs: the state of a graph is an object.", "send one", param="metadata")
        return
    reducer = getattr(getattr(fast, "channels", {}).get("messages"), "operator", None)
    if "messages" in inputs and "add_messages" in getattr(reducer, "__name__", ""):
        check_messages(inputs["messages"])


GRAPH = Way(given, whole, stream, check_inputs)


async def _answer(fast: Any, asked: Asked, state: Any, settings: AppSettings) -> Answer:
    """Of the state that it has ended with, or what it waits for."""
    found = await stopped(fast, asked.thread)
    if found is None or not found.next:
        return answer_of(state, settings.output)
    return Answer("", more={WAITING: found.told()})


def _input(asked: Asked) -> Any:
    """None: it goes on from its last checkpoint."""
    kept = asked.kept
    told = (kept.value,) if kept is not None and kept.goes_on == "told" else asked.told
    if told and told[0] is not None:
        return app_frameworks.resume_command(told[0])
    return None if told or (kept is not None and kept.goes_on) else asked.value


def _config(asked: Asked) -> dict[str, Any]:
    config: dict[str, Any] = {"configurable": {"thread_id": asked.thread}}
    return config if asked.kept is None else {**config, "metadata": {_QUERY: asked.kept.id}}


def _durably(fast: Any, asked: Asked) -> dict[str, Any]:
    """Of a submitted query, a step is kept before the next one begins: what has ended never runs again."""
    return {"durability": "sync"} if asked.kept is not None and has_checkpoints(fast) else {}


# ------------------------------------------------------------ checkpoints


def has_checkpoints(fast: Any) -> bool:
    """Whether it is a graph that keeps them."""
    return hasattr(fast, "aget_state") and bool(getattr(fast, "checkpointer", None))


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a thread is."""

    at: str
    """Id of its last checkpoint."""
    next: tuple[str, ...]
    """Nodes that come; none where it is over."""
    questions: tuple[dict[str, Any], ...]
    """`id` and `value` of the interrupts that nobody has answered."""
    query: str = field(default="")
    """The submitted query that made the checkpoint."""

    def told(self) -> dict[str, Any]:
        return {"at": self.at, "next": list(self.next), "interrupts": list(self.questions)}


async def stopped(fast: Any, thread: str) -> Stop | None:
    """None without checkpoints."""
    if not has_checkpoints(fast):
        return None
    state = await fast.aget_state({"configurable": {"thread_id": thread}})
    questions = tuple({"id": one.id, "value": plain(one.value)} for one in state.interrupts)
    at = str(state.config["configurable"].get("checkpoint_id", ""))
    return Stop(at, tuple(state.next), questions, str((state.metadata or {}).get(_QUERY, "")))


def waits(fast: Any, stop: Stop, approved: str) -> bool:
    """Whether somebody has to say that the thread may go on, as far as its checkpoint tells. `approved`: the checkpoint
    behind which somebody has said so."""
    if stop.questions:
        return True
    before, after = getattr(fast, "interrupt_before_nodes", ()), getattr(fast, "interrupt_after_nodes", ())
    if not stop.next or stop.at == approved:
        return False
    return bool(after) or before == "*" or bool(set(before) & set(stop.next))
