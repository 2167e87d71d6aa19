"""The driver of requests to engines, from the dispatch of a primitive to the outcome of its requests.

The graph scheduler decides which primitive is ready, the engine scheduler which request runs next. Here they meet.
Lives on the pool's loop.

Followers of a primitive that need no code of the client are sent along with it (pre-scheduling). A follower's engine
begins when the value before it is there. The graph scheduler dispatches it later, as ever, and the requests that run by
then are adopted. Values that only engines read may stay where they are made. Only `ForwardingPort`s take part, since
pre-scheduling saves messages between processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.graph import LLM_KINDS, InstancePath, LeftToOriginal, Primitive, PrimitiveKind, Ref, RequestContext
from teola_plugin.requests.payloads import AnswerForm, Generate, Piece, Request, SearchVector
from teola_plugin.runtime import primitive_requests
from teola_plugin.runtime.claims import (
    OWN_GRAPH,
    Caller,
    ClaimRule,
    Claims,
    EngineFingerprint,
    PlannerGraph,
    RequestKey,
    fingerprint,
    request_key,
    rule_of,
)
from teola_plugin.runtime.driver.generation_group import GenerationGroup
from teola_plugin.runtime.driver.recording import Driver, PrimitiveReporter
from teola_plugin.runtime.engine_requests import (
    EngineRequest,
    RequestState,
    RequestTable,
    Writes,
    placed,
    request_id,
)
from teola_plugin.runtime.failures import with_location
from teola_plugin.runtime.loop_thread import PieceLog
from teola_plugin.runtime.output_stream import attach
from teola_plugin.runtime.ports.port import DirectPort, Follow, ForwardingPort, Port, follower_request
from teola_plugin.runtime.primitive_requests import RemainingTimes, enqueue_event, gang_changed
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue
from teola_plugin.scheduling.events import Dispatch
from teola_plugin.scheduling.live_query import LivePrimitive, LiveQuery, Status

_K = PrimitiveKind
FOLLOWING = frozenset({_K.EMBEDDING, _K.INGESTION, _K.SEARCHING, _K.RERANKING})
"""Kinds whose payloads are made of values alone."""
MAX_CHAIN = 32
"""Primitives of one chain that are sent together."""
_numbers = itertools.count(1)


class PreScheduling:
    """The choice of followers. `enqueue_event` makes the event with which a primitive is queued."""

    def __init__(
        self, ports: Callable[[], Mapping[str, Port]], enqueue_event: Callable[[QueryRun, Primitive, int], Enqueue]
    ) -> None:
        self._ports, self._enqueue_event = ports, enqueue_event

    def withdraw(self, run: QueryRun, subplan: str = "") -> None:
        """Give up the followers that the query, or a subplan of it, has not dispatched."""
        primitives = [p for p in run.sent_followers if not subplan or InstancePath(p).inside(subplan) is not None]
        names = [run.sent_followers.pop(p) for p in primitives]
        for port in self._ports().values() if names else ():
            if isinstance(port, ForwardingPort):
                for name in names:
                    port.disown(name)

    def drop_follower(self, run: QueryRun, p: Primitive, requests: int) -> None:
        """Give up the follower for a primitive that is dispatched now, since others have made all of its requests."""
        name, port = run.sent_followers.pop(p.id, None), self._ports()[p.engine]
        if name is not None and isinstance(port, ForwardingPort):
            port.disown(name, requests)

    def keep_remote(self, query: LiveQuery, p: Primitive, entries: Iterable[EngineRequest]) -> None:
        """Mark the requests of a primitive if only engines read its value."""
        if self._is_kept_remote(query, p):
            for entry in entries:
                entry.request = replace(entry.request, keep_remote=True)

    def _is_kept_remote(self, query: LiveQuery, p: Primitive) -> bool:
        """Return True for vectors that are only ingested: nothing here looks at them, not even a request key."""
        if not p.batchable or query.output.producer == p.id or not self._forwards(p):
            return False
        reads = [(r.primitive, key, ref) for r in query.readers(p.id) for key, ref in _reads(r.primitive, p)]
        return bool(reads) and all(
            q.kind is _K.INGESTION and key == "vectors" and len(ref.path) < 2 and not q.call and self._forwards(q)
            for q, key, ref in reads
        )

    def _forwards(self, p: Primitive) -> bool:
        return isinstance(self._ports().get(p.engine), ForwardingPort)

    def followers(
        self, run: QueryRun, query: LiveQuery, before: Primitive, max_length: int = MAX_CHAIN
    ) -> tuple[Follow, ...]:
        """Return the followers of `before`: primitives that wait for it alone, each with its own followers."""
        if before.prefills or before.decodes or max_length < 1:
            return ()
        fitting = (live for live in query.children(before.id) if self._can_be_sent_with(run, live, before))
        followers = (self._follow(run, query, live, before, max_length) for live in fitting)
        return tuple(follow for follow in followers if follow is not None)

    @staticmethod
    def _can_be_sent_with(run: QueryRun, live: LivePrimitive, before: Primitive) -> bool:
        """Return True if `live` can be sent in one message with `before`, the only primitive that it waits for."""
        p = live.primitive
        if p.kind not in FOLLOWING or p.call or p.attributes.wrapped or p.speculative:
            return False
        if p.kind is _K.INGESTION and run.has_original:  # only the original starts writes
            return False
        if live.status is not Status.WAITING or live.waits != {before.id} or live.id in run.sent_followers:
            return False
        return all(ref.producer == before.id or ref.producer in run.store for _, ref in p.inputs)

    def _follow(
        self, run: QueryRun, query: LiveQuery, live: LivePrimitive, before: Primitive, max_length: int
    ) -> Follow | None:
        """Return `live` as a follower of `before`, with its own followers; None if its engine's port forwards nothing.

        The port is told to expect it, and the query notes that it was sent.
        """
        p = live.primitive
        port = self._ports().get(p.engine)
        if not isinstance(port, ForwardingPort):
            return None
        name = f"{run.id}-ahead{next(_numbers)}"
        run.sent_followers[p.id] = name
        inputs = {key: run.store.read(ref) for key, ref in p.inputs if ref.producer != before.id}
        pending = tuple((key, ref.path) for key, ref in p.inputs if ref.producer == before.id)
        event = self._enqueue_event(run, p, live.depth)
        port.expect(name, event)
        followers = self.followers(run, query, p, max_length - 1)
        is_kept_remote = self._is_kept_remote(query, p)
        return Follow(p, name, inputs, pending, event, run.query.tenant, followers, is_kept_remote)


def _reads(reader: Primitive, p: Primitive) -> list[tuple[str, Ref]]:
    """Return the references of `reader` to the value of `p`, by input name; the name of an early one is empty."""
    refs = [*reader.inputs, *(("", ref) for ref in reader.speculative_refs)]
    return [(key, ref) for key, ref in refs if ref.producer == p.id]


class RequestDriver:
    """The driver of the requests of all live queries of one runtime: it makes, sends and ends them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.table = RequestTable()
        self.writes = Writes()
        self.prescheduling = PreScheduling(lambda: driver.ports, self._enqueue_event)
        self._reporter = PrimitiveReporter(driver)
        self._fingerprints: dict[str, EngineFingerprint] = {}
        self.remaining = RemainingTimes(lambda: {name: port.engine.profile for name, port in driver.ports.items()})

    # ------------------------------------------------------------ dispatched primitives

    def dispatch(self, run: QueryRun, order: Dispatch) -> None:
        """Make the payloads of a primitive, off the loop if user code makes them, and then its requests."""
        p = order.primitive
        if p.attributes.form and p.prefills and self._forms_matter(p) and not _is_certain(p, run.form_of(p.id)):
            self._leave_to_original(run, p)  # before the request is written, which takes time
            return
        try:
            inputs = {key: run.store.read(ref) for key, ref in p.inputs if ref.producer in run.store}
        except (KeyError, IndexError, TypeError) as error:  # a value of another form: the original will tell
            self._driver.fail(run, p.id, error)
            return
        run.preparing.add(p.id)
        delay_s = 0.0
        if p.kind is _K.PARTIAL_PREFILLING and run.subplans:
            delay_s = run.first_call_by(p.id) - self._driver.now()
        if delay_s > 0:  # prompts that somebody waits for go first
            asyncio.get_running_loop().call_later(delay_s, self._make_payloads, run, order, inputs)
        else:
            self._make_payloads(run, order, inputs)

    def _make_payloads(self, run: QueryRun, order: Dispatch, inputs: Mapping[str, Any]) -> None:
        """Make the payloads of a dispatched primitive: on a thread if the client's code makes them, else at once."""
        p, calls = order.primitive, run.calls_of(order.primitive.id)
        if p.id not in run.preparing:  # cancelled meanwhile, or the query is over
            return
        drafts = primitive_requests.drafts(p, inputs)
        self._driver.code.run(
            run.id,
            lambda: primitive_requests.payloads(p, inputs, calls),
            lambda payloads, error: self._take_payloads(run, order, payloads, error, drafts),
            is_short=not primitive_requests.needs_client(p, inputs, calls),
        )

    def _take_payloads(
        self,
        run: QueryRun,
        order: Dispatch,
        payloads: list[Any] | None,
        error: BaseException | None,
        drafts: tuple[str, ...],
    ) -> None:
        """Make the requests for the payloads of a primitive; if these could not be made, let the primitive fail.

        Runs on the loop. Requests that may differ from those of the original are left to it.
        """
        p = order.primitive
        if p.id not in run.preparing:  # cancelled meanwhile, or the query is over
            return
        run.preparing.discard(p.id)
        if payloads is None:  # a prefetch on values of an unexpected kind: the original will tell
            self._driver.fail_in_client_code(run, p, error or TypeError("no payloads"))
            return
        if not _can_be_prefetched(p, payloads, run.form_of(p.id)):
            self._leave_to_original(run, p)
            return
        try:
            self._make_requests(run, order, payloads, drafts)
        except Exception as bug:
            self._driver.fail_by_bug(run.id, p.id, bug)

    def _make_requests(self, run: QueryRun, order: Dispatch, payloads: list[Any], drafts: tuple[str, ...]) -> None:
        """Claim or make a request for each payload of a primitive, and send those that are new."""
        p = order.primitive
        self._driver.note_dispatch(run, p)
        live = run.primitives[p.id] = LivePrimitiveRun(p, order.depth)
        if p.prefills:
            live.group = GenerationGroup(p, order.group)
        new = self._join_all(run, live, payloads, drafts)
        self._driver.trace.requested(run, live, payloads)
        self.stream_output(run)
        self._catch_up(run, live, new)
        if new:
            self._send(run, live, new)
        else:
            self.prescheduling.drop_follower(run, p, len(live.entries))

    def _forms_matter(self, p: Primitive) -> bool:
        """Return True if the primitive's engine takes an answer in one form for none in the other."""
        port = self._driver.ports.get(p.engine)
        return port is not None and not getattr(port.engine, "joins", False)

    def _leave_to_original(self, run: QueryRun, p: Primitive) -> None:
        """Let a primitive fail without a request, since the original may send another one in its place, or none."""
        run.left_to_original.add(p.id)
        self._driver.fail_in_client_code(
            run, p, LeftToOriginal("the original may send another request for this answer, or none")
        )

    def stream_output(self, run: QueryRun) -> None:
        """Stream the query's output from the request that writes it, if that is known by now."""
        if run.streamed_into is not None:
            attach(run, self._driver.query(run), self.read)

    # ------------------------------------------------------------ requests

    def _join_all(
        self, run: QueryRun, live: LivePrimitiveRun, payloads: Sequence[Any], drafts: tuple[str, ...]
    ) -> list[EngineRequest]:
        """Claim or make a request for each payload of a primitive. Return those that have yet to be sent."""
        p, new = live.primitive, []
        port, follower = self._driver.ports[p.engine], run.sent_followers.get(p.id)
        graph, request_context = run.graph_of(p.id), placed(run.query.request_context, live.depth, "")
        lookahead = graph.lookahead or p.attributes.lookahead is not None
        for number, payload in enumerate(payloads):
            key = self._search_key(run, port, payload, self.request_key_of(port, run.query.tenant, payload))
            name = follower_request(follower, number) if follower else ""
            entry = self.join(
                run, Caller.PLANNER, port, p.kind, payload, key, request_context, p.id, name, graph, drafts
            )
            entry.claims.add_graph(graph, lookahead=lookahead, is_new=entry.is_expected)
            live.wait_for(entry)
            if live.reads_items:
                self.announce_reader(entry)
            run.waiters.setdefault(entry.request.id, []).append(p.id)
            if entry.is_expected and not (run.has_original and entry.claims.rule is ClaimRule.WRITE):
                entry.note_sent()
                entry.queued_depth = live.depth
                new.append(entry)
        return new

    def join(
        self,
        run: QueryRun,
        caller: Caller,
        port: Port,
        kind: PrimitiveKind,
        payload: Any,
        key: RequestKey | None,
        request_context: RequestContext,
        primitive: str,
        name: str = "",
        graph: PlannerGraph = OWN_GRAPH,
        drafts: tuple[str, ...] = (),
    ) -> EngineRequest:
        """Return the request that `caller` gets in a live query. One that `is_expected` has to be sent.

        `name`: the id of a new request, if it has one already. `graph`: the graph that asks, for the planner. `drafts`:
        texts that the result may repeat.
        """

        def make() -> EngineRequest:
            """Create a request that has yet to be sent. The table calls this if there is none to claim."""
            is_text, is_awaited = kind in LLM_KINDS, run.has_original or run.streamed_into is not None
            request = Request(
                name or request_id(run.id),
                kind,
                payload,
                query=run.id,
                tenant=run.query.tenant,
                stream=not (is_text and port.takes_late_readers),
                background=kind is _K.PARTIAL_PREFILLING,
                app=run.query.app,
                drafts=primitive_requests.all_drafts(port.engine.profile, payload, drafts),
                late=is_awaited,
                unread=is_text and not (port.takes_late_readers or is_awaited),
            )
            entry = EngineRequest(
                request,
                port.name,
                key,
                primitive,
                Claims(rule_of(payload), caller),
                request_context,
                RequestState.EXPECTED,
            )
            entry.stream.is_coarse = not request.stream
            entry.search.writes = self.writes.version(port.name, payload)
            return entry

        entry = self.table.join(run.id, key, caller, request_context, make, graph)
        if not entry.is_expected:
            self._note_claim(run, port, entry)
        return entry

    def read(self, entry: EngineRequest, log: PieceLog) -> None:
        """Let a log get all pieces of a request, from the first one on."""
        self.announce_reader(entry)
        entry.read_into(log)

    def announce_reader(self, entry: EngineRequest) -> None:
        """Have the pieces of a request delivered from now on: somebody reads them."""
        is_streamed = entry.request.stream
        if entry.has_ended or (is_streamed and not entry.request.unread):
            return
        entry.request = replace(entry.request, stream=True, unread=False)
        if not entry.is_expected and not is_streamed:
            self._driver.ports[entry.engine].announce_reader([entry])

    def _note_claim(self, run: QueryRun, port: Port, entry: EngineRequest) -> None:
        """Note that a request was of use. Tell its engine if the claim comes from further before the query's end."""
        if entry.claims.is_left_by_planner:
            self._driver.trace.used(run, entry.primitive)
        if entry.request_context.depth > entry.queued_depth and not entry.has_begun:
            entry.queued_depth = entry.request_context.depth
            port.depths(DepthChanged(self._driver.now(), run.id, {entry.primitive: entry.queued_depth}))

    def request_key_of(self, port: Port, tenant: str, payload: Any) -> RequestKey | None:
        """Return the key of a request to an engine. May be called from any thread.

        None means that the request has no key, so that no other call can claim it. An engine's fingerprint is computed
        once.
        """
        engine = self._fingerprints.get(port.name)
        if engine is None:
            engine = self._fingerprints[port.name] = fingerprint(port.name, port.engine)
        return request_key(engine, tenant, payload)

    def _search_key(self, run: QueryRun, port: Port, payload: Any, key: RequestKey | None) -> RequestKey | None:
        """Return the key under which the planner requests a search.

        Without an original nobody checks whether a search is still up to date. So two searches of the graph are equal
        only if nothing was written, and no user code has ended, between them.
        """
        if run.has_original or key is None or not isinstance(payload, SearchVector):
            return key
        return key._replace(payload=(key.payload, self.writes.version(port.name, payload), run.code_ended))

    def _send(self, run: QueryRun, live: LivePrimitiveRun, new: list[EngineRequest]) -> None:
        """Send the new requests of a primitive to its engine's port, with its followers if the port forwards them.

        If the primitive was sent as a follower before, the port adopts the requests that it has made for it.
        """
        p, port = live.primitive, self._driver.ports[live.primitive.engine]
        if isinstance(port, DirectPort):
            port.enqueue(new)
            return
        event, query = self._enqueue_event(run, p, live.depth), self._driver.query(run)
        for entry in new:
            entry.queued_gang = event.gang
        if query is not None:
            self.prescheduling.keep_remote(query, p, new)
        follower = run.sent_followers.pop(p.id, None)
        are_all_new = len(new) == len(live.entries)
        if not isinstance(port, ForwardingPort):
            port.enqueue(new, event)
        elif follower is not None and are_all_new:
            port.adopt(follower, new, event)
        else:
            if follower is not None:
                port.disown(follower, len(live.entries))
            followers = self.prescheduling.followers(run, query, p) if query is not None and are_all_new else ()
            port.enqueue(new, event, p, followers)

    def _enqueue_event(self, run: QueryRun, p: Primitive, depth: int) -> Enqueue:
        remaining_s = self.remaining.of(self._driver.query(run), p, depth)
        return enqueue_event(self._driver.now(), run, p, depth, self._live(run, p.id), remaining_s)

    def _live(self, run: QueryRun, name: str) -> LivePrimitive | None:
        query = self._driver.query(run)
        return None if query is None else query.get(name)

    def _catch_up(self, run: QueryRun, live: LivePrimitiveRun, new: list[EngineRequest]) -> None:
        """Report what has become of claimed requests, which may be under way or done already."""
        if 0 < len(new) == len(live.entries):
            return
        new_ids = set(map(id, new))
        claimed = [entry for entry in live.entries if not entry.is_expected and id(entry) not in new_ids]
        for entry in claimed:
            entry.stream.is_passed_on |= bool(entry.stream.pieces) and live.reads_items
            for piece in list(entry.stream.pieces):
                self._reporter.read_piece(run, live, piece)
        running = [entry for entry in claimed if not entry.has_ended]
        event = gang_changed(self._driver.now(), run, self._live(run, live.primitive.id), running)
        if event is not None:
            self._driver.ports[live.primitive.engine].depths(event)
        if any(entry.has_begun for entry in claimed):
            self._reporter.note_start(run, live)
        if live.left == 0:
            self._reporter.finish(run, live)

    # ------------------------------------------------------------ requests that are given up

    def cancel(self, run: QueryRun, name: str) -> None:
        """Cancel a primitive that the graph does not need any more."""
        run.preparing.discard(name)
        live = run.primitives.get(name)
        entries = self._stop_waiting(run, live) if live is not None else []
        if not entries or not all(entry.claims.is_wanted for entry in entries):
            self._driver.trace.done(run, name, "cancelled")

    def _stop_waiting(self, run: QueryRun, live: LivePrimitiveRun) -> list[EngineRequest]:
        """Let a primitive wait no more for its requests. Return those for which it did."""
        name = live.primitive.id
        entries = [entry for entry in live.entries if name in run.waiters.get(entry.request.id, ())]
        for entry in entries:
            run.waiters[entry.request.id].remove(name)
            if entry.goes_on:
                entry.claims.give_up(Caller.PLANNER)
            else:
                self.give_up(entry, Caller.PLANNER)
        return entries

    def _release(self, run: QueryRun, entries: Iterable[EngineRequest]) -> None:
        """Forget ended requests of subplans that are over. The others are forgotten when they end."""
        for entry in entries:
            live = run.primitives.get(entry.primitive)
            if live is not None and all(other.has_ended and not other.claims.graphs for other in live.entries):
                del run.primitives[entry.primitive]
        self.table.release(run.id, entries)

    def give_up(self, entry: EngineRequest, caller: Caller) -> None:
        """Take a claim of a caller back, and cancel the request if nobody wants it any more."""
        port = self._driver.ports[entry.engine]
        if entry.claims.give_up(caller) and not entry.is_cancelled and port.holds(entry):
            port.cancel([entry])

    def end_query(self, run: QueryRun, outcome: str, error: BaseException | None) -> None:
        """Give up the requests of a query, but for those that the original has claimed; with an error, those too."""
        entries = list(self.table.of(run.id))
        for entry in entries if error is not None else ():
            entry.resolve(None, error)
        for entry in entries:
            is_unclaimed = not entry.claims.open_by_original
            entry.claims.open_by_planner = 0
            if error is not None:
                entry.claims.open_by_original = 0
            self.give_up(entry, Caller.PLANNER)
            if is_unclaimed and run.has_original and outcome == "closed" and not entry.is_cancelled:
                self._driver.trace.settled(run, entry)
        self.prescheduling.withdraw(run)

    def end_subplan(self, run: QueryRun, name: str) -> None:
        """Forget the requests of a subplan that is over, if they have ended and no other subplan has them."""
        for primitive in [key for key in run.errors if InstancePath(key).inside(name) is not None]:
            del run.errors[primitive]
        primitives = [key for key in run.primitives if InstancePath(key).inside(name) is not None]
        self.prescheduling.withdraw(run, name)
        for primitive in primitives:
            live = run.primitives[primitive]
            entries = self._stop_waiting(run, live)
            if entries and live.group is not None and all(entry.claims.is_wanted for entry in entries):
                for member in live.group.members:  # the prefilling may be done, and these cancelled just now
                    self._driver.trace.used(run, member.id)
        distinct = {id(entry): entry for primitive in primitives for entry in run.primitives[primitive].entries}
        released = [entry for entry in distinct.values() if entry.claims.remove_graph(name)]
        for entry in released:
            if not entry.claims.open_by_original:
                self._driver.trace.settled(run, entry)
        for primitive in primitives:  # an adopted request runs, and is traced, as the primitive that made it
            if all(entry.primitive != primitive for entry in run.primitives[primitive].entries):
                del run.primitives[primitive]
        self._release(run, released)

    # ------------------------------------------------------------ reports of ports

    def request_started(self, entry: EngineRequest, replica: str, batch: int) -> None:
        """Report that a request has left the queue of its engine."""
        entry.started()
        run = self._driver.runs.get(entry.request.query)
        if run is None:
            return
        run.requests[entry.request.id] = entry.primitive
        self._driver.trace.started(run, entry.primitive, replica, batch)
        for name in tuple(run.waiters.get(entry.request.id, ())):
            self._reporter.note_start(run, run.primitives[name], is_traced=name == entry.primitive)

    def request_piece(self, entry: EngineRequest, piece: Piece) -> None:
        """Deliver a piece of a result."""
        entry.stream.add(piece)
        run = self._driver.runs.get(entry.request.query)
        if run is None:
            return
        self._driver.trace.first(run, entry.primitive)
        for name in tuple(run.waiters.get(entry.request.id, ())):
            entry.stream.is_passed_on |= run.primitives[name].reads_items
            self._reporter.read_piece(run, run.primitives[name], piece)

    def administered(self, engine: str, method: str, args: Sequence[Any]) -> None:
        """Note that a method of an engine was called, which may have deleted something."""
        if self.writes.note_call(engine, method, args):
            self.table.drop_writes(engine, args[0])

    def request_ended(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request with its value or an error, for the primitives and calls that wait for it."""
        self.writes.note_end(entry.engine, entry.request.payload)
        run = self._driver.runs.get(entry.request.query)
        located_error = error if error is None else with_location(error, entry)
        names = run.waiters.pop(entry.request.id, ()) if run is not None else ()
        self.table.end(entry, value, located_error)
        if run is None:
            return
        port = self._driver.ports.get(entry.engine)
        tells_cached = getattr(port.engine if port else None, "tells_cached", None)
        self._driver.trace.request_ended(run, entry, value, tells_cached)
        if entry.primitive not in run.primitives or not (entry.primitive in names or entry.is_cancelled):
            self._driver.trace.called_ended(run, entry, value, failed=located_error is not None)
        for name in names:
            live = run.primitives.get(name)
            if live is None:  # the primitive before it has ended the query
                continue
            live.take(entry, value)
            if located_error is not None:
                self._driver.fail(run, name, located_error)
            elif live.left == 0:
                self._reporter.finish(run, live)
        if entry.claims.is_left_by_planner:
            self._release(run, [entry])


def _can_be_prefetched(p: Primitive, payloads: Sequence[Any], form: AnswerForm) -> bool:
    """Return False if a request of the user's own client may not be the one that the original sends.

    `form`: the one in which the original asks for answers.
    """
    fixed = {payload.form for payload in payloads if isinstance(payload, Generate)} - {None}
    return not fixed or (fixed == {form} and _is_certain(p, form))


def _is_certain(p: Primitive, form: AnswerForm) -> bool:
    """Return False if the original may ask for an answer in another form than this one, or not at all.

    Where forms matter, the request would be sent twice, or for nothing.
    """
    return not (form is AnswerForm.UNKNOWN or p.attributes.form == "unknown")
