"""Subclasses of the classes of the user's own objects, and what their instances share with the originals."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal
from weakref import WeakValueDictionary

from teola_plugin.adapters.routing import ROUTE, EngineRoute

_classes: WeakValueDictionary[tuple[Any, ...], type] = WeakValueDictionary()


def subclass_of(
    own: type,
    base: type,
    route: EngineRoute | Literal[False] | None = None,
    slots: tuple[str, ...] = (),
    members: Callable[[], Mapping[str, Any]] = dict,
) -> Any:
    """Create a subclass of `own`, with the mixin `base` before it and with its name, which traces and events show.

    `route` is its attribute `ROUTE`: whatever creates another object of the class gets one with that route. `members`
    returns what else is in its namespace, the same for equal other arguments.
    """
    # Classes keep what their keys name by number.
    key = (own, base, slots, route and (id(route.pool), route.engine))
    subclass: Any = _classes.get(key)
    if subclass is None:
        namespace: dict[str, Any] = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        if slots:
            namespace["__slots__"] = slots
        subclass = type(own)(own.__name__, (base, own), {**namespace, **members()})
        if route is not None:
            setattr(subclass, ROUTE, route)
        if generic := getattr(own, "__pydantic_generic_metadata__", None):
            # LangChain names objects of a generic class after its origin, and pydantic compares objects of one origin.
            subclass.__pydantic_generic_metadata__ = {**generic, "origin": generic["origin"] or own}
        _classes[key] = subclass
    return subclass


def forwarded_slots(own: type, holder: Callable[[Any], Any]) -> dict[str, property]:
    """Create properties for what objects of a class keep in `__slots__`, where sharing `__dict__` does not reach.

    `holder` returns the object whose slots are meant: the original, or the instance itself if it has none.
    """
    members = {
        name: member
        for cls in reversed(own.__mro__)
        for name, member in vars(cls).items()
        if inspect.ismemberdescriptor(member) and not name.startswith("__")
    }

    def forwarded(member: Any) -> property:
        return property(
            lambda self: member.__get__(holder(self)),
            lambda self, value: member.__set__(holder(self), value),
            lambda self: member.__delete__(holder(self)),
        )

    return {name: forwarded(member) for name, member in sorted(members.items())}


class FieldSnapshot:
    """The fields of objects, which plans and copies of them are made of, as they were at some time."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._fields = [(vars(obj), getattr(type(obj), "model_fields", None)) for obj in objects]
        self._values = self._current()

    def holds(self) -> bool:
        """Return True if no field was set, and no list or dictionary among them was changed, since."""
        values = self._current()
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))

    def _current(self) -> list[Any]:
        values: list[Any] = []
        for fields, names in self._fields:
            for value in [*fields.values()] if names is None else [fields.get(name) for name in names]:
                values.append(value)
                if type(value) is list or type(value) is tuple:
                    values += value
                elif type(value) is dict:
                    values += value.values()
        return values
