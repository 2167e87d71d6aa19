"""Subclasses of the classes of the user's own objects, made when they are wanted."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from teola_plugin.pool import EnginePool


class ServedBy(NamedTuple):
    """Who does the work of an object."""

    pool: EnginePool
    engine: str


_classes: WeakValueDictionary[tuple[Any, ...], type] = WeakValueDictionary()


def subclass_of(own: type, base: type, served_by: ServedBy | None = None, slots: tuple[str, ...] = ()) -> Any:
    """A subclass of `own`, with `base` before it and with its name, so that traces and events tell the same.

    It says `__teola_served_by__`, if that is given: whatever makes another object of the class has a served one.
    """
    # Classes keep what their keys name by number.
    key = (own, base, slots, *((id(served_by.pool), served_by.engine) if served_by else ()))
    made: Any = _classes.get(key)
    if made is None:
        said = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        made = type(own)(own.__name__, (base, own), {**said, "__slots__": slots} if slots else said)
        if served_by is not None:
            made.__teola_served_by__ = served_by
        _classes[key] = made
    return made
