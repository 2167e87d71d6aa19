"""Routing rules: which engine of a pool does the work of the user's own objects.

The interceptors of each framework ask for the route of an object where a provider method is called. With a route, the
object's *worker* does the work: a pool-backed object that is set up as the user's object is. Everything above the
provider method stays the user's own object.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from weakref import ref

from teola_plugin.adapters.calls import aitems_inside, items_inside
from teola_plugin.adapters.prompt_cache import PromptCache
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import QueryRun, during
from teola_plugin.runtime.usage import CostMeter, QueryUsage

T = TypeVar("T")
ROUTE = "__teola_route__"
"""The class attribute of objects that are routed wherever they are called: `EngineRoute`, or `WORKER`."""
WORKER: Literal[False] = False
"""The value of `ROUTE` for classes of workers: their own calls are never routed again."""


class EngineRoute(NamedTuple):
    """The engine that does the work of an object."""

    pool: EnginePool
    engine: str


class ServerModel(NamedTuple):
    """A model on a server, as an object of the user's names both."""

    base_url: str
    model: str


class WeakIdentityMap(Generic[T]):
    """Values by object, compared by identity. It keeps no object alive; those that cannot be weakly referenced are not
    remembered."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Any], T]] = {}

    def get(self, obj: Any) -> T | None:
        """Return the value of an object; None without one.

        Objects are told apart by identity, so they need be neither hashable nor comparable. An object that has got the
        identity of a dead one has no value.
        """
        entry = self._entries.get(id(obj))
        return entry[1] if entry is not None and entry[0]() is obj else None

    def set(self, obj: Any, value: T) -> None:
        """Remember a value as long as the object lives."""
        identity, entries = id(obj), self._entries

        def forget(dead: ref[Any]) -> None:
            """Drop the entry of an object that has died, unless its identity belongs to another object by now."""
            entry = entries.get(identity)
            if entry is not None and entry[0] is dead:
                del entries[identity]

        with contextlib.suppress(TypeError):
            entries[identity] = ref(obj, forget), value


class RoutingRules:
    """Rules by object, by class, and by server and model. They hold for objects that are created later, too."""

    def __init__(
        self,
        objects: Iterable[tuple[Any, EngineRoute]] = (),
        classes: Mapping[type, EngineRoute] | None = None,
        servers: Callable[[ServerModel], EngineRoute | None] | None = None,
        server_model_of: Callable[[Any], ServerModel | None] = lambda obj: None,
        prompt_cache: PromptCache | None = None,
        meter: CostMeter | None = None,
    ) -> None:
        """`servers`: returns the route of calls to a model on a server. `server_model_of`: returns which model on which
        server an object talks to; None for objects that talk to none. `prompt_cache`: for models that no engine serves.
        `meter`: counts the calls of models, if the app has prices.
        """
        self._objects = {id(obj): (obj, route) for obj, route in objects}
        self._derived: WeakIdentityMap[EngineRoute] = WeakIdentityMap()
        self._classes = dict(classes or {})
        self._servers, self._server_model_of = servers, server_model_of
        self.prompt_cache, self.meter = prompt_cache, meter
        self.usage: QueryUsage | None = None
        """Counts the calls of the query for which these rules hold; None for rules of no certain query."""

    def __bool__(self) -> bool:
        return bool(self._objects or self._classes or self._servers or self.prompt_cache or self.meter or self.usage)

    @property
    def pools(self) -> list[EnginePool]:
        """The pools of the rules by object and by class."""
        routes = [*(route for _, route in self._objects.values()), *self._classes.values()]
        return [route.pool for route in routes]

    @property
    def holds_for_new_objects(self) -> bool:
        """True if there are rules for objects that do not exist yet."""
        return bool(self._classes or self._servers or self.prompt_cache or self.meter)

    def route(self, obj: Any) -> EngineRoute | None:
        """Return the engine that does the work of an object; None if the object does it itself."""
        entry = self._objects.get(id(obj))
        if entry is not None:
            return entry[1]
        if (derived := self._derived.get(obj)) is not None:
            return derived
        for cls in type(obj).__mro__ if self._classes else ():
            if cls in self._classes:
                return self._classes[cls]
        if self._servers is None:
            return None
        address = self._server_model_of(obj)
        return None if address is None else self._servers(address)

    def derive(self, obj: Any, original: Any) -> None:
        """Route an object that the framework made of `original` as `original` is routed.

        Examples are copies and bound forms of a model. Nothing happens if `original` is not routed, or is the object
        itself.
        """
        route = None if obj is original else self.route(original)
        if route is not None:
            self._derived.set(obj, route)


current_rules: ContextVar[RoutingRules | None] = ContextVar("teola_routing_rules", default=None)
"""The rules of the accelerated object whose code runs, or whose plans are made, here."""


_class_routes: WeakIdentityMap[tuple[EngineRoute | Literal[False] | None]] = WeakIdentityMap()
"""The attribute `ROUTE` by class: Pydantic's classes take ten times as long to say that they have none."""


def class_route(cls: type) -> EngineRoute | Literal[False] | None:
    """Return the attribute `ROUTE` of a class; None without one."""
    entry = _class_routes.get(cls)
    if entry is None:
        entry = (getattr(cls, ROUTE, None),)
        _class_routes.set(cls, entry)
    return entry[0]


def route_of(obj: Any) -> EngineRoute | None:
    """Return the engine that does the work of an object here; None if the object does it itself."""
    route = class_route(type(obj))
    if route is not None:
        return route or None
    rules = current_rules.get()
    return None if rules is None else rules.route(obj)


def rules_of_call(rules: RoutingRules | None, queries: int = 1) -> RoutingRules | None:
    """Return the rules for one call of an app, with what counts its calls of models, if it has prices.

    A call inside another one counts for that. `queries`: number of queries in the call, of which a batch has several.
    """
    if rules is None:
        return None
    outer = current_rules.get()
    usage = None if outer is None else outer.usage
    if usage is None and rules.meter is not None:
        usage = rules.meter.new_query(queries)
    if usage is None:
        return rules
    rules = copy.copy(rules)
    rules.usage = usage
    return rules


def meter_run(rules: RoutingRules | None, run: QueryRun, pool: EnginePool) -> None:
    """Let the trace of a live query say what its calls of models cost, if the rules of its call count them."""
    if rules is None or rules.usage is None:
        return

    def engine_model(name: str) -> str:
        return pool.engine(name).versions().get("model", "") if name in pool.engine_names else ""

    rules.usage.attach(run, engine_model)


def under_routing(rules: RoutingRules | None) -> AbstractContextManager[None]:
    """Return a context in which these rules hold; without rules those around it do."""
    return during(current_rules, rules) if rules else nullcontext()


def routed_items(rules: RoutingRules | None, items: Iterator[T]) -> Iterator[T]:
    """Return an iterator like `items`, each made under these rules, which never leak to the reader in between."""
    return items_inside(partial(under_routing, rules), items) if rules else items


def arouted_items(rules: RoutingRules | None, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Return `routed_items` in a loop."""
    return aitems_inside(partial(under_routing, rules), items) if rules else items


class _Entry(NamedTuple):
    route: EngineRoute
    worker: Any
    is_current: Callable[[Any], bool]


class WorkerTable:
    """The workers of routed objects: made once for each, and again when the fields that decide them have changed."""

    def __init__(self, make: Callable[[Any, EngineRoute], tuple[Any, Callable[[Any], bool] | None]]) -> None:
        """`make`: returns the worker of an object, and a function that tells if the worker still stands for it. Neither
        may hold the object. None in place of the function: the worker is made for each call, and may hold the object.
        `make` raises `RegistrationError` for what the engine cannot do."""
        self._make = make
        self._entries: WeakIdentityMap[dict[EngineRoute, _Entry]] = WeakIdentityMap()

    def worker(self, obj: Any, route: EngineRoute) -> Any:
        """Return the worker of an object on an engine. Raises `RegistrationError` for what the engine cannot do."""
        entries = self._entries.get(obj)
        entry = None if entries is None else entries.get(route)
        if entry is not None and entry.is_current(obj):
            return entry.worker
        worker, is_current = self._make(obj, route)
        if is_current is None:
            return worker
        if entries is None:
            entries = {}
            self._entries.set(obj, entries)
        entries[route] = _Entry(route, worker, is_current)
        return worker
