"""Upper tier: which primitives of which live query are ready (paper, section 5.1). Pure: events in, instructions out.

State of a primitive::

    waiting -> ready -> running -> done
       |         |         |-----> failed      (its requests were retried by the engine's port before)
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
    PartBegun,
    PartEnded,
    PrimitiveFailed,
    Release,
    RunCall,
    Started,
    Unused,
)
from teola_plugin.scheduling.live_primitive import LivePrimitive, Status, optional_edge
from teola_plugin.scheduling.live_query import LiveQuery
from teola_plugin.scheduling.validate import VALIDATE, StateCheck, validate_graph_scheduler

_K = PrimitiveKind


class GraphScheduler:
    """In-degrees of every live e-graph. Dispatches primitives, never loose requests."""

    def __init__(self, *, max_rounds: int = 64) -> None:
        self.queries: dict[str, LiveQuery] = {}
        self._announced: float | None = None
        """When a `Tick` is to come, as far as it was asked for."""
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
            PartBegun: self._expansion.part_begun,
            PartEnded: self._expansion.part_ended,
            CancelQuery: self._cancel_query,
            Close: self._close,
            Tick: self._tick,
        }

    def handle(self, event: GraphEvent) -> Instructions:
        """What to do about `event`. Events of queries that are over are ignored."""
        self._out = []
        if isinstance(event, (Admit, Tick)):
            self._handlers[type(event)](event)
        else:
            query = self.queries.get(event.query)
            if query is not None:
                self._handlers[type(event)](query, event)
        if VALIDATE:
            self._validate("" if isinstance(event, Tick) else event.query)
        return self._out

    def _validate(self, name: str) -> None:
        query = self.queries.get(name)
        if self._check.due(len(self.queries) + (query.primitives if query is not None else 0)):
            validate_graph_scheduler(self, name)

    # ------------------------------------------------------------ queries

    def _admit(self, event: Admit) -> None:
        query = LiveQuery(event.query, event.graph, deadline=event.deadline, ahead=event.ahead)
        self.queries[query.id] = query
        self._announce(event.deadline)
        for live in query:
            if not live.waits or laid_out_early(live):
                self._start(query, live)
        self._expansion.admitted(query)
        self._end_if_done(query)

    def _announce(self, deadline: float | None) -> None:
        """Ask for a `Tick` at the earliest deadline, once: the next one is asked for when it comes."""
        if deadline is not None and (self._announced is None or deadline < self._announced):
            self._announced = deadline
            self._out.append(WakeAt(deadline))

    def _tick(self, event: Tick) -> None:
        for query in list(self.queries.values()):
            if query.deadline is not None and event.at >= query.deadline:
                self._end(query, "timeout")
        if self._announced is not None and event.at >= self._announced:
            self._announced = None
            left = (query.deadline for query in self.queries.values() if query.deadline is not None)
            self._announce(min(left, default=None))

    def _cancel_query(self, query: LiveQuery, event: CancelQuery) -> None:
        self._end(query, "cancelled")

    def _close(self, query: LiveQuery, event: Close) -> None:
        self._end(query, "closed")

    def _end(self, query: LiveQuery, outcome: str, primitive: str = "") -> None:
        if query.ended:
            return
        query.ended = True
        del self.queries[query.id]
        for live in query:
            if live.status.active:
                live.status = Status.DROPPED
                self._out.append(Cancel(query.id, live.id))
        self._out.append(End(query.id, outcome, query.output if outcome == "done" else None, primitive))

    def _end_if_done(self, query: LiveQuery) -> None:
        if query.ended or query.ahead:
            return
        output = query.get(query.output.producer)
        if output is None or output.status is Status.DONE:
            self._end(query, "done")

    # ------------------------------------------------------------ primitives

    def _start(self, query: LiveQuery, live: LivePrimitive) -> None:
        """All it waits for has ended: hand it to whoever executes its kind."""
        p = live.primitive
        if live.status is not Status.WAITING:
            return
        live.status = Status.READY
        if p.holds_fragment:
            self._expansion.begin(query, live)
        elif p.on_engine and not p.decodes and not (query.ahead and p.kind in IMPURE_KINDS):
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
        if live is None or live.status.ended:
            return
        live.status = Status.DONE
        self._after_end(query, live)

    def _unused(self, query: LiveQuery, event: Unused) -> None:
        live = query.get(event.primitive)
        if live is not None and not live.status.ended:
            self._drop(query, live, cancel=False)

    def _after_end(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Its readers may be ready now; values that only it read are released."""
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
        """A full prefilling whose data is there does not wait for a warm-up that has not even started."""
        if live.primitive.kind is not _K.FULL_PREFILLING:
            return
        waited = (query.get(name) for name in live.waits)
        if all(w is None or _unstarted_warm_up(w) for w in waited):  # mostly over with the first, however many they are
            for name in sorted(live.waits):
                if name in query:
                    self._drop(query, query[name])

    def _drop(self, query: LiveQuery, live: LivePrimitive, *, cancel: bool = True) -> None:
        """It ends without a value, and so does everything that cannot do without that value."""
        if not live.status.ended:
            self._mark_dropped(query, live, cancel=cancel)
            self._cut_off(query, live)

    def _mark_dropped(self, query: LiveQuery, live: LivePrimitive, *, cancel: bool = True) -> None:
        if cancel and live.status.active:
            self._out.append(Cancel(query.id, live.id))
        live.status = Status.DROPPED

    def _cut_off(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Depth first, on a stack of its own: a chain may be thousands of primitives long."""
        todo = [(live, self._severed(query, live))]
        while todo:
            gone, children = todo[-1]
            child = next(children, None)
            if child is None:
                todo.pop()
                continue
            child.waits.discard(gone.id)
            if child.status.ended:
                continue
            if optional_edge(child.primitive, gone.primitive) and gone.id not in child.collects:
                self._advance(query, child)
            else:
                self._mark_dropped(query, child)
                todo.append((child, self._severed(query, child)))

    def _severed(self, query: LiveQuery, live: LivePrimitive) -> Iterator[LivePrimitive]:
        """What it read is released; its children."""
        self._release(query, query.released_by(live.id))
        return iter(query.children(live.id))

    def _release(self, query: LiveQuery, producers: Iterable[str]) -> None:
        for producer in producers:
            self._out.append(Release(query.id, producer))

    def _failed(self, query: LiveQuery, event: PrimitiveFailed) -> None:
        live = query.get(event.primitive)
        if live is None:
            return
        group = query.group(live.id) if live.primitive.prefills else []
        served = [member for member in group if member.status.active]
        if live.status.ended and not served:  # a prompt may be computed, and its answer break off
            return
        if not live.status.ended:
            live.status = Status.FAILED
            served.append(live)
        for lost in served:
            if lost is not live:
                lost.status = Status.DROPPED
            self._cut_off(query, lost)
        output = query.get(query.output.producer)
        if not query.ahead and (output is None or output.status in (Status.DROPPED, Status.FAILED)):
            self._end(query, "failed", event.primitive)


def _unstarted_warm_up(live: LivePrimitive) -> bool:
    """A warm-up that has not begun."""
    return live.primitive.kind is _K.PARTIAL_PREFILLING and live.status is not Status.RUNNING
