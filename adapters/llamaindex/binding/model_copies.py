"""Private copies of the user's own models, which have an engine do what the originals do by themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from teola_plugin.adapters.engine_specs import differs
from teola_plugin.adapters.routing import WORKER, EngineRoute
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.query_run import current_run
from teola_plugin.shims.llamaindex.copies import sharing
from teola_plugin.shims.llamaindex.records import Parts, Unreadable

P = TypeVar("P", bound=Parts)
Body = Callable[..., Any]
_ROUTE = "__teola_copy_route__"
"""The private attribute of a copy with its route."""
OWN_CLASS = "__teola_own_class__"
"""The attribute of a class of bound objects with the user's class."""


class ModelCopy:
    """A mixin before the model's own class. A copy shares the model's fields; its private attributes are its own."""

    __teola_route__: ClassVar[Any] = WORKER

    @property
    def route(self) -> EngineRoute:
        private: Any = getattr(self, "__pydantic_private__")  # noqa: B009 - of Pydantic's class, which comes later
        route: EngineRoute = private[_ROUTE]
        return route

    @property
    def pool(self) -> EnginePool:
        return self.route.pool

    @property
    def engine(self) -> str:
        return self.route.engine

    def request(self, kind: PrimitiveKind, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle:
        """Send one request per payload; in an accelerated query, prefetched results are claimed."""
        return self.pool.call(kind, self.engine, payloads, stream=stream, run=current_run.get())


def copy_of(obj: Any, kind: Any, route: EngineRoute, private: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of a Pydantic object that is a `kind` of `ModelCopy` too, with other private attributes."""
    copied = sharing(_copy_class(kind, own_class(obj)), obj)
    private = {**(obj.__pydantic_private__ or {}), **(private or {}), _ROUTE: route}
    object.__setattr__(copied, "__pydantic_private__", private)
    return copied


@lru_cache(maxsize=64)
def _copy_class(kind: Any, original: Any) -> Any:
    """Create a subclass with the name of the original's class, so that spans and events are the same."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (kind, original), names)


def own_class(obj: Any) -> Any:
    """Return the user's class of an object, which may come from `pool.bound`."""
    return vars(type(obj)).get(OWN_CLASS, type(obj))


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


def overridden(obj: Any, base: type[Any]) -> str:
    """Return the name of a method of `base` that a subclass, or the object itself, overrides; empty for none."""
    classes = own_class(obj).__mro__
    for cls in classes[: classes.index(base)]:
        for name, value in vars(cls).items():
            if callable(value) and not name.startswith("__") and callable(getattr(base, name, None)):
                return f"{cls.__name__}.{name}"
    own_names = (name for name, value in vars(obj).items() if callable(value) and callable(getattr(base, name, None)))
    return next((f"its own {name}" for name in own_names if name not in base.model_fields), "")
