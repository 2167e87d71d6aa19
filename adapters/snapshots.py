"""Values as they are now: copies that later changes in place do not reach, and equality that sees every difference.

What was asked ahead of the plain object is compared with what the plain object holds when it comes there. That two
objects are the same one proves nothing: user code may have changed it in between.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

_IMMUTABLE = (str, int, bool, float, complex, bytes, type(None))
_SHOWN = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
"""Immutable, too; some of those that Python takes as equal print differently."""
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
    kind = type(value)
    if kind in _IMMUTABLE or kind in _SHOWN or _is_text(kind):
        return value
    if kind is list:
        return [_copied(one) for one in value]
    if kind is tuple:
        return tuple([_copied(one) for one in value])
    if kind is dict:
        return {_copied(key): _copied(one) for key, one in value.items()}
    if _is_model(kind):
        return _model(value)
    raise NotCopied(f"it holds a {kind.__qualname__}")


def _model(value: Any) -> Any:
    """A message, a document, a prompt: built as `copy` builds it, field by field."""
    kind: Any = type(value)
    made = kind.__new__(kind)
    for name in ("__dict__", "__pydantic_extra__", "__pydantic_private__"):
        object.__setattr__(made, name, _copied(getattr(value, name)))
    object.__setattr__(made, "__pydantic_fields_set__", set(value.__pydantic_fields_set__))
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
