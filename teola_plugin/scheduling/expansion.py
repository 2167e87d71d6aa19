"""Fragments of live queries become primitives: an instance for each item, round or arm, and for parts that begin later.

Pure, as all of the graph scheduler: it is told what happened and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from teola_plugin.graph import INPUT, Fragment, InstancePath, PrimitiveKind, Ref
from teola_plugin.graph.build import captures
from teola_plugin.scheduling.events import Instruction
from teola_plugin.scheduling.graph_events import (
    Collect,
    Expand,
    Expanded,
    ItemClosed,
    PartBegun,
    PartEnded,
    Reprioritise,
)
from teola_plugin.scheduling.live_primitive import LivePrimitive, Status
from teola_plugin.scheduling.live_query import LiveQuery
from teola_plugin.scheduling.objectives import SINK, deduce, gathered, in_gang, sink_of

_K = PrimitiveKind


@dataclass(frozen=True, slots=True)
class Steps:
    """What the graph scheduler does with single primitives."""

    emit: Callable[[Instruction], None]
    start: Callable[[LiveQuery, LivePrimitive], None]
    """All that it waits for has ended."""
    drop: Callable[[LiveQuery, LivePrimitive], None]
    """It ends without a value."""
    ended: Callable[[LiveQuery, LivePrimitive], None]
    """It has its value: whoever waits for it may be ready."""
    release: Callable[[LiveQuery, Iterable[str]], None]
    """Nobody reads these values any more."""


class Expansion:
    """Of one graph scheduler. A LOOP ends after `max_rounds`, if not before."""

    def __init__(self, steps: Steps, max_rounds: int) -> None:
        self._steps, self._max_rounds = steps, max_rounds
        self._spliced: list[LivePrimitive] = []
        """What is new and has not begun."""

    # ------------------------------------------------------------ parts that begin later

    def part_begun(self, query: LiveQuery, event: PartBegun) -> None:
        """The part's e-graph joins the query's."""
        graph, without = event.graph, frozenset[str]() if event.told else event.graph.behind_code
        made, _ = Fragment(graph, graph.output).instantiate(event.name, {INPUT: Ref(event.value)}, without=without)
        spliced = query.splice(made, graph, event.name, SINK, event.depth)
        if without:  # they are as deep as if all that they lead to were there
            for live in spliced:
                live.least += graph.depths[InstancePath(live.id).inside(event.name) or ""]
        if event.gang:
            _join_gang(spliced, event)
        self._spliced += spliced
        if not query.read(event.value):
            self._steps.release(query, (event.value,))
        self._begin_spliced(query)

    def admitted(self, query: LiveQuery) -> None:
        """A query with all that was planned of it."""
        for live in query:
            self._begin_arms(query, live)
        self._begin_spliced(query)

    def part_ended(self, query: LiveQuery, event: PartEnded) -> None:
        """What is left of it is dropped."""
        self._discard_instance(query, event.name)

    # ------------------------------------------------------------ fragments

    def begin(self, query: LiveQuery, live: LivePrimitive) -> None:
        """It is a holder's turn: ask what decides how many instances it gets."""
        p = live.primitive
        live.status = Status.EXPANDING
        if p.kind is _K.LOOP:
            self._add_round(query, live, p.input("init") or Ref("$input"))
            return
        reads = p.input("condition") if p.kind is _K.BRANCH else p.input("items")
        assert reads is not None, f"{p.kind.name} {p.id} lacks its input"
        self._steps.emit(Expand(query.id, p, reads, tuple(live.predicted)))

    def expanded(self, query: LiveQuery, event: Expanded) -> None:
        """The answer: the instances are made."""
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
                name = here.instance(index, is_second=True) if query.within(name) else name
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
        p, taken = live.primitive, bool(event.count)
        here, arm = InstancePath(p.id), p.fragment if taken else p.otherwise
        output = _begun_arm(query, live, here.arm(taken))
        if output is None:
            lost = bool(query.within(here.arm(taken)))
            name = here.arm(taken, is_second=lost)
            output = self._instance(query, live, arm, name, {}) if arm is not None else p.input("condition")
        assert output is not None
        self._await_outputs(query, live, [output])
        if live.early:
            self._discard_instance(query, here.arm(not taken))

    def _begin_arms(self, query: LiveQuery, live: LivePrimitive) -> None:
        """Arms of a branch that may begin before it is chosen: each primitive when what it reads is there."""
        p = live.primitive
        if not p.attributes.early_arms:
            return
        for which, arm in (("then", p.fragment), ("else", p.otherwise)):
            if which in p.attributes.early_arms and arm is not None and live.status is Status.WAITING:
                name = InstancePath(p.id).arm(which == "then")
                output = self._instance(query, live, arm, name, {}, tentative=True)
                live.early.append(output)
                query.hold(live.id, [output])

    def _expand_loop(self, query: LiveQuery, live: LivePrimitive, event: Expanded) -> None:
        carry = live.outputs[-1].at("carry")
        if event.count and len(live.outputs) < self._max_rounds:
            self._add_round(query, live, carry)
        else:
            self._steps.emit(Collect(query.id, live.id, (carry,), single=True))
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
        self._spliced += query.splice(made, body.graph, name, sink, live.least)
        return output

    def _begin_spliced(self, query: LiveQuery) -> None:
        """Depths first, so that what starts now is queued with its own."""
        for live in list(self._spliced):
            self._begin_arms(query, live)
        spliced, self._spliced = self._spliced, []
        changed = query.redepth(spliced)
        if changed:
            self._steps.emit(Reprioritise(query.id, changed))
        for live in spliced:
            if not live.waits or laid_out_early(live):
                self._steps.start(query, live)

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
            self._steps.drop(query, live)
        else:
            self.collect_if_done(query, live)

    def collect_if_done(self, query: LiveQuery, live: LivePrimitive) -> None:
        """A holder whose instances have ended gets its value, or its next round."""
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
        self._steps.ended(query, live)
        for name in live.instances:
            self._steps.release(query, query.forget(name))
        live.instances.clear()

    def item_closed(self, query: LiveQuery, event: ItemClosed) -> None:
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
            self._steps.drop(query, live)
        self._steps.release(query, query.forget(name))


def _begun_arm(query: LiveQuery, live: LivePrimitive, name: str) -> Ref | None:
    """The output of the arm if it was begun, and has not come to nothing."""
    found = next((ref for ref in live.early if InstancePath(ref.producer).inside(name) is not None), None)
    made = None if found is None else query.get(found.producer)
    return None if made is None or made.status in (Status.DROPPED, Status.FAILED) else found


def _join_gang(spliced: list[LivePrimitive], event: PartBegun) -> None:
    """What is wanted of the part alone is wanted of its gang."""
    wanted, sink = deduce(event.graph), sink_of(event.gang)
    for live in spliced:
        inner = InstancePath(live.id).inside(event.name) or ""
        if in_gang(inner, event.members):
            live.wanted = wanted[inner].inside(event.name, sink)


def laid_out_early(live: LivePrimitive) -> bool:
    """A FOLD is laid out once its items are known: only its first instance needs the value that it begins with, and
    the others have prompts whose beginnings can be prefilled."""
    p = live.primitive
    if p.kind is not _K.FOLD:
        return False
    items, init = p.input("items"), p.input("init")
    if items is None or init is None:
        return False
    return live.waits == {init.producer} and items.producer != init.producer
