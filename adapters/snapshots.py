"""Snapshots of values: copies that later changes in place do not reach, and an equality that sees every difference.

The arguments of a prefetched call are compared with those of the original's call. That two objects are the same one
proves nothing: user code may have changed it in between.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import operator
import uuid
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from functools import lru_cache
from typing import Any, Generic

from pydantic import BaseModel

_IMMUTABLE = (str, int, bool, float, complex, bytes, type(None))
_SHOWN = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
"""Immutable, too; some of them are equal in Python, and print differently."""
_CONSTANT = frozenset((*_IMMUTABLE, *_SHOWN))
_FRAMEWORKS = ("langchain_core", "llama_index")


class NotCopied(TypeError):
    """The value holds objects that are not known, or that hold themselves."""


def snapshot(value: Any) -> Any:
    """Return a copy that shares nothing with the value that can change. Run no user code. Raise `NotCopied`."""
    try:
        return _copied(value)
    except NotCopied:
        raise
    except Exception as error:  # it holds itself, or changes while it is copied
        raise NotCopied(f"it cannot be copied: {error!r}") from error


def exactly(one: Any, other: Any) -> bool:
    """Return True if two values have the same types and contents, all the way down, in the same order.

    `True`, `1` and `1.0` differ, as do lists and tuples, `0.0` and `-0.0`. What is not known to be the same differs.
    """
    try:
        return _equal(one, other)
    except Exception:  # they hold themselves, or change while they are compared
        return False


def _copied(value: Any) -> Any:
    kind: Any = type(value)
    return value if kind in _CONSTANT else _copier(kind)(value)


@lru_cache(maxsize=1024)
def _copier(kind: Any) -> Callable[[Any], Any]:
    """Return the function that copies values of one class."""
    if _is_text(kind) or _is_enum(kind):
        return lambda value: value
    if _is_model(kind):
        return _model
    return _COPIERS.get(kind, _refuse_copy)


def _dict(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return a deep copy of a dictionary, or of the fields of a model.

    Raise `NotCopied` for contents that are not known. Constants and empty containers are handled without a call, as
    this runs for the arguments of every provider call.
    """
    constant: Any = _CONSTANT
    copier: Any = _copier
    return {
        key if type(key) in constant else _copied(key): one
        if type(one) in constant
        else (type(one)() if type(one) in _COPIERS and not one else copier(type(one))(one))
        for key, one in value.items()
    }


def _refuse_copy(value: Any) -> Any:
    raise NotCopied(f"it holds a {type(value).__qualname__}")


_COPIERS: dict[type[Any], Callable[[Any], Any]] = {
    list: lambda value: list(map(_copied, value)),
    tuple: lambda value: tuple(map(_copied, value)),
    dict: _dict,
}


def _model(value: Any) -> Any:
    """Copy a message, a document, a prompt or data of the user's as `copy` does, field by field."""
    kind: Any = type(value)
    copy, put = kind.__new__(kind), object.__setattr__
    put(copy, "__dict__", _dict(value.__dict__))
    for name in ("__pydantic_extra__", "__pydantic_private__"):
        fields = getattr(value, name)
        put(copy, name, None if fields is None else _copied(fields))
    put(copy, "__pydantic_fields_set__", set(value.__pydantic_fields_set__))
    return copy


def _is_text(kind: type[Any]) -> bool:
    """Return True for a subclass of `str` of a framework."""
    return issubclass(kind, str) and _of_framework(kind)


def _is_enum(kind: type[Any]) -> bool:
    return issubclass(kind, Enum)


def _is_model(kind: type[Any]) -> bool:
    """Return True for a pydantic class of a framework, and for one of the user's that is data alone: a schema."""
    if not issubclass(kind, BaseModel):
        return False
    classes = [base for base in kind.__mro__ if base not in (object, Generic) and not _of_pydantic(base)]
    is_schema = not any(_of_framework(base) or _COPY_HOOKS & vars(base).keys() for base in classes)
    return is_schema or _of_framework(kind)


_COPY_HOOKS = frozenset(("__new__", "__copy__", "__deepcopy__", "__getattribute__", "__setattr__", "__del__"))
"""Methods by which a class decides what a copy of it is."""


def _of_pydantic(kind: type[Any]) -> bool:
    return kind.__module__.split(".", 1)[0] == "pydantic"


def _of_framework(kind: type[Any]) -> bool:
    return kind.__module__.split(".", 1)[0] in _FRAMEWORKS


def _equal(one: Any, other: Any) -> bool:
    """Return True if two values have the same types and contents, all the way down; the recursion of `exactly`.

    Dictionaries need the same order of keys. Floats, decimals and times are compared by their `repr`, so NaN equals
    NaN, and -0.0 is not 0.0.
    """
    kind: Any = type(one)
    if kind is not type(other):
        return False
    if kind is float or kind is complex or kind in _SHOWN:
        return repr(one) == repr(other)
    if kind in _IMMUTABLE or _is_text(kind):
        return bool(one == other)
    if _is_enum(kind):
        return one is other
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if kind is dict:
        return _equal(list(one.items()), list(other.items()))
    copier: Any = _copier
    return copier(kind) is _model and all(_equal(field(one), field(other)) for field in _CONTENTS)


_CONTENTS: tuple[Callable[[Any], Any], ...] = (lambda m: m.__dict__, lambda m: m.__pydantic_extra__)


# ------------------------------------------------------------ plain data

_ATOMS = (str, bool, int, type(None))


def own_copy(value: Any) -> Any:
    """Copy plain data (the values of JSON, and tuples). The copy shares nothing that can be changed in place."""
    if type(value) is dict:
        return {key: own_copy(inner) for key, inner in value.items()}
    if type(value) is list:
        return [own_copy(inner) for inner in value]
    return value if type(value) in _ATOMS or type(value) is float else copy.deepcopy(value)


def data_key(value: Any) -> Hashable:
    """Return a key of plain data. Keys are equal for values that nobody can tell apart: types and orders of keys count.

    `True`, `1` and `1.0` differ. Raise `TypeError` for other data.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is dict:
        return kind, tuple((data_key(key), data_key(inner)) for key, inner in value.items())
    if kind in (list, tuple):
        return kind, tuple(data_key(inner) for inner in value)
    raise TypeError(f"{kind.__name__} is no plain data")


class FieldSnapshot:
    """The fields of objects, which plans and copies of them are made of, as they were at some time."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._fields = [(vars(obj), getattr(type(obj), "model_fields", None)) for obj in objects]
        self._values = self._current()

    def holds(self) -> bool:
        """Return True if no field was set, and no list or dictionary among them was changed, since.

        Values are compared by identity, so an equal object in place of another counts as a change. No code of the
        user's runs for it.
        """
        values = self._current()
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))

    def _current(self) -> list[Any]:
        """Return the present values of all fields, with the items of lists, tuples and dictionaries among them.

        `holds` compares two such lists to learn if something was set or replaced since.
        """
        values: list[Any] = []
        for fields, names in self._fields:
            for value in [*fields.values()] if names is None else [fields.get(name) for name in names]:
                values.append(value)
                if type(value) is list or type(value) is tuple:
                    values += value
                elif type(value) is dict:
                    values += value.values()
        return values
