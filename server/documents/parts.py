"""Documents in requests: parts of messages in OpenAI's two forms, and documents of submitted queries.

Three stages, each a part of a message: `file` as clients send it (an id, base64, an address), `file` with the id of a
kept one (in what is stored of a query), `document` with its text (what models are given).
"""

from __future__ import annotations

import base64
import binascii
import html
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.server.errors import HttpError, bad_request

if TYPE_CHECKING:
    from teola_plugin.server.wire.requests import ChatRequest

FILE, DOCUMENT = "file", "document"
"""Types of parts: one that is to be read, one that was."""


@dataclass(frozen=True, slots=True)
class GivenDocument:
    """What a client gives: one of an id, bytes, a text and an address."""

    name: str = ""
    id: str = ""
    url: str = ""
    data: bytes | None = None
    text: str | None = None
    type: str = ""
    """Content type that the client says."""


def given_document(part: Any) -> GivenDocument:
    """Of a `file` part, an `input_file`, or an item of `documents`. Raises `HttpError`."""
    found = part.get("file", part) if isinstance(part, Mapping) else None
    if not isinstance(found, Mapping):
        raise _wrong("a document is no object.")
    told = {key: found.get(key) for key in ("file_id", "file_data", "file_url", "url", "text")}
    known = {key: value for key, value in told.items() if value is not None}
    if len(known) != 1 or not all(isinstance(value, str) for value in known.values()):
        raise _wrong("a document is given by one of file_id, file_data, url and text.")
    name = found.get("filename", found.get("name", ""))
    if name is not None and not isinstance(name, str):
        raise _wrong("the name of a document is no text.")
    [(key, value)] = known.items()
    name = name_of(name or "")
    match key:
        case "file_id":
            return GivenDocument(name, id=value)
        case "text":
            return GivenDocument(name or "text", text=value)
        case "file_data":
            type, data = _decoded(value)
            return GivenDocument(name or "file", data=data, type=type)
    return GivenDocument(name, url=value)


def name_of(given: str) -> str:
    """Of a file, without folders and what no name has."""
    last = given.replace("\\", "/").rpartition("/")[2]
    return "".join(sign for sign in last if sign.isprintable()).strip()[:200]


def _decoded(value: str) -> tuple[str, bytes]:
    """Content type and bytes: base64, with or without `data:...;base64,` before it. Raises `HttpError`."""
    type = ""
    if value.startswith("data:"):
        head, _, value = value.partition(",")
        type, _, how = head.removeprefix("data:").partition(";")
        if not how.endswith("base64"):
            raise _wrong("file_data is no base64.")
    try:
        return type, base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("file_data is no base64.") from None


def _wrong(message: str) -> HttpError:
    hint = 'e.g. {"filename": "a.pdf", "file_data": "data:application/pdf;base64,..."} or {"file_id": "file-..."}'
    return bad_request(message, hint, param="documents")


# ------------------------------------------------------------ in messages


def is_file(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (FILE, "input_file")


def has_files(body: ChatRequest) -> bool:
    """Whether documents come with a chat that are not read yet."""
    return any(isinstance(one.content, list) and any(map(is_file, one.content)) for one in body.messages)


def file_parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Of messages as JSON."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from (part for part in content if is_file(part)) if isinstance(content, list) else ()


def without_files(body: Mapping[str, Any]) -> list[Any]:
    """What a chat as JSON says, but for its documents, whose text is nobody's to fill in."""
    rest = [value for key, value in body.items() if key != "messages"]
    for message in body["messages"]:
        content = message.get("content")
        said = [part for part in content if not is_file(part)] if isinstance(content, list) else content
        rest.append({**message, "content": said})
    return rest


Change = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


async def with_parts(messages: Sequence[Mapping[str, Any]], change: Change) -> list[dict[str, Any]]:
    """Messages as JSON, with each `file` part changed."""
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [dict(await change(part)) if is_file(part) else part for part in content]
        made.append({**message, "content": content} if "content" in message else dict(message))
    return made


def document_part(name: str, text: str) -> dict[str, Any]:
    return {"type": DOCUMENT, "name": name, "text": text}


def shown_document(part: Mapping[str, Any]) -> str:
    """As a model reads it."""
    return f'<document name="{html.escape(str(part.get("name") or ""))}">\n{part.get("text") or ""}\n</document>\n'


def with_documents(messages: list[dict[str, Any]], parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as JSON, with parts before what the user says last."""
    if not parts:
        return messages
    at = max((i for i, one in enumerate(messages) if one.get("role") == "user"), default=len(messages) - 1)
    content = messages[at].get("content")
    said = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    return [*messages[:at], {**messages[at], "content": [*parts, *said]}, *messages[at + 1 :]]
