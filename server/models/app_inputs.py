"""Requests to apps and their answers: what apps take for messages or `metadata`, and the answer in what they return.

No framework is imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.adapters import app_frameworks
from teola_plugin.graph import LLM_PREFILLS, PrimitiveKind
from teola_plugin.observe.spans import GENERATION, QueryTrace
from teola_plugin.server.documents.parts import DOCUMENT
from teola_plugin.server.errors import bad_request
from teola_plugin.server.live_queries import SubmittedQueryRef
from teola_plugin.server.settings import AppSettings
from teola_plugin.server.wire.answers import Answer, Usage
from teola_plugin.server.wire.requests import ChatMessage, ChatRequest, parse_json
from teola_plugin.server.wire.sampling import calls_of, content_of, text_of


@dataclass(frozen=True, slots=True)
class AppRequest:
    """One request to an app."""

    value: Any
    thread: str
    """The conversation that a graph with checkpoints goes on with: each tenant has its own."""
    config: Any = None
    """Settings of a deployed workflow, for this query alone."""
    submitted: SubmittedQueryRef | None = None
    """The submitted query that the request belongs to."""
    resume_values: tuple[Any, ...] = ()
    """The one value that answers a graph which has stopped to ask; empty where it has not asked."""
    on_query_begin: Callable[[str], object] = bool
    """Called with the id of the query that the app begins in the pool, if it begins one."""


Pieces = AsyncIterator["str | Answer"]
"""Pieces of text, then the whole answer unless it is that text and nothing more. An app that cannot stream yields the
whole answer alone."""


@dataclass(frozen=True, slots=True)
class AppProtocol:
    """The way to call apps of one kind."""

    to_input: Callable[[Any, ChatRequest, AppSettings], Any]
    """Returns the app's input for a chat."""
    answer: Callable[[Any, Any, AppSettings], Any]
    """A coroutine function that returns the whole answer."""
    stream: Callable[[Any, Any, AppSettings], Pieces]
    check_inputs: Callable[[Any, Any, AppSettings], None]
    """Raises `HttpError` for inputs in `metadata` that the app cannot take."""
    one_at_a_time: bool = False
    """True if the app keeps a call's conversation in itself, so that calls have to follow each other."""


INPUTS = "inputs"
"""The key of `metadata` that holds an app's whole input, as JSON text (or as it is)."""


def inputs_in_metadata(body: ChatRequest) -> Any:
    """Return the app's input as `metadata` has it; None where it has none. Raise `HttpError`.

    OpenAI's clients send texts in `metadata`, so the input may be JSON text; any other value is taken as it is. The
    error is for text that is no JSON.
    """
    inputs = (body.metadata or {}).get(INPUTS)
    if not isinstance(inputs, str):
        return inputs
    return parse_json(inputs, "metadata.inputs", 'e.g. {"inputs": "{\\"question\\": \\"...\\"}"}')


def without_documents(body: ChatRequest) -> tuple[ChatRequest, list[tuple[str, str]]]:
    """Return the chat without its documents, and name and text of each document."""
    documents, messages = list[tuple[str, str]](), list[ChatMessage]()
    for message in body.messages:
        content = message.content
        if isinstance(content, list):
            documents += [(str(p.get("name") or ""), str(p["text"])) for p in content if _is_document(p)]
            content = [part for part in content if not _is_document(part)]
        messages.append(message.model_copy(update={"content": content}) if content != message.content else message)
    return (body.model_copy(update={"messages": messages}) if documents else body), documents


def _is_document(part: Mapping[str, Any]) -> bool:
    """Return True for a document that has been read: a part with its text."""
    return part.get("type") == DOCUMENT and isinstance(part.get("text"), str)


def last_text(body: ChatRequest) -> str:
    """Return the text of the user's last message, or of the last message. Raise `HttpError` for other content.

    It is the input of apps that take one text, such as query engines and chains on a question; earlier messages are
    ignored for these.
    """
    of_user = [m for m in body.messages if m.role == "user"]
    return text_of((of_user or body.messages)[-1], body.model)


def roles_and_texts(body: ChatRequest) -> list[tuple[str, str]]:
    """Return role and text of all messages. Raise `HttpError`."""
    return [(m.role, text_of(m, body.model)) for m in body.messages]


def framework_messages(body: ChatRequest) -> list[Any]:
    """Return all messages as chains and graphs take them.

    Raise `HttpError` for messages that the framework has no form for.
    """
    return [_framework_message(message, at, body.model) for at, message in enumerate(body.messages)]


def _framework_message(message: ChatMessage, at: int, model: str) -> Any:
    """Return a message of a chat as the framework of chains and graphs takes it.

    `at`: its index in the chat, for errors. Raise `HttpError` if a field that its role needs is missing, or for content
    that is no text.
    """
    text, calls = content_of(message, model), calls_of(message)
    required = {"tool": "tool_call_id", "function": "name"}.get(message.role)
    if required is not None and getattr(message, required) is None:
        reason = f"messages.{at}.{required}: a message of the role {message.role} needs it."
        raise bad_request(reason, "see OpenAI's reference of chats", param=f"messages.{at}.{required}")
    fields = {"name": message.name, "tool_call_id": message.tool_call_id if message.role == "tool" else None}
    present = {key: value for key, value in fields.items() if value is not None}
    return app_frameworks.to_message(message.role, text, present, calls)


def check_messages(messages: Any) -> None:
    """Raise `HttpError` for inputs of a client that the app's framework does not take as messages."""
    try:
        app_frameworks.check_messages(messages)
    except Exception as error:  # of a class that depends on the fault
        reason = f"metadata.inputs: LangChain cannot read the messages ({type(error).__name__})."
        raise bad_request(reason, "see OpenAI's form of messages", param="metadata") from None


# ------------------------------------------------------------ what apps return


def answer_of(value: Any, key: str = "") -> Answer:
    """Return the answer in an app's output: a text, a message, the last of `messages`, or a dict's value by `key`.

    With an empty `key` the answer is found by usual names. Sources, where the output has any, are added under
    `sources`.
    """
    if hasattr(value, "outputs") and hasattr(value, "answer"):  # the result of a workflow of our own
        output = value.outputs.get(key) if key else value.answer
        return Answer(text_in(output), more={"sources": plain(value.sources)} if value.sources else {})
    return Answer(text_in(value, key), more=_sources(value))


def usage_in(trace: QueryTrace) -> Usage:
    """Return the tokens of a query's generations, without those that nobody used.

    Prompt and cached tokens are those of prefilling. Completion tokens are those of decoding, and what requests that
    read and write in one step have written.
    """
    used = [span for span in trace.spans if not span.unused]
    read = [span for span in used if span.kind in _READ]
    completion = sum(span.tokens for span in used if span.kind in _WROTE) + sum(span.written for span in read)
    return Usage(sum(span.tokens for span in read), completion, sum(span.cached for span in read))


_READ = {*(kind.name for kind in LLM_PREFILLS - {PrimitiveKind.PARTIAL_PREFILLING}), GENERATION}
_WROTE = {PrimitiveKind.DECODING.name, PrimitiveKind.PARTIAL_DECODING.name}


def is_text(value: Any) -> bool:
    """Return True for a text, and for a message of LangChain's."""
    return isinstance(value, str) or (getattr(value, "content", None) is not None and hasattr(value, "type"))


def text_in(value: Any, key: str = "") -> str:
    """Return the answer's text in whatever an app returns: a text, a message, a dict, or a response of LlamaIndex.

    `key`: the key of a dict that holds the answer. A value without a text becomes JSON.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return text_in(_part(value, key))
    content = getattr(value, "content", None)
    if is_text(value):
        text = getattr(value, "text", "")
        return content if isinstance(content, str) else str(text() if callable(text) else text)
    for name in ("response", "message", "result"):  # of LlamaIndex: responses, agents' outputs, the end of a run
        if (inner := getattr(value, name, None)) is not None and not callable(inner):
            return text_in(inner)
    return content if isinstance(content, str) else json.dumps(plain(value), ensure_ascii=False)


_ANSWERS = ("output", "answer", "result", "response", "text")


def _part(value: Mapping[str, Any], key: str) -> Any:
    """Return the part of a dict that is the answer."""
    if key:
        return value.get(key, "")
    messages = value.get("messages")
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str):
        return messages[-1]
    text = next((value[name] for name in _ANSWERS if isinstance(value.get(name), str)), None)
    return json.dumps(plain(value), ensure_ascii=False) if text is None else text


def plain(value: Any, depth: int = 0) -> Any:
    """Return JSON-ready data: the text of what is no data, and null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if depth > 8:
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one, depth + 1) for one in value]
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return plain(dump(), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, depth + 1)
    return str(value)


def _sources(value: Any) -> dict[str, Any]:
    """Return the nodes that a query engine's answer rests on.

    Each has its text and its score, which is None where the retriever gave none. The result is empty for other outputs.
    """
    nodes = getattr(value, "source_nodes", None)
    if not isinstance(nodes, list) or not nodes:
        return {}
    return {"sources": [{"text": _text(one), "score": plain(getattr(one, "score", None))} for one in nodes]}


def _text(node: Any) -> str:
    text = getattr(node, "text", None)
    return text if isinstance(text, str) else str(node)
