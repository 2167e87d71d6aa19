"""Where the user's own models and retrievers are called: one place per query, shared by plain and early calls.

Whoever comes first makes a call, the plain object or the graph; the other gets its outcome. So there is never a call
that the plain object would not make.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig

from teola_plugin.adapters.langchain.own_models import replay
from teola_plugin.adapters.langchain.own_models.gates import Gate, Pass
from teola_plugin.adapters.langchain.own_models.leaf_calls import (
    LeafCall,
    Outcome,
    Site,
    State,
    aoutcome_of,
    outcome_of,
    same,
)

if TYPE_CHECKING:
    from teola_plugin.pool import EnginePool

open_places: dict[str, Place] = {}
"""By query id."""


class Place:
    """The calls of one query. Used by the caller's side and by the pool's loop at once."""

    sync: bool

    def __init__(
        self, config: RunnableConfig, early: frozenset[str], sites: Mapping[str, Site], limit: Gate | None
    ) -> None:
        self.config = config
        """Of the root call."""
        self.sites = sites
        self._run: Any = None
        self._query = ""
        self._pending: list[LeafCall] = []
        """Early calls asked for before the query's run was known."""
        self._early = early
        self._limit = limit
        self._context = copy_context()
        self._lock = threading.Lock()
        self._calls: dict[str, list[LeafCall]] = {}
        self._closed = False

    # ------------------------------------------------------------ life

    def open(self, query: str, pool: EnginePool) -> None:
        """From now on the pool's graph of this query finds the place. Raises `EngineUnavailable`."""
        from teola_plugin.adapters.langchain.own_models.wrapped import started

        started(pool)
        self._query = query
        open_places[query] = self

    def begin(self, run: Any) -> None:
        """Early calls may start; what they call in turn belongs to `run`."""
        with self._lock:
            self._run = run
            pending, self._pending = self._pending, []
        for call in pending:
            self._start(call)

    def close(self) -> None:
        """The query is over: early calls that nobody claimed are given up."""
        open_places.pop(self._query, None)
        with self._lock:
            self._closed = True
            unclaimed = [c for calls in self._calls.values() for c in calls if not c.for_plain]
            for call in unclaimed:
                call.state = State.DROPPED
        for call in unclaimed:
            call.stop()
            call.end(Outcome(error=asyncio.CancelledError()))

    # ------------------------------------------------------------ the graph's side

    def ahead(self, key: str, input: Any) -> Future[Outcome]:
        """The outcome of the plain object's call, which is made now where that may be done ahead of it."""
        often = self.sites[key].mapped  # what was predicted of a list may come again with the list itself
        with self._lock:
            call = self._find(key, input, lambda c: often or not c.for_graph)
            fresh = call is None
            if call is None:
                call = LeafCall(self.sites[key], input, State.DROPPED if self._closed else State.WAITING)
                self._calls.setdefault(key, []).append(call)
            call.for_graph = True
            starts = fresh and key in self._early and call.state is State.WAITING
            if starts and self._run is None:
                self._pending.append(call)
                starts = False
        if call.state is State.DROPPED:
            call.end(Outcome(error=asyncio.CancelledError()))
        elif starts:
            self._start(call)
        return call.outcome

    def _start(self, call: LeafCall) -> None:
        raise NotImplementedError

    def _pass(self, call: LeafCall, *, early: bool) -> Pass:
        return Pass([gate for gate in (call.site.gate, self._limit) if gate is not None], early=early)

    def _take_up(self, call: LeafCall) -> bool:
        """Whether the early call is still to be made."""
        with self._lock:
            if call.state is not State.WAITING or self._closed:
                return False
            call.state = State.EARLY
            return True

    def _early_config(self, call: LeafCall) -> RunnableConfig:
        return replay.early_config(self.config, call.site.config, call.log, sync=self.sync)

    # ------------------------------------------------------------ the plain object's side

    def _claim(self, site: Site, input: Any) -> LeafCall:
        """The call that the plain object makes here: one made ahead (EARLY), or its own (PLAIN)."""
        with self._lock:
            call = self._find(site.key, input, lambda c: not c.for_plain)
            if call is None:
                call = LeafCall(site, input, State.PLAIN)
                self._calls.setdefault(site.key, []).append(call)
            elif call.state is State.WAITING:
                call.state = State.PLAIN
            call.for_plain = True
        return call

    def _find(self, key: str, input: Any, free: Callable[[LeafCall], bool]) -> LeafCall | None:
        calls = self._calls.get(key, ())
        return next((c for c in calls if c.state is not State.DROPPED and free(c) and same(c.input, input)), None)


@contextlib.contextmanager
def placed(*places: Place | None) -> Iterator[None]:
    """The places are closed after the body."""
    try:
        yield
    finally:
        for place in places:
            if place is not None:
                place.close()


class SyncPlace(Place):
    """For `invoke`: an early call runs on a thread of its own, as the framework's parallel branches do."""

    sync = True

    def _start(self, call: LeafCall) -> None:
        context = self._context.copy()
        config = self._early_config(call)
        replay.prepare(context, config, self._run)
        threading.Thread(target=context.run, args=(self._make, call, config), name="teola-early", daemon=True).start()

    def _make(self, call: LeafCall, config: RunnableConfig) -> None:
        with self._pass(call, early=True):
            if not self._take_up(call):
                return
            with replay.untraced():
                call.end(outcome_of(lambda: call.site.leaf.invoke(call.input, config, **call.site.kwargs)))

    def invoke(self, site: Site, input: Any, config: RunnableConfig | None) -> Any:
        """`site.leaf.invoke`, or the outcome and the events of the same call made ahead."""
        call = self._claim(site, input)
        if call.state is State.PLAIN:
            with self._pass(call, early=False):
                outcome = outcome_of(lambda: site.leaf.invoke(input, config, **site.kwargs))
            call.end(outcome)
            return outcome.get()
        replay.deliver(call.log, config or {}, site.tags)
        outcome = call.outcome.result()
        replay.deliver(call.log, config or {}, site.tags)
        return outcome.get()


class AsyncPlace(Place):
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
        context = self._context.copy()
        config = self._early_config(call)
        replay.prepare(context, config, self._run)
        task = self._loop.create_task(self._make(call, config), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call.stop = lambda: self._cancel(task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(task.cancel)

    async def _make(self, call: LeafCall, config: RunnableConfig) -> None:
        async with self._pass(call, early=True):
            if not self._take_up(call):
                return
            with replay.untraced():
                call.end(await aoutcome_of(call.site.leaf.ainvoke(call.input, config, **call.site.kwargs)))

    async def ainvoke(self, site: Site, input: Any, config: RunnableConfig | None) -> Any:
        """`site.leaf.ainvoke`, or the outcome and the events of the same call made ahead."""
        call = self._claim(site, input)
        if call.state is State.PLAIN:
            return await self._plain(call, config)
        try:
            await replay.adeliver(call.log, config or {}, site.tags)
            outcome = await asyncio.shield(asyncio.wrap_future(call.outcome))
        except asyncio.CancelledError:
            call.stop()
            outcome = await asyncio.shield(asyncio.wrap_future(call.outcome))
            await replay.adeliver(call.log, config or {}, site.tags)
            raise
        await replay.adeliver(call.log, config or {}, site.tags)
        return outcome.get()

    async def _plain(self, call: LeafCall, config: RunnableConfig | None) -> Any:
        try:
            async with self._pass(call, early=False):
                outcome = await aoutcome_of(call.site.leaf.ainvoke(call.input, config, **call.site.kwargs))
        except asyncio.CancelledError as error:  # while it waited for its turn
            outcome = Outcome(error=error)
        call.end(outcome)
        return outcome.get()
