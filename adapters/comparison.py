"""Comparison of answers of any framework: how an object is called, and where two answers first differ."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

TOLERANCE = 1e-5
"""Embeddings and scores may differ by as much, absolutely or relatively: batches of other sizes round differently."""
_DEEPEST = 60
_MAX_CHARS = 80
_PLAIN_TYPES = (str, bytes, int, float, complex, type(None), type, enum.Enum)
"""Types whose values are compared as they are."""


class Shaped(NamedTuple):
    """An object as plain data."""

    type: str
    fields: dict[str, Any]


Fields = Iterator[tuple[str, Any]]
FieldsOf = Callable[[Any], Fields | None]
"""Returns the fields of a framework's object, without those that differ from call to call; None for other values."""


def snapshot(value: Any, depth: int = 60, fields_of: FieldsOf = lambda _: None) -> Any:
    """Return plain data that stands for the value; later changes of the value do not reach it.

    Below `depth` containers within each other only types are kept; of objects of unknown classes, two levels.
    """
    if isinstance(value, _PLAIN_TYPES):
        return value
    name = type(value).__qualname__
    if depth <= 0 or callable(value):
        return Shaped(name, {"name": getattr(value, "__qualname__", "")})
    if isinstance(value, Mapping):
        return {key: snapshot(inner, depth - 1, fields_of) for key, inner in value.items()}
    own_fields = fields_of(value)
    if own_fields is None and _is_unknown(value):
        return Shaped(name, {key: snapshot(inner, min(depth, 2) - 1, fields_of) for key, inner in vars(value).items()})
    fields = {
        key: snapshot(inner, depth - 1, fields_of)
        for key, inner in (_fields(value) if own_fields is None else own_fields)
    }
    return Shaped(name, fields) if fields else value


def failure(error: BaseException) -> Shaped:
    """Return the snapshot of a call that raised."""
    return Shaped(f"raised {type(error).__qualname__}", {"text": str(error)})


def _fields(value: Any) -> Fields:
    """Yield the fields of a value; nothing for one that is compared by its own `__eq__`."""
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name, None)) for name in type(value).model_fields)
        yield from (value.model_extra or {}).items()
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, Sequence):
        yield "items", dict(enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "items", dict(enumerate(sorted(value, key=repr)))
    elif hasattr(value, "tolist"):  # arrays, tensors
        yield "items", value.tolist()


def _is_unknown(value: Any) -> bool:
    """Return True for an object of a class that defines no equality.

    A snapshot holds the fields of such an object in place of it, since two objects would otherwise never be equal.
    """
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value) or not hasattr(value, "__dict__"):
        return False
    return not any("__eq__" in vars(base) for base in type(value).__mro__[:-1])


def difference(first: Any, second: Any, where: str = "") -> str:
    """Return where and how two snapshots first differ, as text; empty if they are the same."""
    if isinstance(first, Shaped) and isinstance(second, Shaped) and first.type == second.type:
        return difference(first.fields, second.fields, where)
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return _at(where, f"{_shortened(list(first))} here, {_shortened(list(second))} there")
        inside = (
            difference(first[key], second[key], where if key == "items" else f"{where}[{key!r}]") for key in first
        )
        return next((text for text in inside if text), "")
    if _equal(first, second):
        return ""
    if isinstance(first, str) and isinstance(second, str):
        return _at(where, _texts(first, second))
    return _at(where, f"{_shortened(first)} here, {_shortened(second)} there")


def _equal(first: Any, second: Any) -> bool:
    """Return True if two values without parts count as the same answer.

    Floats may differ by a small tolerance, and NaN equals NaN. Other values need the same type. An object that cannot
    be compared equals only itself.
    """
    if isinstance(first, float) and isinstance(second, float):
        close = math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return close or (math.isnan(first) and math.isnan(second))
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # an object of the user's that cannot be compared
        return first is second


def _at(where: str, text: str) -> str:
    return f"{where}: {text}" if where else text


def _texts(first: str, second: str) -> str:
    """Return both texts from a little before the point where they differ.

    Up to 20 equal characters stand before that point. Long texts are shortened, for a line of a report.
    """
    apart = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    start = max(0, (min(len(first), len(second)) if apart is None else apart) - 20)
    mark = "…" if start else ""
    return f"{mark}{_shortened(first[start:])} here, {mark}{_shortened(second[start:])} there"


def _shortened(value: Any) -> str:
    """Return a value as text for the report of a difference, cut to a bounded length."""
    if isinstance(value, Shaped):
        items = value.fields.get("items")
        text = f"{value.type} {list(items.values()) if isinstance(items, dict) else value.fields}"
    else:
        text = repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


# ------------------------------------------------------------ how an object is called

Check = Callable[[Any], str]
Call = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Entries:
    """The entries of one kind of objects. Each takes the object, original or accelerated, and an input."""

    kind: str
    """The kind, for messages, e.g. `query engine`."""
    names: str
    """The methods that are called, for the report."""
    call: Call | None
    """The sync entry; None if the object has async entries only."""
    acall: Callable[[Any, Any], Awaitable[Any]]
    answer: Callable[[Any], Any]
    """Returns what counts of an answer, as plain data that later changes do not reach."""
    pieces: Callable[[Any, Any], AsyncIterator[Any]] | None = None
    """A stream of pieces; None for objects without one."""
    fault_in: Check = lambda value: ""
    """Says what is wrong with an input; empty for a valid one."""
    fresh: Callable[[Any], None] = lambda obj: None
    """Makes the object forget earlier calls."""
