"""Data of globals, closures and attributes that plans were made with: another day they may be other data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_PLAIN = (str, int, float, bool, bytes, type(None))
_MANY = (list, tuple, set, frozenset, dict)
MOST = 64
"""Items of a container that are looked at."""
DEEP = 3
"""Containers inside each other."""
TRUSTED = 2
"""Changes of one name after which its value is not believed any more."""

_noting: ContextVar[Believed | None] = ContextVar("teola_believed", default=None)


class Believed:
    """What the plans of one node rest on."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], tuple[Callable[[], Any], Any, object]] = {}
        self._changes: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is read in the body is noted."""
        before = _noting.set(self)
        try:
            yield
        finally:
            _noting.reset(before)

    def note(self, owner: object, name: str, value: Any, again: Callable[[], Any]) -> bool:
        """Whether the value may be taken for what it will be; `again` reads it once more."""
        if self._changes[id(owner), name] >= TRUSTED:
            return False
        self._read[id(owner), name] = (again, _form(value), owner)
        return True

    def hold(self) -> bool:
        """Whether all is as it was. What is not is told of once."""
        others = [key for key, (again, before, _) in list(self._read.items()) if _now(again) != before]
        for key in others:
            self._changes[key] += 1
            self._read.pop(key, None)
        return not others


def believed(owner: object, name: str, value: Any, again: Callable[[], Any]) -> bool:
    """Whether `owner`'s value of that name may be taken for what it will be.

    Data are noted; whatever else there is, such as models and functions, is what it is.
    """
    noting = _noting.get()
    return noting is None or type(value) not in (*_PLAIN, *_MANY) or noting.note(owner, name, value, again)


def _now(again: Callable[[], Any]) -> Any:
    try:
        return _form(again())
    except Exception:  # it is not there any more, or changes at this moment
        return None


def _form(value: Any, deep: int = DEEP) -> Any:
    """Equal for data that are the same; runs no code of the user's."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind not in _MANY or not deep or len(value) > MOST:
        return kind, id(value), len(value) if kind in _MANY else 0
    items = (inner for pair in value.items() for inner in pair) if kind is dict else value
    return kind, tuple(_form(one, deep - 1) for one in items)
