"""Records of what LlamaIndex's objects are made of, read from their private attributes.

One record per class. A field names the attribute that it is read from and the types that it may have; `METHODS` are
those that are called on the object or on copies of it. Whatever the installed version does not have so raises
`Unreadable`: the object is not understood then, and runs as the original does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import llama_index.core
from packaging.version import Version

from teola_plugin.shims import report_missing

KNOWN = "LlamaIndex 0.14"
"""The version that the records are written for."""
_INSTALLED = Version(llama_index.core.__version__)
_MISSING: Any = object()


def is_older_than(version: str) -> bool:
    """Return True if llama-index-core is older than `version`, which changed something that our code depends on."""
    return Version(version) > _INSTALLED


def methods_since(version: str, *methods: str) -> tuple[str, ...]:
    """Return `methods`, which objects have since `version` of llama-index-core; nothing for an older version."""
    return () if is_older_than(version) else methods


def default_before(version: str, value: Any) -> Any:
    """Return the default of a field whose attribute came with `version` of llama-index-core.

    It is `value` in older versions. From `version` on there is no default: an object without the attribute is not
    understood.
    """
    return value if is_older_than(version) else _MISSING


class Unreadable(Exception):
    """An object lacks something, or has it in another shape than LlamaIndex gives it; the text is for the report."""


def missing_attribute(obj: object, name: str | None, kind: str = "") -> Unreadable:
    """Return the error for an object that lacks a name. If its class is LlamaIndex's, that is logged once, too."""
    cls = type(obj)
    if cls.__module__.startswith("llama_index.core."):
        consequence = f"a {cls.__name__} runs as the original does, and nothing of it starts early"
        report_missing("llama-index-core", f"{cls.__name__}.{name}", consequence)
    return Unreadable(f"it has no {kind}{name!r}, which {KNOWN} gives it")


@dataclass(frozen=True, slots=True)
class Attribute:
    """A field that is read from one attribute of the object."""

    name: str
    kinds: tuple[type, ...] = (object,)
    default: Any = _MISSING
    """The value in versions that do not have the attribute yet."""

    def read(self, obj: object) -> Any:
        """Return the value of the attribute. Raise `Unreadable` if it is missing or of another type."""
        value = getattr(obj, self.name, self.default)
        if value is _MISSING:
            raise missing_attribute(obj, self.name)
        if not isinstance(value, self.kinds):
            expected = " or ".join(kind.__name__ for kind in self.kinds)
            raise Unreadable(f"its {self.name!r} is a {type(value).__name__}, in {KNOWN} a {expected}")
        return value


@dataclass(frozen=True, slots=True)
class Derived:
    """A field that is computed from several attributes of the object."""

    function: Callable[[Any], Any]

    def read(self, obj: object) -> Any:
        """Return the computed value. Raise `Unreadable` if an attribute that it needs is missing."""
        try:
            return self.function(obj)
        except AttributeError as error:
            raise missing_attribute(error.obj, error.name) from error


def attribute(name: str, *kinds: type, default: Any = _MISSING) -> Any:
    """Declare a field that is read from the attribute `name`, of one of `kinds` if there are any."""
    return field(metadata={"source": Attribute(name, kinds or (object,), default)})


def derived(function: Callable[[Any], Any]) -> Any:
    """Declare a field that `function` computes from the object."""
    return field(metadata={"source": Derived(function)})


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an object of one class. Values are the object's own: lists are not copied."""

    OF: ClassVar[tuple[type, ...]] = ()
    """The classes whose objects it describes, if they need no further package."""
    METHODS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, obj: object) -> Self:
        """Read the parts of an object. Raises `Unreadable`.

        It does so if the object lacks an attribute or a method that the record names: its version or class is another
        one.
        """
        for name in cls.METHODS:
            if not callable(getattr(type(obj), name, None)):
                raise missing_attribute(obj, name, "method ")
        return cls(**{name: read(obj) for name, read in cls.readers()})

    @classmethod
    def readers(cls) -> Iterator[tuple[str, Callable[[object], Any]]]:
        """Return the name of each field and the function that reads its value."""
        return ((one.name, one.metadata["source"].read) for one in fields(cls))

    @classmethod
    def attribute(cls, name: str) -> str:
        """Return the name of the attribute that a field is read from."""
        source: Attribute = cls.__dataclass_fields__[name].metadata["source"]
        return source.name

    @classmethod
    def path(cls, path: str, name: str) -> str:
        """Return the path of a field's value, for the report, if the object is at `path`."""
        return f"{path}.{cls.attribute(name)}"

    @classmethod
    def as_attributes(cls, **values: Any) -> dict[str, Any]:
        """Return values of fields under the names of their attributes, for a copy."""
        return {cls.attribute(name): value for name, value in values.items()}
