"""Documents in requests: parts of messages in OpenAI's two forms, and documents of submitted queries.

A document is in one of three stages, each a part of a message: `file` as clients send it (an id, base64, an address),
`file` with the id of a stored one (in stored queries), `document` with its text (what models get).
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
"""Types of parts: a document before and after it is read."""


@dataclass(frozen=True, slots=True)
class ClientDocument:
    """A document as a client sends it: one of an id, bytes, a text and an address."""

    name: str = ""
    id: str = ""
    url: str = ""
    data: bytes | None = None
    text: str | None = None
    type: str = ""
    """Content type that the client declares."""


def parse_document(part: Any) -> ClientDocument:
    """Return the document in a `file` part, an `input_file`, or an item of `documents`. Raise `HttpError`."""
    fields = part.get("file", part) if isinstance(part, Mapping) else None
    if not isinstance(fields, Mapping):
        raise _malformed("a document is no object.")
    keys = ("file_id", "file_data", "file_url", "url", "text")
    sources = {key: fields[key] for key in keys if fields.get(key) is not None}
    if len(sources) != 1 or not all(isinstance(value, str) for value in sources.values()):
        raise _malformed("a document is given by one of file_id, file_data, url and text.")
    name = fields.get("filename", fields.get("name", ""))
    if name is not None and not isinstance(name, str):
        raise _malformed("the name of a document is no text.")
    [(key, value)] = sources.items()
    name = file_name(name or "")
    match key:
        case "file_id":
            return ClientDocument(name, id=value)
        case "text":
            return ClientDocument(name or "text", text=value)
        case "file_data":
            type, data = _decode_data_url(value)
            return ClientDocument(name or "file", data=data, type=type)
    return ClientDocument(name, url=value)


def file_name(path: str) -> str:
    """Return the name of a file, without folders and characters that no name has.

    `path` comes from a client, in the form of Windows or of others. At most 200 characters are kept; the result may be
    empty.
    """
    last = path.replace("\\", "/").rpartition("/")[2]
    return "".join(sign for sign in last if sign.isprintable()).strip()[:200]


def _decode_data_url(value: str) -> tuple[str, bytes]:
    """Return content type and bytes of base64, with or without `data:...;base64,` before it. Raise `HttpError`."""
    type = ""
    if value.startswith("data:"):
        head, _, value = value.partition(",")
        type, _, encoding = head.removeprefix("data:").partition(";")
        if not encoding.endswith("base64"):
            raise _malformed("file_data is no base64.")
    try:
        return type, base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        raise _malformed("file_data is no base64.") from None


def _malformed(message: str) -> HttpError:
    hint = 'e.g. {"filename": "a.pdf", "file_data": "data:application/pdf;base64,..."} or {"file_id": "file-..."}'
    return bad_request(message, hint, param="documents")


# ------------------------------------------------------------ in messages


def is_file(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (FILE, "input_file")


def has_files(body: ChatRequest) -> bool:
    """Return True if the chat has documents that are not read yet."""
    return any(isinstance(one.content, list) and any(map(is_file, one.content)) for one in body.messages)


def file_parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the `file` parts of messages as JSON.

    `messages` is what a client sent and may be malformed: whatever is no list of messages with parts yields nothing,
    and is refused elsewhere.
    """
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from (part for part in content if is_file(part)) if isinstance(content, list) else ()


def without_files(body: Mapping[str, Any]) -> list[Any]:
    """Return what a chat as JSON says outside its documents, in whose text no variables are filled in."""
    rest = [value for key, value in body.items() if key != "messages"]
    for message in body["messages"]:
        content = message.get("content")
        parts = [part for part in content if not is_file(part)] if isinstance(content, list) else content
        rest.append({**message, "content": parts})
    return rest


Change = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


async def with_parts(messages: Sequence[Mapping[str, Any]], change: Change) -> list[dict[str, Any]]:
    """Return messages as JSON, with each `file` part changed."""
    changed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [dict(await change(part)) if is_file(part) else part for part in content]
        changed.append({**message, "content": content} if "content" in message else dict(message))
    return changed


def document_part(name: str, text: str) -> dict[str, Any]:
    return {"type": DOCUMENT, "name": name, "text": text}


def shown_document(part: Mapping[str, Any]) -> str:
    """Return the document as a model reads it."""
    return f'<document name="{html.escape(str(part.get("name") or ""))}">\n{part.get("text") or ""}\n</document>\n'


def with_documents(messages: list[dict[str, Any]], parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as JSON, with the parts before what the user says last."""
    if not parts:
        return messages
    at = max((i for i, one in enumerate(messages) if one.get("role") == "user"), default=len(messages) - 1)
    content = messages[at].get("content")
    content_parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    return [*messages[:at], {**messages[at], "content": [*parts, *content_parts]}, *messages[at + 1 :]]
