"""Request keys: hashable snapshots of everything that decides the result of a provider call."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

_KEY_OF_PROCESS = os.urandom(16)
"""Secrets enter keys as digests that mean nothing outside this process."""
_PLAIN = frozenset((type(None), str, int, bool, bytes))
_CONTAINERS = frozenset((dict, list, tuple))
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
    """Return the snapshot of a value that lies `depth` levels deep; see `freeze`.

    Raise `UnknownValue` for a value that is nested too deeply, as one that contains itself.
    """
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
        return kind, _frozen_items(value, special, depth) if value else ()
    if special is not None and (key := special(value)) is not None:
        return key
    if isinstance(value, str):  # a text of a class of its own
        return kind, str.__str__(value)
    if callable(getattr(value, "get_secret_value", None)):
        return kind, _digest(value.get_secret_value())
    if hasattr(kind, "model_fields") and hasattr(value, "__pydantic_extra__"):
        return kind, _frozen_items(value.__dict__, special, depth), _frozen(value.__pydantic_extra__, special, depth)
    return _SameObject(value)


def _frozen_items(values: dict[Any, Any], special: Freezer | None, depth: int) -> Hashable:
    """Return the snapshot of a dictionary's items in their order. Plain keys and values need no further call."""
    plain = _PLAIN
    return tuple(
        [
            (
                (type(key), key) if type(key) in plain else _frozen(key, special, depth),
                (type(one), one)
                if type(one) in plain
                else (type(one), ())
                if type(one) in _CONTAINERS and not one
                else _frozen(one, special, depth),
            )
            for key, one in values.items()
        ]
    )


def freeze_fields(values: dict[str, Any]) -> Hashable:
    """Return a snapshot of an object's fields, as `freeze` does of a dictionary."""
    return _frozen_items(values, None, 1)


def _digest(secret: Any) -> bytes:
    data = secret if isinstance(secret, bytes) else str(secret).encode()
    return hashlib.blake2b(data, key=_KEY_OF_PROCESS, digest_size=16).digest()


# ------------------------------------------------------------ the object that is called

_ABOVE_SEAM = frozenset(
    (
        *("callbacks", "callback_manager", "tags", "metadata", "verbose", "name"),
        *("cache", "rate_limiter", "custom_get_token_ids", "profile"),
    )
)
"""Fields that the frameworks read above the provider methods: they decide nothing of a result."""
_DERIVED_CLIENTS = frozenset(["client", "async_client", "root_client", "root_async_client"])
"""Fields of OpenAI's classes that are made of the other fields, as clients in their private attributes are."""


class TargetKey:
    """A model or retriever in a request key: equal to the same object, and to one of equal class and configuration.

    An object is not compared with itself: what it keeps of its calls (a counter, a log) is no configuration.
    """

    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        """Return True for a key of the same object, or of one with an equal class and configuration."""
        if not isinstance(other, TargetKey):
            return False
        if other.target is self.target:
            return True
        return type(other.target) is type(self.target) and configuration(other.target) == configuration(self.target)

    def __hash__(self) -> int:
        return hash(type(self.target))


def configuration(target: Any) -> Hashable:
    """Return the attributes of a model or retriever that decide its results: fields, also extra ones, and private ones.

    Not read from `__dict__`, which holds cached values, too, that come and go. An object that is no pydantic model has
    no declared fields: its configuration equals that of the same object only.
    """
    cls: Any = type(target)
    if not hasattr(cls, "model_fields"):
        return _SameObject(target)
    values = {name: getattr(target, name) for name in _deciding_fields(cls)}
    for name in ("__pydantic_extra__", "__pydantic_private__"):
        values |= getattr(target, name, None) or {}
    for name in [name for name in values if name in _DERIVED_CLIENTS or name.startswith("_")]:
        if type(values[name]).__module__.partition(".")[0] == "openai":
            del values[name]
    return freeze(values)


@lru_cache(maxsize=512)
def _deciding_fields(cls: type) -> tuple[str, ...]:
    return tuple(name for name in getattr(cls, "model_fields", ()) if name not in _ABOVE_SEAM)
