"""The base class of adapters for frameworks whose models have provider methods and whose apps have entry points.

An adapter says what is its framework's own: how an app is lowered to a template, which methods begin a query, which
methods call a provider, and how their arguments are copied and compared. The rest is here. The accelerated object is of
a subclass of the app's class and shares its state. The original runs, and its provider methods claim what was
prefetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakValueDictionary

from teola_plugin.adapters.automatic_engines import report_with_rules
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.plan_report import CallRow, PlanReport, Status
from teola_plugin.adapters.planned_queries import expected_sizes, log_fallback, sites_that_start_sooner, submit
from teola_plugin.adapters.provider_executor import Outcome, ProviderRequest, ensure_engine, prefetchers, shared_pool
from teola_plugin.adapters.routing import (
    ROUTE,
    EngineRoute,
    RoutingRules,
    current_rules,
    meter_run,
    rules_of_call,
    under_routing,
)
from teola_plugin.adapters.snapshots import FieldSnapshot, NotCopied, snapshot
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.errors import RegistrationError, TraceError
from teola_plugin.graph import ITEM, Attributes, Component, Query, Ref, Role, named
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.steps import PROVIDER
from teola_plugin.pool import EnginePool
from teola_plugin.request_keys import TargetKey, freeze
from teola_plugin.runtime.call_limits import is_inside_prefetch
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.provider_call import Parked, executing
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.threads import daemon_threads
from teola_plugin.runtime.usage import Tokens
from teola_plugin.shims.interception import MethodInterceptors, observed_by
from teola_plugin.tracer.draft import DERIVED, Draft, TraceResult
from teola_plugin.tracer.report import TraceNode, TraceReport
from teola_plugin.tracer.symbols import NotUnderstood

_classes: WeakValueDictionary[tuple[Any, ...], type] = WeakValueDictionary()
_UNSUPPORTED_OPTIONS = ("bind", "engines", "shadow", "read_only", "prompt_cache")


def subclass_of(
    original_class: type,
    base: type,
    route: EngineRoute | Literal[False] | None = None,
    slots: tuple[str, ...] = (),
    members: Callable[[], Mapping[str, Any]] = dict,
) -> Any:
    """Create a subclass of the original class, with the mixin `base` before it and its name, for traces and events.

    `route` is its attribute `ROUTE`: whatever creates another object of the class gets one with that route. `members`
    returns what else is in its namespace, the same for equal other arguments.
    """
    # Classes keep what their keys name by number.
    key = (original_class, base, slots, route and (id(route.pool), route.engine))
    subclass: Any = _classes.get(key)
    if subclass is None:
        namespace: dict[str, Any] = {
            name: getattr(original_class, name) for name in ("__module__", "__qualname__", "__doc__")
        }
        if slots:
            namespace["__slots__"] = slots
        subclass = type(original_class)(original_class.__name__, (base, original_class), {**namespace, **members()})
        if route is not None:
            setattr(subclass, ROUTE, route)
        if generic := getattr(original_class, "__pydantic_generic_metadata__", None):
            # LangChain names objects of a generic class after its origin, and pydantic compares objects of one origin.
            subclass.__pydantic_generic_metadata__ = {**generic, "origin": generic["origin"] or original_class}
        _classes[key] = subclass
    return subclass


def forwarded_slots(original_class: type, holder: Callable[[Any], Any]) -> dict[str, property]:
    """Create properties for what objects of a class keep in `__slots__`, where sharing `__dict__` does not reach.

    `holder` returns the object whose slots are meant: the original, or the instance itself if it has none.
    """
    members = {
        name: member
        for cls in reversed(original_class.__mro__)
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


class MethodCall(NamedTuple):
    """A call of a provider method: its name and what it is called with."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class MethodAdapter(ABC):
    """The adapter of a framework. See `adapters.contract.Adapter`."""

    entry_points: ClassVar[tuple[str, ...]]
    """Methods of an app that answer a query, by names: functions and coroutine functions."""
    provider_methods: ClassVar[Mapping[type, tuple[str, ...]]]
    """By base class: the methods that each class of models defines for itself, below all events of the framework."""

    def __init__(self) -> None:
        self._interceptors = MethodInterceptors()

    @abstractmethod
    def recognizes(self, obj: Any) -> bool:
        """Return True for an object of the framework that may be accelerated. Runs no user code."""

    @abstractmethod
    def lower(self, obj: Any, lowering: MethodLowering) -> Ref:
        """Add the provider calls that an app makes, in its own order; return the ref of its result.

        Runs no user code. Raises `NotUnderstood` for an app that may make other calls than those.
        """

    def query_input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the query's input, which refs to `$input` read, from the arguments of an entry point."""
        return args[0] if args else next(iter(kwargs.values()))

    def snapshot(self, value: Any) -> Any:
        """Return a copy of an argument or a result that shares nothing with it that can change. Raises `TypeError`."""
        return snapshot(value)

    def argument_key(self, value: Any) -> Hashable | None:
        """Return the key of an argument of a class of the framework; None for values that `freeze` takes."""
        return None

    def takes_threads(self, target: Any, threads: ThreadSafety) -> bool:
        """Return True if the sync methods of a model may run on several threads at once."""
        return threads.allows(target)

    def tokens_of(self, value: Any) -> Tokens | None:
        """Return the tokens that a model reports with a result or a chunk, for `prices=`; None if it reports none."""
        return None

    # ------------------------------------------------------------ the same for all frameworks

    def accelerate(self, obj: Any, options: Options) -> Any:
        """Return an object of a subclass of the app's class that shares its state."""
        if unsupported := [name for name in _UNSUPPORTED_OPTIONS if getattr(options, name)]:
            text = f"{'= and '.join(unsupported)}= for a {type(obj).__qualname__}"
            raise RegistrationError(f"this framework's adapter has no {text}.", hint="leave them out")
        obj = getattr(type(obj), "__teola_original__", obj)
        if not hasattr(obj, "__dict__"):
            raise TraceError(f"a {type(obj).__qualname__} has no attributes that can be shared.")
        self.intercept()
        planner = MethodPlanner(self, obj, options)
        entries = {name: planner.entry_point(name) for name in self.entry_points}
        cls: Any = type(obj)
        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        more = {"__teola_original__": obj, "original": property(lambda _: obj), "explain": lambda _: planner.explain()}
        if not hasattr(cls, "report"):  # else it is the app's own
            more["report"] = lambda _: planner.report()
        if not hasattr(cls, "last_trace"):
            more["last_trace"] = lambda _, timeout=5.0: planner.last_trace(timeout)
        subclass: Any = type(cls)(cls.__name__, (cls,), {**names, **entries, **more})
        fast = object.__new__(subclass)
        object.__setattr__(fast, "__dict__", obj.__dict__)
        return fast

    def intercept(self) -> None:
        """Intercept the provider methods of all classes of models that there are by now. Idempotent."""
        for base, names in self.provider_methods.items():
            classes = list[type]()
            unvisited = list[type](base.__subclasses__())
            while unvisited:
                classes.append(cls := unvisited.pop())
                unvisited += cls.__subclasses__()
            self._interceptors.install(classes, {name: self._wrap for name in names})

    def uninstall(self) -> None:
        """Put back every method that is intercepted."""
        self._interceptors.uninstall()

    @property
    def is_installed(self) -> bool:
        """False after `uninstall`, until the next `accelerate`."""
        return self._interceptors.is_installed

    def prefetched_invocation(self, target: Any, call: MethodCall) -> MethodInvocation:
        """Return the call of a provider method below our wrapper, with arguments of its own. Raises `TypeError`."""
        original = self._interceptors.original_of(type(target), call.method)
        if original is None:
            raise NotUnderstood(f"{type(target).__name__}.{call.method} is not intercepted")
        args = tuple(map(self.snapshot, call.args))
        kwargs = {name: self.snapshot(value) for name, value in call.kwargs.items()}
        return MethodInvocation(self, original, target, MethodCall(call.method, args, kwargs))

    def _wrap(self, original: Any) -> Any:
        """Return the replacement of a provider method, which claims prefetched results inside a query of the adapter.

        Outside such a query, for models that the query does not call, and while the same model's provider method is
        already running, the original method is called at once. The wrapper is a coroutine function if the original is
        one.
        """
        name = original.__name__

        def scope_of(target: Any) -> CallScope | None:
            scope, classes = _original_scope.get() if self._interceptors.is_installed else _NO_SCOPE
            return None if type(target) not in classes or executing.get() is target else scope

        def invocation(target: Any, args: Any, kwargs: Any) -> MethodInvocation:
            return MethodInvocation(self, original, target, MethodCall(name, args, kwargs))

        @functools.wraps(original)
        def wrapper(target: Any, /, *args: Any, **kwargs: Any) -> Any:
            scope = scope_of(target)
            if scope is None:
                return _metered(original)(target, *args, **kwargs)
            one = invocation(target, args, kwargs)
            if inspect.isasyncgenfunction(original):
                return scope.aitems(one)
            return scope.items(one) if one.streams else scope.result(one)

        @functools.wraps(original)
        async def awrapper(target: Any, /, *args: Any, **kwargs: Any) -> Any:
            scope = scope_of(target)
            if scope is None:
                return await _metered(original)(target, *args, **kwargs)
            return await scope.aresult(invocation(target, args, kwargs))

        return awrapper if inspect.iscoroutinefunction(original) else wrapper


def _metered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original method of a model, whose calls and tokens are counted if the query around it has prices."""
    rules = current_rules.get()
    return original if rules is None or rules.usage is None else observed_by(rules.usage, original)


_NO_SCOPE: tuple[CallScope | None, frozenset[type]] = (None, frozenset())
_original_scope: ContextVar[tuple[CallScope | None, frozenset[type]]] = ContextVar(
    "teola_method_scope", default=_NO_SCOPE
)
"""Set where an original runs: the scope of its provider calls, and the classes of the models that it may call."""


class MethodInvocation:
    """One entry into a provider method; see `runtime.provider_calls.Invocation`."""

    kind = "GENERATION"
    is_pure = False
    run_id = None

    def __init__(self, adapter: MethodAdapter, original: Any, target: Any, call: MethodCall) -> None:
        self.target = target
        self.streams = inspect.isgeneratorfunction(original) or inspect.isasyncgenfunction(original)
        self.is_async = inspect.iscoroutinefunction(original) or inspect.isasyncgenfunction(original)
        self._adapter, self._original, self._call = adapter, original, call

    def key(self) -> Hashable:
        """Return the model, the method and the arguments."""
        method, args, kwargs = self._call
        by_name = {name: kwargs[name] for name in sorted(kwargs)}
        special = self._adapter.argument_key
        return TargetKey(self.target), method, freeze(args, special), freeze(by_name, special)

    def start(self, record: Callable[[Any], object] | None) -> Any:
        """Call the original method."""
        return _metered(self._original)(self.target, *self._call.args, **self._call.kwargs)

    def report(self, event: Any) -> Any:
        """Report nothing: these methods have no run manager."""


# ------------------------------------------------------------ lowering


@dataclass(slots=True)
class MethodLowering:
    """The template of an app under construction, and the models that it calls."""

    on_loop: bool
    """True for an entry point that is a coroutine function, whose calls are those of the async methods."""
    draft: Draft = field(default_factory=Draft)
    targets: dict[str, Any] = field(default_factory=dict)
    """The models by call site."""
    objects: list[Any] = field(default_factory=list)
    """Objects whose attributes the template depends on: with other values the app is lowered again."""
    _last: str = ""

    def add_call(self, name: str, target: Any, arguments: Callable[..., MethodCall], **inputs: Ref) -> Ref:
        """Add a provider call, which the app makes after those that were added before. `arguments`: what the method
        is called with, made of the values of the inputs."""
        name = self.draft.name(name, *DERIVED)
        self.targets[name] = target
        attributes = Attributes(wrapped=name)
        component = Component(name, Role.GENERATION, tuple(inputs.items()), PROVIDER, attributes=attributes)
        return self._in_order(self.draft.add(component, lambda values: ProviderRequest(name, arguments(**values))))

    def add_value(self, name: str, function: Callable[..., Any], **inputs: Ref) -> Ref:
        """Add a value that the framework's own code makes: a pure function, which may run at any time."""
        return self.draft.call(self.draft.name(name), function, (), **inputs)

    def add_loop(self, name: str, items: Ref, lower_body: Callable[[MethodLowering, Ref], Ref], **captured: Ref) -> Ref:
        """Add a loop over a list, which collects what its body gives. In the body, a captured value has the ref
        `Ref("$name")`; `lower_body` gets the lowering of the body and the ref of the item."""
        body = MethodLowering(self.on_loop, self.draft.new_body(), self.targets, self.objects)
        output = lower_body(body, Ref(ITEM))
        name = self.draft.name(name)
        self.draft.absorb(body.draft)
        inputs = named(items=items, **captured)
        template, attributes = body.draft.template(output, name), Attributes(is_parallel=True)
        return self._in_order(self.draft.add(Component(name, Role.MAP, inputs, body=template, attributes=attributes)))

    def _in_order(self, ref: Ref) -> Ref:
        """Order the component of `ref` after the provider call or loop that was added last. Return `ref`.

        Called for provider calls and loops, which keep the order of the app's own code; pure values may run at any
        time and are not ordered.
        """
        if self._last:
            self.draft.order.append((self._last, ref.producer))
        self._last = ref.producer
        return ref


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """The calls that one entry point prefetches."""

    traced: TraceResult
    targets: Mapping[str, Any]
    prefetched: set[str]
    """Call sites whose calls are prefetched. One whose prefetch was of no use leaves the set."""
    on_threads: frozenset[str]
    """Call sites whose model may be called on several threads at once."""
    fields: FieldSnapshot


class MethodPlanner:
    """Plans the queries of one accelerated app."""

    def __init__(self, adapter: MethodAdapter, obj: Any, options: Options) -> None:
        self._adapter, self._obj, self._options = adapter, obj, options
        self._rules = RoutingRules(meter=options.meter) if options.meter is not None else None
        self._last: QueryRun | None = None
        self._plans: dict[bool, MethodPlan | None] = {}
        """By `on_loop`; None for an app that is not understood."""

    def entry_point(self, name: str) -> Callable[..., Any]:
        """Return the accelerated form of a method: the original's own, with prefetched calls beside it."""
        original = getattr(type(self._obj), name)

        @functools.wraps(original)
        def entry(_: Any, *args: Any, **kwargs: Any) -> Any:
            with self._prefetching(args, kwargs, None):
                return original(self._obj, *args, **kwargs)

        @functools.wraps(original)
        async def aentry(_: Any, *args: Any, **kwargs: Any) -> Any:
            with self._prefetching(args, kwargs, asyncio.get_running_loop()):
                return await original(self._obj, *args, **kwargs)

        return aentry if inspect.iscoroutinefunction(original) else entry

    @contextlib.contextmanager
    def _prefetching(self, args: Any, kwargs: Any, loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
        """Prefetch for one call of an entry point while the body, which is the original's method, runs.

        Without a plan, or if planning fails (which is logged), the body runs as it always did. `loop` is the caller's
        loop; None in a sync method, whose prefetches run on threads.
        """
        query = None
        with under_routing(rules_of_call(self._rules)):
            try:
                plan = self.plan(on_loop=loop is not None) if self._adapter.is_installed else None
                if plan is not None and plan.prefetched:
                    query = MethodQuery(self._adapter, plan, args, kwargs, loop, self._options.pool or shared_pool())
                    self._last = query.run
            except Exception as error:  # nothing has been called yet
                log_fallback(error, self._obj)
            with contextlib.nullcontext() if query is None else query.in_force():
                yield

    def plan(self, *, on_loop: bool) -> MethodPlan | None:
        """Return the plan of the entry points of a kind; None if the app is not understood.

        `on_loop`: for the asynchronous entry points. A plan is made at the first call, and again once a field of the
        app has changed. That an app is not understood is remembered and not tried again.
        """
        plan = self._plans.get(on_loop)
        if on_loop not in self._plans or (plan is not None and not plan.fields.holds()):
            plan = self._plans[on_loop] = self._new_plan(on_loop)
        return plan

    def _new_plan(self, on_loop: bool) -> MethodPlan | None:
        """Plan the app for sync or async entry points; return None if it is not understood or prefetching is off.

        Runs none of the app's code. Prefetched are the call sites that start sooner than in the app's own order; for
        sync entry points only those whose models take several threads.
        """
        lowering = MethodLowering(on_loop)
        if self._options.speculate == "off":
            return None
        try:
            output = self._adapter.lower(self._obj, lowering)
        except NotUnderstood:
            return None
        traced, pool = lowering.draft.finish(output, type(self._obj).__name__), shared_pool()
        planned = pool.plan(traced.template, {}, passes=pool.passes, speculate="auto")
        sites = () if planned.source is None else sites_that_start_sooner(planned.source, planned.graph)
        threads = self._options.threads
        on_threads = {site for site, target in lowering.targets.items() if self._adapter.takes_threads(target, threads)}
        self._adapter.intercept()
        fields = FieldSnapshot([self._obj, *lowering.objects])
        prefetched = {site for site in sites if on_loop or site in on_threads}
        return MethodPlan(traced, dict(lowering.targets), prefetched, frozenset(on_threads), fields)

    def explain(self) -> str:
        """Return one line for each call site of the sync entry points. With prices, what a query costs comes last."""
        report, is_understood = self.report(), self.plan(on_loop=False) is not None
        rows = "\n".join(f"{row.name}: {row.status.value}" for row in report.calls)
        return (rows if is_understood else "not understood: the original runs as it always did") + report.engines_text

    def report(self) -> PlanReport:
        """Return a row for each call site of the sync entry points. With prices, the report has the cost of queries."""
        from teola_plugin.adapters.explain import ended_trace, unplanned

        plan = self.plan(on_loop=False)
        targets, prefetched = ({}, set[str]()) if plan is None else (plan.targets, plan.prefetched)
        rows = tuple(
            CallRow(site, Status.PREFETCHED if site in prefetched else Status.IN_PLACE, type(target).__name__)
            for site, target in targets.items()
        )
        names = tuple(row.name for row in rows if row.status is Status.PREFETCHED)
        parts = TraceReport((TraceNode("app", type(self._obj).__name__, "original" if plan is None else "lowered"),))
        expect = unplanned(names, ended_trace(() if self._last is None else [self._last]))
        return report_with_rules(PlanReport(parts, names, expect, rows), None, self._rules)

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """Return the trace of the last query that prefetched calls; None before it. `timeout`: seconds to wait."""
        return None if self._last is None else self._last.trace.result(timeout)


# ------------------------------------------------------------ one query


class MethodQuery:
    """The prefetched calls of one query: on threads, or as tasks of the caller's loop."""

    def __init__(
        self,
        adapter: MethodAdapter,
        plan: MethodPlan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop | None,
        pool: EnginePool,
    ) -> None:
        """Start to prefetch. Raise `EngineUnavailable` if the pool, which traces the query, is not running."""
        self._adapter, self._plan, self._loop = adapter, plan, loop
        self._table = ProviderCallTable()
        self._context = copy_context()
        self._context.run(is_inside_prefetch.set, True)
        self._lock = threading.Lock()
        self._scopes: list[tuple[str, CallScope]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        input, traced, passes = adapter.query_input(args, kwargs), plan.traced, shared_pool().passes
        ensure_engine(pool)
        optimised = pool.plan(traced.template, expected_sizes(traced, input), passes=passes, speculate="auto")
        query = Query({"input": input})
        self._query_id = query.id
        prefetchers[query.id] = self
        try:
            self.run = submit(pool, query, optimised, traced.calls)
        except BaseException:
            prefetchers.pop(query.id, None)
            raise
        self._table.begin(self.run)
        meter_run(current_rules.get(), self.run, pool)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the original's calls in the body claim prefetched results, and end the query after it."""
        classes = frozenset(type(target) for target in self._plan.targets.values())
        original = CallScope(self._table, Caller.ORIGINAL, self._adapter.snapshot)
        token, has_succeeded = _original_scope.set((original, classes)), False
        try:
            yield
            has_succeeded = True
        finally:
            _original_scope.reset(token)
            self._close(has_succeeded=has_succeeded)

    def _close(self, *, has_succeeded: bool) -> None:
        """End the query: stop the prefetched calls that the original did not claim.

        A site where the original made calls of its own and claimed no prefetch is not prefetched any more, if the call
        of the app succeeded.
        """
        prefetchers.pop(self._query_id, None)
        with self._lock:
            scopes = list(self._scopes)
            self._table.close()
        for site, scope in scopes:
            if has_succeeded and scope.calls and not any(call.is_claimed_by(Caller.ORIGINAL) for call in scope.calls):
                self._plan.prefetched.discard(site)
            scope.drop()
        for task in list(self._tasks):
            task.cancel()
        self.run.close()

    def prefetch(self, request: ProviderRequest, request_id: str, part: str) -> Future[Outcome]:
        """Return what the model at a call site gives. See `provider_executor.Prefetcher`."""
        key, result = request.site, Future[Outcome]()
        scope = CallScope(self._table, Caller.PLANNER, self._adapter.snapshot, request_id=request_id)
        try:
            invocation = self._adapter.prefetched_invocation(self._plan.targets[key], request.input)
            is_repeated = self._table.has_call(invocation.key())  # equal calls are made as the original makes them
        except (NotCopied, TypeError, ValueError, NotUnderstood) as error:
            result.set_result(Outcome(error=error))
            return result
        with self._lock:
            scope.is_dropped = self._table.is_closed
            self._scopes.append((key, scope))
        may_run = invocation.is_async or key in self._plan.on_threads
        scope.may_make = may_run and key in self._plan.prefetched and not is_repeated
        if scope.may_make:
            scope.expect(invocation)
        if scope.is_dropped:
            result.set_result(Outcome(error=asyncio.CancelledError()))
        elif not scope.may_make:
            self._read(scope, invocation, result)
        elif not invocation.is_async:
            daemon_threads().start(partial(self._context.copy().run, self._read, scope, invocation, result))
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._launch, scope, invocation, result)
        return result

    def _read(self, scope: CallScope, invocation: MethodInvocation, result: Future[Outcome]) -> None:
        """Make the call, or wait for that of the original, and end `result` with what comes of it."""
        try:
            value = self._value(list(scope.items(invocation)), invocation)
        except Parked as parked:
            scope.expected = parked.call
            parked.call.when_over(lambda: self._read(scope, invocation, result))
        except BaseException as error:
            _end(result, Outcome(error=error))
        else:
            _end(result, Outcome(value))

    def _launch(self, scope: CallScope, invocation: MethodInvocation, result: Future[Outcome]) -> None:
        """Start a prefetched call as a task of the caller's loop, unless it was dropped. Runs on that loop."""
        assert self._loop is not None
        if not scope.is_dropped:
            task = self._loop.create_task(self._aread(scope, invocation, result), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            scope.stop = lambda: task.cancel()

    async def _aread(self, scope: CallScope, invocation: MethodInvocation, result: Future[Outcome]) -> None:
        """Make a prefetched call on the caller's loop, and end `result` with its value or error."""
        try:
            value = self._value([item async for item in scope.aitems(invocation)], invocation)
        except BaseException as error:
            _end(result, Outcome(error=error))
        else:
            _end(result, Outcome(value))

    def _value(self, items: list[Any], invocation: MethodInvocation) -> Any:
        """Return what the graph gets of a prefetched call: all chunks if its method streams, else its one result."""
        return items if invocation.streams else items[0]


def _end(result: Future[Outcome], outcome: Outcome) -> None:
    with contextlib.suppress(Exception):  # nobody waits for it any more
        result.set_result(outcome)
