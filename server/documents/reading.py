"""Documents -> their kind and their text, each read in a process of its own (`extract.py`), within limits."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from teola_plugin.server.errors import HttpError, bad_request, too_many
from teola_plugin.server.settings import DocumentSettings

DocumentKind = Literal["text", "html", "pdf"]
_HEAD = 1024
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CHARSETS = {
    **dict.fromkeys(("utf-8", "utf8", "us-ascii", "ascii"), "utf-8"),
    **dict.fromkeys(("iso-8859-1", "latin1", "latin-1", "windows-1252", "cp1252"), "windows-1252"),
    "iso-8859-15": "iso-8859-15",
}
"""Character sets that pages declare -> those that browsers use for them. Others are refused: some of Python's codecs do
more than decode."""
_DECLARED = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_-]{1,32})", re.IGNORECASE)
_HTML = re.compile(
    r"\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<!--.{0,500}?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_TEXT = re.compile(r"text/|application/(?:json|xml|yaml|x-yaml|toml|x-ndjson|markdown)$|.*\+(?:json|xml)$")


def kind_of(data: bytes, declared: str = "", name: str = "") -> DocumentKind:
    """Return the kind of a document by its content, which has to fit what the client says.

    `declared`: the client's content type, if any. Raise `HttpError` (400, 415).
    """
    declared = declared.partition(";")[0].strip().lower()
    pdf = data[:_HEAD].lstrip().startswith(b"%PDF-")
    expected = _declared_kind(declared, name.lower())
    if pdf != (expected == "pdf") and expected != "":
        is_one = "is a PDF" if pdf else "is no PDF"
        raise _bad_document(
            name, f"{is_one}, and is declared as {declared or name.rpartition('.')[2]!r:.80}", "mismatch", 400
        )
    if pdf:
        return "pdf"
    if declared and not expected and declared not in _ANY:
        raise _bad_document(name, f"is declared as {declared!r:.80}", "unsupported_document", 415)
    text = decode_document(data, name)
    if expected == "html" or (expected == "" and _HTML.match(text[: 2 * _HEAD])):
        return "html"
    return "text"


_ANY = frozenset({"application/octet-stream", "binary/octet-stream"})
_HTMLS = frozenset({"text/html", "application/xhtml+xml"})


def _declared_kind(declared: str, name: str) -> str:
    """Return the kind that the client declares, by its content type or else the end of the name; empty for none."""
    if declared == "application/pdf" or (not _is_specific(declared) and name.endswith(".pdf")):
        return "pdf"
    if declared in _HTMLS or (not _is_specific(declared) and name.endswith((".html", ".htm", ".xhtml"))):
        return "html"
    if _TEXT.match(declared) or (not _is_specific(declared) and name.endswith((".txt", ".md", ".csv", ".json"))):
        return "text"
    return ""


def _is_specific(declared: str) -> bool:
    return bool(declared) and declared not in _ANY


def decode_document(data: bytes, name: str = "") -> str:
    """Return the text, decoded by its byte order mark, by what a page declares, or as UTF-8.

    Raise `HttpError` for data that is no text.
    """
    charset = next((codec for bom, codec in _BOMS if data.startswith(bom)), "")
    if not charset and (declaration := _DECLARED.search(data[:_HEAD])):
        charset_name = declaration[1].decode().lower()
        if charset_name not in _CHARSETS:
            raise _bad_document(name, f"declares the character set {charset_name!r}", "unsupported_document", 415)
        charset = _CHARSETS[charset_name]
    try:
        text = data.decode(charset or "utf-8")
    except UnicodeDecodeError:
        raise _bad_document(name, f"is no {(charset or 'UTF-8').upper()} text", "unsupported_document", 415) from None
    if _CONTROL.search(text):
        raise _bad_document(name, "is no text", "unsupported_document", 415)
    return text


def _bad_document(name: str, reason: str, code: str, status: int) -> HttpError:
    hint = "send text (UTF-8), HTML or PDF, and declare it as what it is"
    return HttpError(status, f"the document {name or 'given'!r:.140} {reason}.", hint=hint, code=code, param="file")


_MODULE = "teola_plugin.server.documents.extract"
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "SYSTEMROOT", "PATH", "LD_LIBRARY_PATH")
"""Variables that the process needs to find Python's modules. It gets no others, so no keys."""
_HINTS = {
    "encrypted_document": "send it without a password",
    "too_many_pages": "split it",
    "document_too_long": "split it",
    "document_too_complex": "print it to a new PDF, or send its text",
    "broken_document": "open it and save it anew, or send its text",
}


@dataclass(frozen=True, slots=True)
class ReadDocument:
    """The text of a document, and its kind and size."""

    name: str
    kind: DocumentKind
    text: str
    bytes: int
    """Size of the document itself."""
    pages: int | None = None


class Reader:
    """The reader of one server's documents. Used on its loop."""

    def __init__(self, settings: DocumentSettings) -> None:
        """Prepare to read `settings.at_once` documents at a time.

        `_waiting` counts documents that wait for one of these places; beyond `settings.waiting` further ones are
        refused with 429.
        """
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.at_once)
        self._waiting = 0

    async def read(self, name: str, data: bytes, declared: str = "") -> ReadDocument:
        """Return the text of a document.

        Raise `HttpError` for what is no document, is too large or cannot be read; 429 if too many wait.
        """
        if len(data) > self._settings.max_bytes:
            raise too_large(name, self._settings.max_bytes)
        kind = kind_of(data, declared, name)
        text, pages = (decode_document(data, name), None) if kind == "text" else await self._extract(name, kind, data)
        if not text.strip():
            hint = "make a scanned PDF readable first" if kind == "pdf" else "send one with text"
            raise bad_request(f"the document {name!r:.140} holds no text.", hint, param="file", code="no_text")
        if len(text) > self._settings.max_characters:
            raise _unreadable(name, "document_too_long", f"holds more than {self._settings.max_characters} characters")
        return ReadDocument(name, kind, text, len(data), pages)

    async def _extract(self, name: str, kind: DocumentKind, data: bytes) -> tuple[str, int | None]:
        """Return the text of a PDF or HTML page, and its number of pages, as a process of its own reads them.

        Raise `HttpError` if the document cannot be read, and 429 if too many wait.
        """
        input = data if kind == "pdf" else decode_document(data, name).encode()
        async with self._reading_slot():
            reply = await self._run_extractor(name, kind, input)
        if "error" in reply:
            raise _unreadable(name, reply["error"], reply["message"])
        return reply["text"], reply["pages"]

    @asynccontextmanager
    async def _reading_slot(self) -> AsyncIterator[None]:
        """Wait for one of the few places in which documents are read at a time, and hold it while the body runs.

        Raise `HttpError` (429) if too many wait already.
        """
        if self._slots.locked() and self._waiting >= self._settings.waiting:
            message = "the server has as many documents to read as it takes."
            raise too_many(message, 2, code="documents_queue_full", hint="wait as long as Retry-After says")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _run_extractor(self, name: str, kind: DocumentKind, data: bytes) -> dict[str, Any]:
        """Return what the process writes. The process ends with this call."""
        limits = self._settings
        figures = (limits.max_pages, limits.max_characters, limits.memory, math.ceil(limits.seconds) + 1)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", _MODULE, kind, *map(str, figures)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(data), limits.seconds)
        except TimeoutError:
            raise _unreadable(name, "document_too_complex", f"cannot be read within {limits.seconds:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            reply: dict[str, Any] = json.loads(output)
        except ValueError:  # a limit has ended it
            raise _unreadable(name, "document_too_complex", "needs more memory or time than it may have") from None
        return reply


def too_large(name: str, max_bytes: int) -> HttpError:
    message = f"the document {name!r:.140} is larger than {max_bytes} bytes."
    return HttpError(413, message, hint="split it", param="file", code="document_too_large")


def _unreadable(name: str, code: str, reason: str) -> HttpError:
    return bad_request(f"the document {name!r:.140} {reason}.", _HINTS.get(code, ""), param="file", code=code)
