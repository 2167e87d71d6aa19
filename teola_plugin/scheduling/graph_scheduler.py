"""Upper tier: which primitives of which live query are ready (paper, section 5.1). Pure: events in, instructions out.

Fragments are instantiated in live queries: one instance for each item, round or arm, and for subplans that begin later.

State of a primitive::

    waiting -> ready -> running -> done
       |         |         |-----> failed      (the engine's port retried its requests before)
       |---------|---------|-----> dropped     (cancelled, unused, or cut off by a failure)
    waiting -> expanding -> done               (holders of fragments)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from teola_plugin.graph import IMPURE_KINDS, INPUT, Fragment, Graph, InstancePath, Primitive, PrimitiveKind, Ref
from teola_plugin.graph.build import captures
from teola_plugin.scheduling.events import (
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
    Instruction,
    Instructions,
    ItemClosed,
    PrimitiveFailed,
    Release,
    Reprioritise,
    RunCall,
    Started,
    SubplanBegun,
    SubplanEnded,
    Tick,
    Unused,
    WakeAt,
)
from teola_plugin.scheduling.live_query import (
    AWAITED,
    GangObjective,
    LivePrimitive,
    LiveQuery,
    Objective,
    Status,
    deduce_objectives,
    in_gang,
    optional_edge,
)
from teola_plugin.scheduling.validate import VALIDATE, CheckInterval, validate_graph_scheduler

_K = PrimitiveKind


@dataclass(frozen=True, slots=True)
class Steps:
    """The operations of the graph scheduler on single primitives that an expansion uses."""

    emit: Callable[[Instruction], None]
    start: Callable[[LiveQuery, LivePrimitive], None]
    """Start a primitive: all that it waits for has ended."""
    drop: Callable[[LiveQuery, LivePrimitive], None]
    """End a primitive without a value."""
    after_end: Callable[[LiveQuery, LivePrimitive], None]
    """Advance the readers of a primitive that got its value."""
    release: Callable[[LiveQuery, Iterable[str]], None]
    """Release values that nobody reads any more."""


class Expansion:
    """The expansion of one graph scheduler's queries. A LOOP ends after `max_rounds`, if not before."""

    def __init__(self, steps: Steps, max_rounds: int) -> None:
        self._steps, self._max_rounds = steps, max_rounds
        self._spliced: list[LivePrimitive] = []
        """Primitives that were spliced in and not started yet."""

    # ------------------------------------------------------------ parts that begin later

    def subplan_begun(self, query: LiveQuery, event: SubplanBegun) -> None:
        """Join the part's e-graph to the query's."""
        graph, left_out = event.graph, frozenset[str]() if event.reports_results else event.graph.behind_code
        primitives = _primitives_of_part(graph, event.name, event.value, left_out)
        spliced = query.splice(primitives, graph, event.name, AWAITED, event.depth)
        if left_out:  # as deep as if what they lead to had not been left out
            for live in spliced:
                live.base_depth += graph.depths[InstancePath(live.id).inside(event.name) or ""]
        if event.gang:
            _join_gang(spliced, event)
        self._spliced += spliced
        if not query.has_readers(event.value):
            self._steps.release(query, (event.value,))
        self._begin_spliced(query)

    def admitted(self, query: LiveQuery) -> None:
        """Begin what may begin of a new query whose planned primitives are all there."""
        for live in query:
            self._begin_arms(query, live)
        self._begin_spliced(query)

    # ------------------------------------------------------------ fragments

    def begin(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Request what decides how many instances a holder gets, once it is its turn."""
        p = live.primitive
        live.status = Status.EXPANDING
        if p.kind is _K.LOOP:
            self._add_round(query, live, p.input("init") or Ref("$input"))
            return
        reads = p.input("condition") if p.kind is _K.BRANCH else p.input("items")
        assert reads is not None, f"{p.kind.name} {p.id} lacks its input"
        self._steps.emit(Expand(query.id, p, reads, tuple(live.predicted)))

    def expanded(self, query: LiveQuery, event: Expanded) -> None:
        """Make the instances, as many as the answer says."""
        live = query.get(event.primitive)
        if live is None or live.status is not Status.EXPANDING:
            return
        expand_kind: dict[PrimitiveKind, Callable[[LiveQuery, LivePrimitive, Expanded], None]] = {
            _K.MAP: self._expand_map,
            _K.FOLD: self._expand_fold,
            _K.LOOP: self._expand_loop,
            _K.BRANCH: self._expand_branch,
        }
        expand_kind[live.primitive.kind](query, live, event)

    def _expand_map(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        """Make an instance of a MAP for each item, or take the speculative one whose predicted item equals it.

        Speculative instances that match no item are dropped.
        """
        p = live.primitive
        items = p.input("items")
        assert items is not None
        path = InstancePath(p.id)
        matches = event.matches or (None,) * event.count
        matched = {m for m in matches if m is not None}
        outputs = []
        for index, match in enumerate(matches):
            if match is not None:
                outputs.append(live.speculative_outputs[match])
            else:
                name = path.instance(index)
                name = path.instance(index, is_second=True) if query.within(name) else name
                bind = {"$item": items.at(index)}
                outputs.append(self._instance(query, live, p.fragment, name, bind, sibling_count=event.count))
        self._await_outputs(query, live, outputs)
        for index in range(len(live.speculative_outputs)):
            if index not in matched:
                self.discard_instance(query, path.instance(index))

    def _expand_fold(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        """Make an instance of a FOLD for each item, each of which reads the value carried from the one before."""
        p = live.primitive
        items, carry = p.input("items"), p.input("init")
        assert items is not None and carry is not None
        for index in range(event.count):
            bind = {"$item": items.at(index), "$carry": carry}
            carry = self._instance(query, live, p.fragment, InstancePath(p.id).instance(index), bind)
        self._await_outputs(query, live, [carry])

    def _expand_branch(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        """Make the chosen arm of a BRANCH, or take it over if it has begun speculatively; drop the other arm.

        Without a second arm the branch has the value of its condition.
        """
        p, first_arm = live.primitive, bool(event.count)
        path, arm = InstancePath(p.id), p.fragment if first_arm else p.otherwise
        output = _speculative_arm(query, live, path.arm(first_arm))
        if output is None:
            is_used_up = bool(query.within(path.arm(first_arm)))
            name = path.arm(first_arm, is_second=is_used_up)
            output = self._instance(query, live, arm, name, {}) if arm is not None else p.input("condition")
        assert output is not None
        self._await_outputs(query, live, [output])
        if live.speculative_outputs:
            self.discard_instance(query, path.arm(not first_arm))

    def _begin_arms(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Begin the arms of a branch that may begin before one is chosen: each primitive once its inputs are there."""
        p = live.primitive
        if not p.attributes.speculative_arms:
            return
        for arm_name, arm in (("then", p.fragment), ("else", p.otherwise)):
            if arm_name in p.attributes.speculative_arms and arm is not None and live.status is Status.WAITING:
                name = InstancePath(p.id).arm(arm_name == "then")
                output = self._instance(query, live, arm, name, {}, speculative=True)
                live.speculative_outputs.append(output)
                query.hold(live.id, [output])

    def _expand_loop(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        """Begin the next round of a LOOP, or end the loop with its carried value, as its last round says."""
        carry = live.outputs[-1].at("carry")
        if event.count and len(live.outputs) < self._max_rounds:
            self._add_round(query, live, carry)
        else:
            self._steps.emit(Collect(query.id, live.id, (carry,), single=True))
            self._complete(query, live)

    def _add_round(self, query: LiveQuery, live: LivePrimitive, carry: Ref) -> None:
        """Begin a round of a loop. Its body returns `{"carry": ..., "again": bool}`, which decides about the next."""
        name = InstancePath(live.id).instance(len(live.outputs))
        output = self._instance(query, live, live.primitive.fragment, name, {"$carry": carry})
        live.outputs.append(output)
        live.collects.add(output.producer)
        live.waits = {output.producer}
        query.hold(live.id, [output])
        self._begin_spliced(query)
        self.collect_if_done(query, live)

    def _instance(
        self,
        query: LiveQuery,
        live: LivePrimitive,
        body: Fragment | None,
        name: str,
        bind: dict[str, Ref],
        *,
        speculative: bool = False,
        sibling_count: int = 1,
    ) -> Ref:
        """Splice in an instance of a fragment. `sibling_count` instances, this one included, are put together."""
        assert body is not None, f"{live.id} holds no fragment"
        live.instances.append(name)
        outer = {ref: Ref(ref) for ref in body.externals if ref not in bind}
        captured = captures(live.primitive.inputs, "items")
        primitives, output = body.instantiate(name, {**outer, **captured, **bind}, speculative=speculative)
        if speculative:  # before its holder's turn: its effects wait for what the holder must come after
            primitives = [p.with_(after=p.after + live.primitive.after) if p.effects else p for p in primitives]
        objective = GangObjective(Objective.THROUGHPUT, live.id) if sibling_count > 1 else live.gang_objective
        self._spliced += query.splice(primitives, body.graph, name, objective, live.base_depth)
        return output

    def _begin_spliced(self, query: LiveQuery) -> None:
        """Start new primitives, once all depths are known: what starts now is queued with its own depth."""
        for live in list(self._spliced):
            self._begin_arms(query, live)
        spliced, self._spliced = self._spliced, []
        changed = query.update_depths(spliced)
        if changed:
            self._steps.emit(Reprioritise(query.id, changed))
        for live in spliced:
            if not live.waits or is_laid_out_before_it_starts(live):
                self._steps.start(query, live)

    def _await_outputs(self, query: LiveQuery, live: LivePrimitive, outputs: list[Ref]) -> None:
        """Have a holder wait for the outputs of its instances, and collect them if they are all there.

        The holder is dropped if one of them never comes.
        """
        live.outputs = outputs
        live.collects.update(r.producer for r in outputs)
        live.waits = {
            r.producer for r in outputs if (producer := query.get(r.producer)) and not producer.status.has_ended
        }
        query.hold(live.id, outputs)
        self._begin_spliced(query)
        missing = [
            r
            for r in outputs
            if (producer := query.get(r.producer)) and producer.status in (Status.DROPPED, Status.FAILED)
        ]
        if missing:
            self._steps.drop(query, live)
        else:
            self.collect_if_done(query, live)

    def collect_if_done(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Give a holder whose instances have ended its value, or its next round."""
        if live.waits or not (live.outputs or live.primitive.kind is _K.MAP):
            return
        if live.primitive.kind is _K.LOOP:
            self._steps.emit(Expand(query.id, live.primitive, live.outputs[-1].at("again")))
            return
        single = live.primitive.kind is not _K.MAP
        self._steps.emit(Collect(query.id, live.id, tuple(live.outputs), single))
        self._complete(query, live)

    def _complete(self, query: LiveQuery, live: LivePrimitive) -> None:
        """End a holder that has its value: advance its readers, and forget its instances."""
        live.status = Status.DONE
        self._steps.after_end(query, live)
        for name in live.instances:
            self._steps.release(query, query.forget(name))
        live.instances.clear()

    def item_closed(self, query: LiveQuery, event: ItemClosed) -> None:
        """Begin speculative work on an item of a list that is still being decoded."""
        decoding = query.get(event.primitive)
        names = decoding.primitive.attributes.stream_items if decoding is not None else ()
        for name in names:
            holder = query.get(name)
            if holder is not None and holder.status is Status.WAITING and event.index == len(holder.predicted):
                self._grow(query, holder, Ref(event.value))
        self._begin_spliced(query)

    def _grow(self, query: LiveQuery, holder: LivePrimitive, item: Ref) -> None:
        """Add a speculative instance to a MAP for the next item of a list that is still being written."""
        name = InstancePath(holder.id).instance(len(holder.predicted))
        holder.predicted.append(item)
        bind = {"$item": item}
        output = self._instance(query, holder, holder.primitive.fragment, name, bind, speculative=True, sibling_count=2)
        holder.speculative_outputs.append(output)
        query.keep(holder.id, [item])
        query.hold(holder.id, [output])

    def discard_instance(self, query: LiveQuery, name: str) -> None:
        """Drop all primitives of an instance or a part that nobody needs."""
        for live in query.within(name):
            self._steps.drop(query, live)
        self._steps.release(query, query.forget(name))


def _speculative_arm(query: LiveQuery, live: LivePrimitive, name: str) -> Ref | None:
    """Return the output of the arm if it was begun early and is not dropped or failed."""
    output = next(
        (ref for ref in live.speculative_outputs if InstancePath(ref.producer).inside(name) is not None), None
    )
    producer = None if output is None else query.get(output.producer)
    return None if producer is None or producer.status in (Status.DROPPED, Status.FAILED) else output


@lru_cache(maxsize=256)
def _primitives_of_part(graph: Graph, name: str, value: str, without: frozenset[str]) -> tuple[Primitive, ...]:
    """Return the primitives of a part. Kept, since the first part of each query has the same name, as has the next."""
    return tuple(Fragment(graph, graph.output).instantiate(name, {INPUT: Ref(value)}, without=without)[0])


def _join_gang(spliced: list[LivePrimitive], event: SubplanBegun) -> None:
    """Give primitives that only the part's output needs the objective of the part's gang."""
    objectives, output = deduce_objectives(event.graph), GangObjective(Objective.THROUGHPUT, event.gang)
    for live in spliced:
        inner = InstancePath(live.id).inside(event.name) or ""
        if in_gang(inner, event.members):
            live.gang_objective = objectives[inner].inside(event.name, output)


def is_laid_out_before_it_starts(live: LivePrimitive) -> bool:
    """Return True for a FOLD whose items are known while the value that it begins with is not.

    Only its first instance needs that value: the prompts of the others begin with text that can be prefilled.
    """
    p = live.primitive
    if p.kind is not _K.FOLD:
        return False
    items, init = p.input("items"), p.input("init")
    if items is None or init is None:
        return False
    return live.waits == {init.producer} and items.producer != init.producer


class GraphScheduler:
    """Tracks in-degrees in every live e-graph. Dispatches primitives, never single requests."""

    def __init__(self, *, max_rounds: int = 64) -> None:
        self.queries: dict[str, LiveQuery] = {}
        self._next_tick: float | None = None
        """Time of the `Tick` that was requested; None if none is due."""
        self._check = CheckInterval()
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
            if self._check.is_due(len(self.queries) + (len(query) if query is not None else 0)):
                validate_graph_scheduler(self, name)
        return self._out

    # ------------------------------------------------------------ queries

    def _admit(self, event: Admit) -> None:
        """Begin a query: start the primitives that wait for nothing, and the speculative arms of branches."""
        query = LiveQuery(event.query, event.graph, deadline=event.deadline, original_runs=event.original_runs)
        self.queries[query.id] = query
        self._request_tick(event.deadline)
        for live in query:
            if not live.waits or is_laid_out_before_it_starts(live):
                self._start(query, live)
        self._expansion.admitted(query)
        self._end_if_done(query)

    def _request_tick(self, deadline: float | None) -> None:
        """Request a `Tick` at the earliest deadline, once: the next one is requested when it comes."""
        if deadline is not None and (self._next_tick is None or deadline < self._next_tick):
            self._next_tick = deadline
            self._out.append(WakeAt(deadline))

    def _tick(self, event: Tick) -> None:
        """End queries whose deadline has passed, and request a `Tick` at the next deadline."""
        for query in list(self.queries.values()):
            if query.deadline is not None and event.at >= query.deadline:
                self._end(query, "timeout")
        if self._next_tick is not None and event.at >= self._next_tick:
            self._next_tick = None
            left = (query.deadline for query in self.queries.values() if query.deadline is not None)
            self._request_tick(min(left, default=None))

    def _end(self, query: LiveQuery, outcome: str, primitive: str = "") -> None:
        """End a query with this outcome: cancel its active primitives, and report the end.

        `primitive`: the one whose failure ended it, if one did.
        """
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
        """End a query as done once its output is there. If an original runs, that one ends the query."""
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
        """Note that a primitive has its value, and start what waited for that alone."""
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
        """Start a primitive, or collect a holder's outputs, if all that it waited for has ended."""
        if live.status is Status.EXPANDING:
            self._expansion.collect_if_done(query, live)
        elif live.status is Status.WAITING:
            if live.waits:
                self._overtake_warmups(query, live)
            if not live.waits or is_laid_out_before_it_starts(live):
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
        """End a failed primitive, its decodings, and everything that cannot do without their values.

        The query fails if its output is among them; where an original runs, it goes on.
        """
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
