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
    """Stands before the object's own class in the order of methods; each kind overrides what its engine does."""

    @property
    def pool(self) -> EnginePool:
        engine: _EngineRef = vars(self)[_SERVED_BY]
        return engine.pool

    @property
    def engine(self) -> str:
        engine: _EngineRef = vars(self)[_SERVED_BY]
        return engine.engine

    def request(self, kind: PrimitiveKind, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle:
        return self.pool.call(kind, self.engine, payloads, stream=stream, run=current_run.get())

    def __getstate__(self) -> NoReturn:
        refuse_pickling(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Models and clients, which are private attributes, are shared."""
        return copy_sharing_privates(self, memo)


def proxied(obj: Any, kind: Any, engine: str, pool: EnginePool, private: Mapping[str, Any] | None = None) -> Any:
    """A copy of the Pydantic object, of the `EngineProxy` class `kind` too, with these private attributes replaced."""
    own: Any = type(obj)
    return of_class(_class(kind, own), obj, {_SERVED_BY: _EngineRef(pool, engine)}, private or {})


@lru_cache(maxsize=64)
def _class(kind: Any, own: Any) -> Any:
    """With the name of the object's own class, so that spans and events tell the same."""
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def instance_of(module: str, name: str, obj: Any) -> type[Any] | None:
    """The class of that name, if `obj` is an instance of it; without importing what nobody has imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls if cls is not None and isinstance(obj, cls) else None


def read(kind: type[P], obj: Any) -> P:
    """What the object is made of. Raises `RegistrationError` where it is not built as the tested versions build it."""
    try:
        return kind.of(obj)
    except Unreadable as why:
        raise differs(obj, str(why), "leave it unbound") from why


def differs(obj: Any, why: str, hint: str) -> RegistrationError:
    return RegistrationError(f"{type(obj).__name__} cannot be served by the engine: {why}.", hint=hint)


def overridden(obj: Any, known: type[Any]) -> str:
    """What a subclass of `known`, or the object itself, does in its own way; empty for nothing."""
    for cls in type(obj).__mro__[: type(obj).__mro__.index(known)]:
        for name, value in vars(cls).items():
            if callable(value) and not name.startswith("__") and callable(getattr(known, name, None)):
                return f"{cls.__name__}.{name}"
    own = (name for name, value in vars(obj).items() if callable(value) and callable(getattr(known, name, None)))
    return next((f"its own {name}" for name in own if name not in known.model_fields), "")
