"""The runtime in one process: engines and schedulers run on a loop thread, user code where it runs without us."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

from teola_plugin.engines.base import Engine, forget
from teola_plugin.engines.devices.assignment import assign_devices, on_cards
from teola_plugin.engines.profiles import calibrate
from teola_plugin.errors import pool_closed, pool_not_started, unknown_name
from teola_plugin.graph import Graph, PrimitiveKind, Query, Ref, RequestContext
from teola_plugin.graph.prefix_blocks import request_prefix_events
from teola_plugin.observe.recorder import TraceRecorder, TraceSink
from teola_plugin.observe.spans import GraphView, PassRun, QueryTrace
from teola_plugin.requests.payloads import AnswerForm, Version
from teola_plugin.runtime.driver.graph_driver import GraphDriver
from teola_plugin.runtime.engine_requests import placed
from teola_plugin.runtime.loop_thread import CallHandle, LoopThread, PieceLog, SameLoop
from teola_plugin.runtime.original_calls import OriginalCalls, RequestedCall
from teola_plugin.runtime.ports.engine_port import MAX_QUEUED, EnginePort
from teola_plugin.runtime.ports.port import Port, PortListener
from teola_plugin.runtime.primitive_requests import Calls
from teola_plugin.runtime.query_run import (
    Claiming,
    DeferredSubplan,
    QueryRun,
    QueryStore,
    Subplan,
    current_call,
    current_position,
    current_request_context,
)
from teola_plugin.runtime.threads import at_most, cancel_tasks
from teola_plugin.runtime.usage import current_tally
from teola_plugin.scheduling import BatchPolicy
from teola_plugin.scheduling.events import CancelQuery, Close

_STOP_TIMEOUT_S = 30.0
"""Time that an engine has to stop when the pool is closed."""
_NO_GRAPH = Graph((), Ref("$input"))
"""The graph of a query that is only traced."""


class LocalRuntime:
    """The runtime that executes e-graphs and single calls on the given engines.

    `engines`: replicas by engine name; `policy`: of all engines, or of each by name; `max_queued`: number of requests
    that an engine takes before it refuses more, by name. With `loop=SameLoop()` everything runs on the caller's own
    loop (virtual time); otherwise on a thread of its own, so callers may come from any thread or loop.
    """

    shared = False
    """True if the engines are elsewhere."""

    def __init__(
        self,
        engines: Mapping[str, Sequence[Engine]],
        *,
        policy: BatchPolicy | Mapping[str, BatchPolicy] | None = None,
        max_queued: Mapping[str, int] | None = None,
        loop: LoopThread | SameLoop | None = None,
        details: bool = False,
        keep_traces: int = 64,
        sink: TraceSink | None = None,
    ) -> None:
        self._engines = {name: list(replicas) for name, replicas in engines.items()}
        self._policy = policy
        self._max_queued = max_queued or {}
        self.loop = loop or LoopThread()
        self._threads = isinstance(self.loop, LoopThread)
        wall = time.time if self._threads else None
        self.recorder = TraceRecorder(keep_traces, details=details, wall=wall, sink=sink)
        self._reset_state()

    def _reset_state(self) -> None:
        """Set the state of a runtime that was never started: no queries, no requests, no ports."""
        self._driver = GraphDriver(self.recorder, threads=self._threads)
        self._calls = OriginalCalls(self._driver, self._version, self._deliver)
        request_driver = self._driver.engines
        self._listener = PortListener(
            request_driver.request_started, request_driver.request_piece, request_driver.request_ended
        )
        self._ports: dict[str, Port] = {}
        self._start: Future[Any] | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._running = False

    # ------------------------------------------------------------ start and stop

    def start(self) -> None:
        """Start the loop and the engines, side by side; again after `stop`. Raises what an engine raises, and
        `EngineUnavailable` in a process that was forked while they ran."""
        if self.loop.was_forked:
            raise self.loop.unavailable()
        if self.loop.used:
            self.renew()
        self.loop.start()
        starting = self._start = self.loop.run(self._start_engines())
        try:
            starting.result()
        except CancelledError:  # see `break_off`
            self.stop()
            raise pool_closed() from None
        except BaseException:
            starting.cancel()
            self.stop()
            raise
        finally:
            self._start = None

    def break_off(self) -> None:
        """Break off a `start` on another thread: it fails as closed. Engines that have started are stopped again.

        `EnginePool.close` calls this before it takes the lock that the starting thread holds.
        """
        if (start := self._start) is not None:
            start.cancel()

    def renew(self) -> None:
        """Make the runtime as if never started, with a new loop: the last one has ended, or is the parent process's."""
        self.loop = LoopThread()
        self._reset_state()

    async def _start_engines(self) -> None:
        self._starting = asyncio.current_task()
        await self.astart()

    async def astart(self) -> None:
        """`start` for a runtime on the caller's loop."""
        for replicas in self._engines.values():
            request_prefix_events(replicas)
        engines = [e for replicas in self._engines.values() for e in replicas]
        if placed := on_cards(engines):
            await asyncio.to_thread(assign_devices, placed)
        await asyncio.gather(*(e.start() for e in engines))
        for engine in engines:  # one after the other: engines that share cores would disturb each other's figures
            await calibrate(engine)
        self._open({name: self._port_of(name, replicas) for name, replicas in self._engines.items()})

    def _port_of(self, name: str, replicas: Sequence[Engine]) -> Port:
        """Return the port of an engine: the one that the engine itself makes, if it needs no scheduler."""
        make_port = getattr(replicas[0], "make_port", None) if len(replicas) == 1 else None
        if make_port is not None:
            return make_port(self._listener)  # type: ignore[no-any-return]
        by_name = {str(number): engine for number, engine in enumerate(replicas)}
        policy = self._policy.get(name) if isinstance(self._policy, Mapping) else self._policy
        max_queued = self._max_queued.get(name, MAX_QUEUED)
        return EnginePort(name, by_name, self._listener, policy=policy, max_queued=max_queued)

    def _open(self, ports: Mapping[str, Port]) -> None:
        """Add ports of engines that have started. From now on, queries are accepted."""
        self._ports.update(ports)
        self._driver.ports = self._ports
        self._running = True

    def stop(self) -> None:
        """Stop the engines and the loop. Idempotent; calls under way fail as unavailable. A forked child leaves its
        parent's alone."""
        if self.loop.was_forked:
            return
        try:
            if self.loop.runs:
                self.loop.run(self.astop()).result(60)
        finally:
            self.loop.stop()
            if self.recorder.sink is not None:
                self.recorder.sink.close()

    async def astop(self) -> None:
        """End all queries, close the ports and stop the engines, on the runtime's loop. Break off a start under way."""
        self._running = False
        starting, self._starting = self._starting, None
        if starting is not None:  # its caller has given up
            await cancel_tasks(_STOP_TIMEOUT_S, [starting])
        self._driver.close()
        await asyncio.gather(*(port.close() for port in self._ports.values()))
        await self._close_engines()

    async def _close_engines(self) -> None:
        stops = (at_most(_STOP_TIMEOUT_S, e.stop()) for replicas in self._engines.values() for e in replicas)
        await asyncio.gather(*stops, return_exceptions=True)

    def add(self, engine: Engine, *, running: bool) -> None:
        """Add an engine, started if the others are. Raises what its start raises, and then it is not added."""
        if running:
            self.loop.run(self._start_added_engine(engine)).result()
        self._engines = {**self._engines, engine.name: [engine]}

    async def _start_added_engine(self, engine: Engine) -> None:
        """Start and calibrate an engine, and open its port. If that fails, stop the engine and raise the error."""
        try:
            await engine.start()
            await calibrate(engine)
        except BaseException:
            await at_most(_STOP_TIMEOUT_S, engine.stop())
            raise
        self._open({engine.name: self._port_of(engine.name, [engine])})

    def attach(self, engine: Engine) -> None:
        """Add an engine that needs no start and no stop (the client's own objects); once per name.

        Raise EngineUnavailable if the pool is not running. The engine is added on the loop, soon.
        """
        self._need_running()
        if engine.name not in self._ports:
            self.loop.post(self._attach, engine)

    def _attach(self, engine: Engine) -> None:
        if engine.name not in self._ports:
            self._ports[engine.name] = self._port_of(engine.name, [engine])

    def _need_running(self) -> None:
        if not self._running:
            raise pool_closed() if self.loop.used else pool_not_started()

    def port(self, engine: str) -> Port:
        """Return the port of an engine by its name.

        Raise `EngineUnavailable` unless the pool is running, and `RegistrationError` for an unknown name.
        """
        self._need_running()
        if engine not in self._ports:
            raise unknown_name("engine", engine, list(self._ports))
        return self._ports[engine]

    # ------------------------------------------------------------ queries

    def submit(
        self,
        query: Query,
        graph: Graph,
        calls: Calls,
        *,
        has_original: bool = False,
        pgraph: Graph | None = None,
        passes: tuple[PassRun, ...] = (),
        streamed: str = "",
        into: PieceLog | None = None,
        form: AnswerForm = AnswerForm.UNKNOWN,
    ) -> QueryRun:
        """Begin to execute `graph` for `query`.

        Args:
            query: The query.
            graph: Its e-graph.
            calls: The client's callables.
            has_original: True if an original runs, too, and ends the query by `run.close()`.
            pgraph: The graph before the passes, for the trace.
            passes: The passes that ran, for the trace.
            streamed: A primitive whose text goes `into` a log as it is written, if a model writes it.
            into: The log.
            form: See `QueryRun`.
        """
        self._need_running()
        query.check(graph)
        store, due = QueryStore(query.inputs), self._due(query)
        run = QueryRun(
            self, query, graph, calls, has_original, store, due=due, form=form, streamed=streamed, streamed_into=into
        )
        self.loop.post(self._admit, run, graph, pgraph, passes, self.time())  # began now, however busy the loop is
        return run

    def watch(self, query: Query, *, joins: bool = False) -> QueryRun:
        """Begin a query of an original without a graph, whose calls are only traced.

        `joins`: subplans may bring graphs for parts of it.
        """
        store, due = QueryStore(query.inputs), self._due(query)
        claiming = Claiming.WITH_SUBPLAN if joins else Claiming.NEVER
        run = QueryRun(self, query, _NO_GRAPH, {}, True, store, claiming=claiming, due=due)
        post = (
            self.loop.post_lazily if query.deadline is None else self.loop.try_post
        )  # nothing happens to it before it calls
        if not post(self._admit, run, _NO_GRAPH, None, (), self.time()):
            raise self.loop.unavailable()
        return run

    def _due(self, query: Query) -> float | None:
        """Return the time by which a query should end: its deadline, or the goal of the running code; None without
        either."""
        if query.deadline is not None:
            return query.deadline
        request_context = current_request_context.get()
        return None if request_context is None or request_context.goal is None else self.time() + request_context.goal

    def _admit(
        self,
        run: QueryRun,
        graph: Graph,
        pgraph: Graph | None,
        passes: tuple[PassRun, ...],
        began: float,
    ) -> None:
        """Begin a query at the driver, and add its graphs to its trace. Runs on the loop, for `submit` and `watch`."""
        self._driver.admit(run, graph, began)
        before = "" if pgraph is None else _text(pgraph)
        self.recorder.describe(run.id, graph=_view(graph), graph_text=_text(graph), pgraph_text=before, passes=passes)

    def request_count(self, query: str) -> int:
        """Return the number of requests of a live query that are under way, or that its graph has made."""
        return sum(1 for _ in self._driver.engines.table.of(query))

    def begin_subplan(self, run: QueryRun, subplan: Subplan) -> None:
        self.loop.try_post(self._driver.begin_subplan, run, subplan)

    def end_subplan(self, run: QueryRun, name: str) -> None:
        self.loop.try_post(self._driver.end_subplan, run, name)

    def schedule_subplans(
        self, run: QueryRun, deferred: DeferredSubplan | None, finished: Sequence[str], *, soon: bool
    ) -> None:
        """Begin a deferred subplan and end finished ones a moment later. From any thread.

        `soon`: False if this may wait until something else wakes the loop.
        """
        send = self.loop.try_post if soon else self.loop.post_lazily
        send(self._driver.schedule_subplans, run, deferred, finished)

    def begin_unforeseen(self, run: QueryRun, deferred: DeferredSubplan) -> None:
        self.loop.try_post(self._driver.begin_unforeseen, run, deferred)

    def observe(self, run: QueryRun, primitive: str, value: Any) -> None:
        self.loop.try_post(self._driver.observe, run, primitive, value, self.time())

    def observe_ends(self, run: QueryRun, primitives: Sequence[str]) -> None:
        self.loop.try_post(self._driver.observe_ends, run, primitives, self.time())

    def close_run(self, run: QueryRun) -> None:
        """Close a query whose original has its answer or gave up, so that requests that nobody claimed are dropped.

        May be called from any thread, and more than once. The end of the query counts from now, even if the loop is
        busy.
        """
        if not run.closed:
            run.closed, run.ended_at = True, self.time()  # now, however busy the loop is
            self.loop.try_post(lambda: self._driver.post(Close(self._driver.now(), run.id)))

    def cancel_run(self, run: QueryRun) -> None:
        """Cancel a query whose caller has given up. May be called from any thread, and more than once."""
        if not run.closed:
            run.closed, run.ended_at = True, self.time()
            self.loop.try_post(lambda: self._driver.post(CancelQuery(self._driver.now(), run.id)))

    @property
    def traces(self) -> tuple[QueryTrace, ...]:
        """The traces of the last finished queries, oldest first."""
        return self.recorder.traces

    def time(self) -> float:
        """The runtime's clock, in seconds; deadlines are on it."""
        return self.loop.time()

    # ------------------------------------------------------------ single calls

    def call(
        self,
        kind: PrimitiveKind,
        engine: str,
        payloads: Sequence[Any],
        *,
        stream: bool = False,
        speculative: bool = False,
        keep_remote: bool = False,
        run: QueryRun | None = None,
        request_context: RequestContext | None = None,
    ) -> CallHandle:
        """Make a call, with one request per payload; inside a live query, earlier requests are claimed.

        With `stream`, pieces can be read as they come: as a part of the result, or, if `speculative`, as a prediction
        of it, which does not change how the request is scheduled and repeated.

        A call outside any live query has this request context, or that of the running code. With `keep_remote`,
        large values may stay where they are made: the results are `RemoteValue`s, for other requests.
        """
        port = self.port(engine)
        future: Future[list[Any]] = Future()
        future.set_running_or_notify_cancel()  # given up through the handle, never by itself
        tally = current_tally.get()
        if tally is not None:
            tally.watch(future)
        payloads, log = list(payloads), PieceLog(speculative=speculative) if stream else None
        call = RequestedCall(
            kind, port, payloads, (), _request_context_of(run, request_context), future, log, keep_remote
        )
        if run is not None:
            caller = current_position.get()
            call.step, call.deferred = run.steps.id_of(caller.step), caller.deferred
            call.wait = run.waits.begin(self.time(), call.step)
            call.wait.within = current_call.get()
            if run.claiming is Claiming.ALLOWED and not run.closed:  # here, not on the loop: rows have long vectors
                key_of, tenant = self._driver.engines.request_key_of, run.query.tenant
                call.keys = [key_of(port, tenant, payload) for payload in payloads]
        loop, calls = self.loop, self._calls
        loop.post(calls.join, run, call)
        # A caller whose loop is closed will never close its query, which would stay for ever.
        on_lost = run.close if run is not None else lambda: None
        return CallHandle(
            future, pieces=log, cancel=lambda: loop.try_post(calls.give_up, call), owner=loop.ident, on_lost=on_lost
        )

    def _deliver(self, future: Future[list[Any]], values: list[Any]) -> None:
        """Hand over the values of a call. Runs on the loop."""
        future.set_result(values)

    async def _version(self, port: Port, collection: str) -> Version | None:
        """Return the present version of a collection; None if the store has no versions."""
        if getattr(port.engine, "version", None) is None and not self.shared:
            return None
        version = await self._administer(port, "version", (collection,))
        return version if isinstance(version, Version) else None

    def admin(self, engine: str, method: str, *args: Any) -> Future[Any]:
        """Run a coroutine method of the engine's (first) replica on the pool's loop, e.g. `count`, `delete`."""
        return self.loop.run(self._admin(self.port(engine), method, args))

    async def _admin(self, port: Port, method: str, args: tuple[Any, ...]) -> Any:
        """Call a coroutine method of an engine for `admin`, and note that it may have deleted rows."""
        try:
            return await self._administer(port, method, args)
        finally:
            self._driver.engines.administered(port.name, method, args)

    async def _administer(self, port: Port, method: str, args: tuple[Any, ...]) -> Any:
        return await getattr(port.engine, method)(*args)

    def reset(self) -> None:
        """Empty every engine's prefix cache and the like, so that runs can be compared."""
        self.loop.run(self.areset()).result(60)

    async def areset(self) -> None:
        """Empty the caches of all engines, one replica after another. Raises what an engine's `reset` raises."""
        for replicas in self._engines.values():
            for engine in replicas:
                await engine.reset()

    def forget(self, tenant: str) -> None:
        """Forget what engines have learned from a tenant's requests, and the traces of its queries."""
        self.loop.run(self.aforget(tenant)).result(60)

    def _forget_queries(self, tenant: str) -> None:
        """Forget the traces of a tenant's queries, and the texts of plans, which may contain their prompts."""
        self.recorder.forget(tenant)
        _text.cache_clear()
        _view.cache_clear()

    async def aforget(self, tenant: str) -> None:
        """Forget what engines have learned from a tenant, and its traces. This is `forget` for a caller on the
        runtime's loop."""
        self._forget_queries(tenant)
        for replicas in self._engines.values():
            for engine in replicas:
                await forget(engine, tenant)


def _request_context_of(run: QueryRun | None, request_context: RequestContext | None) -> RequestContext:
    """Return the request context of a call at its place. Code that goes on after a query keeps its tenant."""
    if request_context is not None:
        return request_context
    if run is None:
        request_context = current_request_context.get() or RequestContext()
    else:
        request_context = replace(run.query.request_context, deadline=None) if run.closed else run.query.request_context
    caller = current_position.get()
    return placed(request_context, caller.depth, caller.gang)


@functools.lru_cache(maxsize=64)
def _text(graph: Graph) -> str:
    return str(graph)


@functools.lru_cache(maxsize=64)
def _view(graph: Graph) -> GraphView:
    """The e-graph as plain data for drawing."""
    nodes = tuple((p.id, p.kind.name, p.engine, graph.depths[p.id], p.speculative) for p in graph)
    edges: list[tuple[str, str, Any]] = []
    for p in graph:
        data = {r.producer for r in p.refs if not r.external}
        edges += [(producer, p.id, "data") for producer in sorted(data)]
        edges += [(a, p.id, "order") for a in p.after if a not in data]
    return GraphView(nodes, tuple(edges))
