"""Copies of the user's own objects whose work an engine does: same class name, same fields, same events."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar

from teola_plugin.adapters.llamaindex.pool_backed import refuse_pickling
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.context import current_run
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.shims.llamaindex.copies import copy_sharing_privates, of_class
from teola_plugin.shims.llamaindex.records import Parts, Unreadable

P = TypeVar("P", bound=Parts)
_SERVED_BY = "__teola_served_by__"


class _EngineRef(NamedTuple):
    pool: EnginePool
    engine: str


class EngineProxy:
    """A mixin before the object's own class; each subclass overrides the methods whose work its engine does."""

    @property
    def pool(self) -> EnginePool:
        reference: _EngineRef = vars(self)[_SERVED_BY]
        return reference.pool

    @property
    def engine(self) -> str:
        reference: _EngineRef = vars(self)[_SERVED_BY]
        return reference.engine

    def request(self, kind: PrimitiveKind, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle:
        return self.pool.call(kind, self.engine, payloads, stream=stream, run=current_run.get())

    def __getstate__(self) -> NoReturn:
        refuse_pickling(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy that shares models and clients, which are private attributes."""
        return copy_sharing_privates(self, memo)


def proxied(obj: Any, kind: Any, engine: str, pool: EnginePool, private: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of a Pydantic object that is a `kind` of `EngineProxy` too, with new private attributes."""
    original_class: Any = type(obj)
    return of_class(_proxy_class(kind, original_class), obj, {_SERVED_BY: _EngineRef(pool, engine)}, private or {})


@lru_cache(maxsize=64)
def _proxy_class(kind: Any, original: Any) -> Any:
    """Create a subclass with the name of the original's class, so that spans and events are the same."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (kind, original), names)


def instance_of(module: str, name: str, obj: Any) -> type[Any] | None:
    """Return the class of that name if `obj` is an instance of it, else None. Imports nothing."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls if cls is not None and isinstance(obj, cls) else None


def read(kind: type[P], obj: Any) -> P:
    """Return the parts of an object. Raise `RegistrationError` if it is not built as in the tested versions."""
    try:
        return kind.of(obj)
    except Unreadable as error:
        raise differs(obj, str(error), "leave it unbound") from error


def differs(obj: Any, reason: str, hint: str) -> RegistrationError:
    """Return the error for an object that the engine would not serve as it serves itself."""
    return RegistrationError(f"{type(obj).__name__} cannot be served by the engine: {reason}.", hint=hint)


def overridden(obj: Any, base: type[Any]) -> str:
    """Return the name of a method of `base` that a subclass, or the object itself, overrides; empty for none."""
    for cls in type(obj).__mro__[: type(obj).__mro__.index(base)]:
        for name, value in vars(cls).items():
            if callable(value) and not name.startswith("__") and callable(getattr(base, name, None)):
                return f"{cls.__name__}.{name}"
    own_names = (name for name, value in vars(obj).items() if callable(value) and callable(getattr(base, name, None)))
    return next((f"its own_names {name}" for name in own_names if name not in base.model_fields), "")
