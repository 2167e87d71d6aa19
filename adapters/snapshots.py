"""Values as they are now: copies that later changes in place do not reach, and equality that sees every difference.

What was asked ahead of the plain object is compared with what the plain object holds when it comes there. That two
objects are the same one proves nothing: user code may have changed it in between.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

_IMMUTABLE = (str, int, bool, float, complex, bytes, type(None))
_SHOWN = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
"""Immutable, too; some of those that Python takes as equal print differently."""
_CONSTANT = frozenset((*_IMMUTABLE, *_SHOWN))
_FRAMEWORKS = ("langchain_core", "llama_index")


class NotCopied(TypeError):
    """The value holds objects that are not known, or that hold themselves."""


def snapshot(value: Any) -> Any:
    """A copy that shares nothing with the value that can change. Runs no user code. Raises `NotCopied`."""
    try:
        return _copied(value)
    except NotCopied:
        raise
    except Exception as error:  # it holds itself, or changes while it is copied
        raise NotCopied(f"it cannot be copied: {error!r}") from error


def exactly(one: Any, other: Any) -> bool:
    """Whether two values are of the same types and contents, all the way down, in the same order.

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
    if _is_text(kind):
        return lambda value: value
    if _is_model(kind):
        return _model
    return _COPIERS.get(kind, _refuse_copy)


def _list(value: list[Any]) -> list[Any]:
    return [_copied(one) for one in value]


def _tuple(value: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([_copied(one) for one in value])


def _dict(value: dict[Any, Any]) -> dict[Any, Any]:
    constant: Any = _CONSTANT
    copier: Any = _copier
    return {
        key if type(key) in constant else _copied(key): one if type(one) in constant else copier(type(one))(one)
        for key, one in value.items()
    }


def _refuse_copy(value: Any) -> Any:
    raise NotCopied(f"it holds a {type(value).__qualname__}")


_COPIERS: dict[type[Any], Callable[[Any], Any]] = {list: _list, tuple: _tuple, dict: _dict}


def _model(value: Any) -> Any:
    """A message, a document, a prompt: built as `copy` builds it, field by field."""
    kind: Any = type(value)
    made, put = kind.__new__(kind), object.__setattr__
    put(made, "__dict__", _dict(value.__dict__))
    put(made, "__pydantic_extra__", _copied(value.__pydantic_extra__))
    put(made, "__pydantic_private__", _copied(value.__pydantic_private__))
    put(made, "__pydantic_fields_set__", set(value.__pydantic_fields_set__))
    return made


def _is_text(kind: type[Any]) -> bool:
    """Texts of the framework's own kinds."""
    return issubclass(kind, str) and _of_framework(kind)


def _is_model(kind: type[Any]) -> bool:
    return issubclass(kind, BaseModel) and _of_framework(kind)


def _of_framework(kind: type[Any]) -> bool:
    return kind.__module__.split(".", 1)[0] in _FRAMEWORKS


def _equal(one: Any, other: Any) -> bool:
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float or kind is complex or kind in _SHOWN:
        return repr(one) == repr(other)
    if kind in _IMMUTABLE or _is_text(kind):
        return bool(one == other)
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if kind is dict:
        return _equal(list(one.items()), list(other.items()))
    if _is_model(kind):
        return all(_equal(field(one), field(other)) for field in _CONTENTS)
    return False


_CONTENTS: tuple[Callable[[Any], Any], ...] = (lambda m: m.__dict__, lambda m: m.__pydantic_extra__)
