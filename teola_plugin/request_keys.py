"""Request keys: hashable snapshots of everything that decides the result of a provider call."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable
from typing import Any

_KEY_OF_PROCESS = os.urandom(16)
"""Secrets enter keys as digests that mean nothing outside this process."""
_PLAIN = (type(None), str, int, bool, bytes)
_MAX_DEPTH = 100

Freezer = Callable[[Any], Hashable | None]
"""Return the key of a value of a class of its own, or None to leave it to `freeze`."""


class UnknownValue(ValueError):
    """A value that contains itself, or that changes while it is read: no key can be formed of it."""


class _SameObject:
    """Stands for an object in a key: equal to the same object only, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def freeze(value: Any, special: Freezer | None = None) -> Hashable:
    """Return a hashable snapshot of a value, equal to that of another value of the same types and contents only.

    `True`, `1` and `1.0` differ, as do lists and tuples, and the order of keys in a dictionary counts. Data of pydantic
    models is compared field by field; an object of any other class equals itself only. Secrets are digested. Raises
    `UnknownValue` for a value that contains itself.
    """
    try:
        return _frozen(value, special, 0)
    except UnknownValue:
        raise
    except Exception as error:  # it changes while it is read
        raise UnknownValue(f"a {type(value).__name__} cannot be read: {error!r}") from error


def _frozen(value: Any, special: Freezer | None, depth: int) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, repr(value)  # 0.0 is not -0.0, and nan is nan
    if depth > _MAX_DEPTH:
        raise UnknownValue(f"a value is nested more than {_MAX_DEPTH} levels deep, or contains itself")
    depth += 1
    if kind is list or kind is tuple:
        return kind, tuple([_frozen(item, special, depth) for item in value])
    if kind is dict:
        return kind, tuple([(_frozen(k, special, depth), _frozen(v, special, depth)) for k, v in value.items()])
    if special is not None and (key := special(value)) is not None:
        return key
    if isinstance(value, str):  # a text of a class of its own
        return kind, str.__str__(value)
    if callable(getattr(value, "get_secret_value", None)):
        return kind, _digest(value.get_secret_value())
    if hasattr(kind, "model_fields") and hasattr(value, "__pydantic_extra__"):
        fields = tuple([(name, _frozen(one, special, depth)) for name, one in value.__dict__.items()])
        return kind, fields, _frozen(value.__pydantic_extra__, special, depth)
    return _SameObject(value)


def _digest(secret: Any) -> bytes:
    data = secret if isinstance(secret, bytes) else str(secret).encode()
    return hashlib.blake2b(data, key=_KEY_OF_PROCESS, digest_size=16).digest()
