"""The runtime in one process: engines and schedulers on a loop thread, user code where it always ran."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.engines.cache_news import ask_for_news
from teola_plugin.engines.calibration import calibrate
from teola_plugin.errors import EngineUnavailable, QueryTimeout, unknown_name
from teola_plugin.graph import Graph, PrimitiveKind, Query, Ref, Terms
from teola_plugin.observe.recorder import TraceRecorder
from teola_plugin.observe.spans import GraphView, PassRun, QueryTrace
from teola_plugin.runtime.context import current_terms
from teola_plugin.runtime.engine_port import EnginePort, Port, PortListener
from teola_plugin.runtime.graph_driver import GraphDriver
from teola_plugin.runtime.handles import CallHandle, PieceLog
from teola_plugin.runtime.loop_thread import LoopThread, SameLoop
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.query_store import QueryStore
from teola_plugin.runtime.request_table import PendingCall, RequestEntry
from teola_plugin.runtime.requests import Calls
from teola_plugin.runtime.tickets import call_ticket
from teola_plugin.scheduling import BatchPolicy
from teola_plugin.scheduling.events import CancelQuery, Close, PartEnded

_calls = itertools.count(1)
_log = logging.getLogger("teola_plugin")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call from outside, on its way: a request per payload."""

    kind: PrimitiveKind
    port: Port
    payloads: Sequence[Any]
    future: Future[list[Any]]
    log: PieceLog | None
    """Where its pieces go, if it is streamed."""
    stays: bool = False
    """Whether its values may stay where they are made."""
    terms: Terms = field(default_factory=Terms)
    """Of a call that joins no live query."""
    entries: list[RequestEntry] = field(default_factory=list)
    """Its requests, once they are made or claimed."""


class LocalRuntime:
    """Executes e-graphs and single calls on the given engines.

    `engines`: instances by engine name. With `loop=SameLoop()` everything runs on the caller's own loop (virtual
    time); otherwise on a thread of its own, so callers may come from any thread or loop.
    """

    shared = False
    """Whether the engines are elsewhere."""

    def __init__(
        self,
        engines: Mapping[str, Sequence[Engine]],
        *,
        policy: BatchPolicy | None = None,
        loop: LoopThread | SameLoop | None = None,
        details: bool = False,
        keep_traces: int = 64,
    ) -> None:
        self._engines = {name: list(instances) for name, instances in engines.items()}
        self._policy = policy
        self.loop = loop or LoopThread()
        threads = isinstance(self.loop, LoopThread)
        self.recorder = TraceRecorder(keep_traces, details=details, wall=time.time if threads else None)
        self._driver = GraphDriver(self.recorder, threads=threads)
        driver = self._driver
        self._listener = PortListener(driver.request_started, driver.request_piece, driver.request_ended)
        self._ports: dict[str, Port] = {}
        self._running = False

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the loop and the engines, side by side. Raises what an engine raises."""
        self.loop.start()
        try:
            self.loop.run(self.astart()).result()
        except BaseException:
            self.loop.run(self.astop()).result()
            self.loop.stop()
            raise

    async def astart(self) -> None:
        """`start` for a runtime on the caller's loop."""
        for instances in self._engines.values():
            ask_for_news(instances)
        engines = [e for instances in self._engines.values() for e in instances]
        await asyncio.gather(*(e.start() for e in engines))
        for engine in engines:  # one after the other: engines that share cores would disturb each other's figures
            await calibrate(engine)
        self._open({name: self._port_of(name, instances) for name, instances in self._engines.items()})

    def _port_of(self, name: str, instances: Sequence[Engine]) -> EnginePort:
        named = {str(number): engine for number, engine in enumerate(instances)}
        return EnginePort(name, named, self._listener, policy=self._policy)

    def _open(self, ports: Mapping[str, Port]) -> None:
        """Engines are there: queries may come."""
        self._ports.update(ports)
        self._driver.ports = self._ports
        self._running = True

    def stop(self) -> None:
        """Stop the engines and the loop. Idempotent; calls under way fail as unavailable."""
        if self._running:
            self.loop.run(self.astop()).result(60)
        self.loop.stop()

    async def astop(self) -> None:
        self._running = False
        for port in self._ports.values():
            await port.close()
        stops = (e.stop() for instances in self._engines.values() for e in instances)
        await asyncio.gather(*stops, return_exceptions=True)

    def attach(self, engine: Engine) -> None:
        """Add an engine that needs no start and no stop (the client's own objects); once per name."""
        self._need_running()
        if engine.name not in self._ports:
            self.loop.post(self._attach, engine)

    def _attach(self, engine: Engine) -> None:
        if engine.name not in self._ports:
            self._ports[engine.name] = self._port_of(engine.name, [engine])

    def _need_running(self) -> None:
        if not self._running:
            raise EngineUnavailable("the engine pool is not running.", hint="use it inside `with EnginePool...:`")

    def port(self, engine: str) -> Port:
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
        ahead: bool = False,
        pgraph: Graph | None = None,
        passes: tuple[PassRun, ...] = (),
    ) -> QueryRun:
        """Begin to execute `graph` for `query`. With `ahead` the plain object ends the query by `run.close()`."""
        self._need_running()
        query.check(graph)
        run = QueryRun(self, query, graph, calls, ahead, QueryStore(query.inputs))
        self.loop.post(self._admit, run, graph, pgraph, passes)
        return run

    def watch(self, query: Query, *, joins: bool = False) -> QueryRun:
        """A query without a graph: calls made under it are traced, and nothing else; for plain objects.

        `joins`: parts of it may bring graphs of their own.
        """
        graph = Graph((), Ref("$input"))
        run = QueryRun(self, query, graph, {}, True, QueryStore(query.inputs), claims=False, joins=joins)
        self.loop.post(self._admit, run, graph, None, ())
        return run

    def _admit(self, run: QueryRun, graph: Graph, pgraph: Graph | None, passes: tuple[PassRun, ...]) -> None:
        self._driver.admit(run, graph)
        before = "" if pgraph is None else _text(pgraph)
        self.recorder.describe(run.id, graph=_view(graph), graph_text=_text(graph), pgraph_text=before, passes=passes)

    def begin_part(self, run: QueryRun, name: str, graph: Graph, calls: Calls, value: Any) -> None:
        self.loop.post(self._driver.begin_part, run, name, graph, calls, value)

    def end_part(self, run: QueryRun, name: str) -> None:
        self.loop.post(lambda: self._driver.post(PartEnded(self._driver.now(), run.id, name)))

    def observe(self, run: QueryRun, primitive: str, value: Any) -> None:
        self.loop.post(self._driver.observe, run, primitive, value)

    def close_run(self, run: QueryRun) -> None:
        if not run.closed:
            run.closed = True
            self.loop.post(lambda: self._driver.post(Close(self._driver.now(), run.id)))

    def cancel_run(self, run: QueryRun) -> None:
        if not run.closed:
            run.closed = True
            self.loop.post(lambda: self._driver.post(CancelQuery(self._driver.now(), run.id)))

    @property
    def traces(self) -> tuple[QueryTrace, ...]:
        """The traces of the last finished queries, oldest first."""
        return self.recorder.traces

    def time(self) -> float:
        """The runtime's clock, in seconds; deadlines are on it."""
        return self.loop.loop.time()

    # ------------------------------------------------------------ single calls

    def call(
        self,
        kind: PrimitiveKind,
        engine: str,
        payloads: Sequence[Any],
        *,
        stream: bool = False,
        stays: bool = False,
        run: QueryRun | None = None,
        terms: Terms | None = None,
    ) -> CallHandle:
        """One request per payload; inside a live query, what was asked for already is claimed.

        With `stays`, large values may stay where they are made: what is got are `KeptValue`s, for other requests.
        `terms`: of a call that joins no live query; by default those of its query that has ended, or the ambient ones.
        """
        port = self.port(engine)
        future: Future[list[Any]] = Future()
        future.set_running_or_notify_cancel()  # given up through the handle, never by itself
        call = _Call(kind, port, list(payloads), future, PieceLog() if stream else None, stays, terms or _terms(run))
        self.loop.post(self._join, run, call)
        return CallHandle(
            future, pieces=call.log, cancel=lambda: self.loop.post(self._give_up, call.entries), owner=self.loop.ident
        )

    def _join(self, run: QueryRun | None, call: _Call) -> None:
        """A call always ends: one that cannot join its query is an ordinary one; one that comes late fails."""
        late = run.late if run is not None else None
        if late is None and not self._lives(run) and _passed(call.terms, self._driver.now()):
            late = _late()
        if late is not None:
            self._end_late(call, late)
            return
        try:
            self._make(run, call)
        except Exception as error:
            if call.future.done():
                return
            if run is None:
                call.future.set_exception(error)
                return
            _log.warning(
                "a call cannot join its query and is made by itself (%s is a bug of teola-plugin: please report it)",
                type(error).__name__,
                exc_info=True,
            )
            for entry in call.entries:
                entry.waiting = [pending for pending in entry.waiting if pending.future is not call.future]
            call.entries.clear()
            self._join(None, call)

    def _lives(self, run: QueryRun | None) -> bool:
        return run is not None and run.id in self._driver.runs

    @staticmethod
    def _end_late(call: _Call, error: QueryTimeout) -> None:
        if not call.future.done():
            call.future.set_exception(error)
        if call.log is not None:
            call.log.close()

    def _end_by(self, deadline: float, call: _Call) -> None:
        """A call of no live query ends at its own deadline."""

        def passed() -> None:
            if not call.future.done():
                self._end_late(call, _late())
                self._give_up(call.entries)

        timer = asyncio.get_running_loop().call_at(deadline, passed)
        call.future.add_done_callback(lambda _: timer.cancel())

    def _make(self, run: QueryRun | None, call: _Call) -> None:
        driver, port = self._driver, call.port
        live = self._lives(run)
        if run is None or not live:
            run = QueryRun(self, _query(call.terms), None, {}, True, QueryStore({}))
        run.calls_made += 1
        name = f"{port.name}.call#{run.calls_made}"
        fresh = []
        for payload in call.payloads:
            entry = driver.claim(run, port, payload, plain=True) if live and run.claims else None
            if entry is None:
                entry = driver.new_entry(run, name, call.kind, port, payload)
                if call.log is None and not (live and run.claims):
                    entry.request = replace(entry.request, stream=False)  # nobody can come to read its pieces
                if call.stays:
                    entry.request = replace(entry.request, stays=True)
                fresh.append(entry)
            entry.by_plain += 1
            call.entries.append(entry)
            if call.log is not None:
                entry.read_into(call.log)
        PendingCall(call.entries, call.future, Future.set_result if call.stays else self._deliver)
        if not live and call.terms.deadline is not None:
            self._end_by(call.terms.deadline, call)
        if fresh:
            self._enqueue_fresh(run, call.kind, port, name, fresh, live)

    def _enqueue_fresh(
        self, run: QueryRun, kind: PrimitiveKind, port: Port, name: str, fresh: list[RequestEntry], live: bool
    ) -> None:
        now = self._driver.now()
        depth = 0
        if live:
            # The plain object waits for this very call: nothing of its query is more urgent.
            depth = max((p.depth for p in self._driver.scheduler.queries[run.id] if not p.status.ended), default=0)
            self.recorder.queued(run.id, name, now, kind=kind.name, engine=port.name, depth=depth, size=len(fresh))
        event, known = call_ticket(now, run, kind, name, depth, fresh)
        if known is not None:
            port.depths(known)
        port.enqueue(fresh, event)

    def _deliver(self, future: Future[list[Any]], values: list[Any]) -> None:
        """The values of a call are there. On the loop."""
        future.set_result(values)

    def _give_up(self, entries: list[RequestEntry]) -> None:
        for entry in entries:
            entry.by_plain = max(0, entry.by_plain - 1)
            self._driver.give_up(entry)

    def admin(self, engine: str, method: str, *args: Any) -> Future[Any]:
        """Run a coroutine method of the engine's (first) instance on the pool's loop, e.g. `count`, `delete`."""
        return self.loop.run(self._admin(self.port(engine), method, args))

    async def _admin(self, port: Port, method: str, args: tuple[Any, ...]) -> Any:
        result = await self._administer(port, method, args)
        self._driver.writes.administered(port.name, method, args)
        return result

    async def _administer(self, port: Port, method: str, args: tuple[Any, ...]) -> Any:
        return await getattr(port.engine, method)(*args)

    def reset(self) -> None:
        """Empty every engine's prefix cache and the like, so that runs can be compared."""
        self.loop.run(self.areset()).result(60)

    async def areset(self) -> None:
        for instances in self._engines.values():
            for engine in instances:
                await engine.reset()


def _terms(run: QueryRun | None) -> Terms:
    """Of a call that says nothing itself: its query's, whose deadline ends with it, or the ambient ones."""
    if run is None:
        return current_terms.get() or Terms()
    return replace(run.query.terms, deadline=None) if run.closed else run.query.terms


def _query(terms: Terms) -> Query:
    """Of a single call."""
    name = f"call{next(_calls)}"
    return Query(id=name, app=terms.app, tenant=terms.tenant, deadline=terms.deadline, weight=terms.weight)


def _passed(terms: Terms, now: float) -> bool:
    return terms.deadline is not None and terms.deadline <= now


def _late() -> QueryTimeout:
    return QueryTimeout("a call did not end before its deadline.", hint="allow more time")


@functools.lru_cache(maxsize=64)
def _text(graph: Graph) -> str:
    return str(graph)


@functools.lru_cache(maxsize=64)
def _view(graph: Graph) -> GraphView:
    """The e-graph as plain data for drawing."""
    nodes = tuple((p.id, p.kind.name, p.engine, graph.depths[p.id], p.tentative) for p in graph)
    edges: list[tuple[str, str, Any]] = []
    for p in graph:
        data = {r.producer for r in p.refs if not r.external}
        edges += [(producer, p.id, "data") for producer in sorted(data)]
        edges += [(a, p.id, "order") for a in p.after if a not in data]
    return GraphView(nodes, tuple(edges))
