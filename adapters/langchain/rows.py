"""LangChain documents <-> the rows of a vector store. Ids, metadata and filters are checked here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from teola_plugin.adapters.plain_data import own_copy
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.graph import on_loop
from teola_plugin.requests.payloads import Chunk, Stored

Filter = tuple[tuple[str, Any], ...]


@on_loop
def to_documents(rows: Iterable[Stored]) -> list[Document]:
    return [Document(id=row.id, page_content=row.text, metadata=own_copy(dict(row.metadata))) for row in rows]


def content_id(text: str, metadata: Mapping[str, Any]) -> str:
    """An id that depends on nothing but the content, so that ingesting again replaces the row by itself."""
    content = json.dumps([text, metadata], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def to_chunks(
    texts: Iterable[str], metadatas: Sequence[Mapping[str, Any]] | None, ids: Sequence[str | None] | None
) -> tuple[Chunk, ...]:
    """One chunk per text, in order; a missing id is made from the content. Raises `TeolaError` for bad metadata."""
    texts = list(texts)
    metadatas = [{} for _ in texts] if metadatas is None else metadatas
    ids = [None for _ in texts] if ids is None else ids
    if not len(texts) == len(metadatas) == len(ids):
        counts = f"{len(texts)} texts, {len(metadatas)} metadatas, {len(ids)} ids"
        raise RegistrationError(f"the numbers differ: {counts}.", hint="give one metadata and one id per text")
    return tuple(_chunk(*given) for given in zip(texts, metadatas, ids, strict=True))


def _chunk(text: str, metadata: Mapping[str, Any], id: str | None) -> Chunk:
    kept = {key: _kept(key, value) for key, value in metadata.items()}
    return Chunk(id or content_id(text, kept), text, kept)


def latest(chunks: Iterable[Chunk]) -> list[Chunk]:
    """The last chunk of every id: what the collection holds after all of them are written in order."""
    return list({chunk.id: chunk for chunk in chunks}.values())


def _kept(key: Any, value: Any) -> Any:
    """The value as the store gives it back: equal, and a copy."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
        same = isinstance(key, str) and copy == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise TeolaError(
            f"metadata key {key!r} holds {type(value).__name__} {value!r:.80}, which JSON cannot keep unchanged.",
            hint="store strings, finite numbers, booleans, None, and lists and dicts of them; e.g. str(value)",
        )
    return copy


def to_filter(wanted: Mapping[str, Any] | None) -> Filter:
    """Equality of metadata keys, in the order of the keys. Raises `RegistrationError` for anything else."""
    for key, value in (wanted or {}).items():
        if not isinstance(value, str | int | float | bool | None):
            raise RegistrationError(
                f"filter key {key!r} holds {type(value).__name__} {value!r:.80}, but only equality is supported.",
                hint="give a string, a number, a boolean or None; filter further on the documents found",
            )
    return tuple(sorted((wanted or {}).items()))
