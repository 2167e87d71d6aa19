"""Upper tier: which primitives of which live query are ready (paper, section 5.1). Pure: events in, instructions out.

State of a primitive::

    waiting -> ready -> running -> done
       |         |         |-----> failed      (the engine's port retried its requests before)
       |---------|---------|-----> dropped     (cancelled, unused, or cut off by a failure)
    waiting -> expanding -> done               (holders of fragments)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from teola_plugin.graph import IMPURE_KINDS, PrimitiveKind
from teola_plugin.scheduling.events import Instructions, Tick, WakeAt
from teola_plugin.scheduling.expansion import Expansion, Steps, laid_out_early
from teola_plugin.scheduling.graph_events import (
    Admit,
    Await,
    Cancel,
    CancelQuery,
    Close,
    Dispatch,
    End,
    Expanded,
    Finished,
    GraphEvent,
    ItemClosed,
    PrimitiveFailed,
    Release,
    RunCall,
    Started,
    SubplanBegun,
    SubplanEnded,
    Unused,
)
from teola_plugin.scheduling.live_query import LivePrimitive, LiveQuery, Status, optional_edge
from teola_plugin.scheduling.validate import VALIDATE, StateCheck, validate_graph_scheduler

_K = PrimitiveKind


class GraphScheduler:
    """Tracks in-degrees in every live e-graph. Dispatches primitives, never single requests."""

    def __init__(self, *, max_rounds: int = 64) -> None:
        self.queries: dict[str, LiveQuery] = {}
        self._next_tick: float | None = None
        """Time of the `Tick` that was requested; None if none is due."""
        self._check = StateCheck()
        self._out: Instructions = []
        steps = Steps(lambda order: self._out.append(order), self._start, self._drop, self._after_end, self._release)
        self._expansion = Expansion(steps, max_rounds)
        self._handlers: dict[type, Callable[..., None]] = {
            Admit: self._admit,
            Started: self._started,
            Finished: self._finished,
            Unused: self._unused,
            PrimitiveFailed: self._failed,
            Expanded: self._expansion.expanded,
            ItemClosed: self._expansion.item_closed,
            SubplanBegun: self._expansion.subplan_begun,
            SubplanEnded: lambda query, event: self._expansion.discard_instance(query, event.name),
            CancelQuery: lambda query, event: self._end(query, "cancelled"),
            Close: lambda query, event: self._end(query, "closed"),
            Tick: self._tick,
        }

    def handle(self, event: GraphEvent) -> Instructions:
        """Return the instructions that follow from `event`. Events of queries that have ended are ignored."""
        self._out = []
        if isinstance(event, (Admit, Tick)):
            self._handlers[type(event)](event)
        else:
            query = self.queries.get(event.query)
            if query is not None:
                self._handlers[type(event)](query, event)
        if VALIDATE:
            name = "" if isinstance(event, Tick) else event.query
            query = self.queries.get(name)
            if self._check.due(len(self.queries) + (len(query) if query is not None else 0)):
                validate_graph_scheduler(self, name)
        return self._out

    # ------------------------------------------------------------ queries

    def _admit(self, event: Admit) -> None:
        query = LiveQuery(event.query, event.graph, deadline=event.deadline, original_runs=event.original_runs)
        self.queries[query.id] = query
        self._request_tick(event.deadline)
        for live in query:
            if not live.waits or laid_out_early(live):
                self._start(query, live)
        self._expansion.admitted(query)
        self._end_if_done(query)

    def _request_tick(self, deadline: float | None) -> None:
        """Request a `Tick` at the earliest deadline, once: the next one is requested when it comes."""
        if deadline is not None and (self._next_tick is None or deadline < self._next_tick):
            self._next_tick = deadline
            self._out.append(WakeAt(deadline))

    def _tick(self, event: Tick) -> None:
        for query in list(self.queries.values()):
            if query.deadline is not None and event.at >= query.deadline:
                self._end(query, "timeout")
        if self._next_tick is not None and event.at >= self._next_tick:
            self._next_tick = None
            left = (query.deadline for query in self.queries.values() if query.deadline is not None)
            self._request_tick(min(left, default=None))

    def _end(self, query: LiveQuery, outcome: str, primitive: str = "") -> None:
        if query.has_ended:
            return
        query.has_ended = True
        del self.queries[query.id]
        for live in query:
            if live.status.active:
                live.status = Status.DROPPED
                self._out.append(Cancel(query.id, live.id))
        self._out.append(End(query.id, outcome, query.output if outcome == "done" else None, primitive))

    def _end_if_done(self, query: LiveQuery) -> None:
        if query.has_ended or query.original_runs:
            return
        output = query.get(query.output.producer)
        if output is None or output.status is Status.DONE:
            self._end(query, "done")

    # ------------------------------------------------------------ primitives

    def _start(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Hand a primitive, once all that it waits for has ended, to whoever executes its kind."""
        p = live.primitive
        if live.status is not Status.WAITING:
            return
        live.status = Status.READY
        if p.holds_fragment:
            self._expansion.begin(query, live)
        elif p.on_engine and not p.decodes and not (query.original_runs and p.kind in IMPURE_KINDS):
            group = query.group(p.id) if p.prefills else []
            for member in group:
                if member.status is Status.WAITING:
                    member.status = Status.READY
            self._out.append(Dispatch(query.id, p, live.depth, tuple(m.primitive for m in group)))
        elif p.kind in IMPURE_KINDS:
            self._out.append(Await(query.id, p))
        elif not p.decodes:  # a decoding is served by its group's request
            self._out.append(RunCall(query.id, p))

    def _started(self, query: LiveQuery, event: Started) -> None:
        live = query.get(event.primitive)
        if live is not None and live.status is Status.READY:
            live.status = Status.RUNNING

    def _finished(self, query: LiveQuery, event: Finished) -> None:
        live = query.get(event.primitive)
        if live is None or live.status.has_ended:
            return
        live.status = Status.DONE
        self._after_end(query, live)

    def _unused(self, query: LiveQuery, event: Unused) -> None:
        live = query.get(event.primitive)
        if live is not None:
            self._drop(query, live, cancel=False)

    def _after_end(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Advance the readers of a primitive that ended, and release the values that only it read."""
        for child in self._severed(query, live):
            child.waits.discard(live.id)
            self._advance(query, child)
        self._end_if_done(query)

    def _advance(self, query: LiveQuery, live: LivePrimitive) -> None:
        if live.status is Status.EXPANDING:
            self._expansion.collect_if_done(query, live)
        elif live.status is Status.WAITING:
            if live.waits:
                self._overtake_warmups(query, live)
            if not live.waits or laid_out_early(live):
                self._start(query, live)

    def _overtake_warmups(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Start a full prefilling whose data is there without its warm-ups, if none of them has started."""
        if live.primitive.kind is not _K.FULL_PREFILLING:
            return
        predecessors = (query.get(name) for name in live.waits)
        if all(  # usually decided by the first
            p is None or (p.primitive.kind is _K.PARTIAL_PREFILLING and p.status is not Status.RUNNING)
            for p in predecessors
        ):
            for name in sorted(live.waits):
                if name in query:
                    self._drop(query, query[name])

    def _drop(self, query: LiveQuery, live: LivePrimitive, *, cancel: bool = True) -> None:
        """End a primitive without a value, and with it everything that cannot do without that value."""
        if not live.status.has_ended:
            self._mark_dropped(query, live, cancel=cancel)
            self._cut_off(query, live)

    def _mark_dropped(self, query: LiveQuery, live: LivePrimitive, *, cancel: bool = True) -> None:
        if cancel and live.status.active:
            self._out.append(Cancel(query.id, live.id))
        live.status = Status.DROPPED

    def _cut_off(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Drop the descendants that cannot do without the value of a dropped primitive.

        Works depth first on a stack of its own, since a chain may be thousands of primitives long.
        """
        stack = [(live, self._severed(query, live))]
        while stack:
            ended_primitive, children = stack[-1]
            child = next(children, None)
            if child is None:
                stack.pop()
                continue
            child.waits.discard(ended_primitive.id)
            if child.status.has_ended:
                continue
            if optional_edge(child.primitive, ended_primitive.primitive) and ended_primitive.id not in child.collects:
                self._advance(query, child)
            else:
                self._mark_dropped(query, child)
                stack.append((child, self._severed(query, child)))

    def _severed(self, query: LiveQuery, live: LivePrimitive) -> Iterator[LivePrimitive]:
        """Release what a primitive read, and return its children."""
        self._release(query, query.released_by(live.id))
        return iter(query.children(live.id))

    def _release(self, query: LiveQuery, producers: Iterable[str]) -> None:
        self._out += [Release(query.id, producer) for producer in producers]

    def _failed(self, query: LiveQuery, event: PrimitiveFailed) -> None:
        live = query.get(event.primitive)
        if live is None:
            return
        group = query.group(live.id) if live.primitive.prefills else []
        cut_off = [member for member in group if member.status.active]
        if live.status.has_ended and not cut_off:  # ended, but its decodings may still break off
            return
        if not live.status.has_ended:
            live.status = Status.FAILED
            cut_off.append(live)
        for member in cut_off:
            if member is not live:
                member.status = Status.DROPPED
            self._cut_off(query, member)
        output = query.get(query.output.producer)
        if not query.original_runs and (output is None or output.status in (Status.DROPPED, Status.FAILED)):
            self._end(query, "failed", event.primitive)
