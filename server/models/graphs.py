"""Graphs as apps: with checkpoints they continue where they were, and may stop to ask somebody."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.adapters import app_frameworks
from teola_plugin.server.errors import bad_request
from teola_plugin.server.models.app_inputs import (
    AppProtocol,
    AppRequest,
    Pieces,
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
"""Key of `Answer.more` that says where the graph has stopped to ask somebody."""
_QUERY = "teola_query"
"""Key of a checkpoint's metadata: the submitted query that made it."""


def to_input(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """Return the state with which a graph begins for a chat: all messages under `messages`, or the last text under the
    key of the settings.

    Raise `HttpError` if the graph's state has no such key.
    """
    key = settings.input or ("messages" if "messages" in fast.channels else "")
    if not key:
        raise bad_request(
            f"the app {body.model!r} takes a state without messages.",
            "give it as JSON in metadata.inputs, or say the key in the app's settings (input)",
            param="metadata",
        )
    return {key: framework_messages(body) if key == "messages" else last_text(body)}


async def answer(fast: Any, request: AppRequest, settings: AppSettings) -> Answer:
    state = await fast.ainvoke(_input(request), _config(request), **_durability(fast, request))
    return await _answer(fast, request, state, settings)


async def stream(fast: Any, request: AppRequest, settings: AppSettings) -> Pieces:
    """Yield the tokens of one node, if the settings name one; then the answer, whose text counts."""
    state: Any = None
    options: dict[str, Any] = {"stream_mode": ["messages", "values"], **_durability(fast, request)}
    async with aclosing(fast.astream(_input(request), _config(request), **options)) as chunks:
        async for mode, chunk in chunks:
            if mode == "values":
                state = chunk
            elif app_frameworks.is_chunk_of(chunk[1], settings.stream_node) and (piece := text_in(chunk[0])):
                yield piece
    yield await _answer(fast, request, state, settings)


def check_inputs(fast: Any, inputs: Any, settings: AppSettings) -> None:
    """Raise `HttpError` for inputs that are no state of the graph."""
    if not isinstance(inputs, Mapping):
        if set(fast.get_input_jsonschema()) & {"properties", "$ref"}:
            raise bad_request("metadata.inputs: the state of a graph is an object.", "send one", param="metadata")
        return
    reducer = getattr(getattr(fast, "channels", {}).get("messages"), "operator", None)
    if "messages" in inputs and "add_messages" in getattr(reducer, "__name__", ""):
        check_messages(inputs["messages"])


GRAPH = AppProtocol(to_input, answer, stream, check_inputs)


async def _answer(fast: Any, request: AppRequest, state: Any, settings: AppSettings) -> Answer:
    """Return the answer in the state that the graph ended with, or the questions that it waits for.

    A graph that has stopped is told by its last checkpoint: the answer then has no text, and the stop under `WAITING`.
    A graph without checkpoints cannot stop.
    """
    stop = await find_stop(fast, request.thread)
    if stop is None or not stop.next:
        return answer_of(state, settings.output)
    return Answer("", more={WAITING: stop.to_json()})


def _input(request: AppRequest) -> Any:
    """Return the graph's input; None if it continues from its last checkpoint."""
    submitted = request.submitted
    answers = request.resume_values
    if submitted is not None and submitted.resumes_from == "answer":
        answers = (submitted.value,)
    if answers and answers[0] is not None:
        return app_frameworks.resume_command(answers[0])
    return None if answers or (submitted is not None and submitted.resumes_from) else request.value


def _config(request: AppRequest) -> dict[str, Any]:
    config: dict[str, Any] = {"configurable": {"thread_id": request.thread}}
    return config if request.submitted is None else {**config, "metadata": {_QUERY: request.submitted.id}}


def _durability(fast: Any, request: AppRequest) -> dict[str, Any]:
    """Return options that store each step of a submitted query before the next begins, so that no step runs twice."""
    return {"durability": "sync"} if request.submitted is not None and has_checkpoints(fast) else {}


# ------------------------------------------------------------ checkpoints


def has_checkpoints(fast: Any) -> bool:
    """Return True for a graph that keeps checkpoints."""
    return hasattr(fast, "aget_state") and bool(getattr(fast, "checkpointer", None))


@dataclass(frozen=True, slots=True)
class Stop:
    """The last checkpoint of a thread."""

    at: str
    """Id of its last checkpoint."""
    next: tuple[str, ...]
    """The nodes to run next; none if the graph has ended."""
    questions: tuple[dict[str, Any], ...]
    """`id` and `value` of the open interrupts."""
    query: str = field(default="")
    """The submitted query that made the checkpoint."""

    def to_json(self) -> dict[str, Any]:
        return {"at": self.at, "next": list(self.next), "interrupts": list(self.questions)}


async def find_stop(fast: Any, thread: str) -> Stop | None:
    """Return where a thread is; None for a graph without checkpoints."""
    if not has_checkpoints(fast):
        return None
    state = await fast.aget_state({"configurable": {"thread_id": thread}})
    questions = tuple({"id": one.id, "value": plain(one.value)} for one in state.interrupts)
    at = str(state.config["configurable"].get("checkpoint_id", ""))
    return Stop(at, tuple(state.next), questions, str((state.metadata or {}).get(_QUERY, "")))


def is_waiting(fast: Any, stop: Stop, approved: str) -> bool:
    """Return True if somebody has to answer or approve before the thread may continue, as far as its checkpoint tells.

    `approved`: the checkpoint after which somebody has approved.
    """
    if stop.questions:
        return True
    before, after = getattr(fast, "interrupt_before_nodes", ()), getattr(fast, "interrupt_after_nodes", ())
    if not stop.next or stop.at == approved:
        return False
    return bool(after) or before == "*" or bool(set(before) & set(stop.next))
