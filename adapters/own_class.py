"""Subclasses of the classes of the user's own objects, made when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from teola_plugin.pool import EnginePool


class ServedBy(NamedTuple):
    """Who does the work of an object."""

    pool: EnginePool
    engine: str


_classes: WeakValueDictionary[tuple[Any, ...], type] = WeakValueDictionary()


def subclass_of(
    own: type,
    base: type,
    served_by: ServedBy | None = None,
    slots: tuple[str, ...] = (),
    members: Callable[[], Mapping[str, Any]] = dict,
) -> Any:
    """Create a subclass of `own`, with the mixin `base` before it and with its name, which traces and events show.

    With `served_by` it has the attribute `__teola_served_by__`: whatever creates another object of the class gets a
    served one. `members` returns what else is in its namespace, the same for equal other arguments.
    """
    # Classes keep what their keys name by number.
    key = (own, base, slots, *((id(served_by.pool), served_by.engine) if served_by else ()))
    subclass: Any = _classes.get(key)
    if subclass is None:
        namespace: dict[str, Any] = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        if slots:
            namespace["__slots__"] = slots
        subclass = type(own)(own.__name__, (base, own), {**namespace, **members()})
        if served_by is not None:
            subclass.__teola_served_by__ = served_by
        _classes[key] = subclass
    return subclass
