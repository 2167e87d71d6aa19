"""Checks of each request to the vector store, so that one that PostgreSQL would refuse fails alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from teola_plugin.requests.payloads import IngestRow, OneOf, SearchVector

if TYPE_CHECKING:
    import numpy as np

MAX_DIMENSION = 16_000
"""Maximum dimension of pgvector's type `vector`."""
_MAX_KEY = 2000
"""Maximum bytes of an id or of a collection's name: both are indexed."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it is copied into the database."""

    collection: str
    id: str
    body: str
    metadata: str
    """JSON text, kept as it is: the order of keys and the writing of numbers survive."""
    vector: np.ndarray
    """float32, [dimension]."""


class SqlCondition(NamedTuple):
    """A condition of a filter as it is sent to the database."""

    key: str
    values: tuple[str, ...]
    """JSON texts, one of which the value of the key must equal."""
    negated: bool
    """True if the value must equal none of them instead."""


@dataclass(frozen=True, slots=True)
class QueryVector:
    """A search as it is sent to the database; those with equal `group` go together."""

    vector: np.ndarray
    group: tuple[str, int, tuple[SqlCondition, ...]]
    """Collection, number of hits, and the filter."""

    @property
    def collection(self) -> str:
        return self.group[0]


def to_row(payload: IngestRow) -> Row:
    """Check an ingestion and return its row. Raise ValueError or TypeError for an invalid one."""
    chunk = payload.chunk
    if not isinstance(chunk.metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {type(chunk.metadata).__name__}")
    return Row(
        _key(payload.collection, "the collection's name"),
        _key(chunk.id, "the chunk's id"),
        _text(chunk.text, "the text"),
        _json(chunk.metadata, "metadata"),
        to_vector(payload.vector),
    )


def to_query_vector(payload: SearchVector) -> QueryVector:
    """Check a search and return its query vector. Raise ValueError or TypeError for an invalid one."""
    if not isinstance(payload.k, int) or payload.k < 0:
        raise ValueError(f"k must be a number of hits, not {payload.k!r}")
    collection = _text(payload.collection, "the collection's name")
    return QueryVector(to_vector(payload.vector), (collection, int(payload.k), to_conditions(payload.filter)))


def to_conditions(filter: Sequence[tuple[str, Any]]) -> tuple[SqlCondition, ...]:
    """Return the conditions of a `SearchVector.filter`. Raise `ValueError` or `TypeError` if one is no JSON."""
    return tuple(_condition(_text(key, "a filter's key"), OneOf.from_condition(value)) for key, value in filter)


def _condition(key: str, one_of: OneOf) -> SqlCondition:
    return SqlCondition(key, tuple([_json(value, f"filter {key!r}") for value in one_of.values]), one_of.negated)


def to_vector(values: Sequence[float]) -> np.ndarray:
    """Return a copy of a vector as float32, [dimension]. Raise ValueError if it is invalid."""
    import numpy as np

    with np.errstate(over="ignore"):
        vector = np.array(values, dtype=np.float32)
    if vector.ndim != 1 or not 1 <= len(vector) <= MAX_DIMENSION:
        shape = "x".join(map(str, vector.shape)) or "a single number"
        raise ValueError(f"a vector must be a list of 1 to {MAX_DIMENSION} numbers, not {shape}")
    if not np.isfinite(vector).all():
        raise ValueError("the vector has numbers that are NaN, infinite or too large for 32 bits")
    return vector


def _key(text: str, field_name: str) -> str:
    """Check an id or a collection's name and return it. Raise ValueError above 2,000 bytes: both are indexed."""
    if len(_text(text, field_name).encode()) > _MAX_KEY:
        raise ValueError(f"{field_name} is longer than {_MAX_KEY} bytes")
    return text


def _text(text: str, field_name: str) -> str:
    """Return a text unchanged if PostgreSQL can store it. Raise TypeError or ValueError, which names the field."""
    if not isinstance(text, str):
        raise TypeError(f"{field_name} must be a str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{field_name} has a NUL character, which PostgreSQL cannot store")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field_name} has lone surrogates at {error.start}, which are no characters") from None
    return text


def _json(value: Any, field_name: str) -> str:
    """Return a value as JSON text that PostgreSQL can store. Raise ValueError, which names the field."""
    try:
        text = json.dumps(value if not isinstance(value, Mapping) else dict(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field_name} cannot be written as JSON: {error}") from error
    if "\\u0000" in text and "\0" in _strings(value):
        raise ValueError(f"{field_name} has a NUL character, which PostgreSQL cannot store")
    return _text(text, field_name)


def _strings(value: Any) -> str:
    """Return all text inside a JSON value, joined."""
    if isinstance(value, Mapping):
        return "".join(_strings(part) for item in value.items() for part in item)
    if isinstance(value, list | tuple):
        return "".join(map(_strings, value))
    return value if isinstance(value, str) else ""
