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
"""What pages declare, and how browsers read it. Others are refused: some of Python's codecs do more than decode."""
_DECLARED = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_-]{1,32})", re.IGNORECASE)
_HTML = re.compile(
    r"\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<!--.{0,500}?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_TEXT = re.compile(r"text/|application/(?:json|xml|yaml|x-yaml|toml|x-ndjson|markdown)$|.*\+(?:json|xml)$")


def kind_of(data: bytes, declared: str = "", name: str = "") -> DocumentKind:
    """`declared`: the client's content type, if any. Raises `HttpError` (400, 415)."""
    declared = declared.partition(";")[0].strip().lower()
    pdf = data[:_HEAD].lstrip().startswith(b"%PDF-")
    wanted = _wanted(declared, name.lower())
    if pdf != (wanted == "pdf") and wanted != "":
        is_one = "is a PDF" if pdf else "is no PDF"
        raise _wrong(name, f"{is_one}, and is declared as {declared or name.rpartition('.')[2]!r:.80}", "mismatch", 400)
    if pdf:
        return "pdf"
    if declared and not wanted and declared not in _ANY:
        raise _wrong(name, f"is declared as {declared!r:.80}", "unsupported_document", 415)
    text = decoded(data, name)
    if wanted == "html" or (wanted == "" and _HTML.match(text[: 2 * _HEAD])):
        return "html"
    return "text"


_ANY = frozenset({"application/octet-stream", "binary/octet-stream"})
_HTMLS = frozenset({"text/html", "application/xhtml+xml"})


def _wanted(declared: str, name: str) -> str:
    """What the client says that it is: its type, else the end of its name. Empty where that says nothing."""
    if declared == "application/pdf" or (not _said(declared) and name.endswith(".pdf")):
        return "pdf"
    if declared in _HTMLS or (not _said(declared) and name.endswith((".html", ".htm", ".xhtml"))):
        return "html"
    if _TEXT.match(declared) or (not _said(declared) and name.endswith((".txt", ".md", ".csv", ".json"))):
        return "text"
    return ""


def _said(declared: str) -> bool:
    return bool(declared) and declared not in _ANY


def decoded(data: bytes, name: str = "") -> str:
    """The text: by its byte order mark, by what a page declares, else UTF-8. Raises `HttpError` for what is no text."""
    charset = next((codec for bom, codec in _BOMS if data.startswith(bom)), "")
    if not charset and (found := _DECLARED.search(data[:_HEAD])):
        said = found[1].decode().lower()
        if said not in _CHARSETS:
            raise _wrong(name, f"declares the character set {said!r}", "unsupported_document", 415)
        charset = _CHARSETS[said]
    try:
        text = data.decode(charset or "utf-8")
    except UnicodeDecodeError:
        raise _wrong(name, f"is no {(charset or 'UTF-8').upper()} text", "unsupported_document", 415) from None
    if _CONTROL.search(text):
        raise _wrong(name, "is no text", "unsupported_document", 415)
    return text


def _wrong(name: str, why: str, code: str, status: int) -> HttpError:
    hint = "send text (UTF-8), HTML or PDF, and declare it as what it is"
    return HttpError(status, f"the document {name or 'given'!r:.140} {why}.", hint=hint, code=code, param="file")


_MODULE = "teola_plugin.server.documents.extract"
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "SYSTEMROOT", "PATH", "LD_LIBRARY_PATH")
"""That the process needs to find Python's modules. What else is there, keys among it, is none of its business."""
_HINTS = {
    "encrypted_document": "send it without a password",
    "too_many_pages": "split it",
    "document_too_long": "split it",
    "document_too_complex": "print it to a new PDF, or send its text",
    "broken_document": "open it and save it anew, or send its text",
}


@dataclass(frozen=True, slots=True)
class ReadDocument:
    """A document's text, and what it was."""

    name: str
    kind: DocumentKind
    text: str
    bytes: int
    """Of the document itself."""
    pages: int | None = None


class Reader:
    """One server's. Lives on its loop."""

    def __init__(self, settings: DocumentSettings) -> None:
        self._settings = settings
        self._places = asyncio.Semaphore(settings.at_once)
        self._waiting = 0

    async def read(self, name: str, data: bytes, declared: str = "") -> ReadDocument:
        """Raises `HttpError` for a document that is none, or too large, or cannot be read; 429 where too many wait."""
        if len(data) > self._settings.max_bytes:
            raise too_large(name, self._settings.max_bytes)
        kind = kind_of(data, declared, name)
        text, pages = (decoded(data, name), None) if kind == "text" else await self._extracted(name, kind, data)
        if not text.strip():
            hint = "make a scanned PDF readable first" if kind == "pdf" else "send one with text"
            raise bad_request(f"the document {name!r:.140} holds no text.", hint, param="file", code="no_text")
        if len(text) > self._settings.max_characters:
            raise _refused(name, "document_too_long", f"holds more than {self._settings.max_characters} characters")
        return ReadDocument(name, kind, text, len(data), pages)

    async def _extracted(self, name: str, kind: DocumentKind, data: bytes) -> tuple[str, int | None]:
        given = data if kind == "pdf" else decoded(data, name).encode()
        async with self._place():
            told = await self._asked(name, kind, given)
        if "error" in told:
            raise _refused(name, told["error"], told["said"])
        return told["text"], told["pages"]

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._places.locked() and self._waiting >= self._settings.waiting:
            message = "the server has as many documents to read as it takes."
            raise too_many(message, 2, code="documents_queue_full", hint="wait as long as Retry-After says")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    async def _asked(self, name: str, kind: DocumentKind, data: bytes) -> dict[str, Any]:
        """What the process tells. It ends with this call, however that ends."""
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
            told, _ = await asyncio.wait_for(process.communicate(data), limits.seconds)
        except TimeoutError:
            raise _refused(name, "document_too_complex", f"cannot be read within {limits.seconds:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            found: dict[str, Any] = json.loads(told)
        except ValueError:  # it was ended by a limit
            raise _refused(name, "document_too_complex", "needs more memory or time than it may have") from None
        return found


def too_large(name: str, most: int) -> HttpError:
    message = f"the document {name!r:.140} is larger than {most} bytes."
    return HttpError(413, message, hint="split it", param="file", code="document_too_large")


def _refused(name: str, code: str, why: str) -> HttpError:
    return bad_request(f"the document {name!r:.140} {why}.", _HINTS.get(code, ""), param="file", code=code)
