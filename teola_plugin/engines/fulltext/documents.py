"""The documents that are searched: given as chunks, or read from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Chunk

_TEXTS = (".txt", ".md", ".rst")


def read_documents(path: str | Path) -> list[Chunk]:
    """Read documents from a JSONL file or from the text files of a folder.

    Args:
        path: A JSONL file with one object per line (`text`, and optionally `url`, `title` and other metadata), or a
            folder with .txt, .md or .rst files, whose names become their addresses.

    Raises:
        RegistrationError: The file or folder cannot be read, or has no documents.
    """
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            files = sorted(file for file in place.rglob("*") if file.suffix in _TEXTS and file.is_file())
            found = [_of_file(file, place) for file in files]
        else:
            lines = place.read_text(encoding="utf-8-sig").split("\n")  # not splitlines(): JSON may hold U+2028
            found = [_of_line(place, n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RegistrationError(
            f"the documents of {str(place)!r} cannot be read: {error}.", hint="give a JSONL file in UTF-8, or a folder"
        ) from error
    if not found:
        raise RegistrationError(f"{str(place)!r} has no documents.", hint=f"give a JSONL file, or {', '.join(_TEXTS)}")
    return found


def _of_file(file: Path, folder: Path) -> Chunk:
    name = file.relative_to(folder).as_posix()
    return Chunk(name, file.read_text(encoding="utf-8"), {"title": file.stem, "source": name})


def _of_line(place: Path, number: int, line: str) -> Chunk:
    try:
        found: Any = json.loads(line)
        return to_chunk(found)
    except (ValueError, RegistrationError) as error:
        raise RegistrationError(
            f"{str(place)!r}, line {number}: {getattr(error, 'message', error)}",
            hint='write {"url": "...", "title": "...", "text": "..."}, one object a line',
        ) from None


def to_chunk(given: Any) -> Chunk:
    """A document as it is searched; its metadata say `source` and `title`. Raises `RegistrationError`."""
    if isinstance(given, Chunk):
        return Chunk(given.id, given.text, {"source": given.id, **given.metadata})
    if isinstance(given, str):
        given = {"text": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        raise RegistrationError(
            f"a document is {type(given).__name__} without a text.", hint="give texts, mappings with `text`, or chunks"
        )
    text = given["text"]
    url = str(given.get("url") or given.get("id") or "text:" + hashlib.sha256(text.encode()).hexdigest()[:16])
    more = {key: value for key, value in given.items() if key not in ("text", "url", "id")}
    return Chunk(url, text, {"source": url, "title": "", **more})


def to_chunks(documents: Iterable[Any]) -> tuple[Chunk, ...]:
    """Raises `RegistrationError`, also for two documents of one address."""
    found = tuple(to_chunk(one) for one in documents)
    seen: set[str] = set()
    for chunk in found:
        if chunk.id in seen:
            raise RegistrationError(f"two documents have the address {chunk.id!r}.", hint="give each its own `url`")
        seen.add(chunk.id)
    return found


def digest(chunks: Iterable[Chunk], language: str) -> str:
    """Equal for equal documents, whoever gives them."""
    made = hashlib.sha256(language.encode())
    for chunk in chunks:
        made.update(json.dumps([chunk.id, chunk.text, chunk.metadata], sort_keys=True, default=str).encode())
    return made.hexdigest()[:32]
