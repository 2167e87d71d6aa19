"""The calls of the user's own models and retrievers: one table a query, shared by plain and early calls.

Whoever comes first makes a call, the plain object or the graph; the other gets its outcome. So there is never a call
that the plain object would not make, unless somebody changes in place what it is made with.

What a call was asked with is kept as a snapshot. The plain object's call is that call only if it comes with exactly
that, whatever object it is. Nothing that one side may change is shared with the other: an early call gets a copy, the
graph gets a copy of the outcome, the plain object gets the outcome itself, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig

from teola_plugin.adapters.langchain.own_models import replay
from teola_plugin.adapters.langchain.own_models.concurrency import ConcurrencyLimit, Permit
from teola_plugin.adapters.langchain.own_models.leaf_calls import CallSite, LeafCall, told_of
from teola_plugin.adapters.own_calls import Outcome, State, aoutcome_of, outcome_of
from teola_plugin.adapters.snapshots import NotCopied, exactly, snapshot
from teola_plugin.runtime.context import current_call, current_place
from teola_plugin.runtime.forks import in_child

open_tables: dict[str, CallTable] = {}
"""By query id."""
in_child(open_tables.clear)  # early calls are under way in the parent process alone

Make = Callable[[Any, RunnableConfig | None], Any]
"""Makes a call in its place: (input, config) -> value."""

_UNKNOWN = object()
"""Stands for what cannot be copied: equal to nothing."""


class CallTable:
    """The calls of one query. Used by the caller's side and by the pool's loop at once."""

    sync: bool

    def __init__(
        self,
        config: RunnableConfig,
        early: frozenset[str],
        sites: Mapping[str, CallSite],
        limit: ConcurrencyLimit | None,
        behind: Mapping[str, frozenset[str]],
    ) -> None:
        self.config = config
        """Of the root call."""
        self.sites = sites
        self._run: Any = None
        self._query = ""
        self._pending: list[LeafCall] = []
        """Early calls that wait for the query's run to be known, or for what is asked before them."""
        self._asked: set[str] = set()
        """Sites whose input is there: nothing has failed before them."""
        self._behind = behind
        self._early = early
        self._limit = limit
        self._context = copy_context()
        self._lock = threading.Lock()
        self._calls: dict[str, list[LeafCall]] = {}
        self._closed = False

    # ------------------------------------------------------------ life

    def open(self, query: str) -> None:
        """From now on the graph of this query finds the table."""
        self._query = query
        open_tables[query] = self

    def begin(self, run: Any) -> None:
        """Early calls may start; what they call in turn belongs to `run`."""
        with self._lock:
            self._run = run
            for calls in self._calls.values():
                for call in calls:
                    run.waits.calls(call.told)
        self._start_ready()

    def close(self) -> None:
        """The query is over: early calls that nobody claimed are given up."""
        open_tables.pop(self._query, None)
        with self._lock:
            self._closed = True
            unclaimed = [c for calls in self._calls.values() for c in calls if not c.for_plain]
        for call in unclaimed:
            self._drop(call)

    # ------------------------------------------------------------ the graph's side

    def call_early(self, key: str, input: Any, request: str) -> Future[Outcome]:
        """What the plain object's call gives, as a copy; it is made now where that may be done ahead of it. `request`:
        the id of the graph's."""
        site, asked = self.sites[key], _snapshot(input)
        often = site.mapped  # what was predicted of a list may come again with the list itself
        with self._lock:
            call = self._find(key, asked, lambda c: often or not c.for_graph)
            fresh = call is None
            if call is None:
                call = self._new(site, asked, self._first_state(site, asked))
            call.for_graph = True
            call.told.requests.append(request)
            self._asked.add(key)
            if fresh and call.state is State.WAITING and key in self._early and not site.changes_input.is_set():
                self._pending.append(call)
        if call.state is State.DROPPED:
            call.end(Outcome(error=asyncio.CancelledError()))
        self._start_ready()
        return call.shown

    def _start_ready(self) -> None:
        with self._lock:
            pending = [] if self._run is None else self._pending
            ready = [call for call in pending if self._behind.get(call.site.key, frozenset()) <= self._asked]
            self._pending = [call for call in self._pending if call not in ready]
        for call in ready:
            self._start(call)

    def _first_state(self, site: CallSite, asked: Any) -> State:
        """Of a call that the graph is the first to want. The plain object may have come with something else."""
        past = not site.mapped and any(c.for_plain for c in self._calls.get(site.key, ()))
        return State.DROPPED if self._closed or past or asked is _UNKNOWN else State.WAITING

    def _start(self, call: LeafCall) -> None:
        raise NotImplementedError

    def _permit(self, call: LeafCall, *, early: bool) -> Permit:
        return Permit([one for one in (call.site.limit, self._limit) if one is not None], early=early)

    def _take_up(self, call: LeafCall) -> bool:
        """Whether the early call is still to be made."""
        with self._lock:
            if call.state is not State.WAITING or self._closed:
                return False
            call.state = State.EARLY
            return True

    def _apart(self, site: CallSite, log: replay.EventLog) -> tuple[Context, RunnableConfig]:
        """Where, and with which config, a call is made that only `log` hears of."""
        context = self._context.copy()
        config = replay.early_config(self.config, site.config, log, sync=self.sync)
        replay.prepare(context, config, self._run)
        return context, config

    # ------------------------------------------------------------ the plain object's side

    def _claim(self, site: CallSite, input: Any) -> LeafCall:
        """The call that the plain object makes here: one made ahead (EARLY), or its own (PLAIN)."""
        with self._lock:
            call = self._find(site.key, input, lambda c: not c.for_plain)
            if call is None:
                call = self._new(site, _snapshot(input), State.PLAIN)
            elif call.state is State.WAITING:
                call.state = State.PLAIN
            call.for_plain = call.told.used = True
            self._asked.add(site.key)
            missed = [] if site.mapped else [c for c in self._calls[site.key] if not c.for_plain]
        for other in missed:  # the plain object came with something else
            self._drop(other)
        self._start_ready()
        return call

    def _new(self, site: CallSite, asked: Any, state: State) -> LeafCall:
        call = LeafCall(site, asked, state, told=told_of(site, asked))
        self._calls.setdefault(site.key, []).append(call)
        if self._run is not None:
            self._run.waits.calls(call.told)
        return call

    def _now(self) -> float:
        """On the runtime's clock."""
        return float(self._run.runtime.time())

    @contextlib.contextmanager
    def _running(self, call: LeafCall) -> Iterator[None]:
        """The leaf is called in the body, for the trace."""
        call.told.began, token = self._now(), current_call.set(call.told)
        try:
            yield
        finally:
            current_call.reset(token)
            call.told.ended = self._now()

    @contextlib.contextmanager
    def _waiting(self, call: LeafCall) -> Iterator[None]:
        """The plain object waits for the call in the body, for the trace."""
        run = self._run
        wait = run.waits.asked(self._now(), run.steps.id_of(current_place.get().step))
        wait.own = call.told
        try:
            yield
        finally:
            wait.answered = self._now()

    def _drop(self, call: LeafCall) -> None:
        call.state = State.DROPPED
        call.stop()
        call.end(Outcome(error=asyncio.CancelledError()))

    def _find(self, key: str, input: Any, free: Callable[[LeafCall], bool]) -> LeafCall | None:
        calls = self._calls.get(key, ())
        return next((c for c in calls if c.state is not State.DROPPED and free(c) and exactly(c.asked, input)), None)


def _snapshot(value: Any) -> Any:
    try:
        return snapshot(value)
    except NotCopied:
        return _UNKNOWN


@contextlib.contextmanager
def closing(*tables: CallTable | None) -> Iterator[None]:
    """The tables are closed after the body."""
    try:
        yield
    finally:
        for table in tables:
            if table is not None:
                table.close()


class SyncCallTable(CallTable):
    """For `invoke`: an early call runs on a thread of its own, as the framework's parallel branches do."""

    sync = True

    def _start(self, call: LeafCall) -> None:
        context, config = self._apart(call.site, call.log)
        threading.Thread(target=context.run, args=(self._make, call, config), name="teola-early", daemon=True).start()

    def _make(self, call: LeafCall, config: RunnableConfig) -> None:
        with self._permit(call, early=True):
            if not self._take_up(call):
                return
            given = snapshot(call.asked)
            with replay.untraced(), self._running(call):
                outcome = outcome_of(lambda: call.site.leaf.invoke(given, config, **call.site.kwargs))
            call.note_changes(given)
            call.end(outcome)

    def invoke(self, site: CallSite, input: Any, config: RunnableConfig | None, make: Make | None = None) -> Any:
        """`site.leaf.invoke` (or `make`), or the outcome and the events of the same call made ahead."""
        call = self._claim(site, input)
        with self._waiting(call):
            return self._taken(call, input, config, make or partial(_invoked, site))

    def _taken(self, call: LeafCall, input: Any, config: RunnableConfig | None, make: Make) -> Any:
        site = call.site
        if call.state is State.PLAIN:
            with self._permit(call, early=False), self._running(call):
                outcome = outcome_of(lambda: make(input, config))
            call.end(outcome)
            return outcome.get()
        replay.deliver(call.log, config or {}, site.tags)
        with replay.breaking_off(call.log, config or {}, site.tags):
            outcome = call.outcome.result()
        replay.deliver(call.log, config or {}, site.tags)
        return (self._once_more(call, input) if call.spoilt else outcome).get()

    def _once_more(self, call: LeafCall, input: Any) -> Outcome:
        """The leaf changes what it is called with: it is called with the plain object's own values, unheard."""
        context, config = self._apart(call.site, replay.EventLog())
        turn = self._permit(call, early=False)

        def make() -> Outcome:
            with replay.untraced(), turn:
                return outcome_of(lambda: call.site.leaf.invoke(input, config, **call.site.kwargs))

        return context.run(make)


def _invoked(site: CallSite, input: Any, config: RunnableConfig | None) -> Any:
    return site.leaf.invoke(input, config, **site.kwargs)


class AsyncCallTable(CallTable):
    """For `ainvoke`: an early call is a task on the caller's loop."""

    sync = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def _start(self, call: LeafCall) -> None:
        try:
            self._loop.call_soon_threadsafe(self._launch, call)
        except RuntimeError:  # the caller's loop is closed: nobody waits any more
            call.end(Outcome(error=asyncio.CancelledError()))

    def _launch(self, call: LeafCall) -> None:
        if call.state is not State.WAITING:
            return
        context, config = self._apart(call.site, call.log)
        task = self._loop.create_task(self._make(call, config), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call.stop = lambda: self._cancel(task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(task.cancel)

    async def _make(self, call: LeafCall, config: RunnableConfig) -> None:
        async with self._permit(call, early=True):
            if not self._take_up(call):
                return
            given = snapshot(call.asked)
            with replay.untraced(), self._running(call):
                outcome = await aoutcome_of(call.site.leaf.ainvoke(given, config, **call.site.kwargs))
            call.note_changes(given)
            call.end(outcome)

    async def ainvoke(self, site: CallSite, input: Any, config: RunnableConfig | None) -> Any:
        """`site.leaf.ainvoke`, or the outcome and the events of the same call made ahead."""
        call = self._claim(site, input)
        with self._waiting(call):
            return await self._taken(call, input, config)

    async def _taken(self, call: LeafCall, input: Any, config: RunnableConfig | None) -> Any:
        site = call.site
        if call.state is State.PLAIN:
            return await self._plain(call, input, config)
        try:
            await replay.adeliver(call.log, config or {}, site.tags)
            outcome = await asyncio.shield(asyncio.wrap_future(call.outcome))
        except asyncio.CancelledError:
            call.stop()
            outcome = await asyncio.shield(asyncio.wrap_future(call.outcome))
            await replay.adeliver(call.log, config or {}, site.tags)
            raise
        await replay.adeliver(call.log, config or {}, site.tags)
        return (await self._once_more(call, input) if call.spoilt else outcome).get()

    async def _once_more(self, call: LeafCall, input: Any) -> Outcome:
        """The leaf changes what it is called with: it is called with the plain object's own values, unheard."""
        context, config = self._apart(call.site, replay.EventLog())
        turn = self._permit(call, early=False)

        async def make() -> Outcome:
            async with turn:
                with replay.untraced():
                    return await aoutcome_of(call.site.leaf.ainvoke(input, config, **call.site.kwargs))

        return await asyncio.get_running_loop().create_task(make(), context=context)

    async def _plain(self, call: LeafCall, input: Any, config: RunnableConfig | None) -> Any:
        try:
            async with self._permit(call, early=False):
                with self._running(call):
                    outcome = await aoutcome_of(call.site.leaf.ainvoke(input, config, **call.site.kwargs))
        except asyncio.CancelledError as error:  # while it waited for its turn
            outcome = Outcome(error=error)
        call.end(outcome)
        return outcome.get()
