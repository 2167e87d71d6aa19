"""Pass 1: drop the order edges of the template that neither data nor effects ask for (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import IMPURE_KINDS, Effect, Graph, GraphEdit, Primitive, PrimitiveKind
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.stage_decomposition import CONCAT


@dataclass(frozen=True, slots=True)
class PruneDependencies:
    """Keeps an order edge only where two effects conflict, in front of user code, or behind a partial prefilling.

    What the template ordered through a primitive whose own edges go stays ordered: the edge is drawn directly.
    User code waits for everything it waited for before. `early` values may be dropped at run time, so nothing is
    taken as implied by them.
    """

    name: ClassVar[str] = "prune-dependencies"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        if not any(p.after for p in graph):
            return graph
        edit = GraphEdit(graph)
        pruning = _Pruning(graph)
        for index, p in enumerate(pruning.order):
            after = pruning.edges(index, p)
            if after != p.after:
                edit.replace(p.with_(after=after))
        return edit.freeze()


class _Pruning:
    """Walks a graph in order; sets of primitives are bit masks over their places in it."""

    def __init__(self, graph: Graph) -> None:
        self.order = tuple(graph)
        self.index = {p.id: i for i, p in enumerate(self.order)}
        self.before: list[int] = []
        """What each primitive waited for, directly or not, before this pass."""
        self.now: list[int] = []
        """What it waits for with the edges kept so far."""
        self.effects = {i: found for i, p in enumerate(self.order) if (found := self._effects(p, graph))}

    @staticmethod
    def _effects(p: Primitive, graph: Graph) -> tuple[Effect, ...]:
        if p.kind is PrimitiveKind.AGGREGATE and p.call == CONCAT:
            # The end of staged primitives stands for all of them.
            return p.effects + tuple(e for r in p.refs if not r.external for e in graph[r.producer].effects)
        return p.effects

    def edges(self, at: int, p: Primitive) -> tuple[str, ...]:
        """The order edges that stay, in their old order, then those drawn directly."""
        index, before, waits = self.index, 0, 0
        for _, ref in p.inputs:
            i = index.get(ref.producer, -1)
            if i >= 0:  # otherwise an external value
                before |= self.before[i] | 1 << i
                waits |= self.now[i] | 1 << i
        impure = is_impure(p)
        if not p.after and not impure and at not in self.effects:
            self.before.append(before)
            self.now.append(waits)
            return ()
        own = [index[a] for a in p.after]
        self.before.append(before | _closure(own, self.before))
        kept: set[int] = set()
        for i in own:
            if impure or self.order[i].kind is PrimitiveKind.PARTIAL_PREFILLING:
                kept.add(i)
                waits |= self.now[i] | 1 << i
        for i in self._needed(at, impure):
            # Latest first: whatever a later one waits for is implied by it.
            if not waits >> i & 1:
                kept.add(i)
                waits |= self.now[i] | 1 << i
        self.now.append(waits)
        if not kept:
            return ()
        direct = sorted(kept.difference(own))
        return (*(a for a, i in zip(p.after, own, strict=True) if i in kept), *(self.order[i].id for i in direct))

    def _needed(self, at: int, impure: bool) -> list[int]:
        before = self.before[at]
        if impure:
            return [i for i in range(at - 1, -1, -1) if before >> i & 1]
        mine = self.effects.get(at)
        if not mine:
            return []
        others = [i for i in self.effects if i < at and before >> i & 1]
        return [i for i in reversed(others) if conflict(mine, self.effects[i])]


def _closure(direct: list[int], above: list[int]) -> int:
    mask = 0
    for i in direct:
        mask |= above[i] | 1 << i
    return mask


def conflict(mine: tuple[Effect, ...], others: tuple[Effect, ...]) -> bool:
    """Whether any two of the effects must keep their order."""
    return any(a.conflicts(b) for a in mine for b in others)


def is_impure(p: Primitive) -> bool:
    """User code, or a holder whose instances run user code."""
    if p.kind in IMPURE_KINDS:
        return True
    if p.fragment is None:
        return False
    return any(is_impure(inner) for f in (p.fragment, p.otherwise) if f is not None for inner in f.graph)
