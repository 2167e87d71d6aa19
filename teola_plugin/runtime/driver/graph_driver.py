"""Carries out the graph scheduler's instructions: the middle of the local runtime. Lives on the pool's loop.

Instructions come from one `GraphScheduler`; requests to engines go to `RequestDriver`; outcomes come back as events. No
policy is decided here.
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
from teola_plugin.runtime import dead_parts
from teola_plugin.runtime import primitive_requests as requests
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.driver.enqueue_events import deeper
from teola_plugin.runtime.driver.incremental_prefilling import IncrementalPrefilling
from teola_plugin.runtime.driver.query_end import settle, settle_part
from teola_plugin.runtime.driver.recording import RunTrace
from teola_plugin.runtime.driver.request_driver import RequestDriver
from teola_plugin.runtime.failures import outcome_error
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.query_run import FIRST_CALL, HeldPart, Part, QueryRun, growing_prompts
from teola_plugin.scheduling import GraphScheduler
from teola_plugin.scheduling.engine_events import DepthChanged
from teola_plugin.scheduling.events import Instruction, Tick, WakeAt
from teola_plugin.scheduling.graph_events import (
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
    PartBegun,
    PartEnded,
    PrimitiveFailed,
    Release,
    Reprioritise,
    RunCall,
)
from teola_plugin.scheduling.live_query import LivePrimitive, LiveQuery


class Deadlines:
    """Calls `ring` when one is reached. Lives on the pool's loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._times: list[float] = []
        self._wanted: Counter[float] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, at: float) -> bool:
        return self._wanted[at] > 0

    def add(self, at: float) -> None:
        """Once for each query that has it."""
        if at not in self:
            heapq.heappush(self._times, at)
        self._wanted[at] += 1
        self._set()

    def drop(self, at: float) -> None:
        """A query that has it is over."""
        if at in self:
            self._wanted[at] -= 1
            self._set()

    def _set(self) -> None:
        while self._times and self._times[0] not in self:
            self._wanted.pop(heapq.heappop(self._times), None)
        first = self._times[0] if self._times else None
        if self._timer is not None and self._timer.when() != first:
            self._timer.cancel()
            self._timer = None
        if first is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(first, self._rings, context=Context())  # no caller's

    def _rings(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._times and self._times[0] <= now:
            self._wanted.pop(heapq.heappop(self._times), None)
        self._ring()
        self._set()


log = logging.getLogger("teola_plugin")


class GraphDriver:
    """All live queries of one runtime."""

    def __init__(self, recorder: TraceRecorder, *, threads: bool) -> None:
        self.scheduler = GraphScheduler()
        self._clock: Callable[[], float] | None = None
        self.ports: Mapping[str, Port] = {}
        self.runs: dict[str, QueryRun] = {}
        self.trace = RunTrace(recorder, self.now)
        self.code = ClientCode(here=not threads)
        self.engines = RequestDriver(self)
        self._once = dead_parts.Once()
        self._events: deque[GraphEvent] = deque()
        self._pumping = False
        self._cause = ""
        """The primitive of the event that is being handled."""
        self._deadlines = Deadlines(lambda: self.post(Tick(self.now())))
        self._incremental = IncrementalPrefilling(self._live, computed, self._start_early, self._stop_early, self.code)
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
        """On the runtime's clock. To be asked on its loop, which stays the same."""
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time
        return self._clock()

    # ------------------------------------------------------------ queries and their parts

    def admit(self, run: QueryRun, graph: Graph, began: float) -> None:
        """A query, which has begun at that time."""
        now = self.now()
        self.runs[run.id] = run
        run.growing = growing_prompts(graph)
        run.has_user_code |= runs_user_code(graph)
        query = run.query
        self.trace.recorder.begin(run.id, query.app, began, ago=now - began, tenant=query.tenant)
        if query.deadline is not None:
            self._deadlines.add(query.deadline)
        self.post(Admit(self.now(), run.id, graph, query.deadline, run.ahead))

    def begin_part(self, run: QueryRun, part: Part, since: int | None = None) -> None:
        """The plain object has come to a part that has an e-graph of its own. `since`: the number of its last call
        before that, where that is not the last one."""
        if run.id in self.runs:
            run.parts[part.name] = part.asks(run.calls_made if since is None else since, self.now())
            run.has_user_code |= runs_user_code(part.graph)
            run.store.put(part.stored, part.value)
            run.growing += growing_prompts(part.graph, part.name, part.stored)
            place = part.depth, part.gang, part.members, not part.lookahead
            self.post(PartBegun(self.now(), run.id, part.name, part.graph, part.stored, *place))

    def end_part(self, run: QueryRun, name: str) -> None:
        """It has the part's value: nobody will ask for what was made for it."""
        if run.id not in self.runs:
            return
        self.post(PartEnded(self.now(), run.id, name))
        run.store.drop(f"${name}")
        run.parts.pop(name, None)
        run.growing = [one for one in run.growing if InstancePath(one.growth.holder).inside(name) is None]
        settle_part(run, name, self.engines)

    def turn(self, run: QueryRun, held: HeldPart | None, over: Sequence[str]) -> None:
        """A part is held at the place that the plain object has come to, and others are over: for what is to be done
        about it, no call waits."""
        asyncio.get_running_loop().call_later(FIRST_CALL, self._turn, run, held, over)

    def _turn(self, run: QueryRun, held: HeldPart | None, over: Sequence[str]) -> None:
        if held is not None and held.begins(foreseen=True):
            self.begin_part(run, held.part)
        for name in over:
            self.end_part(run, name)

    def query(self, run: QueryRun) -> LiveQuery | None:
        """What the scheduler knows of it."""
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
        """What one instruction raises is its own query's misfortune: the others are carried out."""
        self._cause = getattr(event, "primitive", "")
        try:
            instructions = self.scheduler.handle(event)
        except Exception as error:
            self.broken(getattr(event, "query", ""), "", error)
            return
        for instruction in instructions:
            try:
                self._carry_out(instruction)
            except Exception as error:
                named = getattr(instruction, "primitive", "")
                self.broken(getattr(instruction, "query", ""), getattr(named, "id", named), error)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, WakeAt):
            if instruction.at not in self._deadlines:
                self._deadlines.add(instruction.at)
            return
        run = self.runs.get(getattr(instruction, "query", ""))
        if run is not None:
            named = getattr(instruction, "primitive", "")
            run.causes[getattr(named, "id", named)] = self._cause
            self._perform[type(instruction)](run, instruction)

    def broken(self, query: str, primitive: str, error: Exception) -> None:
        """A bug of ours: the primitive fails; without one the query ends, and nobody waits for it in vain."""
        log.error("query=%s primitive=%s: a bug of teola-plugin, please report it", query, primitive, exc_info=error)
        run = self.runs.get(query)
        if run is None:
            return
        live = self._live(run, primitive)
        if live is not None and not live.status.has_ended:
            self.fail(run, primitive, error)
            return
        self._drop(run, error, primitive)

    def fail(self, run: QueryRun, name: str, error: BaseException) -> None:
        run.errors.setdefault(name, error)
        log.debug("query=%s primitive=%s failed: %r", run.id, name, error)
        self.trace.done(run, name, "failed")
        self.post(PrimitiveFailed(self.now(), run.id, name))

    def died(self, run: QueryRun, p: Primitive, error: BaseException) -> None:
        """A function of the client's raised for it."""
        dead = dead_parts.died(p, run.calls_of(p.id), error)
        if dead is not None:
            run.dead.append(dead)
        self.fail(run, p.id, error)

    def made(self, run: QueryRun, name: str) -> None:
        """A primitive has its value, in the query's store."""
        if run.has_user_code and not run.ahead:
            live = self._live(run, name)
            run.code_ended += live is not None and live.primitive.kind in IMPURE_KINDS
        self.post(Finished(self.now(), run.id, name))
        if run.growing:
            self._incremental.made(run, name)

    def _store(self, run: QueryRun, name: str, value: Any, at: float | None = None) -> None:
        run.store.put(name, value)
        self.trace.done(run, name, at=at)
        self.made(run, name)

    # ------------------------------------------------------------ client primitives

    def _run_call(self, run: QueryRun, order: RunCall) -> None:
        p = order.primitive
        self.trace.queued(run, p)
        self.trace.started(run, p.id)
        verifies = p.kind is PrimitiveKind.VERIFY
        try:
            inputs = {key: run.store.read(ref) for key, ref in p.inputs if key == "actual" or not verifies}
        except (KeyError, IndexError, TypeError) as error:  # a value of another form: the plain object will tell
            self.fail(run, p.id, error)
            return
        calls = run.calls_of(p.id)
        self.code.run(
            run.id,
            lambda: client_value(run, p, inputs),
            lambda value, error: self._called(run, p, value, error),
            short=p.kind is not PrimitiveKind.CHUNKING and not requests.needs_client(p, inputs, calls),
            apart=has_own_thread(calls.get(p.call)),
        )

    def _called(self, run: QueryRun, p: Primitive, value: Any, error: BaseException | None) -> None:
        if run.id not in self.runs:
            return
        try:
            if error is None:
                self._store(run, p.id, value)
            else:
                self.died(run, p, error)
        except Exception as bug:
            self.broken(run.id, p.id, bug)

    def _await(self, run: QueryRun, order: Await) -> None:
        """User code: the plain object runs it; a query without one runs it here, once, on a thread."""
        if run.ahead:
            self.trace.queued(run, order.primitive)
        else:
            self._run_call(run, RunCall(run.id, order.primitive))

    def observe(self, run: QueryRun, name: str, value: Any, at: float) -> None:
        """The plain object has run user code until then, and this came of it."""
        if run.id in self.runs and name not in run.store:
            self._store(run, name, value, at)

    # ------------------------------------------------------------ prompts that grow

    def dispatched(self, run: QueryRun, p: Primitive) -> None:
        """All inputs of a primitive are there."""
        if run.growing and p.prefills:
            self._incremental.dispatched(run, p)

    def _live(self, run: QueryRun, name: str) -> LivePrimitive | None:
        query = self.query(run)
        return None if query is None else query.get(name)

    def _start_early(self, run: QueryRun, p: Primitive) -> None:
        """Dispatch what is not in the graph: a prefix that has grown. Its prompt's own primitive is one deeper."""
        whole = self._live(run, InstancePath(p.id).ungrown)
        self.engines.dispatch(run, Dispatch(run.id, p, 1 + (whole.depth if whole is not None else 0)))

    def _stop_early(self, run: QueryRun, name: str) -> None:
        live = run.primitives.get(name)
        if live is None or not live.began:
            self.engines.cancel(run, name)

    # ------------------------------------------------------------ fragments

    def _expand(self, run: QueryRun, order: Expand) -> None:
        try:
            event = expansion(run, order, self.now())
        except Exception as error:
            self.fail(run, order.primitive.id, error)
        else:
            self.post(event)
            if run.streamed_into is not None:  # when it is laid out, what writes its value may be under way already
                asyncio.get_running_loop().call_soon(self.engines.stream_output, run)

    def _collect(self, run: QueryRun, order: Collect) -> None:
        values = [run.store.read(ref) for ref in order.refs]
        run.store.put(order.primitive, values[0] if order.single else values)
        self.trace.collected(run, order.primitive, tuple(ref.producer for ref in order.refs))

    # ------------------------------------------------------------ ends

    def _reprioritise(self, run: QueryRun, order: Reprioritise) -> None:
        event = DepthChanged(self.now(), run.id, deeper(run, order.depths))
        for port in self.ports.values():
            port.depths(event)

    def close(self) -> None:
        """The pool is closed: whoever waits for a query, or for its trace, learns of it."""
        self.code.close()
        for run in list(self.runs.values()):
            self._drop(run, pool_closed())

    def _drop(self, run: QueryRun, error: BaseException, primitive: str = "") -> None:
        """It ends here and now, failed."""
        run.errors.setdefault(primitive, error)
        self.scheduler.queries.pop(run.id, None)
        self._end(run, End(run.id, "failed", None, primitive))

    def withdraw_all(self) -> None:
        """Followers that were sent along may never come: what the graph comes to is sent anew."""
        for run in self.runs.values():
            self.engines.prescheduling.withdraw(run)

    def _end(self, run: QueryRun, order: End) -> None:
        del self.runs[run.id]
        if order.outcome == "closed" and not run.plain_failed:
            for dead in run.dead:
                self._once(dead.cause, partial(dead_parts.warn, dead))
        if run.query.deadline is not None:
            self._deadlines.drop(run.query.deadline)
        error = outcome_error(run, order)
        if isinstance(error, QueryError):
            error.story = self.trace.recorder.story(run.id)
        try:
            settle(run, order.outcome, error, self.engines)
        finally:
            trace = self.trace.finish(run, order.outcome)
            if not run.output.done():
                if order.outcome == "done" and order.output is not None:
                    run.output.set_result(run.store.read(order.output))
                else:
                    run.output.set_exception(error or QueryCancelled("the query was closed.", query_id=run.id))
            self.engines.table.forget(run.id)
            run.over()
            run.trace.set_result(trace)


@lru_cache(maxsize=256)
def runs_user_code(graph: Graph) -> bool:
    """Whether user code runs in it, or in what its primitives hold."""
    return any(is_impure(p) for p in graph)


def computed(run: QueryRun, p: Primitive, inputs: dict[str, Any]) -> Any:
    """Of a CALL, CHUNKING or AGGREGATE. Raises what the client's function raises."""
    if p.call == "concat":
        return [item for part in inputs.values() for item in part]
    function = run.calls_of(p.id).get(p.call)
    return inputs if function is None else function(**inputs)


def client_value(run: QueryRun, p: Primitive, inputs: dict[str, Any]) -> Any:
    """`computed`, and of a VERIFY what it lets through."""
    return inputs["actual"] if p.kind is PrimitiveKind.VERIFY else computed(run, p, inputs)


def expansion(run: QueryRun, order: Expand, now: float) -> Expanded:
    """The answer to `order`. Raises what reading the value or its items raises."""
    p = order.primitive
    value = run.store.read(order.reads)
    if p.kind in (PrimitiveKind.BRANCH, PrimitiveKind.LOOP):
        return Expanded(now, run.id, p.id, int(holds(value)))
    items = items_of(value)
    return Expanded(now, run.id, p.id, len(items), _matches(run, items, order.predicted))


def _matches(run: QueryRun, items: list[Any], predicted: tuple[Ref, ...]) -> tuple[int | None, ...]:
    """Which prediction equals each item; its own place first. A prediction serves one item."""
    guesses = {i: run.store.read(ref) for i, ref in enumerate(predicted) if ref.producer in run.store}
    types = {type(guess) for guess in guesses.values()}
    alike: dict[Hashable, dict[int, Any]] = {}
    for place, guess in guesses.items():
        alike.setdefault(_kind(guess), {})[place] = guess
    matches: list[int | None] = []
    for index, item in enumerate(items):
        mine = alike.get(_kind(item), {}) if type(item) in types else {}
        order = (index, *mine) if index in mine else mine
        hit = next((i for i in order if type(mine[i]) is type(item) and mine[i] == item), None)
        matches.append(hit)
        if hit is not None:
            del mine[hit]
    return tuple(matches)


def _kind(value: Any) -> Hashable:
    """The same for values of one type that are equal, and rarely for others: there may be thousands of them."""
    try:
        return type(value), hash(_frozen(value))
    except Exception:  # not even hashable: compared with all of its type
        return type(value), None


def _frozen(value: Any) -> Hashable:
    """Lists and dictionaries, which is what lists of items hold, by what is in them."""
    if type(value) is dict:
        return frozenset([(key, _frozen(inner)) for key, inner in value.items()])
    return tuple([_frozen(inner) for inner in value]) if type(value) is list else value
