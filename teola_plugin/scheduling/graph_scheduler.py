"""Upper tier: which primitives of which live query are ready (paper, section 5.1). Pure: events in, instructions out.

State of a primitive::

    waiting -> ready -> running -> done
       |         |         |-----> failed      (its requests were retried by the engine's port before)
       |---------|---------|-----> dropped     (cancelled, unused, or cut off by a failure)
    waiting -> expanding -> done               (holders of fragments)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from teola_plugin.graph import IMPURE_KINDS, INPUT, Fragment, InstancePath, PrimitiveKind, Ref
from teola_plugin.graph.build import captures
from teola_plugin.scheduling.events import Instructions, Tick, WakeAt
from teola_plugin.scheduling.graph_events import (
    Admit,
    Await,
    Cancel,
    CancelQuery,
    Close,
    Collect,
    Dispatch,
    End,
    Expand,
    Expanded,
    Finished,
    GraphEvent,
    ItemClosed,
    PartBegun,
    PartEnded,
    PrimitiveFailed,
    Release,
    Reprioritise,
    RunCall,
    Started,
    Unused,
)
from teola_plugin.scheduling.live_query import LivePrimitive, LiveQuery, Status, optional_edge
from teola_plugin.scheduling.objectives import SINK, gathered
from teola_plugin.scheduling.validate import VALIDATE, StateCheck, validate_graph_scheduler

_K = PrimitiveKind


class GraphScheduler:
    """In-degrees of every live e-graph. Dispatches primitives, never loose requests."""

    def __init__(self, *, max_rounds: int = 64) -> None:
        self.max_rounds = max_rounds
        self.queries: dict[str, LiveQuery] = {}
        self._announced: float | None = None
        """When a `Tick` is to come, as far as it was asked for."""
        self._check = StateCheck()
        self._out: Instructions = []
        self._spliced: list[LivePrimitive] = []
        self._handlers: dict[type, Callable[..., None]] = {
            Admit: self._admit,
            Started: self._started,
            Finished: self._finished,
            Unused: self._unused,
            PrimitiveFailed: self._failed,
            Expanded: self._expanded,
            ItemClosed: self._item_closed,
            PartBegun: self._part_begun,
            PartEnded: self._part_ended,
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
            if not live.waits or _laid_out_early(live):
                self._start(query, live)
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
            self._ask_to_expand(query, live)
        elif p.on_engine and not p.decodes:
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
            self._collect_if_done(query, live)
        elif live.status is Status.WAITING:
            if live.waits:
                self._overtake_warmups(query, live)
            if not live.waits or _laid_out_early(live):
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
        if live is None or live.status.ended:
            return
        live.status = Status.FAILED
        for member in query.group(live.id) if live.primitive.prefills else []:
            if member.status.active:
                member.status = Status.DROPPED
                self._cut_off(query, member)
        self._cut_off(query, live)
        output = query.get(query.output.producer)
        if not query.ahead and (output is None or output.status in (Status.DROPPED, Status.FAILED)):
            self._end(query, "failed", event.primitive)

    # ------------------------------------------------------------ parts that begin later

    def _part_begun(self, query: LiveQuery, event: PartBegun) -> None:
        whole = Fragment(event.graph, event.graph.output)
        made, _ = whole.instantiate(event.name, {INPUT: Ref(event.value)})
        self._spliced += query.splice(made, event.graph, event.name, SINK)
        if not query.read(event.value):
            self._release(query, (event.value,))
        self._begin_spliced(query)

    def _part_ended(self, query: LiveQuery, event: PartEnded) -> None:
        self._discard_instance(query, event.name)

    # ------------------------------------------------------------ fragments

    def _ask_to_expand(self, query: LiveQuery, live: LivePrimitive) -> None:
        p = live.primitive
        live.status = Status.EXPANDING
        if p.kind is _K.LOOP:
            self._add_round(query, live, p.input("init") or Ref("$input"))
            return
        reads = p.input("condition") if p.kind is _K.BRANCH else p.input("items")
        assert reads is not None, f"{p.kind.name} {p.id} lacks its input"
        self._out.append(Expand(query.id, p, reads, tuple(live.predicted)))

    def _expanded(self, query: LiveQuery, event: Expanded) -> None:
        live = query.get(event.primitive)
        if live is None or live.status is not Status.EXPANDING:
            return
        grow: dict[PrimitiveKind, Callable[[LiveQuery, LivePrimitive, Expanded], None]] = {
            _K.MAP: self._expand_map,
            _K.FOLD: self._expand_fold,
            _K.LOOP: self._expand_loop,
            _K.BRANCH: self._expand_branch,
        }
        grow[live.primitive.kind](query, live, event)

    def _expand_map(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        p = live.primitive
        items = p.input("items")
        assert items is not None
        here = InstancePath(p.id)
        matches = event.matches or (None,) * event.count
        used = {m for m in matches if m is not None}
        outputs = []
        for index, match in enumerate(matches):
            if match is not None:
                outputs.append(live.early[match])
            else:
                name = here.instance(index)
                name = here.instance(index, again=True) if query.within(name) else name
                bind = {"$item": items.at(index)}
                outputs.append(self._instance(query, live, p.fragment, name, bind, together=event.count))
        self._await_outputs(query, live, outputs)
        for index in range(len(live.early)):
            if index not in used:
                self._discard_instance(query, here.instance(index))

    def _expand_fold(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        p = live.primitive
        items, carry = p.input("items"), p.input("init")
        assert items is not None and carry is not None
        for index in range(event.count):
            bind = {"$item": items.at(index), "$carry": carry}
            carry = self._instance(query, live, p.fragment, InstancePath(p.id).instance(index), bind)
        self._await_outputs(query, live, [carry])

    def _expand_branch(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        p = live.primitive
        arm = p.fragment if event.count else p.otherwise
        name = InstancePath(p.id).arm(bool(event.count))
        output = self._instance(query, live, arm, name, {}) if arm is not None else p.input("condition")
        assert output is not None
        self._await_outputs(query, live, [output])

    def _expand_loop(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        carry = live.outputs[-1].at("carry")
        if event.count and len(live.outputs) < self.max_rounds:
            self._add_round(query, live, carry)
        else:
            self._out.append(Collect(query.id, live.id, (carry,), single=True))
            self._complete(query, live)

    def _add_round(self, query: LiveQuery, live: LivePrimitive, carry: Ref) -> None:
        """The body gives `{"carry": ..., "again": bool}`; its value decides about the next round."""
        name = InstancePath(live.id).instance(len(live.outputs))
        output = self._instance(query, live, live.primitive.fragment, name, {"$carry": carry})
        live.outputs.append(output)
        live.collects.add(output.producer)
        live.waits = {output.producer}
        query.hold(live.id, [output])
        self._begin_spliced(query)
        self._collect_if_done(query, live)

    def _instance(
        self,
        query: LiveQuery,
        live: LivePrimitive,
        body: Fragment | None,
        name: str,
        bind: dict[str, Ref],
        *,
        tentative: bool = False,
        together: int = 1,
    ) -> Ref:
        """`together`: instances whose outputs are put together, this one among them."""
        assert body is not None, f"{live.id} holds no fragment"
        live.instances.append(name)
        outer = {ref: Ref(ref) for ref in body.externals if ref not in bind}
        captured = captures(live.primitive.inputs, "items")
        made, output = body.instantiate(name, {**outer, **captured, **bind}, tentative=tentative)
        if tentative:  # not yet its holder's turn: what the holder waits for by order, its effects wait for too
            made = [p.with_(after=p.after + live.primitive.after) if p.effects else p for p in made]
        sink = gathered(live.id, together, live.wanted)
        self._spliced += query.splice(made, body.graph, name, sink)
        return output

    def _begin_spliced(self, query: LiveQuery) -> None:
        """Depths first, so that what starts now is queued with its own."""
        spliced, self._spliced = self._spliced, []
        changed = query.redepth(spliced)
        if changed:
            self._out.append(Reprioritise(query.id, changed))
        for live in spliced:
            if not live.waits or _laid_out_early(live):
                self._start(query, live)

    def _await_outputs(self, query: LiveQuery, live: LivePrimitive, outputs: list[Ref]) -> None:
        live.outputs = outputs
        live.collects.update(r.producer for r in outputs)
        live.waits = {r.producer for r in outputs if (made := query.get(r.producer)) and not made.status.ended}
        query.hold(live.id, outputs)
        self._begin_spliced(query)
        lost = [
            r for r in outputs if (made := query.get(r.producer)) and made.status in (Status.DROPPED, Status.FAILED)
        ]
        if lost:
            self._drop(query, live)
        else:
            self._collect_if_done(query, live)

    def _collect_if_done(self, query: LiveQuery, live: LivePrimitive) -> None:
        if live.waits or not (live.outputs or live.primitive.kind is _K.MAP):
            return
        if live.primitive.kind is _K.LOOP:
            self._out.append(Expand(query.id, live.primitive, live.outputs[-1].at("again")))
            return
        single = live.primitive.kind is not _K.MAP
        self._out.append(Collect(query.id, live.id, tuple(live.outputs), single))
        self._complete(query, live)

    def _complete(self, query: LiveQuery, live: LivePrimitive) -> None:
        live.status = Status.DONE
        self._after_end(query, live)
        for name in live.instances:
            self._release(query, query.forget(name))
        live.instances.clear()

    def _item_closed(self, query: LiveQuery, event: ItemClosed) -> None:
        """A list is still being decoded and an item of it has closed: work on it begins, tentatively."""
        decoding = query.get(event.primitive)
        names = decoding.primitive.attributes.stream_items if decoding is not None else ()
        for name in names:
            holder = query.get(name)
            if holder is not None and holder.status is Status.WAITING and event.index == len(holder.predicted):
                self._grow(query, holder, Ref(event.value))
        self._begin_spliced(query)

    def _grow(self, query: LiveQuery, holder: LivePrimitive, item: Ref) -> None:
        name = InstancePath(holder.id).instance(len(holder.predicted))
        holder.predicted.append(item)
        bind = {"$item": item}
        output = self._instance(query, holder, holder.primitive.fragment, name, bind, tentative=True, together=2)
        holder.early.append(output)
        query.keep(holder.id, [item])
        query.hold(holder.id, [output])

    def _discard_instance(self, query: LiveQuery, name: str) -> None:
        """Whoever is in it has not come to anything that is wanted."""
        for live in query.within(name):
            self._drop(query, live)
        self._release(query, query.forget(name))


def _unstarted_warm_up(live: LivePrimitive) -> bool:
    """A warm-up that has not begun."""
    return live.primitive.kind is _K.PARTIAL_PREFILLING and live.status is not Status.RUNNING


def _laid_out_early(live: LivePrimitive) -> bool:
    """A FOLD is laid out once its items are known: only its first instance needs the value that it begins with, and
    the others have prompts whose beginnings can be prefilled."""
    p = live.primitive
    if p.kind is not _K.FOLD:
        return False
    items, init = p.input("items"), p.input("init")
    if items is None or init is None:
        return False
    return live.waits == {init.producer} and items.producer != init.producer
