"""Carries out the graph scheduler's instructions: the middle of the local runtime. Lives on the pool's loop.

Instructions come from one `GraphScheduler`; engine work goes to `EnginePort`s; outcomes come back as events. No policy
is decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from teola_plugin.engines.base import Piece, Request
from teola_plugin.engines.items import ItemStream
from teola_plugin.errors import QueryCancelled
from teola_plugin.graph import LOOKAHEAD, STREAM_ITEMS, Graph, Primitive, PrimitiveKind
from teola_plugin.observe.recorder import TraceRecorder
from teola_plugin.runtime import requests
from teola_plugin.runtime.engine_port import ForwardingPort, Port
from teola_plugin.runtime.failures import located, outcome_error
from teola_plugin.runtime.fragments import expansion
from teola_plugin.runtime.growing_prefix import GrowingPrefixes, growing
from teola_plugin.runtime.prescheduling import PreScheduling
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun
from teola_plugin.runtime.recording import fate, record_ended, record_queued
from teola_plugin.runtime.request_table import RequestEntry, request_id
from teola_plugin.runtime.tickets import classed, ticket
from teola_plugin.runtime.writes import Writes
from teola_plugin.scheduling import GraphScheduler
from teola_plugin.scheduling.events import (
    Admit,
    Await,
    Cancel,
    Collect,
    DepthChanged,
    Dispatch,
    End,
    Enqueue,
    Expand,
    Finished,
    GraphEvent,
    Instruction,
    ItemClosed,
    PartBegun,
    PrimitiveFailed,
    Release,
    Reprioritise,
    RunCall,
    Started,
    Tick,
    Unused,
    WakeAt,
)
from teola_plugin.scheduling.live_query import LivePrimitive

_K = PrimitiveKind
log = logging.getLogger("teola_plugin")


class GraphDriver:
    """All live queries of one runtime."""

    def __init__(self, recorder: TraceRecorder, *, threads: bool) -> None:
        self.scheduler = GraphScheduler()
        self.ports: Mapping[str, Port] = {}
        self.runs: dict[str, QueryRun] = {}
        self.recorder = recorder
        self.writes = Writes()
        self._threads = threads
        self._events: deque[GraphEvent] = deque()
        self._pumping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ahead = PreScheduling(lambda: self.ports, self._ticket)
        self._prefixes = GrowingPrefixes(self._live, self._computed, self._start_early, self._stop_early)
        self._perform: dict[type[Instruction], Callable[[QueryRun, Any], None]] = {
            Dispatch: self._dispatch,
            RunCall: self._run_call,
            Await: self._await,
            Expand: self._expand,
            Collect: self._collect,
            Release: self._release,
            Cancel: self._cancel,
            Reprioritise: self._reprioritise,
            End: self._end,
        }

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def admit(self, run: QueryRun, graph: Graph) -> None:
        self.runs[run.id] = run
        run.growing = growing(graph)
        query = run.query
        self.recorder.begin(run.id, query.app, self.now())
        self.post(Admit(self.now(), run.id, graph, query.deadline, run.ahead))

    def begin_part(self, run: QueryRun, name: str, graph: Graph, calls: requests.Calls, value: Any) -> None:
        """The plain object has come to a part that has an e-graph of its own."""
        if run.id in self.runs:
            run.parts[name] = calls
            run.store.put(f"${name}", value)
            self.post(PartBegun(self.now(), run.id, name, graph, f"${name}"))

    def post(self, event: GraphEvent) -> None:
        """Handle `event` and everything that follows from it at once."""
        self._events.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events:
                for instruction in self.scheduler.handle(self._events.popleft()):
                    self._carry_out(instruction)
        finally:
            self._pumping = False

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, WakeAt):
            asyncio.get_running_loop().call_at(instruction.at, lambda: self.post(Tick(self.now())))
            return
        run = self.runs.get(getattr(instruction, "query", ""))
        if run is not None:
            self._perform[type(instruction)](run, instruction)

    # ------------------------------------------------------------ engine primitives

    def _dispatch(self, run: QueryRun, order: Dispatch) -> None:
        p = order.primitive
        try:
            made = requests.payloads(p, self._inputs(run, p), run.calls_of(p.id))
        except Exception as error:  # early work on values of an unexpected kind: the plain object will tell
            self._fail(run, p.id, error)
            return
        if run.growing and p.leads_group:
            self._prefixes.dispatched(run, p)
        port = self.ports[p.engine]
        live = LivePrimitiveRun(p, [], order.depth, order.group)
        run.primitives[p.id] = live
        fresh = []
        ahead = run.sent_ahead.get(p.id)
        for number, payload in enumerate(made):
            entry = self.claim(run, port, payload, plain=False)
            if entry is None:
                entry = self.new_entry(run, p.id, p.kind, port, payload, f"{ahead}.{number}" if ahead else "")
                entry.spare = p.option(LOOKAHEAD) is not None
                fresh.append(entry)
            else:
                entry.spare = False
            entry.by_graph = True
            live.entries.append(entry)
            run.waiters.setdefault(entry.request.id, []).append(p.id)
        live.left = sum(not e.ended for e in live.entries)
        record_queued(self.recorder, self.now(), run, p, order.depth, made)
        self._prepare_items(live)
        self._catch_up(run, live, fresh)
        if fresh:
            self._send(run, port, live, fresh)

    def _send(self, run: QueryRun, port: Port, live: LivePrimitiveRun, fresh: list[RequestEntry]) -> None:
        p, ticket = live.primitive, self._ticket(run, live.primitive, live.depth)
        query = self.scheduler.queries.get(run.id)
        if query is not None:
            self._ahead.leave(query, p, fresh)
        ahead = run.sent_ahead.pop(p.id, None)
        all_fresh = len(fresh) == len(live.entries)
        if not isinstance(port, ForwardingPort):
            port.enqueue(fresh, ticket)
        elif ahead is not None and all_fresh:
            port.adopt(ahead, fresh, ticket)
        else:
            if ahead is not None:
                port.disown(ahead, len(live.entries))
            then = self._ahead.followers(run, query, p) if query is not None and all_fresh else ()
            port.enqueue(fresh, ticket, p, then)

    def _live(self, run: QueryRun, name: str) -> LivePrimitive | None:
        query = self.scheduler.queries.get(run.id)
        return None if query is None else query.get(name)

    def _start_early(self, run: QueryRun, p: Primitive) -> None:
        """Dispatch what is not in the graph: a prefix that has grown. Its prompt's own primitive is one deeper."""
        whole = self._live(run, p.id.partition(".grown#")[0])
        self._dispatch(run, Dispatch(run.id, p, 1 + (whole.depth if whole is not None else 0)))

    def _stop_early(self, run: QueryRun, name: str) -> None:
        live = run.primitives.get(name)
        if live is not None and not live.began:
            self._cancel(run, Cancel(run.id, name))

    def _catch_up(self, run: QueryRun, live: LivePrimitiveRun, fresh: list[RequestEntry]) -> None:
        """Requests that the plain object had started before may be under way or done already."""
        if 0 < len(fresh) == len(live.entries):
            return
        claimed = [entry for entry in live.entries if entry not in fresh and not entry.ended]
        for entry in claimed:
            entry.passed_on |= live.items is not None and bool(entry.pieces)
            for piece in list(entry.pieces):
                self._piece_of(run, live, piece)
        known = classed(self.now(), run, self._live(run, live.primitive.id), claimed)
        if known is not None:
            self.ports[live.primitive.engine].depths(known)
        if len(fresh) < len(live.entries) and not live.began:
            live.began = True
            self.recorder.started(run.id, live.primitive.id, self.now())
            self.post(Started(self.now(), run.id, live.primitive.id))
        if live.left == 0:
            self._entries_ended(run, live)

    def withdraw_all(self) -> None:
        """Followers that were sent along may never come: what the graph comes to is sent anew."""
        for run in self.runs.values():
            self._ahead.withdraw(run)

    def _ticket(self, run: QueryRun, p: Primitive, depth: int) -> Enqueue:
        return ticket(self.now(), run, p, depth, self._live(run, p.id))

    def new_entry(
        self, run: QueryRun, name: str, kind: PrimitiveKind, port: Port, payload: Any, request: str = ""
    ) -> RequestEntry:
        """`request`: its id, where it has one already."""
        made = Request(
            request or request_id(run.id),
            kind,
            payload,
            query=run.id,
            tenant=run.query.tenant,
            stream=True,
            background=kind is _K.PARTIAL_PREFILLING,
        )
        entry = RequestEntry(made, port.name, requests.content_key(port.name, payload), name)
        entry.version = self.writes.version(port.name, payload)
        run.table.add(entry)
        return entry

    def claim(self, run: QueryRun, port: Port, payload: Any, *, plain: bool) -> RequestEntry | None:
        key = requests.content_key(port.name, payload)
        return run.table.find(key, plain=plain, version=self.writes.version(port.name, payload))

    def _prepare_items(self, live: LivePrimitiveRun) -> None:
        for member in live.group:
            if member.kind is _K.PARTIAL_DECODING or member.option(STREAM_ITEMS):
                live.items = ItemStream(member.option("items", "json"))
                return

    # ------------------------------------------------------------ what ports report

    def request_started(self, entry: RequestEntry, instance: str, batch: int) -> None:
        run = self.runs.get(entry.request.query)
        if run is None:
            return
        self.recorder.started(run.id, entry.primitive, self.now(), instance=instance, batch=batch)
        for name in run.waiters.get(entry.request.id, ()):
            live = run.primitives[name]
            if not live.began:
                live.began = True
                self.post(Started(self.now(), run.id, name))

    def request_piece(self, entry: RequestEntry, piece: Piece) -> None:
        entry.add_piece(piece)
        run = self.runs.get(entry.request.query)
        if run is None:
            return
        self.recorder.first(run.id, entry.primitive, self.now())
        for name in run.waiters.get(entry.request.id, ()):
            entry.passed_on |= run.primitives[name].items is not None
            self._piece_of(run, run.primitives[name], piece)

    def _piece_of(self, run: QueryRun, live: LivePrimitiveRun, piece: Piece) -> None:
        if not live.prefilled:
            self._end_prefilling(run, live)
        if live.items is not None:
            for item in live.items.feed(piece.text):
                self._close_item(run, live, item)

    def _end_prefilling(self, run: QueryRun, live: LivePrimitiveRun) -> None:
        """The first piece is there: prefilling is over, decoding begins."""
        p = live.primitive
        live.prefilled = True
        run.store.put(p.id, True)
        self.recorder.first(run.id, p.id, self.now())
        if live.group:
            self.recorder.done(run.id, p.id, self.now())
            self._begin_decoding(run, live, 0)
        self.post(Finished(self.now(), run.id, p.id))

    def _begin_decoding(self, run: QueryRun, live: LivePrimitiveRun, index: int) -> None:
        if index < len(live.group):
            member = live.group[index]
            record_queued(self.recorder, self.now(), run, member, live.depth)
            self.recorder.started(run.id, member.id, self.now())

    def _close_item(self, run: QueryRun, live: LivePrimitiveRun, item: Any) -> None:
        index, live.closed_items = live.closed_items, live.closed_items + 1
        part = next((m for m in live.group if m.item == index), None)
        if part is not None:
            run.store.put(part.id, item)
            self.recorder.done(run.id, part.id, self.now())
            self._begin_decoding(run, live, index + 1)
            self.post(Finished(self.now(), run.id, part.id))
            return
        for member in live.group:
            if member.option(STREAM_ITEMS):
                name = f"{member.id}#{index}"
                run.store.put(name, item)
                self.post(ItemClosed(self.now(), run.id, member.id, index, name))

    def request_ended(self, entry: RequestEntry, value: Any, error: BaseException | None) -> None:
        self.writes.ended(entry.engine, entry.request.payload)
        run = self.runs.get(entry.request.query)
        named = error if error is None else located(error, entry)
        entry.resolve(value, named)
        if run is None:
            return
        for name in run.waiters.pop(entry.request.id, ()):
            live = run.primitives[name]
            if named is not None:
                self._fail(run, name, named)
                continue
            live.left -= 1
            if live.left == 0:
                self._entries_ended(run, live)
        if entry.primitive not in run.primitives:
            record_ended(self.recorder, self.now(), run, entry.primitive, [entry])

    def _entries_ended(self, run: QueryRun, live: LivePrimitiveRun) -> None:
        p = live.primitive
        failed = next((e for e in live.entries if e.failed), None)
        if failed is not None:
            self._fail(run, p.id, failed.error or QueryCancelled("cancelled"))
            return
        value = requests.value(p, [e.value for e in live.entries])
        record_ended(self.recorder, self.now(), run, p.id, live.entries)
        if not p.leads_group:
            run.store.put(p.id, value)
            self._made(run, p.id)
            return
        if not live.prefilled:
            self._end_prefilling(run, live)
        for item in live.items.finish() if live.items is not None else ():
            self._close_item(run, live, item)
        self._end_group(run, live, value)

    def _end_group(self, run: QueryRun, live: LivePrimitiveRun, value: Any) -> None:
        for member in live.group:
            if member.item is not None and member.item >= live.closed_items:
                self.post(Unused(self.now(), run.id, member.id))
        for member in live.group:
            if member.kind is _K.DECODING:
                run.store.put(member.id, value)
                record_ended(self.recorder, self.now(), run, member.id, live.entries, decoding=True)
                self.post(Finished(self.now(), run.id, member.id))

    def _fail(self, run: QueryRun, name: str, error: BaseException) -> None:
        run.errors.setdefault(name, error)
        log.debug("query=%s primitive=%s failed: %r", run.id, name, error)
        self.recorder.done(run.id, name, self.now(), outcome="failed")
        self.post(PrimitiveFailed(self.now(), run.id, name))

    # ------------------------------------------------------------ client primitives

    def _inputs(self, run: QueryRun, p: Primitive) -> dict[str, Any]:
        return {key: run.store.read(ref) for key, ref in p.inputs if ref.producer in run.store}

    def _run_call(self, run: QueryRun, order: RunCall) -> None:
        p = order.primitive
        record_queued(self.recorder, self.now(), run, p)
        self.recorder.started(run.id, p.id, self.now())
        if p.kind is _K.CHUNKING and self._threads:
            self._spawn(self._call_in_thread(run, p))
            return
        try:
            value = self._client_value(run, p)
        except Exception as error:
            self._fail(run, p.id, error)
        else:
            self._store(run, p.id, value)

    def _client_value(self, run: QueryRun, p: Primitive) -> Any:
        inputs = {key: run.store.read(ref) for key, ref in p.inputs if p.kind is not _K.VERIFY or key == "actual"}
        return inputs["actual"] if p.kind is _K.VERIFY else self._computed(run, p, inputs)

    @staticmethod
    def _computed(run: QueryRun, p: Primitive, inputs: dict[str, Any]) -> Any:
        if p.call == "concat":
            return [item for part in inputs.values() for item in part]
        function = run.calls_of(p.id).get(p.call)
        return inputs if function is None else function(**inputs)

    async def _call_in_thread(self, run: QueryRun, p: Primitive) -> None:
        try:
            value = await asyncio.get_running_loop().run_in_executor(None, self._client_value, run, p)
        except Exception as error:
            self._fail(run, p.id, error)
        else:
            self._store(run, p.id, value)

    def _store(self, run: QueryRun, name: str, value: Any) -> None:
        run.store.put(name, value)
        self.recorder.done(run.id, name, self.now())
        self._made(run, name)

    def _made(self, run: QueryRun, name: str) -> None:
        self.post(Finished(self.now(), run.id, name))
        if run.growing:
            self._prefixes.made(run, name)

    def _await(self, run: QueryRun, order: Await) -> None:
        """User code: the plain object runs it; a query without one runs it here, once, on a thread."""
        p = order.primitive
        record_queued(self.recorder, self.now(), run, p)
        if run.ahead:
            return
        self.recorder.started(run.id, p.id, self.now())
        if self._threads:
            self._spawn(self._call_in_thread(run, p))
        else:
            self._run_call(run, RunCall(run.id, p))

    def observe(self, run: QueryRun, name: str, value: Any) -> None:
        if run.id in self.runs and name not in run.store:
            self._store(run, name, value)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ fragments

    def _expand(self, run: QueryRun, order: Expand) -> None:
        try:
            event = expansion(run, order, self.now())
        except Exception as error:
            self._fail(run, order.primitive.id, error)
        else:
            self.post(event)

    def _collect(self, run: QueryRun, order: Collect) -> None:
        values = [run.store.read(ref) for ref in order.refs]
        run.store.put(order.primitive, values[0] if order.single else values)
        now = self.now()
        self.recorder.queued(run.id, order.primitive, now, kind="MAP", parents=tuple(r.producer for r in order.refs))
        self.recorder.done(run.id, order.primitive, now)

    # ------------------------------------------------------------ ends

    def _release(self, run: QueryRun, order: Release) -> None:
        run.store.drop(order.producer)

    def _reprioritise(self, run: QueryRun, order: Reprioritise) -> None:
        event = DepthChanged(self.now(), run.id, order.depths)
        for port in self.ports.values():
            port.depths(event)

    def _cancel(self, run: QueryRun, order: Cancel) -> None:
        live = run.primitives.get(order.primitive)
        for entry in live.entries if live is not None else ():
            run.waiters.get(entry.request.id, [])[:] = [
                w for w in run.waiters.get(entry.request.id, []) if w != order.primitive
            ]
            entry.by_graph = bool(run.waiters.get(entry.request.id))
            self.give_up(entry)
        self.recorder.done(run.id, order.primitive, self.now(), outcome="cancelled")

    def give_up(self, entry: RequestEntry) -> None:
        """Stop a request that nobody wants any more."""
        port = self.ports[entry.engine]
        if not entry.wanted and not entry.cancelled and port.holds(entry):
            port.cancel([entry])

    def _end(self, run: QueryRun, order: End) -> None:
        del self.runs[run.id]
        error = outcome_error(run, order)
        if error is not None:
            for entry in run.table:
                entry.resolve(None, error)
        for entry in run.table:
            entry.by_graph = False
            if entry.by_plain == 0 or error is not None:
                entry.by_plain = 0
                self.give_up(entry)
                if run.ahead and order.outcome == "closed" and not entry.cancelled:
                    self.recorder.settle(run.id, entry.primitive, fate(run, entry))
        self._ahead.withdraw(run)
        trace = self.recorder.finish(run.id, self.now(), outcome=order.outcome)
        if not run.output.done():
            if order.outcome == "done" and order.output is not None:
                run.output.set_result(run.store.read(order.output))
            else:
                run.output.set_exception(error or QueryCancelled("the query was closed.", query_id=run.id))
        run.store.clear()
        run.table.clear()
        run.last_calls.clear()
        run.primitives.clear()
        run.trace.set_result(trace)
