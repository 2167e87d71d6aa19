"""Prefetched calls of the user's own models and retrievers.

A prefetch runs the framework's own `invoke` or `stream` of the object, heard by nobody, with the input that the planner
computed. The provider call inside is registered under its request key (`ProviderCallTable`); the original takes it when
it comes to the same call. So the prefetch needs to know nothing of how the framework calls a provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs, var_child_runnable_config
from langchain_core.utils.uuid import uuid7
from langchain_core.vectorstores import VectorStore

from teola_plugin.adapters.langchain.listening import runs_in
from teola_plugin.adapters.langchain.prefetch_listener import added_to_every_manager, listener_class
from teola_plugin.adapters.plan_report import PrefetchCounts
from teola_plugin.adapters.provider_executor import Outcome, ProviderRequest, prefetchers
from teola_plugin.adapters.snapshots import NotCopied, snapshot
from teola_plugin.graph import InstancePath
from teola_plugin.runtime.call_limits import ConcurrencyLimit, is_inside_prefetch
from teola_plugin.runtime.claims import Caller, PlannerGraph
from teola_plugin.runtime.prefetch_gate import scope_in_place
from teola_plugin.runtime.provider_call import Parked, executing
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.query_run import QueryRun, SubplanRun, current_run
from teola_plugin.runtime.threads import daemon_threads, in_child
from teola_plugin.shims import langchain as shims
from teola_plugin.shims import langchain_interceptors
from teola_plugin.shims.langchain_interceptors import live_scopes
from teola_plugin.tracer.langchain.classes import provider_of

open_calls: dict[str, QueryCalls] = {}
"""Provider calls of live queries, by query id."""
for _live in (open_calls, live_scopes):
    in_child(_live.clear)  # prefetches are under way in the parent process alone

calls_scope: ContextVar[CallScope | None] = ContextVar("teola_calls_scope", default=None)
"""Set where a composite runs whose calls are prefetched outside of a query's table."""

prefetch_scope: ContextVar[CallScope | None] = ContextVar("teola_prefetch_scope", default=None)
"""Set where a prefetch runs."""


def intercept() -> None:
    """Intercept provider methods, if that is not done yet."""
    langchain_interceptors.install(find_scope)


def find_scope(target: Any, run_manager: Any) -> CallScope | None:
    """Return on whose behalf a provider method of `target` is called here; None outside every query."""
    scope = prefetch_scope.get()
    executed = executing.get()
    if executed is target or (executed is not None and isinstance(target, (Embeddings, VectorStore))):
        return None  # what embeds and searches for a retriever is part of its call
    if scope is not None:
        return scope
    for run in _runs_here(run_manager):
        calls = open_calls.get(run.id)
        if calls is not None and type(target) in calls.classes:
            return calls.original
    return calls_scope.get() or scope_in_place.get()


def _runs_here(run_manager: Any) -> Iterator[Any]:
    """Yield the query runs that a call here may belong to, innermost first."""
    yield from reversed(runs_in(run_manager))
    if (run := current_run.get()) is not None:
        yield run
    yield from reversed(runs_in((var_child_runnable_config.get() or {}).get("callbacks")))


def current_calls(run: Any) -> ProviderCallTable | None:
    """Return the table in which provider calls are found that are made here; None if there is none.

    `run`: the query run that the code here belongs to, if any.
    """
    scope = prefetch_scope.get() or calls_scope.get()
    if scope is not None:
        return scope.table
    calls = None if run is None else open_calls.get(run.id)
    return None if calls is None else calls.table


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """A model or retriever of the user's own at its place in a chain, or a call of a store or embeddings in code."""

    key: str
    target: Runnable[Any, Any]
    kwargs: Mapping[str, Any]
    """Arguments bound to it there."""
    config: RunnableConfig
    """What the bindings around it add to its config."""
    limit: ConcurrencyLimit | None
    """Of the object: one call at a time, unless it is known to be safe."""
    mapped: bool = False
    """Called once for each item of a list, so maybe with what an item is predicted to be."""
    within: str = ""
    """Path of the user's object that holds it, where that is planned with an equivalent chain."""
    in_code: Literal["", "sync", "async", "either"] = ""
    """The kind of method by which a function or a node of a graph makes the call, any number of times; empty in chains.
    `either`: a node calls it as the graph is called."""
    on_loop: bool | None = None
    """True if only entry points of a loop come to it, False if only others do."""
    stays_in_place: threading.Event = field(default_factory=threading.Event)
    """Set once a prefetch was of no use: the object changed what it was called with, or the original succeeded and
    made another call. From then on nothing is prefetched here."""
    counts: PrefetchCounts = field(default_factory=PrefetchCounts)

    @property
    def provider(self) -> Any:
        """The object whose provider method is called."""
        return provider_of(self.target)


class EntryPoint(NamedTuple):
    """Through which method a query began."""

    on_loop: bool
    """True for methods of a loop: `ainvoke`, `astream`, ..."""
    streams: bool = False
    """True for methods that stream."""
    listeners: tuple[type, ...] = ()
    """Kinds of handlers that models stream to, which the method itself adds."""


class EntryForm(NamedTuple):
    """The form in which an entry point makes models answer."""

    streams: bool
    """True for `stream` and `astream` of a chain, whose models stream unless they stand inside `.map()`."""
    listeners: tuple[type, ...]
    """Kinds of handlers among the callbacks that models stream to."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """One call that the planner wants for a request of its graph."""

    site: CallSite
    input: Any
    scope: CallScope
    result: Future[Outcome] = field(default_factory=Future)
    ends: tuple[str, ...] = ()
    """Ids of user code that has ended once the original makes the call."""
    cancel: Callable[[], object] = bool

    def end(self, outcome: Outcome) -> None:
        with contextlib.suppress(Exception):  # it was dropped before
            self.result.set_result(outcome)

    def drop(self) -> None:
        """Give it up: nobody waits for it any more.

        Its call is cancelled as far as it can be. Its outcome is a `CancelledError`, unless it has one already.
        """
        self.scope.is_dropped = True
        self.cancel()
        self.end(Outcome(error=asyncio.CancelledError()))


class QueryCalls:
    """The provider calls of one query: those that its graph prefetches, and the original's own."""

    def __init__(
        self,
        config: RunnableConfig,
        sites: Mapping[str, CallSite],
        prefetched: frozenset[str],
        required_inputs: Mapping[str, frozenset[str]],
        unread: frozenset[str],
        limit: ConcurrencyLimit | None,
        form: EntryForm,
        *,
        on_loop: bool,
        learns: bool,
    ) -> None:
        """`prefetched`: keys of the sites whose calls may be made before the original comes to them; the planner waits
        for calls at the others. `required_inputs`: by site, those whose input must be known before. `unread`: those
        whose results the planner has no use for. `on_loop`: prefetches are tasks of the running loop, as the original's
        calls are; otherwise threads. `learns`: a site whose prefetch was for nothing is left alone from then on."""
        self.sites = sites
        self._inherited = _inherited(config)
        self.table = ProviderCallTable(self._limits_of, self._note_call, self._asks_for)
        self.classes = frozenset(type(site.provider) for site in sites.values())
        self.original = CallScope(self.table, Caller.ORIGINAL, copied)
        self._prefetched, self._required_inputs, self._unread = prefetched, required_inputs, unread
        self._limit, self._form = limit, form
        self._loop = asyncio.get_running_loop() if on_loop else None
        self._learns = learns
        self._tasks: set[asyncio.Task[None]] = set()
        self._run: QueryRun | SubplanRun | None = None
        self._query_id = ""
        self._context = copy_context()
        """In which prefetches run: that of the caller, from `begin` on with nobody listening."""
        self._lock = threading.Lock()
        self._reached: set[str] = set()
        """Sites whose input is known: nothing has failed before them."""
        self._passed: set[str] = set()
        """Sites that the original has come to: what the planner wants there now, it was wrong about."""
        self._calls_made: Counter[int] = Counter()
        """Calls of the original, by the identity of the object."""
        self._calls_before_part: dict[str, int] = {}
        """By part of the query: the number of the original's calls before it."""
        self._calls_before_new_part = 0
        """That number for a part whose name is not known yet."""
        self._waiting: list[Prefetch] = []
        self._to_launch: list[Prefetch] = []
        """For the caller's loop, which has been woken for them."""
        self._all: list[Prefetch] = []
        self._refuted: list[Prefetch] = []
        """Dropped since the original came to their site with something else."""

    def open(self, query_id: str) -> None:
        """Let provider calls find the query from now on."""
        self._query_id = query_id
        open_calls[query_id] = prefetchers[query_id] = self
        live_scopes.add(id(self))

    def add_sites(self, sites: Mapping[str, CallSite]) -> None:
        """Prefetch calls at these sites, too, from now on. Other threads may add to the mapping meanwhile."""
        with self._lock:
            new = {key: site for key, site in list(sites.items()) if key not in self.sites}
            if new:
                self.sites = {**self.sites, **new}
                self._prefetched |= new.keys()
                self.classes |= {type(site.provider) for site in new.values()}

    def note_new_part(self) -> int:
        """Note that a part of the query begins now. Return the number of the original's calls before it."""
        with self._lock:
            self._calls_before_new_part = self.table.original_calls
            return self._calls_before_new_part

    def name_new_part(self, name: str, calls_before: int) -> None:
        """Note the name of a part that was noted before, and the number of the original's calls before it."""
        with self._lock:
            self._calls_before_part[name] = calls_before

    def begin(self, run: QueryRun | SubplanRun) -> None:
        """Start prefetching; pool-backed objects that are called in turn belong to `run`."""
        self._context.run(_silence, run.query_run)
        with self._lock:
            self._run = run
        self.table.begin(run.query_run)
        self._start_ready()

    def close(self, *, succeeded: bool = False) -> None:
        """End the query: cancel the prefetched calls that the original did not claim.

        If it `succeeded`, nothing more is prefetched at call sites where a prefetched call was wasted.
        """
        open_calls.pop(self._query_id, None)
        prefetchers.pop(self._query_id, None)
        self.table.close()
        live_scopes.discard(id(self))
        with self._lock:
            prefetches, self._all, self._waiting = self._all, [], []
        for prefetch in prefetches:
            if not prefetch.result.done():
                prefetch.drop()
        for prefetch in dict.fromkeys((*prefetches, *self._refuted)):
            site, calls = prefetch.site, prefetch.scope.calls
            is_hit = any(call.is_claimed_by(Caller.ORIGINAL) for call in calls)
            if calls:
                site.counts.add(is_hit=is_hit)
            if calls and not is_hit and succeeded and self._learns:
                site.stays_in_place.set()

    # ------------------------------------------------------------ the graph's side

    def prefetch(self, request: ProviderRequest, request_id: str, part: str) -> Future[Outcome] | None:
        """Return what the object at a site gives for an input: from a prefetch, or from the original's own call.

        Return None if the planner has no use for it, and at a site to which entry points of this kind do not come.
        """
        key, input = request.site, request.input
        site, is_read = self.sites[key], bool(part) or key not in self._unread or bool(request.ends)
        if site.on_loop not in (None, self._loop is not None):
            return None
        with self._lock:
            self._reached.add(key)
            is_prefetched = key in self._prefetched and key not in self._passed and not request.ends
        may_make = is_prefetched and not site.stays_in_place.is_set()
        copy = copied if is_read else None
        scope = CallScope(self.table, Caller.PLANNER, copy, may_make, request_id=request_id)
        prefetch = self._make_prefetch(site, scope, part) if may_make or is_read else None
        if prefetch is not None and request.ends:
            prefetch.ends = tuple(InstancePath(part).child(name) if part else name for name in request.ends)
        if prefetch is not None and not prefetch.scope.is_dropped:
            try:
                prefetch.input = snapshot(input)
            except NotCopied as error:
                prefetch.end(Outcome(error=error))
            else:
                with self._lock:
                    self._waiting.append(prefetch)
        self._start_ready()
        return prefetch.result if prefetch is not None and is_read else None

    def _make_prefetch(self, site: CallSite, scope: CallScope, part: str) -> Prefetch:
        """Create the prefetch for a site that the planner has come to; drop it if the query has ended.

        `part`: name of the subplan that prefetches, empty for the query's own graph. If a prefetched call changes its
        arguments, nothing is prefetched at the site from then on.
        """
        scope.on_change = site.stays_in_place.set
        prefetch = Prefetch(site, None, scope)
        scope.stop = lambda: prefetch.cancel()
        with self._lock:
            if part:
                calls_before = self._calls_before_part.get(part, self._calls_before_new_part)
                scope.graph = PlannerGraph(part, part, lookahead=True, since=calls_before)
            scope.is_dropped = self.table.is_closed
            if not scope.is_dropped:
                self._all.append(prefetch)
        if scope.is_dropped:
            prefetch.drop()
        return prefetch

    def _start_ready(self) -> None:
        """Start the waiting prefetches whose required inputs are known by now; none before the query has begun."""
        with self._lock:
            if self._run is None:
                return
            ready = [
                one for one in self._waiting if self._required_inputs.get(one.site.key, frozenset()) <= self._reached
            ]
            self._waiting = [one for one in self._waiting if one not in ready]
        for prefetch in ready:
            self._start(prefetch)

    def _start(self, prefetch: Prefetch) -> None:
        """Start a prefetch on a thread, or as a task of the caller's loop. Called from any thread."""
        if self._loop is None or prefetch.site.in_code == "sync":
            if prefetch.site.in_code == "async":
                prefetch.end(Outcome(error=asyncio.InvalidStateError("the caller has no loop")))
            else:
                daemon_threads().start(partial(self._context.copy().run, self._run_on_thread, prefetch))
            return
        with self._lock:
            is_woken = bool(self._to_launch)
            self._to_launch.append(prefetch)
        if is_woken:
            return
        try:
            self._loop.call_soon_threadsafe(self._launch)
        except RuntimeError:  # the caller's loop is closed: nobody waits any more
            prefetch.drop()

    def _run_on_thread(self, prefetch: Prefetch) -> None:
        """Make a prefetched call on this thread, and end the prefetch with its outcome."""
        try:
            config = self._silent(prefetch, CallbackManager)
            with live(config), untraced():
                value = _call_object(prefetch.site, prefetch.input, config, streams=self._streams(prefetch.site))
        except BaseException as error:
            self._end_or_retry(prefetch, error)
        else:
            prefetch.end(Outcome(value))

    def _launch(self) -> None:
        """Begin the prefetches that have come up since, as tasks of the caller's loop."""
        assert self._loop is not None
        with self._lock:
            prefetches, self._to_launch = self._to_launch, []
        for prefetch in prefetches:
            if not prefetch.scope.is_dropped:
                task = self._loop.create_task(self._run_on_loop(prefetch), context=self._context.copy())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                prefetch.cancel = partial(self._cancel, task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel the task of a prefetched call, from any thread. Nothing happens if the caller's loop is closed."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(task.cancel)

    async def _run_on_loop(self, prefetch: Prefetch) -> None:
        """Make a prefetched call on the caller's loop, and end the prefetch with its outcome."""
        try:
            config = self._silent(prefetch, AsyncCallbackManager)
            with live(config), untraced():
                value = await _acall_object(prefetch.site, prefetch.input, config, streams=self._streams(prefetch.site))
        except BaseException as error:
            self._end_or_retry(prefetch, error)
        else:
            prefetch.end(Outcome(value))

    def _end_or_retry(self, prefetch: Prefetch, error: BaseException) -> None:
        """End a prefetch that raised; one that waits for the original's equal call (`Parked`) goes on after it."""
        if not isinstance(error, Parked):  # an error that nobody reads would keep the frames that it was raised in
            prefetch.end(Outcome(error=error) if prefetch.scope.copy is not None else Outcome())
            return

        def go_on() -> None:
            prefetch.scope.expected = error.call
            if not prefetch.scope.is_dropped:
                self._start(prefetch)

        error.call.when_over(go_on)
        if prefetch.ends and self._run is not None:
            error.call.when_begun(partial(self._run.query_run.observe_ends, prefetch.ends))

    def _streams(self, site: CallSite) -> bool:
        return self._form.streams and not site.mapped and not site.in_code

    def _silent(self, prefetch: Prefetch, manager: Any) -> RunnableConfig:
        """Return the config of a prefetch, which the user's callbacks do not hear, and make it ambient.

        Called in the prefetch's own thread or task, just before its model or retriever is called. Provider calls made
        there find the scope of the prefetch. `manager`: the class of the callback manager.
        """
        config, site_config = self._inherited, prefetch.site.config
        if site_config:
            config = _inherited(merge_configs(site_config, config))
        return heard_by_nobody(prefetch.scope, config, self._form.listeners, manager)

    # ------------------------------------------------------------ the original's side

    def _limits_of(self, target: Any) -> list[ConcurrencyLimit]:
        limits = {id(site.limit): site.limit for site in self.sites.values() if site.provider is target and site.limit}
        return [*limits.values(), *([self._limit] if self._limit is not None else [])]

    def _asks_for(self, payload: Any, target: Any) -> bool:
        return self.sites[payload.site].provider is target

    def _note_call(self, target: Any, is_made: bool) -> None:
        """Note a call of the original. If it makes the call itself, drop what was prefetched of this object for other
        arguments: the planner was wrong about them."""
        sites = [site for site in self.sites.values() if site.provider is target]
        if any(site.mapped or site.in_code for site in sites):
            return
        with self._lock:
            self._calls_made[id(target)] += 1
            if self._calls_made[id(target)] < len(sites):
                return  # which of the sites it came to is not known
            keys = {site.key for site in sites}
            self._reached |= keys
            self._passed |= keys
            wrong = []
            for prefetch in self._all if is_made else ():
                if prefetch.site.key in keys and not prefetch.result.done() and prefetch.scope.may_make:
                    if not prefetch.scope.calls:
                        prefetch.scope.may_make = False  # it takes this call, if it is the same, and makes no other
                    elif not any(call.is_claimed_by(Caller.ORIGINAL) for call in prefetch.scope.calls):
                        wrong.append(prefetch)
        self._refuted += wrong
        for prefetch in wrong:
            prefetch.drop()
        self._start_ready()


@contextlib.contextmanager
def closing(*calls: QueryCalls | None) -> Iterator[None]:
    """Close the calls of queries after the body."""
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        for one in calls:
            if one is not None:
                one.close(succeeded=succeeded)


def silenced(scope: CallScope, config: RunnableConfig, listeners: tuple[type, ...], manager: Any) -> RunnableConfig:
    """Make the current context one in which a prefetch runs and nobody hears of it. Return the config for it."""
    _silence(current_run.get())
    return heard_by_nobody(scope, _inherited(config), listeners, manager)


def _silence(run: QueryRun | None) -> None:
    """Make the current context one in which nobody hears of calls; pool-backed objects that they call join `run`."""
    is_inside_prefetch.set(True)
    current_run.set(run)
    shims.silence()


def heard_by_nobody(
    scope: CallScope, config: RunnableConfig, listeners: tuple[type, ...], manager: Any
) -> RunnableConfig:
    """Return a config for a prefetch in a silenced context, and make it the ambient one there.

    `listeners`: kinds of handlers that models stream to, as they would to those of the original. `manager`: the class
    of the callback manager.
    """
    listener = listener_class((*listeners, *added_to_every_manager(manager)))(scope)
    silent = config.copy()
    silent["callbacks"] = manager([listener], [listener], parent_run_id=uuid7())
    prefetch_scope.set(scope)
    var_child_runnable_config.set(silent)
    return silent


def _inherited(config: RunnableConfig) -> RunnableConfig:
    inherited: Any = {key: value for key, value in config.items() if key not in ("callbacks", "run_name", "run_id")}
    return inherited  # type: ignore[no-any-return]


def copied(value: Any) -> Any:
    """Return a copy of what a provider gave. Raises `TypeError` for a value that cannot be copied."""
    return snapshot(value)


def _call_object(site: CallSite, input: Any, config: RunnableConfig, *, streams: bool) -> Any:
    """Return what a call site's object gives for an input: by `invoke`, or by `stream` with the chunks added up."""
    if not streams and shims.generates_as_usual(site.target):
        return shims.generate(site.target, input, _run_manager(CallbackManagerForLLMRun, site, config), site.kwargs)
    if not streams:
        return site.target.invoke(input, config, **site.kwargs)
    total = None
    for chunk in site.target.stream(input, config, **site.kwargs):
        total = chunk if total is None else total + chunk
    return total


async def _acall_object(site: CallSite, input: Any, config: RunnableConfig, *, streams: bool) -> Any:
    """Return what a call site's object gives for an input, as `_call_object` does, in a loop."""
    if not streams and shims.generates_as_usual(site.target):
        manager = _run_manager(AsyncCallbackManagerForLLMRun, site, config)
        return await shims.agenerate(site.target, input, manager, site.kwargs)
    if not streams:
        return await site.target.ainvoke(input, config, **site.kwargs)
    total = None
    async for chunk in site.target.astream(input, config, **site.kwargs):
        total = chunk if total is None else total + chunk
    return total


def _run_manager(manager_class: Any, site: CallSite, config: RunnableConfig) -> Any:
    """Return the run manager that the model's own `invoke` would make for this config."""
    callbacks: Any = config["callbacks"]
    model: Any = site.target
    inheritable_tags, inheritable_metadata = config.get("tags") or [], config.get("metadata") or {}
    return manager_class(
        run_id=callbacks.parent_run_id,  # so what the model calls in turn is known to be called by it
        handlers=callbacks.handlers,
        inheritable_handlers=callbacks.inheritable_handlers,
        tags=[*inheritable_tags, *(model.tags or ())],
        inheritable_tags=inheritable_tags,
        metadata={**inheritable_metadata, **shims.tracing_metadata(model, site.kwargs), **(model.metadata or {})},
        inheritable_metadata=inheritable_metadata,
    )


@contextlib.contextmanager
def live(config: RunnableConfig) -> Iterator[None]:
    """Let provider calls in the body look for the prefetch that runs there with this config."""
    live_scopes.add(id(config))
    try:
        yield
    finally:
        live_scopes.discard(id(config))


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Keep LangSmith's own tracer away from the body."""
    from langsmith.run_helpers import get_tracing_context, tracing_context
    from langsmith.utils import tracing_is_enabled

    context = get_tracing_context()
    if not tracing_is_enabled(context) and context["parent"] is None:
        yield
        return
    with tracing_context(enabled=False, parent=False):
        yield
