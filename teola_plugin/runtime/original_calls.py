"""Calls of the original at engines of the pool: what was requested before is claimed, the rest is requested.

Lives on the pool's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.errors import QueryCancelled, QueryError, QueryTimeout, pool_closed
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Query, RequestContext
from teola_plugin.observe.steps import OpenWait
from teola_plugin.requests.payloads import Generate, IngestRow, Request, SearchVector, Version
from teola_plugin.runtime.claims import Caller, RequestKey
from teola_plugin.runtime.driver.graph_driver import GraphDriver
from teola_plugin.runtime.engine_requests import (
    EngineRequest,
    PendingCall,
    RequestState,
    placed,
    request_id,
)
from teola_plugin.runtime.loop_thread import PieceLog
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.prefetch_outcomes import OncePerCause
from teola_plugin.runtime.primitive_requests import all_drafts, call_enqueue_event, drafts
from teola_plugin.runtime.query_run import Claiming, DeferredSubplan, QueryRun, QueryStore

_numbers = itertools.count(1)
_log = logging.getLogger("teola_plugin")
_warn_once = OncePerCause()


@dataclass(slots=True, eq=False)
class RequestedCall:
    """A call of the original, or of code outside every query, with a request per payload."""

    kind: PrimitiveKind
    port: Port
    payloads: Sequence[Any]
    keys: Sequence[RequestKey | None]
    """Request keys of the payloads; empty if nothing can be claimed."""
    request_context: RequestContext
    future: Future[list[Any]]
    log: PieceLog | None
    """Reader of its pieces; None unless it is streamed."""
    keep_remote: bool = False
    """True if its values may stay where they are made."""
    step: int = 0
    """Id of the original's step that calls; 0 if that is not known."""
    deferred: DeferredSubplan | None = None
    """The deferred subplan at the place of the call."""
    wait: OpenWait | None = None
    """The row of the call in the trace of its query."""
    entries: list[EngineRequest] = field(default_factory=list)
    """One request for each payload, once they are made or claimed."""
    is_given_up: bool = False


class OriginalCalls:
    """Joins calls to their queries."""

    def __init__(
        self,
        driver: GraphDriver,
        version: Callable[[Port, str], Awaitable[Version | None]],
        deliver: Callable[[Future[list[Any]], list[Any]], None],
    ) -> None:
        """`version`: reads the version of a collection. `deliver`: hands over the values of a call."""
        self._driver, self._version, self._deliver = driver, version, deliver
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, run: QueryRun | None, call: RequestedCall) -> None:
        """Claim or make the requests of a call. It always ends.

        A call that cannot join its query is made outside it. One that comes after the deadline fails.
        """
        timeout = run.late if run is not None else None
        if timeout is not None:
            self._refuse(call, timeout)
            return
        is_live = run is not None and run.id in self._driver.runs
        try:
            self._make(run if is_live and run is not None else self._run_for(call), call, is_live=is_live)
        except Exception as error:
            if call.future.done():
                return
            if not is_live:
                self._refuse(call, error)
                return
            _log.warning(
                "a call cannot join its query and is made by itself (%s is a bug of teola-plugin: please report it)",
                type(error).__name__,
                exc_info=True,
            )
            for entry in call.entries:
                entry.pending_calls = [pending for pending in entry.pending_calls if pending.future is not call.future]
            call.entries.clear()
            call.keys = ()
            self.join(None, call)

    @staticmethod
    def _refuse(call: RequestedCall, error: BaseException) -> None:
        """Fail a call of the original without a request for it, and end the stream of its pieces, if it reads one."""
        call.future.set_exception(error)
        if call.log is not None:
            call.log.close()

    def _run_for(self, call: RequestedCall) -> QueryRun:
        """Create a run for a call that is made outside any live query. Its context holds all the same."""
        request_context, name = call.request_context, f"call{next(_numbers)}"
        query = Query(
            id=name,
            app=request_context.app,
            tenant=request_context.tenant,
            deadline=request_context.deadline,
            weight=request_context.weight,
        )
        if request_context.deadline is not None and not self._set_timer(call, name, request_context.deadline):
            raise _too_late(name)
        return QueryRun(None, query, None, {}, True, QueryStore({}))  # type: ignore[arg-type]

    def _set_timer(self, call: RequestedCall, name: str, deadline: float) -> bool:
        """End the call at its deadline. Return False if that has passed."""
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline:
            return False
        timer = loop.call_at(
            deadline, self._time_out, call, name, context=Context()
        )  # once cancelled, it stays for a while
        call.future.add_done_callback(lambda _: timer.cancel())
        return True

    def _time_out(self, call: RequestedCall, name: str) -> None:
        """Fail a call that has no result by its deadline, and give up its requests."""
        if not call.future.done():
            self._refuse(call, _too_late(name))
            self.give_up(call)

    def _make(self, run: QueryRun, call: RequestedCall, *, is_live: bool) -> None:
        """Claim or make a request for each payload of a call, and send those that are new.

        Claimed searches are checked first, in a task, since their collections may have changed.
        """
        run.calls_made += 1
        if is_live and call.wait is not None:
            self._trace_answer(run, call, call.wait)
        name = f"{call.port.name}.call#{run.calls_made}"
        for collection in {row.collection for row in call.payloads if isinstance(row, IngestRow)}:
            self._driver.engines.table.drop_writes(call.port.name, collection)
        searches: list[int] = []
        for number, payload in enumerate(call.payloads):
            entry = self._claim(run, call, number, name) if is_live else self._request(run, call, payload, name)
            call.entries.append(entry)
            if not entry.is_expected and isinstance(payload, SearchVector):
                searches.append(number)
                entry.search.open_checks += 1
        if searches:
            self._spawn(self._check_searches(run, call, searches, name))
        else:
            self._wait(run, call, name)
        self._send(run, call, name, is_live=is_live)

    def _claim(self, run: QueryRun, call: RequestedCall, number: int, name: str) -> EngineRequest:
        """Return a request of a live query: one that is claimed, or one that has yet to be sent."""
        payload, engines = call.payloads[number], self._driver.engines
        key = None
        if run.claiming is Claiming.ALLOWED:
            key = call.keys[number] if call.keys else None
            key = key or engines.request_key_of(call.port, run.query.tenant, payload)
        drafts = drafts_of_call(run, call.port.name, payload) if call.port.engine.profile.drafts else ()
        entry = engines.join(
            run, Caller.ORIGINAL, call.port, call.kind, payload, key, call.request_context, name, drafts=drafts
        )
        entry.claims.last_claim = run.calls_made
        if not entry.is_expected and call.step:
            self._driver.trace.at_step(run, entry, call.step)
        if entry.is_expected and run.claiming is not Claiming.ALLOWED:  # nobody can come to read its pieces
            entry.request = replace(entry.request, stream=call.log is not None, late=False)
            entry.stream.is_coarse = not entry.request.stream
        if call.log is not None:
            engines.read(entry, call.log)
        return entry

    def _trace_answer(self, run: QueryRun, call: RequestedCall, wait: OpenWait) -> None:
        """Have the trace record the end of the call.

        The future keeps its callbacks, which must not keep the call's values until the garbage collector runs.
        """
        open_calls = [call]
        call.future.add_done_callback(lambda _: self._driver.trace.answered(run, wait, open_calls.pop().entries))

    @staticmethod
    def _request(run: QueryRun, call: RequestedCall, payload: Any, name: str) -> EngineRequest:
        """Create the request for a call that is made outside any live query."""
        request_context, is_streamed = call.request_context, call.log is not None
        request = Request(
            request_id(run.id),
            call.kind,
            payload,
            query=run.id,
            tenant=request_context.tenant,
            stream=is_streamed,
            app=request_context.app,
            drafts=all_drafts(call.port.engine.profile, payload),
        )
        entry = EngineRequest(
            request, call.port.name, None, name, request_context=request_context, state=RequestState.EXPECTED
        )
        entry.subscribe(Caller.ORIGINAL, request_context)
        if call.log is not None:
            entry.read_into(call.log)
        return entry

    def _send(self, run: QueryRun, call: RequestedCall, name: str, *, is_live: bool) -> None:
        """Queue the requests that nobody has sent yet."""
        new = list({id(entry): entry for entry in call.entries if entry.is_expected}.values())
        if new:
            self._enqueue(run, call, name, new, is_live=is_live)
        deferred = call.deferred
        if is_live and deferred is not None and deferred.query == run.id and deferred.begin(is_foreseen=not new):
            # After the call, but so that the subplan may claim the call's requests.
            asyncio.get_running_loop().call_soon(self._driver.begin_subplan, run, deferred.subplan, run.calls_made - 1)

    def _enqueue(
        self, run: QueryRun, call: RequestedCall, name: str, new: list[EngineRequest], *, is_live: bool
    ) -> None:
        """Queue the new requests of a call at its engine, as urgent as the most urgent primitive of its query."""
        driver = self._driver
        for entry in new:
            entry.note_sent()
            entry.primitive = name
            if call.keep_remote:
                entry.request = replace(entry.request, keep_remote=True)
        depth, query = call.request_context.depth, driver.query(run) if is_live else None
        if query is not None:
            # The original waits for this very call: nothing of its query is more urgent.
            depth = max(depth, query.deepest() + run.is_lookahead)
            driver.trace.called(run, name, new, depth, call.step)
        for entry in new:
            entry.request_context = placed(entry.request_context, depth, entry.request_context.gang)
            entry.queued_depth = depth
        remaining_s = driver.engines.remaining.of_call(query, depth)
        event, change = call_enqueue_event(
            driver.now(), run, call.kind, name, depth, call.request_context.gang, new, remaining_s
        )
        if change is not None:
            call.port.depths(change)
        call.port.enqueue(new, event)

    def _wait(self, run: QueryRun, call: RequestedCall, name: str) -> None:
        """Resolve the call's future once all of its requests have ended. Prefetched ones that fail may be replaced."""
        deliver = Future.set_result if call.keep_remote else self._deliver
        PendingCall(
            call.entries, call.future, deliver, replace_failed=lambda entry: self._request_again(run, call, entry, name)
        )

    def _request_again(
        self, run: QueryRun, call: RequestedCall, failed: EngineRequest, name: str
    ) -> EngineRequest | None:
        """Return the original's own request in place of a prefetched one that has failed after it was claimed.

        None if that cannot be made: the query is over, or pieces were delivered; and if it would fail alike.
        """
        if (
            not failed.has_failed_in_passing
            or failed.claims.made_by is not Caller.PLANNER
            or run.id not in self._driver.runs
            or call.is_given_up
        ):
            return None
        if call.log is not None and failed.stream.pieces:
            if not call.log.speculative:
                return None
            call.log.close()
            call.log = None
        self._warn_of_failure(call.port.name, failed)
        failed.claims.give_up(Caller.ORIGINAL)  # so it counts as wasted
        number = next(i for i, entry in enumerate(call.entries) if entry is failed)
        entry = call.entries[number] = self._claim(run, call, number, name)
        self._send(run, call, name, is_live=True)
        return entry

    @staticmethod
    def _warn_of_failure(engine: str, failed: EngineRequest) -> None:
        """Log a failed prefetch, once for each kind of error; a cancelled one is not logged."""
        error = failed.error
        if error is None or failed.is_cancelled:
            return
        _warn_once(
            (engine, type(error)),
            lambda: _log.warning(
                "a prefetched request of engine %s failed, and was made again by the original: %s Answers are the "
                "same, only later than they could be. This is said once for each kind of error",
                engine,
                error,
            ),
        )

    def give_up(self, call: RequestedCall) -> None:
        """Give up a call whose caller does not want it any more."""
        call.is_given_up = True
        for entry in call.entries:
            self._driver.engines.give_up(entry, Caller.ORIGINAL)

    # ------------------------------------------------------------ prefetched searches

    async def _check_searches(self, run: QueryRun, call: RequestedCall, numbers: list[int], name: str) -> None:
        """Request claimed searches again whose collection has changed, and go on with the call."""
        claimed = [call.entries[number] for number in numbers]
        try:
            for number in numbers:
                if not await self._is_up_to_date(run, call, call.entries[number], call.payloads[number].collection):
                    self._search_again(run, call, number, name)
            refusal: QueryError | None = run.late
            if call.is_given_up:
                refusal = QueryCancelled("the call was given up.", query_id=run.id, hint="ask again")
            if refusal is not None:
                self._refuse(call, refusal)
                return
            self._send(run, call, name, is_live=run.id in self._driver.runs)
            self._wait(run, call, name)
        except BaseException as error:
            if not call.future.done():
                self._refuse(call, error if isinstance(error, Exception) else pool_closed())
            if not isinstance(error, Exception):  # the loop ends
                raise
        finally:
            for entry in claimed:
                entry.checked()

    def _search_again(self, run: QueryRun, call: RequestedCall, number: int, name: str) -> None:
        """Replace a claimed search that is outdated by another one, which may have to be sent."""
        entry = call.entries[number]
        entry.search.is_outdated = True
        self._driver.engines.give_up(entry, Caller.ORIGINAL)
        if run.id in self._driver.runs:
            call.entries[number] = self._claim(run, call, number, name)
        else:
            call.entries[number] = self._request(run, call, call.payloads[number], name)

    async def _is_up_to_date(self, run: QueryRun, call: RequestedCall, entry: EngineRequest, collection: str) -> bool:
        """Return True if a claimed search would find the same rows if it were made now. Wait until it has ended.

        If versions of the collection are not known, it is False after any write of this process, and if the query has
        user code, which might write.
        """
        try:
            current = await self._version(call.port, collection)
        except Exception:  # the search itself will tell
            return False
        if not entry.has_ended:
            await _end_of(entry)
        if entry.has_failed or entry.is_cancelled:
            return False
        version = entry.search.version
        if version is None or current is None:  # not known: so not if anything might have written meanwhile
            writes = self._driver.engines.writes.version(call.port.name, entry.request.payload)
            return entry.search.writes == writes and not run.has_user_code
        return version.identity == current.identity and version.counter >= current.counter

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _too_late(name: str) -> QueryTimeout:
    return QueryTimeout(f"call {name} did not end before its deadline.", query_id=name, hint="allow more time")


async def _end_of(entry: EngineRequest) -> None:
    """Return when the request has ended, well or not."""
    future: Future[list[Any]] = Future()
    PendingCall([entry], future)
    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)


# ------------------------------------------------------------ drafts

_MIN_LITERAL_CHARACTERS = 16
"""Length of the literals of a prompt by which the prompt is recognized."""


def drafts_of_call(run: QueryRun, engine: str, payload: Any) -> tuple[str, ...]:
    """Return texts that the answer to a call may repeat, if the call comes before its graph's own prefilling.

    They are those of the first prefilling on this engine whose literals are in the prompt. They are drafts, so those of
    a wrong prefilling cost a few verified tokens.
    """
    if not isinstance(payload, Generate) or not payload.sampling.greedy:
        return ()
    prompt = ""
    for graph in (run.graph, *(live.subplan.graph for live in run.subplans.values())):
        for p in _prefillings(graph) if graph is not None else ():
            if p.engine != engine or not p.attributes.drafts:
                continue
            prompt = prompt or payload.prompt.flat()
            if _has_literals(p, prompt):
                return drafts(p, _available_inputs(run, p))
    return ()


def _prefillings(graph: Graph) -> Iterator[Primitive]:
    """Yield the prefillings of a graph and of all fragments in it."""
    for p in graph:
        if p.prefills:
            yield p
        for fragment in (p.fragment, p.otherwise):
            if fragment is not None:
                yield from _prefillings(fragment.graph)


def _has_literals(p: Primitive, prompt: str) -> bool:
    """Return True if `prompt` contains a prefilling's literal texts in order, and they are long enough.

    `drafts_of_call` finds by it the prefilling that corresponds to a call of the original, whose answer may repeat the
    prefilling's draft texts. A part that is a variable matches any text.
    """
    position = characters = 0
    for part in p.prompt:
        literal = part.text.strip()
        position = prompt.find(literal, position)
        if position < 0:
            return False
        position, characters = position + len(literal), characters + len(literal)
    return characters >= _MIN_LITERAL_CHARACTERS


def _available_inputs(run: QueryRun, p: Primitive) -> dict[str, Any]:
    """Return the inputs of a primitive whose values are there already."""
    inputs: dict[str, Any] = {}
    for key, ref in p.inputs:
        try:
            inputs[key] = run.store.read(ref)
        except (KeyError, IndexError, TypeError):
            continue
    return inputs
