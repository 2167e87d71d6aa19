"""Documents -> their text, each in a process of its own (`extract.py`), some at a time, within limits."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from teola_plugin.server.documents.content import DocumentKind, decoded, kind_of
from teola_plugin.server.documents.settings import DocumentSettings
from teola_plugin.server.errors import HttpError, bad_request, too_many

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
