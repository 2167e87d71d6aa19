"""Names and attributes of objects at hand, read without running anything of the user's."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import (
    CellType,
    ClassMethodDescriptorType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from teola_plugin.tracer.functions.believed import believed
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE, Known, Symbol

_FRAMEWORKS = ("langchain", "langchain_classic", "langchain_core", "langchain_openai", "teola_plugin")
_NOTHING = object()
_classes_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""The classes that a class is made of, itself included; a metaclass has no say in it."""
_OF_C = (MethodDescriptorType, ClassMethodDescriptorType)
"""Methods that are not written in Python."""


def of_framework(thing: Any) -> bool:
    """Whether a class or function is the framework's own."""
    module = getattr(thing, "__module__", "")
    return isinstance(module, str) and module.split(".", 1)[0] in _FRAMEWORKS


def is_a(value: object, kind: type) -> bool:
    """Return True if `kind` is among the classes of `value`. Runs none of their code, unlike `isinstance`."""
    return derives_from(type(value), kind)


def derives_from(kind: type, *bases: type) -> bool:
    """Return True if one of `bases` is among the classes that `kind` is made of. Runs no code of a metaclass.

    `issubclass` may run some: abstract classes ask their subclasses, too, and those of Pydantic 2.11 read an attribute
    of `kind`.
    """
    return any(cls is base for cls in _classes_of(kind) for base in bases)


def attribute(owner: Any, name: str) -> Symbol:
    """`owner.name`; unknown for what a property, or any code, would give."""
    found = _attribute(owner, name)
    if isinstance(found, Known) and not believed(owner, name, found.value, lambda: _again(owner, name)):
        return UNKNOWN_VALUE
    return found


def _again(owner: Any, name: str) -> Any:
    found = _attribute(owner, name)
    return found.value if isinstance(found, Known) else found


def _attribute(owner: Any, name: str) -> Symbol:
    if is_a(owner, ModuleType):
        found = vars(owner).get(name, _NOTHING)
        return UNKNOWN_VALUE if found is _NOTHING else Known(found)
    try:
        held = inspect.getattr_static(owner, name, _NOTHING)
    except Exception:  # an object that is strange enough
        return UNKNOWN_VALUE
    if held is _NOTHING:
        return UNKNOWN_VALUE
    return _bound(owner, name, held)


def _bound(owner: Any, name: str, held: Any) -> Symbol:
    """What the attribute gives that is held so."""
    kind = type(held)
    of_instance = not is_a(owner, type) and held is _own(owner).get(name, _NOTHING)
    if of_instance or not any("__get__" in vars(one) for one in kind.__mro__):
        return Known(held)
    if kind is MemberDescriptorType and not is_a(owner, type):
        try:
            return Known(held.__get__(owner, type(owner)))
        except AttributeError:
            return UNKNOWN_VALUE
    if kind in _OF_C:
        return Known(held.__get__(None, owner) if is_a(owner, type) else held.__get__(owner, type(owner)))
    if kind is property and held.fget is not None and of_framework(held.fget):
        try:
            return Known(held.__get__(owner, type(owner)))
        except Exception:
            return UNKNOWN_VALUE
    if kind is staticmethod:
        return Known(held.__func__)
    if kind is classmethod and isinstance(held.__func__, FunctionType):
        return Known(MethodType(held.__func__, owner if is_a(owner, type) else type(owner)))
    if kind is FunctionType:
        return Known(held if is_a(owner, type) else MethodType(held, owner))
    return UNKNOWN_VALUE


def _own(owner: Any) -> Mapping[str, Any]:
    """The object's own attributes."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a function's free names come from."""

    cells: Mapping[str, Any]
    globals: Mapping[str, Any]
    held: Mapping[str, CellType] = field(default_factory=dict)
    """The cells themselves."""

    @staticmethod
    def of(func: FunctionType) -> Surroundings:
        cells: dict[str, Any] = {}
        held = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
        for name, cell in held.items():
            try:
                cells[name] = cell.cell_contents
            except ValueError:  # not there yet
                continue
        return Surroundings(cells, func.__globals__, held)

    def has(self, *names: str) -> bool:
        """Whether all of them are there."""
        return all(any(name in found for found in (self.cells, self.globals, vars(builtins))) for name in names)

    def read(self, name: str) -> Symbol:
        if name in self.cells:
            cell, value = self.held.get(name), self.cells[name]
            sure = cell is None or believed(cell, name, value, lambda: cell.cell_contents)
            return Known(value) if sure else UNKNOWN_VALUE
        if name in self.globals:
            value = self.globals[name]
            return Known(value) if believed(self.globals, name, value, lambda: self.globals[name]) else UNKNOWN_VALUE
        return Known(vars(builtins)[name]) if name in vars(builtins) else UNKNOWN_VALUE


NOWHERE = Surroundings({}, {})
