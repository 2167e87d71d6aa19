"""Reading an object of LlamaIndex into a record of what it is made of.

One record per class. A field names the attribute that it is read from and the types that it may have; `METHODS` are
those that are called on the object or on copies of it. Whatever the installed version does not have so raises
`Unreadable`: the object is not understood then, and runs as it always did.
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


def since(version: str, *methods: str) -> tuple[str, ...]:
    """Return `methods`, which objects have since `version` of llama-index-core; nothing for an older version."""
    return () if is_older_than(version) else methods


def before(version: str, value: Any) -> Any:
    """Return the default of a field whose attribute came with `version` of llama-index-core.

    It is `value` in older versions. From `version` on there is no default: an object without the attribute is not
    understood.
    """
    return value if is_older_than(version) else _MISSING


class Unreadable(Exception):
    """What an object lacks, or has in another shape than LlamaIndex gives it, in words for the report."""


def missing(obj: object, name: str | None, kind: str = "") -> Unreadable:
    """Return the error for an object that lacks a name. That LlamaIndex's own class lacks it is logged once, too."""
    cls = type(obj)
    if cls.__module__.startswith("llama_index.core."):
        consequence = f"a {cls.__name__} runs as the original does, and nothing of it starts early"
        report_missing("llama-index-core", f"{cls.__name__}.{name}", consequence)
    return Unreadable(f"it has no {kind}{name!r}, which {KNOWN} gives it")


@dataclass(frozen=True, slots=True)
class Attribute:
    """Where a field's value stands in the object."""

    name: str
    kinds: tuple[type, ...] = (object,)
    default: Any = _MISSING
    """For versions that do not have it yet."""

    def read(self, obj: object) -> Any:
        value = getattr(obj, self.name, self.default)
        if value is _MISSING:
            raise missing(obj, self.name)
        if not isinstance(value, self.kinds):
            wanted = " or ".join(kind.__name__ for kind in self.kinds)
            raise Unreadable(f"its {self.name!r} is a {type(value).__name__}, in {KNOWN} a {wanted}")
        return value


@dataclass(frozen=True, slots=True)
class Derived:
    """What is found out of several attributes."""

    function: Callable[[Any], Any]

    def read(self, obj: object) -> Any:
        try:
            return self.function(obj)
        except AttributeError as error:
            raise missing(error.obj, error.name) from error


def attribute(name: str, *kinds: type, default: Any = _MISSING) -> Any:
    """A field that is read from the attribute `name`, of one of these types if any are named."""
    return field(metadata={"source": Attribute(name, kinds or (object,), default)})


def derived(function: Callable[[Any], Any]) -> Any:
    """A field whose value is found out from the object."""
    return field(metadata={"source": Derived(function)})


@dataclass(frozen=True, slots=True)
class Parts:
    """What an object of one class is made of. Values are the object's own: lists are not copied."""

    OF: ClassVar[tuple[type, ...]] = ()
    """The classes that it is a record of, where they need no further package."""
    METHODS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, obj: object) -> Self:
        """Raises `Unreadable`."""
        for name in cls.METHODS:
            if not callable(getattr(type(obj), name, None)):
                raise missing(obj, name, "method ")
        return cls(**{name: read(obj) for name, read in cls.readers()})

    @classmethod
    def readers(cls) -> Iterator[tuple[str, Callable[[object], Any]]]:
        """Each field's name, and what reads its value."""
        return ((one.name, one.metadata["source"].read) for one in fields(cls))

    @classmethod
    def attribute(cls, name: str) -> str:
        """The attribute that a field is read from."""
        source: Attribute = cls.__dataclass_fields__[name].metadata["source"]
        return source.name

    @classmethod
    def path(cls, path: str, name: str) -> str:
        """Where a field's value is found, for the report, if the object is at `path`."""
        return f"{path}.{cls.attribute(name)}"

    @classmethod
    def named(cls, **values: Any) -> dict[str, Any]:
        """Values of fields under the names of their attributes, for a copy."""
        return {cls.attribute(name): value for name, value in values.items()}
