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
        for p in graph:
            after = pruning.edges(p)
            if after != p.after:
                edit.replace(p.with_(after=after))
        return edit.freeze()


class _Pruning:
    """Walks a graph in order; sets of primitives are bit masks over their places in it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = tuple(graph)
        self.index = {p.id: i for i, p in enumerate(self.order)}
        self.before: list[int] = []
        """Each primitive walked so far, with what it waited for, directly or not, before this pass."""
        self.now: list[int] = []
        """Each with what it waits for by the edges kept so far."""
        self.effects: dict[int, tuple[Effect, ...]] = {}

    def edges(self, p: Primitive) -> tuple[str, ...]:
        """The order edges that stay, in their old order, then those drawn directly."""
        at, before, waits = len(self.before), 0, 0
        for _, ref in p.inputs:
            i = self.index.get(ref.producer)
            if i is not None:  # otherwise an external value
                before |= self.before[i]
                waits |= self.now[i]
        kept: tuple[str, ...] = ()
        impure, effects = is_impure(p), self._effects(p)
        if p.after or impure or effects:
            own = [self.index[a] for a in p.after]
            for i in own:
                before |= self.before[i]
            always = own if impure else [i for i in own if self.order[i].kind is PrimitiveKind.PARTIAL_PREFILLING]
            for i in always:
                waits |= self.now[i]
            needed, waits = self._needed(before, waits, None if impure else effects)
            kept = tuple([a for a, i in zip(p.after, own, strict=True) if i in always or i in needed])
            kept += tuple([self.order[i].id for i in reversed(needed) if i not in own])
        self.before.append(before | 1 << at)
        self.now.append(waits | 1 << at)
        if effects:
            self.effects[at] = effects
        return kept

    def _effects(self, p: Primitive) -> tuple[Effect, ...]:
        if p.kind is PrimitiveKind.AGGREGATE and p.call == CONCAT:
            # The end of staged primitives stands for all of them.
            return p.effects + tuple(e for r in p.refs if not r.external for e in self.graph[r.producer].effects)
        return p.effects

    def _needed(self, before: int, waits: int, effects: tuple[Effect, ...] | None) -> tuple[list[int], int]:
        """What of `before` must be waited for beyond `waits`, latest first; and all that is waited for then.

        Without `effects`, everything must.
        """
        needed: list[int] = []
        for i in range(before.bit_length() - 1, -1, -1) if effects is None else reversed(self.effects):
            # Latest first: whatever a later one waits for is implied by it.
            if before >> i & 1 and not waits >> i & 1 and (effects is None or conflict(effects, self.effects[i])):
                needed.append(i)
                waits |= self.now[i]
        return needed, waits


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
