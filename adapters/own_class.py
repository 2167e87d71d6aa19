"""Objects of the user's own class whose calls an engine of a pool serves."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from teola_plugin.pool import EnginePool


class ServedBy(NamedTuple):
    """Who does the work of an object."""

    pool: EnginePool
    engine: str


_classes: WeakValueDictionary[tuple[type, type, int, str], type] = WeakValueDictionary()


def served_class(base: type, own: type, served_by: ServedBy) -> Any:
    """A subclass of an object's own class, with `base` before it and its name, so that traces and events tell the same.

    It says `__teola_served_by__`, so that whatever makes another object of the class gets a served one.
    """
    key = (base, own, id(served_by.pool), served_by.engine)  # the class keeps its pool alive, and so the number
    made: Any = _classes.get(key)
    if made is None:
        said = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        made = type(own)(own.__name__, (base, own), said)
        made.__teola_served_by__ = served_by
        _classes[key] = made
    return made
