"""Calls of the plain object: what was asked for already is claimed, the rest is asked for. Lives on the pool's loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.errors import QueryCancelled, QueryError, QueryTimeout, pool_closed
from teola_plugin.graph import PrimitiveKind, Query, Terms
from teola_plugin.observe.waits import OpenWait
from teola_plugin.requests.payloads import IngestRow, SearchVector, Version
from teola_plugin.requests.request import Request
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.dead_parts import Once
from teola_plugin.runtime.driver.enqueue_events import call_enqueue_event
from teola_plugin.runtime.driver.graph_driver import GraphDriver
from teola_plugin.runtime.engine_requests.engine_request import (
    EngineRequest,
    PendingCall,
    RequestState,
    placed,
    request_id,
)
from teola_plugin.runtime.engine_requests.keys import RequestKey
from teola_plugin.runtime.handles import PieceLog
from teola_plugin.runtime.part import HeldPart
from teola_plugin.runtime.plain_drafts import drafts_of_call
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.primitive_requests import all_drafts
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.query_store import QueryStore

_calls = itertools.count(1)
_log = logging.getLogger("teola_plugin")
_said = Once()


@dataclass(slots=True, eq=False)
class Call:
    """One call from outside, on its way: a request per payload."""

    kind: PrimitiveKind
    port: Port
    payloads: Sequence[Any]
    identities: Sequence[RequestKey | None]
    """Empty where nothing can be claimed."""
    terms: Terms
    future: Future[list[Any]]
    log: PieceLog | None
    """Where its pieces go, if it is streamed."""
    keep_remote: bool = False
    """Whether its values may stay where they are made."""
    step: int = 0
    """Of the plain object: the one that calls; 0 where that is not known."""
    held: HeldPart | None = None
    """That of its place."""
    wait: OpenWait | None = None
    """What the trace of its query says of it."""
    works: list[EngineRequest] = field(default_factory=list)
    """One for each payload, once they are made or claimed."""
    given_up: bool = False


class PlainCalls:
    """Joins calls to their queries. `version` reads that of a collection; `deliver` hands over the values of a call."""

    def __init__(
        self,
        driver: GraphDriver,
        version: Callable[[Port, str], Awaitable[Version | None]],
        deliver: Callable[[Future[list[Any]], list[Any]], None],
    ) -> None:
        self._driver, self._version, self._deliver = driver, version, deliver
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, run: QueryRun | None, call: Call) -> None:
        """A call always ends: one that cannot join its query is an ordinary one; one that comes late fails."""
        late = run.late if run is not None else None
        if late is not None:
            self._refuse(call, late)
            return
        live = run is not None and run.id in self._driver.runs
        try:
            self._make(run if live and run is not None else self._alone(call), call, live=live)
        except Exception as error:
            if call.future.done():
                return
            if not live:
                self._refuse(call, error)
                return
            _log.warning(
                "a call cannot join its query and is made by itself (%s is a bug of teola-plugin: please report it)",
                type(error).__name__,
                exc_info=True,
            )
            for work in call.works:
                work.pending_calls = [pending for pending in work.pending_calls if pending.future is not call.future]
            call.works.clear()
            call.identities = ()
            self.join(None, call)

    @staticmethod
    def _refuse(call: Call, error: BaseException) -> None:
        call.future.set_exception(error)
        if call.log is not None:
            call.log.close()

    def _alone(self, call: Call) -> QueryRun:
        """For a call of no live query: its terms hold all the same."""
        terms, name = call.terms, f"call{next(_calls)}"
        query = Query(id=name, app=terms.app, tenant=terms.tenant, deadline=terms.deadline, weight=terms.weight)
        if terms.deadline is not None and not self._in_time(call, name, terms.deadline):
            raise _too_late(name)
        return QueryRun(None, query, None, {}, True, QueryStore({}))  # type: ignore[arg-type]

    def _in_time(self, call: Call, name: str, deadline: float) -> bool:
        """Whether there is time left; the call ends when there is none."""
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline:
            return False
        timer = loop.call_at(
            deadline, self._ring, call, name, context=Context()
        )  # once cancelled, it stays for a while
        call.future.add_done_callback(lambda _: timer.cancel())
        return True

    def _ring(self, call: Call, name: str) -> None:
        if not call.future.done():
            self._refuse(call, _too_late(name))
            self.give_up(call)

    def _make(self, run: QueryRun, call: Call, *, live: bool) -> None:
        run.calls_made += 1
        if live and call.wait is not None:
            self._told(run, call, call.wait)
        name = f"{call.port.name}.call#{run.calls_made}"
        for collection in {one.collection for one in call.payloads if isinstance(one, IngestRow)}:
            self._driver.engines.works.drop_writes(call.port.name, collection)
        doubtful: list[int] = []
        for number, payload in enumerate(call.payloads):
            work = self._claimed(run, call, number, name) if live else self._own(run, call, payload, name)
            call.works.append(work)
            if not work.is_expected and isinstance(payload, SearchVector):
                doubtful.append(number)
                work.search.open_checks += 1
        if doubtful:
            self._spawn(self._checked(run, call, doubtful, name))
        else:
            self._wait(run, call, name)
        self._send(run, call, name, live=live)

    def _claimed(self, run: QueryRun, call: Call, number: int, name: str) -> EngineRequest:
        """The work of a live query that is claimed, or yet to be sent."""
        payload, engines = call.payloads[number], self._driver.engines
        known = None
        if run.claims:
            known = call.identities[number] if call.identities else None
            known = known or engines.identity_of(call.port, run.query.tenant, payload)
        drafts = drafts_of_call(run, call.port.name, payload) if call.port.engine.profile.drafts else ()
        work = engines.join(run, Caller.ORIGINAL, call.port, call.kind, payload, known, call.terms, name, drafts=drafts)
        work.claims.last_claim = run.calls_made
        if not work.is_expected and call.step:
            self._driver.trace.at_step(run, work, call.step)
        if work.is_expected and not run.claims:  # nobody can come to read its pieces
            work.request = replace(work.request, stream=call.log is not None, late=False)
            work.stream.is_coarse = not work.request.stream
        if call.log is not None:
            engines.read(work, call.log)
        return work

    def _told(self, run: QueryRun, call: Call, wait: OpenWait) -> None:
        """The trace hears of the call's end. The future keeps its callbacks, and they must not keep the call's values:
        they would be there until Python's collector comes."""
        asking = [call]
        call.future.add_done_callback(lambda _: self._driver.trace.answered(run, wait, asking.pop().works))

    @staticmethod
    def _own(run: QueryRun, call: Call, payload: Any, name: str) -> EngineRequest:
        """Of no live query."""
        terms, streamed = call.terms, call.log is not None
        request = Request(
            request_id(run.id),
            call.kind,
            payload,
            query=run.id,
            tenant=terms.tenant,
            stream=streamed,
            app=terms.app,
            drafts=all_drafts(call.port.engine.profile, payload),
        )
        work = EngineRequest(request, call.port.name, None, name, terms=terms, state=RequestState.EXPECTED)
        work.subscribe(Caller.ORIGINAL, terms)
        if call.log is not None:
            work.read_into(call.log)
        return work

    def _send(self, run: QueryRun, call: Call, name: str, *, live: bool) -> None:
        """Queue what nobody has asked for yet."""
        fresh = list({id(work): work for work in call.works if work.is_expected}.values())
        if fresh:
            self._enqueue(run, call, name, fresh, live=live)
        held = call.held
        if live and held is not None and held.query == run.id and held.begins(foreseen=not fresh):
            # Behind the call, and with what it asks for.
            asyncio.get_running_loop().call_soon(self._driver.begin_part, run, held.part, run.calls_made - 1)

    def _enqueue(self, run: QueryRun, call: Call, name: str, fresh: list[EngineRequest], *, live: bool) -> None:
        driver = self._driver
        for work in fresh:
            work.sent()
            work.primitive = name
            if call.keep_remote:
                work.request = replace(work.request, keep_remote=True)
        depth, query = call.terms.depth, driver.query(run) if live else None
        if query is not None:
            # The plain object waits for this very call: nothing of its query is more urgent, what is for later less so.
            depth = max(depth, query.deepest() + run.looks_ahead)
            driver.trace.called(run, name, fresh, depth, call.step)
        for work in fresh:
            work.terms = placed(work.terms, depth, work.terms.gang)
            work.queued_depth = depth
        left = driver.engines.remaining.call(query, depth)
        event, known = call_enqueue_event(driver.now(), run, call.kind, name, depth, call.terms.gang, fresh, left)
        if known is not None:
            call.port.depths(known)
        call.port.enqueue(fresh, event)

    def _wait(self, run: QueryRun, call: Call, name: str) -> None:
        deliver = Future.set_result if call.keep_remote else self._deliver
        PendingCall(call.works, call.future, deliver, again=lambda work: self._again(run, call, work, name))

    def _again(self, run: QueryRun, call: Call, lost: EngineRequest, name: str) -> EngineRequest | None:
        """Early work that failed after it was claimed: the plain object's own request is made, as it would have been.

        None where that cannot be: the query is over, or pieces were passed on; and where it would fail alike.
        """
        if (
            not lost.has_failed_in_passing
            or lost.claims.made_by is not Caller.PLANNER
            or run.id not in self._driver.runs
            or call.given_up
        ):
            return None
        if call.log is not None and lost.stream.pieces:
            if not call.log.tentative:
                return None
            call.log.close()
            call.log = None
        self._note(call.port.name, lost)
        lost.claims.give_up(Caller.ORIGINAL)  # so it counts as wasted
        number = next(i for i, work in enumerate(call.works) if work is lost)
        work = call.works[number] = self._claimed(run, call, number, name)
        self._send(run, call, name, live=True)
        return work

    @staticmethod
    def _note(engine: str, lost: EngineRequest) -> None:
        """What was done for nothing would be a loss that nobody hears of; of what was cancelled, nothing is said."""
        error = lost.error
        if error is None or lost.is_cancelled:
            return
        _said(
            (engine, type(error)),
            lambda: _log.warning(
                "work that engine %s did ahead failed, and was asked for again in its place: %s Answers are "
                "unaffected, only later than they could be; this is said once for each kind of error",
                engine,
                error,
            ),
        )

    def give_up(self, call: Call) -> None:
        """The caller does not want it any more."""
        call.given_up = True
        for work in call.works:
            self._driver.engines.give_up(work, Caller.ORIGINAL)

    # ------------------------------------------------------------ searches that were made before

    async def _checked(self, run: QueryRun, call: Call, doubtful: list[int], name: str) -> None:
        """A search is claimed only if its collection is still what it was: asked for again, from now on."""
        claimed = [call.works[number] for number in doubtful]
        try:
            for number in doubtful:
                if not await self._still_true(run, call, call.works[number], call.payloads[number].collection):
                    self._search_again(run, call, number, name)
            over: QueryError | None = run.late
            if call.given_up:
                over = QueryCancelled("the call was given up.", query_id=run.id, hint="ask again")
            if over is not None:
                self._refuse(call, over)
                return
            self._send(run, call, name, live=run.id in self._driver.runs)
            self._wait(run, call, name)
        except BaseException as error:
            if not call.future.done():
                self._refuse(call, error if isinstance(error, Exception) else pool_closed())
            if not isinstance(error, Exception):  # the loop ends, and nobody else does
                raise
        finally:
            for work in claimed:
                work.checked()

    def _search_again(self, run: QueryRun, call: Call, number: int, name: str) -> None:
        work = call.works[number]
        work.search.is_outdated = True
        self._driver.engines.give_up(work, Caller.ORIGINAL)
        live = run.id in self._driver.runs
        payload = call.payloads[number]
        call.works[number] = self._claimed(run, call, number, name) if live else self._own(run, call, payload, name)

    async def _still_true(self, run: QueryRun, call: Call, work: EngineRequest, collection: str) -> bool:
        try:
            current = await self._version(call.port, collection)
        except Exception:  # the search itself will tell
            return False
        if not work.has_ended:
            await _end_of(work)
        if work.has_failed or work.is_cancelled:
            return False
        found = work.search.version
        if found is None or current is None:  # nobody can tell: not across anything that might have written
            written = self._driver.engines.writes.version(call.port.name, work.request.payload)
            return work.search.writes == written and not run.has_user_code
        return found.identity == current.identity and found.counter >= current.counter

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _too_late(name: str) -> QueryTimeout:
    return QueryTimeout(f"call {name} did not end before its deadline.", query_id=name, hint="allow more time")


async def _end_of(work: EngineRequest) -> None:
    """Returns when the work has ended, well or not."""
    ended: Future[list[Any]] = Future()
    PendingCall([work], ended)
    await asyncio.gather(asyncio.wrap_future(ended), return_exceptions=True)
