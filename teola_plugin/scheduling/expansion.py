"""Instantiates fragments in live queries: one instance for each item, round or arm, and for parts that begin later.

Pure, like all of the graph scheduler: events go in, instructions come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from teola_plugin.graph import INPUT, Fragment, Graph, InstancePath, Primitive, PrimitiveKind, Ref
from teola_plugin.graph.build import captures
from teola_plugin.scheduling.events import Instruction
from teola_plugin.scheduling.graph_events import (
    Collect,
    Expand,
    Expanded,
    ItemClosed,
    Reprioritise,
    SubplanBegun,
)
from teola_plugin.scheduling.live_query import LivePrimitive, LiveQuery, Status
from teola_plugin.scheduling.objectives import AWAITED, GangObjective, Objective, deduce_objectives, in_gang

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
        p = live.primitive
        items = p.input("items")
        assert items is not None
        path = InstancePath(p.id)
        matches = event.matches or (None,) * event.count
        matched = {m for m in matches if m is not None}
        outputs = []
        for index, match in enumerate(matches):
            if match is not None:
                outputs.append(live.early_outputs[match])
            else:
                name = path.instance(index)
                name = path.instance(index, is_second=True) if query.within(name) else name
                bind = {"$item": items.at(index)}
                outputs.append(self._instance(query, live, p.fragment, name, bind, sibling_count=event.count))
        self._await_outputs(query, live, outputs)
        for index in range(len(live.early_outputs)):
            if index not in matched:
                self.discard_instance(query, path.instance(index))

    def _expand_fold(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        p = live.primitive
        items, carry = p.input("items"), p.input("init")
        assert items is not None and carry is not None
        for index in range(event.count):
            bind = {"$item": items.at(index), "$carry": carry}
            carry = self._instance(query, live, p.fragment, InstancePath(p.id).instance(index), bind)
        self._await_outputs(query, live, [carry])

    def _expand_branch(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        p, first_arm = live.primitive, bool(event.count)
        path, arm = InstancePath(p.id), p.fragment if first_arm else p.otherwise
        output = _early_arm(query, live, path.arm(first_arm))
        if output is None:
            is_used_up = bool(query.within(path.arm(first_arm)))
            name = path.arm(first_arm, is_second=is_used_up)
            output = self._instance(query, live, arm, name, {}) if arm is not None else p.input("condition")
        assert output is not None
        self._await_outputs(query, live, [output])
        if live.early_outputs:
            self.discard_instance(query, path.arm(not first_arm))

    def _begin_arms(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Begin the arms of a branch that may begin before one is chosen: each primitive once its inputs are there."""
        p = live.primitive
        if not p.attributes.early_arms:
            return
        for arm_name, arm in (("then", p.fragment), ("else", p.otherwise)):
            if arm_name in p.attributes.early_arms and arm is not None and live.status is Status.WAITING:
                name = InstancePath(p.id).arm(arm_name == "then")
                output = self._instance(query, live, arm, name, {}, tentative=True)
                live.early_outputs.append(output)
                query.hold(live.id, [output])

    def _expand_loop(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
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
        tentative: bool = False,
        sibling_count: int = 1,
    ) -> Ref:
        """Splice in an instance of a fragment. `sibling_count` instances, this one included, are put together."""
        assert body is not None, f"{live.id} holds no fragment"
        live.instances.append(name)
        outer = {ref: Ref(ref) for ref in body.externals if ref not in bind}
        captured = captures(live.primitive.inputs, "items")
        primitives, output = body.instantiate(name, {**outer, **captured, **bind}, tentative=tentative)
        if tentative:  # before its holder's turn: its effects wait for what the holder must come after
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
            if not live.waits or laid_out_early(live):
                self._steps.start(query, live)

    def _await_outputs(self, query: LiveQuery, live: LivePrimitive, outputs: list[Ref]) -> None:
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
        name = InstancePath(holder.id).instance(len(holder.predicted))
        holder.predicted.append(item)
        bind = {"$item": item}
        output = self._instance(query, holder, holder.primitive.fragment, name, bind, tentative=True, sibling_count=2)
        holder.early_outputs.append(output)
        query.keep(holder.id, [item])
        query.hold(holder.id, [output])

    def discard_instance(self, query: LiveQuery, name: str) -> None:
        """Drop all primitives of an instance or a part that nobody needs."""
        for live in query.within(name):
            self._steps.drop(query, live)
        self._steps.release(query, query.forget(name))


def _early_arm(query: LiveQuery, live: LivePrimitive, name: str) -> Ref | None:
    """Return the output of the arm if it was begun early and is not dropped or failed."""
    output = next((ref for ref in live.early_outputs if InstancePath(ref.producer).inside(name) is not None), None)
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


def laid_out_early(live: LivePrimitive) -> bool:
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
