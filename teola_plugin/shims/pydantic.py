"""Copies of Pydantic's objects of another class, by no more than its `__slots__`, whose names have two underscores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SLOTS = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
"""Where Pydantic keeps what is not in an object's `__dict__`."""


def sharing(cls: type, obj: Any) -> Any:
    """Return an object of the class `cls` that shares its attributes with `obj`: what is set on one is set on both."""
    shared: Any = object.__new__(cls)
    object.__setattr__(shared, "__dict__", vars(obj))
    for slot in _SLOTS:
        if hasattr(obj, slot):
            object.__setattr__(shared, slot, getattr(obj, slot))
    return shared


def of_class(cls: type, obj: Any, attributes: Mapping[str, Any], private: Mapping[str, Any]) -> Any:
    """Return a copy of a Pydantic object, of the class `cls`, with more attributes and other private ones."""
    copied = obj.model_copy()
    converted = sharing(cls, copied)
    object.__setattr__(converted, "__dict__", {**vars(copied), **attributes})
    if private:
        object.__setattr__(converted, "__pydantic_private__", {**(copied.__pydantic_private__ or {}), **private})
    return converted
