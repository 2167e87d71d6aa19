"""Checks of what is asked of the vector store, request by request: what PostgreSQL would refuse fails here, alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from teola_plugin.requests.payloads import IngestRow, OneOf, SearchVector

if TYPE_CHECKING:
    import numpy as np

MAX_DIMENSION = 16_000
"""Of pgvector's type `vector`."""
_MAX_KEY = 2000
"""Bytes of an id or of a collection's name: both are indexed."""


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
    """Raises `ValueError` or `TypeError` with what is wrong."""
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
    """Raises `ValueError` or `TypeError` with what is wrong."""
    if not isinstance(payload.k, int) or payload.k < 0:
        raise ValueError(f"k must be a number of hits, not {payload.k!r}")
    collection = _text(payload.collection, "the collection's name")
    return QueryVector(to_vector(payload.vector), (collection, int(payload.k), to_conditions(payload.filter)))


def to_conditions(filter: Sequence[tuple[str, Any]]) -> tuple[SqlCondition, ...]:
    """Return the conditions of a `SearchVector.filter`. Raise `ValueError` or `TypeError` if one is no JSON."""
    return tuple(_condition(_text(key, "a filter's key"), OneOf.from_condition(value)) for key, value in filter)


def _condition(key: str, one_of: OneOf) -> SqlCondition:
    return SqlCondition(key, tuple([_json(value, f"filter {key!r}") for value in one_of.values]), one_of.negated)


def to_vector(given: Sequence[float]) -> np.ndarray:
    """The vector as float32, [dimension]: a copy, whatever its owner does with it. Raises `ValueError`."""
    import numpy as np

    with np.errstate(over="ignore"):
        vector = np.array(given, dtype=np.float32)
    if vector.ndim != 1 or not 1 <= len(vector) <= MAX_DIMENSION:
        shape = "x".join(map(str, vector.shape)) or "a single number"
        raise ValueError(f"a vector must be a list of 1 to {MAX_DIMENSION} numbers, not {shape}")
    if not np.isfinite(vector).all():
        raise ValueError("the vector has numbers that are NaN, infinite or too large for 32 bits")
    return vector


def _key(text: str, what: str) -> str:
    if len(_text(text, what).encode()) > _MAX_KEY:
        raise ValueError(f"{what} is longer than {_MAX_KEY} bytes")
    return text


def _text(text: str, what: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what} has a NUL character, which PostgreSQL cannot store")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has lone surrogates at {error.start}, which are no characters") from None
    return text


def _json(value: Any, what: str) -> str:
    try:
        text = json.dumps(value if not isinstance(value, Mapping) else dict(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from error
    if "\\u0000" in text and "\0" in _strings(value):
        raise ValueError(f"{what} has a NUL character, which PostgreSQL cannot store")
    return _text(text, what)


def _strings(value: Any) -> str:
    """Return all text inside a JSON value, joined."""
    if isinstance(value, Mapping):
        return "".join(_strings(part) for item in value.items() for part in item)
    if isinstance(value, list | tuple):
        return "".join(map(_strings, value))
    return value if isinstance(value, str) else ""
