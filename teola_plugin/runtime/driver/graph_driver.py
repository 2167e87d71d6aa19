"""The driver of the graph scheduler, in the middle of the local runtime: it carries out instructions.

Instructions come from one `GraphScheduler`; requests to engines go to `RequestDriver`; outcomes come back as events. No
policy is decided here. Lives on the pool's loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import Context
from functools import lru_cache, partial
from typing import Any

from teola_plugin.errors import QueryCancelled, QueryError, pool_closed
from teola_plugin.graph import (
    IMPURE_KINDS,
    Graph,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Ref,
    has_own_thread,
    holds,
    is_impure,
    items_of,
)
from teola_plugin.observe.recorder import TraceRecorder
from teola_plugin.runtime import primitive_requests
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.driver.recording import RunTrace
from teola_plugin.runtime.driver.request_driver import RequestDriver
from teola_plugin.runtime.failures import outcome_error
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.prefetch_outcomes import OncePerCause, failed_prefetch, log_failed_prefetch
from teola_plugin.runtime.primitive_requests import IncrementalPrefilling, changed_depths, growing_prompts
from teola_plugin.runtime.query_run import FIRST_CALL_S, DeferredSubplan, QueryRun, Subplan
from teola_plugin.scheduling import GraphScheduler
from teola_plugin.scheduling.engine_queue import DepthChanged
from teola_plugin.scheduling.events import (
    Admit,
    Await,
    Cancel,
    Collect,
    Dispatch,
    End,
    Expand,
    Expanded,
    Finished,
    GraphEvent,
    Instruction,
    PrimitiveFailed,
    Release,
    Reprioritise,
    RunCall,
    SubplanBegun,
    SubplanEnded,
    Tick,
    WakeAt,
)
from teola_plugin.scheduling.live_query import LivePrimitive, LiveQuery


class Deadlines:
    """The deadlines of all live queries, with one timer, for the earliest. `on_deadline` is called at each of them."""

    def __init__(self, on_deadline: Callable[[], None]) -> None:
        self._on_deadline = on_deadline
        self._times: list[float] = []
        """A heap."""
        self._counts: Counter[float] = Counter()
        """Number of queries that have each deadline."""
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, at: float) -> bool:
        return self._counts[at] > 0

    def add(self, at: float) -> None:
        """Add the deadline of a query.

        `at`: seconds on the loop's clock. Queries may share a deadline: each adds it, and drops it as it ends.
        """
        if at not in self:
            heapq.heappush(self._times, at)
        self._counts[at] += 1
        self._set_timer()

    def drop(self, at: float) -> None:
        """Drop the deadline of a query that has ended."""
        if at in self:
            self._counts[at] -= 1
            self._set_timer()

    def _set_timer(self) -> None:
        """Set the one timer to the earliest deadline that a query still has, and cancel it if there is none."""
        while self._times and self._times[0] not in self:
            self._counts.pop(heapq.heappop(self._times), None)
        first = self._times[0] if self._times else None
        if self._timer is not None and self._timer.when() != first:
            self._timer.cancel()
            self._timer = None
        if first is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(first, self._ring, context=Context())  # no caller's

    def _ring(self) -> None:
        """Drop the deadlines that have passed, and call `on_deadline` once for all of them. This is the timer's
        callback."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._times and self._times[0] <= now:
            self._counts.pop(heapq.heappop(self._times), None)
        self._on_deadline()
        self._set_timer()


log = logging.getLogger("teola_plugin")


class GraphDriver:
    """The driver of all live queries of one runtime."""

    def __init__(self, recorder: TraceRecorder, *, threads: bool) -> None:
        self.scheduler = GraphScheduler()
        self._clock: Callable[[], float] | None = None
        self.ports: Mapping[str, Port] = {}
        self.runs: dict[str, QueryRun] = {}
        self.trace = RunTrace(recorder, self.now)
        self.code = ClientCode(runs_inline=not threads)
        self.engines = RequestDriver(self)
        self._log_once = OncePerCause()
        self._events: deque[GraphEvent] = deque()
        self._pumping = False
        self._cause = ""
        """The primitive of the event that is handled now."""
        self._deadlines = Deadlines(lambda: self.post(Tick(self.now())))
        self._incremental = IncrementalPrefilling(
            self._live, compute_value, self._start_prefix, self._stop_prefix, self.code
        )
        self._perform: dict[type[Instruction], Callable[[QueryRun, Any], None]] = {
            Dispatch: self.engines.dispatch,
            RunCall: self._run_call,
            Await: self._await,
            Expand: self._expand,
            Collect: self._collect,
            Release: lambda run, order: run.store.drop(order.producer),
            Cancel: lambda run, order: self.engines.cancel(run, order.primitive),
            Reprioritise: self._reprioritise,
            End: self._end,
        }

    def now(self) -> float:
        """Return the time on the runtime's clock. Called on its loop, which stays the same."""
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time
        return self._clock()

    # ------------------------------------------------------------ queries and their subplans

    def admit(self, run: QueryRun, graph: Graph, began: float) -> None:
        """Begin to execute a query that has begun at that time."""
        now = self.now()
        self.runs[run.id] = run
        run.growing = growing_prompts(graph)
        run.has_user_code |= runs_user_code(graph)
        query = run.query
        self.trace.recorder.begin(run.id, query.app, began, ago=now - began, tenant=query.tenant)
        if query.deadline is not None:
            self._deadlines.add(query.deadline)
        self.post(Admit(self.now(), run.id, graph, query.deadline, run.has_original))

    def begin_subplan(self, run: QueryRun, subplan: Subplan, since: int | None = None) -> None:
        """Begin to execute a subplan of a live query.

        `since`: the number of the original's last call before its code began; by default the last call so far.
        """
        if run.id in self.runs:
            run.subplans[subplan.name] = subplan.begin(run.calls_made if since is None else since, self.now())
            run.has_user_code |= runs_user_code(subplan.graph)
            run.store.put(subplan.input_name, subplan.value)
            run.growing += growing_prompts(subplan.graph, subplan.name, subplan.input_name)
            event = SubplanBegun(
                self.now(),
                run.id,
                subplan.name,
                subplan.graph,
                subplan.input_name,
                subplan.depth,
                subplan.gang,
                subplan.members,
                reports_results=not subplan.lookahead,
            )
            self.post(event)

    def end_subplan(self, run: QueryRun, name: str) -> None:
        """End a subplan: the original has its value, so nobody will claim its requests any more."""
        if run.id not in self.runs:
            return
        self.post(SubplanEnded(self.now(), run.id, name))
        run.store.drop(f"${name}")
        run.subplans.pop(name, None)
        run.growing = [prompt for prompt in run.growing if InstancePath(prompt.growth.holder).inside(name) is None]
        self.engines.end_subplan(run, name)

    def schedule_subplans(self, run: QueryRun, deferred: DeferredSubplan | None, finished: Sequence[str]) -> None:
        """Begin a deferred subplan and end finished ones after a moment, in which the original makes its first call."""

        def begin_and_end() -> None:
            if deferred is not None and deferred.begin(is_foreseen=True):
                self.begin_subplan(run, deferred.subplan)
            for name in finished:
                self.end_subplan(run, name)

        asyncio.get_running_loop().call_later(FIRST_CALL_S, begin_and_end)

    def begin_unforeseen(self, run: QueryRun, deferred: DeferredSubplan) -> None:
        """Begin a deferred subplan at whose place an unforeseen call came, if the subplan that covers it has failed.

        One that has not failed is only slower than the original.
        """
        has_failed = any(InstancePath(name).inside(deferred.covering) is not None for name in run.errors)
        if has_failed and deferred.begin(is_foreseen=False):
            self.begin_subplan(run, deferred.subplan)

    def query(self, run: QueryRun) -> LiveQuery | None:
        """Return the query as the scheduler has it; None once it has ended."""
        return self.scheduler.queries.get(run.id)

    # ------------------------------------------------------------ events and instructions

    def post(self, event: GraphEvent) -> None:
        """Handle `event` and everything that follows from it at once."""
        self._events.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._pumping = False

    def _handle(self, event: GraphEvent) -> None:
        """Handle an event, and carry out its instructions. If one of them raises, its query fails, and no other."""
        self._cause = getattr(event, "primitive", "")
        try:
            instructions = self.scheduler.handle(event)
        except Exception as error:
            self.fail_by_bug(getattr(event, "query", ""), "", error)
            return
        for instruction in instructions:
            try:
                self._carry_out(instruction)
            except Exception as error:
                primitive = getattr(instruction, "primitive", "")
                self.fail_by_bug(getattr(instruction, "query", ""), getattr(primitive, "id", primitive), error)

    def _carry_out(self, instruction: Instruction) -> None:
        """Carry out one instruction of the graph scheduler; ignore it if its query has ended.

        The primitive whose event led to it is noted as its cause, for the trace.
        """
        if isinstance(instruction, WakeAt):
            if instruction.at not in self._deadlines:
                self._deadlines.add(instruction.at)
            return
        run = self.runs.get(getattr(instruction, "query", ""))
        if run is not None:
            primitive = getattr(instruction, "primitive", "")
            run.causes[getattr(primitive, "id", primitive)] = self._cause
            self._perform[type(instruction)](run, instruction)

    def fail_by_bug(self, query: str, primitive: str, error: Exception) -> None:
        """Log a bug of ours and let the primitive fail; without one the query, so that nobody waits for it in vain."""
        log.error("query=%s primitive=%s: a bug of teola-plugin, please report it", query, primitive, exc_info=error)
        run = self.runs.get(query)
        if run is None:
            return
        live = self._live(run, primitive)
        if live is not None and not live.status.has_ended:
            self.fail(run, primitive, error)
            return
        self._end_failed(run, error, primitive)

    def fail(self, run: QueryRun, name: str, error: BaseException) -> None:
        """Let a primitive fail with this error.

        Only the first error of a primitive is kept. Primitives that cannot do without its value are dropped by the
        scheduler.
        """
        run.errors.setdefault(name, error)
        log.debug("query=%s primitive=%s failed: %r", run.id, name, error)
        self.trace.done(run, name, "failed")
        self.post(PrimitiveFailed(self.now(), run.id, name))

    def fail_in_client_code(self, run: QueryRun, p: Primitive, error: BaseException) -> None:
        """Let a primitive fail with the error that a function of the client has raised for it."""
        failure = failed_prefetch(p, run.calls_of(p.id), error)
        if failure is not None:
            run.failed_prefetches.append(failure)
        self.fail(run, p.id, error)

    def finish(self, run: QueryRun, name: str) -> None:
        """Note that a primitive has its value, in the query's store."""
        if run.has_user_code and not run.has_original:
            live = self._live(run, name)
            run.code_ended += live is not None and live.primitive.kind in IMPURE_KINDS
        self.post(Finished(self.now(), run.id, name))
        if run.growing:
            self._incremental.note_end(run, name)

    def _store(self, run: QueryRun, name: str, value: Any, at: float | None = None) -> None:
        """Store the value of a primitive that has ended, trace its end, and report it as finished.

        `at`: the time of its end, in seconds on the runtime's clock; None is now.
        """
        run.store.put(name, value)
        self.trace.done(run, name, at=at)
        self.finish(run, name)

    # ------------------------------------------------------------ client primitives

    def _run_call(self, run: QueryRun, order: RunCall) -> None:
        """Compute a primitive that needs no engine (CALL, CHUNKING, AGGREGATE, VERIFY) and store its value.

        Functions of the client that may be slow run on a thread. The value of a VERIFY is its actual input: predictions
        are compared with it when its MAP is expanded.
        """
        p = order.primitive
        self.trace.queued(run, p)
        self.trace.started(run, p.id)
        verifies = p.kind is PrimitiveKind.VERIFY
        try:
            inputs = {key: run.store.read(ref) for key, ref in p.inputs if key == "actual" or not verifies}
        except (KeyError, IndexError, TypeError) as error:  # a value of another form: the original will tell
            self.fail(run, p.id, error)
            return
        calls = run.calls_of(p.id)

        def take_value(value: Any, error: BaseException | None) -> None:
            """Store the value, or let the primitive fail. Runs on the loop, perhaps after the query has ended."""
            if run.id not in self.runs:
                return
            try:
                if error is None:
                    self._store(run, p.id, value)
                else:
                    self.fail_in_client_code(run, p, error)
            except Exception as bug:
                self.fail_by_bug(run.id, p.id, bug)

        self.code.run(
            run.id,
            lambda: inputs["actual"] if verifies else compute_value(run, p, inputs),
            take_value,
            is_short=p.kind is not PrimitiveKind.CHUNKING and not primitive_requests.needs_client(p, inputs, calls),
            has_own_thread=has_own_thread(calls.get(p.call)),
        )

    def _await(self, run: QueryRun, order: Await) -> None:
        """Wait for user code: the original runs it. A query without an original runs it here, once, on a thread."""
        if run.has_original:
            self.trace.queued(run, order.primitive)
        else:
            self._run_call(run, RunCall(run.id, order.primitive))

    def observe(self, run: QueryRun, name: str, value: Any, at: float) -> None:
        """Note the value of user code that the original has run until then.

        `at`: the time at which the original had the value, in seconds. A query that has ended is ignored, and so is a
        primitive whose value is known.
        """
        if run.id in self.runs and name not in run.store:
            self._store(run, name, value, at)

    def observe_ends(self, run: QueryRun, names: Sequence[str], at: float) -> None:
        """Note that user code had ended by then. Its values are not known, so what reads one of them fails."""
        for name in names:
            live = self._live(run, name)
            if live is not None and not live.status.has_ended:
                self.trace.done(run, name, at=at)
                self.finish(run, name)

    # ------------------------------------------------------------ growing prompts

    def note_dispatch(self, run: QueryRun, p: Primitive) -> None:
        """Note that a primitive is dispatched: all of its inputs are known."""
        if run.growing and p.prefills:
            self._incremental.note_dispatch(run, p)

    def _live(self, run: QueryRun, name: str) -> LivePrimitive | None:
        query = self.query(run)
        return None if query is None else query.get(name)

    def _start_prefix(self, run: QueryRun, p: Primitive) -> None:
        """Dispatch a prefix of a growing prompt. It is one deeper than the prompt's primitive."""
        prefilling = self._live(run, InstancePath(p.id).ungrown)
        self.engines.dispatch(run, Dispatch(run.id, p, 1 + (prefilling.depth if prefilling is not None else 0)))

    def _stop_prefix(self, run: QueryRun, name: str) -> None:
        """Cancel the prefilling of a prompt's prefix, unless its engine has begun it: it then goes on to its end."""
        live = run.primitives.get(name)
        if live is None or not live.began:
            self.engines.cancel(run, name)

    # ------------------------------------------------------------ fragments

    def _expand(self, run: QueryRun, order: Expand) -> None:
        """Tell the scheduler how to instantiate a fragment (of a MAP, LOOP, BRANCH, ...), now that the value it depends
        on is known.

        The primitive fails if the value cannot be read as the plan expected.
        """
        try:
            event = expansion(run, order, self.now())
        except Exception as error:
            self.fail(run, order.primitive.id, error)
        else:
            self.post(event)
            if run.streamed_into is not None:  # the request that writes the streamed value may be under way already
                asyncio.get_running_loop().call_soon(self.engines.stream_output, run)

    def _collect(self, run: QueryRun, order: Collect) -> None:
        values = [run.store.read(ref) for ref in order.refs]
        run.store.put(order.primitive, values[0] if order.single else values)
        self.trace.collected(run, order.primitive, tuple(ref.producer for ref in order.refs))

    # ------------------------------------------------------------ ends

    def _reprioritise(self, run: QueryRun, order: Reprioritise) -> None:
        """Send the new depths of a query's primitives to all engines, which order their queues by them."""
        event = DepthChanged(self.now(), run.id, changed_depths(run, order.depths))
        for port in self.ports.values():
            port.depths(event)

    def close(self) -> None:
        """End all queries, with the error of a closed pool."""
        self.code.close()
        for run in list(self.runs.values()):
            self._end_failed(run, pool_closed())

    def _end_failed(self, run: QueryRun, error: BaseException, primitive: str = "") -> None:
        """End a query at once, as failed."""
        run.errors.setdefault(primitive, error)
        self.scheduler.queries.pop(run.id, None)
        self._end(run, End(run.id, "failed", None, primitive))

    def withdraw_all(self) -> None:
        """Give up the followers of all running queries that their graphs have not dispatched yet.

        A follower is a primitive whose requests were sent along with those of the one before it. `SharedPort` calls
        this when an engine's host or a remote value was lost; the graph then sends the requests itself.
        """
        for run in self.runs.values():
            self.engines.prescheduling.withdraw(run)

    def _end(self, run: QueryRun, order: End) -> None:
        """End a query: give up its requests, finish its trace, and resolve its output with a value or an error."""
        del self.runs[run.id]
        if order.outcome == "closed" and not run.original_failed:
            for failure in run.failed_prefetches:
                self._log_once(failure.cause, partial(log_failed_prefetch, failure))
        if run.query.deadline is not None:
            self._deadlines.drop(run.query.deadline)
        error = outcome_error(run, order)
        if isinstance(error, QueryError):
            error.story = self.trace.recorder.story(run.id)
        try:
            self.engines.end_query(run, order.outcome, error)
        finally:
            trace = self.trace.finish(run, order.outcome)
            if not run.output.done():
                if order.outcome == "done" and order.output is not None:
                    run.output.set_result(run.store.read(order.output))
                else:
                    run.output.set_exception(error or QueryCancelled("the query was closed.", query_id=run.id))
            self.engines.table.forget(run.id)
            run.clear()
            run.trace.set_result(trace)


@lru_cache(maxsize=256)
def runs_user_code(graph: Graph) -> bool:
    """Return True if user code runs in a graph, or in the fragments of its primitives."""
    return any(is_impure(p) for p in graph)


def compute_value(run: QueryRun, p: Primitive, inputs: dict[str, Any]) -> Any:
    """Compute the value of a CALL, CHUNKING or AGGREGATE. Raises what the client's function raises.

    `concat` is built in: it joins lists. A call that nobody provides gives the inputs themselves, by name.
    """
    if p.call == "concat":
        return [item for part in inputs.values() for item in part]
    function = run.calls_of(p.id).get(p.call)
    return inputs if function is None else function(**inputs)


def expansion(run: QueryRun, order: Expand, now: float) -> Expanded:
    """Return the event that says how a fragment is instantiated. Raises what reading the value or its items raises."""
    p = order.primitive
    value = run.store.read(order.reads)
    if p.kind in (PrimitiveKind.BRANCH, PrimitiveKind.LOOP):
        return Expanded(now, run.id, p.id, int(holds(value)))
    items = items_of(value)
    return Expanded(now, run.id, p.id, len(items), _matches(run, items, order.predicted))


def _matches(run: QueryRun, items: list[Any], predicted: tuple[Ref, ...]) -> tuple[int | None, ...]:
    """Return the number of the prediction that equals each item, its own number first. A prediction serves one item."""
    predictions = {i: run.store.read(ref) for i, ref in enumerate(predicted) if ref.producer in run.store}
    types = {type(prediction) for prediction in predictions.values()}
    groups: dict[Hashable, dict[int, Any]] = {}
    for number, prediction in predictions.items():
        groups.setdefault(_group_key(prediction), {})[number] = prediction
    matches: list[int | None] = []
    for index, item in enumerate(items):
        candidates = groups.get(_group_key(item), {}) if type(item) in types else {}
        order = (index, *candidates) if index in candidates else candidates
        match = next((i for i in order if type(candidates[i]) is type(item) and candidates[i] == item), None)
        matches.append(match)
        if match is not None:
            del candidates[match]
    return tuple(matches)


def _group_key(value: Any) -> Hashable:
    """Return a key that is the same for equal values of one type, and rarely for others: there may be thousands."""
    try:
        return type(value), hash(_frozen(value))
    except Exception:  # not even hashable: compared with all others of its type
        return type(value), None


def _frozen(value: Any) -> Hashable:
    """Return a hashable form of a list or dictionary; another value as it is."""
    if type(value) is dict:
        return frozenset([(key, _frozen(inner)) for key, inner in value.items()])
    return tuple([_frozen(inner) for inner in value]) if type(value) is list else value
