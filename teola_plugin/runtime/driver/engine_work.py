"""What queries ask of engines, and what engines report: dispatched primitives, their works, their news.

Lives on the pool's loop. Which primitive is ready is the graph scheduler's to say, which request runs next the engine
scheduler's; here they meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.graph import LLM_KINDS, LeftToPlain, Primitive, PrimitiveKind, Terms
from teola_plugin.requests.payloads import AnswerForm, Generate, Generation, SearchVector
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
from teola_plugin.runtime import primitive_requests as requests
from teola_plugin.runtime.claims import OWN_GRAPH, Caller, ClaimRule, Claims, PlannerGraph
from teola_plugin.runtime.driver.enqueue_events import enqueue_event, gang_changed
from teola_plugin.runtime.driver.generation_group import GenerationGroup
from teola_plugin.runtime.driver.prescheduling import PreScheduling
from teola_plugin.runtime.driver.primitive_news import PrimitiveNews
from teola_plugin.runtime.driver.protocol import Driver
from teola_plugin.runtime.driver.provisional_answers import ProvisionalAnswers
from teola_plugin.runtime.driver.remaining import Remaining
from teola_plugin.runtime.engine_requests.engine_request import (
    EngineRequest,
    GuessRole,
    RequestState,
    placed,
    request_id,
)
from teola_plugin.runtime.engine_requests.keys import EngineFingerprint, RequestKey, fingerprint, request_key, rule_of
from teola_plugin.runtime.engine_requests.table import RequestTable
from teola_plugin.runtime.engine_requests.writes import Writes
from teola_plugin.runtime.failures import located
from teola_plugin.runtime.handles import PieceLog
from teola_plugin.runtime.output_stream import attach
from teola_plugin.runtime.ports.port import ForwardingPort, Port, follower_request
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue
from teola_plugin.scheduling.graph_events import Dispatch
from teola_plugin.scheduling.live_primitive import LivePrimitive
from teola_plugin.scheduling.objectives import Objective

_K = PrimitiveKind


class EngineWork:
    """The works of all live queries of one runtime."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.works = RequestTable()
        self.writes = Writes()
        self.ahead = PreScheduling(lambda: driver.ports, self._enqueue_event)
        self._news = PrimitiveNews(driver)
        self._fingerprints: dict[str, EngineFingerprint] = {}
        self.guesses = ProvisionalAnswers(driver, self.works, self.identity_of)
        self.remaining = Remaining(lambda: {name: port.engine.profile for name, port in driver.ports.items()})

    # ------------------------------------------------------------ dispatched primitives

    def dispatch(self, run: QueryRun, order: Dispatch) -> None:
        """Make the payloads, off the loop where that is not ours to do, then the works."""
        p = order.primitive
        if p.attributes.form and p.prefills and self._forms_matter(p) and not _is_certain(p, run.form_of(p.id)):
            self._left_to_original(run, p)  # known before the request is written, which takes its time
            return
        try:
            inputs = {key: run.store.read(ref) for key, ref in p.inputs if ref.producer in run.store}
        except (KeyError, IndexError, TypeError) as error:  # a value of another form: the plain object will tell
            self._driver.fail(run, p.id, error)
            return
        run.preparing.add(p.id)
        wait = run.first_call_by(p.id) - self._driver.now() if p.kind is _K.PARTIAL_PREFILLING and run.parts else 0.0
        if wait > 0:  # a prompt that somebody waits for goes first
            asyncio.get_running_loop().call_later(wait, self._prepare, run, order, inputs)
        else:
            self._prepare(run, order, inputs)

    def _prepare(self, run: QueryRun, order: Dispatch, inputs: Mapping[str, Any]) -> None:
        p, calls = order.primitive, run.calls_of(order.primitive.id)
        if p.id not in run.preparing:  # cancelled meanwhile, or the query is over
            return
        drafts = requests.drafts(p, inputs)
        self._driver.code.run(
            run.id,
            lambda: requests.payloads(p, inputs, calls),
            lambda made, error: self._prepared(run, order, made, error, drafts),
            short=not requests.needs_client(p, inputs, calls),
        )

    def _prepared(
        self,
        run: QueryRun,
        order: Dispatch,
        made: list[Any] | None,
        error: BaseException | None,
        drafts: tuple[str, ...],
    ) -> None:
        p = order.primitive
        if p.id not in run.preparing:  # cancelled meanwhile, or the query is over
            return
        run.preparing.discard(p.id)
        if made is None:  # early work on values of an unexpected kind: the plain object will tell
            self._driver.died(run, p, error or TypeError("no payloads"))
            return
        if not _may_be_sent_early(p, made, run.form_of(p.id)):
            self._left_to_original(run, p)
            return
        try:
            self._asked(run, order, made, drafts)
        except Exception as bug:
            self._driver.broken(run.id, p.id, bug)

    def _asked(self, run: QueryRun, order: Dispatch, made: list[Any], drafts: tuple[str, ...]) -> None:
        p = order.primitive
        if p.prefills and p.attributes.provisional:
            self.guesses.begin(run, order, made[0])
            return
        self._driver.dispatched(run, p)
        live = run.primitives[p.id] = LivePrimitiveRun(p, order.depth)
        if p.prefills:
            live.group = GenerationGroup(p, order.group)
        fresh = self._joined(run, live, made, drafts)
        self._driver.trace.asked(run, live, made)
        self.stream_output(run)
        self._catch_up(run, live, fresh)
        if fresh:
            self._send(run, live, fresh)
        else:
            self.ahead.unneeded(run, p, len(live.works))

    def _forms_matter(self, p: Primitive) -> bool:
        """Return True if the primitive's engine takes an answer in one form for none in the other."""
        port = self._driver.ports.get(p.engine)
        return port is not None and not getattr(port.engine, "joins", False)

    def _left_to_original(self, run: QueryRun, p: Primitive) -> None:
        run.left_to_original.add(p.id)
        self._driver.died(run, p, LeftToPlain("the original may send another request for this answer, or none"))

    def stream_output(self, run: QueryRun) -> None:
        """More of the graph is known, or asked for: maybe what writes the value that is streamed."""
        if run.streamed_into is not None:
            attach(run, self._driver.query(run), self.read)

    def _joined(
        self, run: QueryRun, live: LivePrimitiveRun, payloads: Sequence[Any], drafts: tuple[str, ...]
    ) -> list[EngineRequest]:
        """Works for a primitive of the graph; those that have yet to be sent."""
        p, fresh, guess = live.primitive, [], bool(live.primitive.attributes.provisional)
        port, name = self._driver.ports[p.engine], run.sent_ahead.get(p.id)
        graph, terms = run.graph_of(p.id), placed(run.query.terms, live.depth, "")
        lookahead = graph.lookahead or p.attributes.lookahead is not None
        for number, payload in enumerate(payloads):
            known = self._between_writes(run, port, payload, self.identity_of(port, run.query.tenant, payload))
            drafts += self.guesses.drafts(run, p, payload, known)
            request = follower_request(name, number) if name else ""
            work = self.join(
                run, Caller.PLANNER, port, p.kind, payload, known, terms, p.id, request, graph, drafts, for_guess=guess
            )
            work.claims.add_graph(graph, lookahead=lookahead, is_new=work.is_expected)
            live.wait_for(work)
            if live.reads_items:
                self.listen(work)
            run.waiters.setdefault(work.request.id, []).append(p.id)
            if work.is_expected and not (run.ahead and work.claims.rule is ClaimRule.WRITE):
                work.sent()
                work.queued_depth = live.depth
                fresh.append(work)
        return fresh

    def join(
        self,
        run: QueryRun,
        caller: Caller,
        port: Port,
        kind: PrimitiveKind,
        payload: Any,
        known: RequestKey | None,
        terms: Terms,
        primitive: str,
        request: str = "",
        graph: PlannerGraph = OWN_GRAPH,
        drafts: tuple[str, ...] = (),
        *,
        for_guess: bool = False,
    ) -> EngineRequest:
        """The work of a caller of a live query; one that is not `made` has to be sent. `request`: its id, if any;
        `graph`: the one that asks, if it is early; `drafts`: texts that the result may repeat; `for_guess`: only a
        guess at a prompt needs it."""

        def make() -> EngineRequest:
            text, awaited = kind in LLM_KINDS, run.ahead or run.streamed_into is not None
            made = Request(
                request or request_id(run.id),
                kind,
                payload,
                query=run.id,
                tenant=run.query.tenant,
                stream=not (text and port.listens),
                background=kind is _K.PARTIAL_PREFILLING,
                app=run.query.app,
                drafts=requests.all_drafts(port.engine.profile, payload, drafts),
                late=awaited,
                unread=text and not (port.listens or awaited),
            )
            created = EngineRequest(
                made,
                port.name,
                known,
                primitive,
                Claims(rule_of(payload), caller),
                terms,
                RequestState.EXPECTED,
                guess_role=GuessRole.NEEDED if for_guess else GuessRole.NONE,
            )
            created.stream.is_coarse = not made.stream
            created.search.writes = self.writes.version(port.name, payload)
            return created

        work = self.works.join(run.id, known, caller, terms, make, graph)
        if work.guess_role is GuessRole.UNCLAIMED:
            self.guesses.claimed(run, work, caller, primitive, terms.depth)
        if work.guess_role is GuessRole.NEEDED and not for_guess:
            self._wanted(run, port, work)
        if not work.is_expected:
            self._found(run, port, work)
        return work

    def read(self, work: EngineRequest, log: PieceLog) -> None:
        """Its pieces go there, too, from the first one on."""
        self.listen(work)
        work.read_into(log)

    def listen(self, work: EngineRequest) -> None:
        """Somebody reads its pieces from now on."""
        heard = work.request.stream
        if work.has_ended or (heard and not work.request.unread):
            return
        work.request = replace(work.request, stream=True, unread=False)
        if not work.is_expected and not heard:
            self._driver.ports[work.engine].listen([work])

    def _found(self, run: QueryRun, port: Port, work: EngineRequest) -> None:
        """Somebody else had asked for it: who comes now may be further from the end of the query."""
        if work.claims.is_left_by_planner:
            self._driver.trace.used(run, work.primitive)
        if work.terms.depth > work.queued_depth and not work.has_begun:
            work.queued_depth = work.terms.depth
            port.depths(DepthChanged(self._driver.now(), run.id, {work.primitive: work.queued_depth}))

    def _wanted(self, run: QueryRun, port: Port, work: EngineRequest) -> None:
        """A guess had asked for it, and now somebody waits: it is as urgent as any, and all that was asked with it."""
        live = run.primitives.get(work.primitive)
        for one in live.works if live is not None else (work,):
            one.guess_role = GuessRole.NONE
        work.queued_depth = max(work.queued_depth, work.terms.depth)
        wanted = {work.primitive: (Objective.LATENCY, "")}
        port.depths(DepthChanged(self._driver.now(), run.id, {work.primitive: work.queued_depth}, wanted))

    def identity_of(self, port: Port, tenant: str, payload: Any) -> RequestKey | None:
        """May be asked from any thread."""
        found = self._fingerprints.get(port.name)
        if found is None:
            found = self._fingerprints[port.name] = fingerprint(port.name, port.engine)
        return request_key(found, tenant, payload)

    def _between_writes(self, run: QueryRun, port: Port, payload: Any, known: RequestKey | None) -> RequestKey | None:
        """Without a plain object nobody asks again whether a search is still true: one of the graph's own is taken for
        another only if nothing has been written, and no user code has ended, between the two."""
        if run.ahead or known is None or not isinstance(payload, SearchVector):
            return known
        return known._replace(payload=(known.payload, self.writes.version(port.name, payload), run.code_ended))

    def _send(self, run: QueryRun, live: LivePrimitiveRun, fresh: list[EngineRequest]) -> None:
        p, event = live.primitive, self._enqueue_event(run, live.primitive, live.depth)
        for work in fresh:
            work.queued_gang = event.gang
        port, query = self._driver.ports[p.engine], self._driver.query(run)
        if query is not None:
            self.ahead.leave(query, p, fresh)
        name = run.sent_ahead.pop(p.id, None)
        all_fresh = len(fresh) == len(live.works)
        if not isinstance(port, ForwardingPort):
            port.enqueue(fresh, event)
        elif name is not None and all_fresh:
            port.adopt(name, fresh, event)
        else:
            if name is not None:
                port.disown(name, len(live.works))
            then = self.ahead.followers(run, query, p) if query is not None and all_fresh else ()
            port.enqueue(fresh, event, p, then)

    def _enqueue_event(self, run: QueryRun, p: Primitive, depth: int) -> Enqueue:
        remaining = self.remaining.of(self._driver.query(run), p, depth)
        return enqueue_event(self._driver.now(), run, p, depth, self._live(run, p.id), remaining)

    def _live(self, run: QueryRun, name: str) -> LivePrimitive | None:
        query = self._driver.query(run)
        return None if query is None else query.get(name)

    def _catch_up(self, run: QueryRun, live: LivePrimitiveRun, fresh: list[EngineRequest]) -> None:
        """Works that the plain object or another graph had started before may be under way or done already."""
        if 0 < len(fresh) == len(live.works):
            return
        new = set(map(id, fresh))
        claimed = [work for work in live.works if not work.is_expected and id(work) not in new]
        for work in claimed:
            work.stream.is_passed_on |= bool(work.stream.pieces) and live.reads_items
            for piece in list(work.stream.pieces):
                self._news.piece(run, live, piece)
        running = [work for work in claimed if not work.has_ended]
        known = gang_changed(self._driver.now(), run, self._live(run, live.primitive.id), running)
        if known is not None:
            self._driver.ports[live.primitive.engine].depths(known)
        if any(work.has_begun for work in claimed):
            self._news.began(run, live)
        if live.left == 0:
            self._news.all_ended(run, live)

    def cancel(self, run: QueryRun, name: str) -> None:
        """The graph does not want a primitive any more."""
        run.preparing.discard(name)
        if self.guesses.give_up(run, name):
            return
        live = run.primitives.get(name)
        works = self.leave(run, live) if live is not None else []
        if not works or not all(work.claims.is_wanted for work in works):
            self._driver.trace.done(run, name, "cancelled")

    def leave(self, run: QueryRun, live: LivePrimitiveRun) -> list[EngineRequest]:
        """A primitive waits no more for the works that it waited for. Returns those."""
        name = live.primitive.id
        works = [work for work in live.works if name in run.waiters.get(work.request.id, ())]
        for work in works:
            run.waiters[work.request.id].remove(name)
            if work.goes_on:
                work.claims.give_up(Caller.PLANNER)
            else:
                self.give_up(work, Caller.PLANNER)
        return works

    def used(self, run: QueryRun, name: str) -> None:
        """A part is over, and what was made for it is of use to others."""
        self._driver.trace.used(run, name)

    def settled(self, run: QueryRun, work: EngineRequest) -> None:
        """It is known now what came of work that the plain object did not claim."""
        self._driver.trace.settled(run, work)

    def let_go(self, run: QueryRun, works: Iterable[EngineRequest]) -> None:
        """Parts that had them are over: what has ended is forgotten, the rest will be when it ends."""
        for work in works:
            live = run.primitives.get(work.primitive)
            if live is not None and all(one.has_ended and not one.claims.graphs for one in live.works):
                del run.primitives[work.primitive]
        self.works.release(run.id, works)

    def give_up(self, work: EngineRequest, caller: Caller) -> None:
        """Take a claim of a caller back, and stop the request if nobody wants it any more."""
        port = self._driver.ports[work.engine]
        if work.claims.give_up(caller) and not work.is_cancelled and port.holds(work):
            port.cancel([work])

    # ------------------------------------------------------------ what ports report

    def request_started(self, work: EngineRequest, instance: str, batch: int) -> None:
        work.started()
        run = self._driver.runs.get(work.request.query)
        if run is None:
            return
        if work.guess_role is GuessRole.UNCLAIMED:
            self.guesses.started(run, work, instance, batch)
            return
        run.requests[work.request.id] = work.primitive
        self._driver.trace.started(run, work.primitive, instance, batch)
        for name in tuple(run.waiters.get(work.request.id, ())):
            self._news.began(run, run.primitives[name], traced=name == work.primitive)

    def request_piece(self, work: EngineRequest, piece: Piece) -> None:
        work.stream.add(piece)
        run = self._driver.runs.get(work.request.query)
        if run is None:
            return
        if work.guess_role is GuessRole.UNCLAIMED:
            self.guesses.piece(run, work, piece)
            return
        self._driver.trace.first(run, work.primitive)
        for name in tuple(run.waiters.get(work.request.id, ())):
            work.stream.is_passed_on |= run.primitives[name].reads_items
            self._news.piece(run, run.primitives[name], piece)

    def administered(self, engine: str, method: str, args: Sequence[Any]) -> None:
        """A method of an engine was called, maybe one that deletes."""
        if self.writes.administered(engine, method, args):
            self.works.drop_writes(engine, args[0])

    def request_ended(self, work: EngineRequest, value: Any, error: BaseException | None) -> None:
        self.writes.ended(work.engine, work.request.payload)
        run = self._driver.runs.get(work.request.query)
        if work.guess_role is GuessRole.UNCLAIMED and run is not None:
            self.guesses.ended(run, work, value, error)
            self.works.end(work, value, error)
            return
        if error is not None and run is not None and self.guesses.again(run, work):
            return
        named = error if error is None else located(error, work)
        names = run.waiters.pop(work.request.id, ()) if run is not None else ()
        self.works.end(work, value, named)
        if run is None:
            return
        run.wrote += value.completion_tokens if isinstance(value, Generation) else 0
        port = self._driver.ports.get(work.engine)
        self._driver.trace.request_ended(run, work, value, getattr(port.engine if port else None, "tells_cached", None))
        if work.primitive not in run.primitives or not (work.primitive in names or work.is_cancelled):
            self._driver.trace.called_ended(run, work, value, failed=named is not None)
        for name in names:
            live = run.primitives.get(name)
            if live is None:  # the one before has ended the query
                continue
            live.take(work, value)
            if named is not None:
                self._driver.fail(run, name, named)
            elif live.left == 0:
                self._news.all_ended(run, live)
        if work.claims.is_left_by_planner:
            self.let_go(run, [work])


def _may_be_sent_early(p: Primitive, payloads: Sequence[Any], form: AnswerForm) -> bool:
    """Return False if a request of the user's own client may not be the one that the original sends.

    `form`: the one in which the original asks for answers.
    """
    fixed = {one.form for one in payloads if isinstance(one, Generate)} - {None}
    return not fixed or (fixed == {form} and _is_certain(p, form))


def _is_certain(p: Primitive, form: AnswerForm) -> bool:
    """Return False if the original may ask for an answer in another form than this one, or not at all.

    Where forms matter, the former would be sent twice, the latter for nothing.
    """
    return not (form is AnswerForm.UNKNOWN or p.attributes.form == "unknown" or p.attributes.provisional)
