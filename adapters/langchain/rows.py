"""LangChain documents <-> the rows of a vector store. Ids, metadata and filters are checked here."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from teola_plugin.adapters.snapshots import own_copy
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.graph import on_loop
from teola_plugin.requests.payloads import Chunk, OneOf, Stored

Filter = tuple[tuple[str, Any], ...]
"""As in `SearchVector.filter`."""
_OPERATORS = {"$eq": (False, False), "$ne": (False, True), "$in": (True, False), "$nin": (True, True)}
"""Operator of a filter -> (True if it takes a list, True if it is negated)."""


@on_loop
def to_documents(rows: Iterable[Stored]) -> list[Document]:
    return [Document(id=row.id, page_content=row.text, metadata=own_copy(dict(row.metadata))) for row in rows]


def content_id(text: str, metadata: Mapping[str, Any]) -> str:
    """An id that depends on nothing but the content, so that ingesting again replaces the row by itself.

    It has 32 hexadecimal digits. Raise `TypeError` for metadata that is no JSON; the order of its keys does not matter.
    """
    content = json.dumps([text, metadata], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def to_chunks(
    texts: Iterable[str], metadatas: Sequence[Mapping[str, Any]] | None, ids: Sequence[str | None] | None
) -> tuple[Chunk, ...]:
    """One chunk per text, in order; a missing id is made from the content. Raises `TeolaError` for bad metadata."""
    texts = list(texts)
    metadatas = metadatas or [{} for _ in texts]  # an empty list says nothing, as in LangChain's own stores
    ids = ids or [None for _ in texts]
    if not len(texts) == len(metadatas) == len(ids):
        counts = f"{len(texts)} texts, {len(metadatas)} metadatas, {len(ids)} ids"
        raise RegistrationError(f"the numbers differ: {counts}.", hint="give one metadata and one id per text")
    return tuple(_chunk(*row) for row in zip(texts, metadatas, ids, strict=True))


def _chunk(text: str, metadata: Mapping[str, Any], id: str | None) -> Chunk:
    """Return the row of a document. One without an id gets one made of its content."""
    kept_metadata = {key: _checked_copy(key, value) for key, value in metadata.items()}
    return Chunk(id or content_id(text, kept_metadata), text, kept_metadata)


def latest(chunks: Iterable[Chunk]) -> list[Chunk]:
    """The last chunk of every id: what the collection holds after all of them are written in order."""
    return list({chunk.id: chunk for chunk in chunks}.values())


def _checked_copy(key: Any, value: Any) -> Any:
    """Return a copy of a metadata value. Raise `TeolaError` for one that JSON cannot keep unchanged."""
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


def to_filter(conditions: Mapping[str, Any] | None) -> Filter:
    """Return the conditions of a filter for `SearchVector`, in the order of their keys.

    A filter is a dict of metadata keys, each with the value that it must have or with operators (`$eq`, `$ne`, `$in`,
    `$nin`); `$and` takes a list of filters. Raise `RegistrationError` for anything else.
    """
    if conditions is None:
        return ()
    if not isinstance(conditions, Mapping):
        raise RegistrationError(
            f"the filter is a {type(conditions).__name__}, but the store compares values of metadata only.",
            hint='give a dict, e.g. filter={"kind": "animal"}, or filter the documents that the search returns',
        )
    by_key = [condition for key, value in conditions.items() for condition in _conditions(key, value)]
    return tuple(sorted(by_key, key=lambda condition: (condition[0], repr(condition[1]))))


def _conditions(key: str, value: Any) -> Filter:
    """Return the engine's conditions for one entry of a LangChain filter: equality, operators, or `$and`.

    Raise `RegistrationError` for anything else.
    """
    if key == "$and" and isinstance(value, list | tuple):
        return tuple([condition for part in value for condition in to_filter(part)])
    if isinstance(value, Mapping) and value and value.keys() <= _OPERATORS.keys():
        return tuple([(key, _operator_condition(key, *item)) for item in value.items()])
    if not isinstance(key, str) or not _is_scalar(value):
        raise _unsupported(key, value)
    return ((key, value),)


def _operator_condition(key: str, operator: str, operand: Any) -> Any:
    """Return the condition for `$eq`, `$ne`, `$in` or `$nin`. Raise `RegistrationError` for a wrong operand."""
    takes_list, negated = _OPERATORS[operator]
    values = operand if takes_list else [operand]
    if not isinstance(values, list | tuple | set | frozenset) or not all(map(_is_scalar, values)):
        raise _unsupported(key, {operator: operand})
    return operand if operator == "$eq" else OneOf(tuple(values), negated)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | bool | None) or (isinstance(value, float) and math.isfinite(value))


def _unsupported(key: str, value: Any) -> RegistrationError:
    """Return the error for an entry of a filter that no engine evaluates."""
    return RegistrationError(
        f"filter key {key!r} holds {type(value).__name__} {value!r:.80}, but only equality is supported.",
        hint="give a key that is a string, and a string, a finite number, a boolean or None. $eq, $ne, $in and $nin"
        " take those; $and takes a list of filters. Filter further on the documents found",
    )
