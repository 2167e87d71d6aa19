"""Pass 1: drop the order edges of the template that neither data nor effects ask for (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import IMPURE_KINDS, Effect, Graph, GraphEdit, Primitive, PrimitiveKind, conflict, is_impure
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.stage_decomposition import CONCAT

_NOTED = IMPURE_KINDS | {PrimitiveKind.AGGREGATE}
"""Kinds that may bring effects or keep an order without saying so in a field."""


@dataclass(frozen=True, slots=True)
class PruneDependencies:
    """Keeps an order edge only where two effects conflict, in front of user code, or behind a partial prefilling.

    What the template ordered through a primitive whose own edges go stays ordered: the edge is drawn directly.
    User code waits for everything it waited for before. `early` values may be dropped at run time, so nothing is
    taken as implied by them.
    """

    name: ClassVar[str] = "prune-dependencies"
    once: ClassVar[bool] = True

    def run(self, graph: Graph, context: PassContext) -> Graph:
        if not any(p.after for p in graph):
            return graph
        edit = GraphEdit(graph)
        pruning = _Pruning(graph)
        for p in graph:
            if p.after or p.early or p.effects or p.kind in _NOTED or p.fragment is not None:
                after = pruning.edges(p)
                if after != p.after:
                    edit.replace(p.with_(after=after))
            else:
                pruning.follow(p)
        return edit.freeze()


class _Pruning:
    """Walks a graph in order; sets of primitives are bit masks over their places in it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = tuple(graph)
        self.walked: dict[str, tuple[int, int]] = {}
        """Each primitive so far, with all that it waited for before this pass, and with the edges kept so far."""
        self.effects: dict[int, tuple[Effect, ...]] = {}
        self.effectful = 0

    def follow(self, p: Primitive) -> None:
        """A primitive with data edges only, which all stay."""
        before = waits = 1 << len(self.walked)
        for name in self.graph.parents(p.id):
            was, now = self.walked[name]
            before |= was
            waits |= now
        self.walked[p.id] = before, waits

    def edges(self, p: Primitive) -> tuple[str, ...]:
        """The order edges that stay, in their old order, then those drawn directly."""
        at, before, waits = len(self.walked), 0, 0
        for _, ref in p.inputs:
            found = self.walked.get(ref.producer)
            if found is not None:  # otherwise an external value
                before |= found[0]
                waits |= found[1]
        kept: tuple[str, ...] = ()
        impure, effects = is_impure(p), self._effects(p)
        if p.after or impure or effects:
            for name in p.after:
                before |= self.walked[name][0]
            partial = PrimitiveKind.PARTIAL_PREFILLING
            always = p.after if impure else [name for name in p.after if self.graph[name].kind is partial]
            for name in always:
                waits |= self.walked[name][1]
            needed, waits = self._needed(before, waits, None if impure else effects)
            drawn = [self.order[i].id for i in needed]
            kept = tuple([name for name in p.after if name in always or name in drawn])
            kept += tuple([name for name in reversed(drawn) if name not in p.after])
        self.walked[p.id] = before | 1 << at, waits | 1 << at
        if effects:
            self.effects[at] = effects
            self.effectful |= 1 << at
        return kept

    def _effects(self, p: Primitive) -> tuple[Effect, ...]:
        if p.kind is PrimitiveKind.AGGREGATE and p.call == CONCAT:
            # The end of staged primitives stands for all of them, and a stage may have stages.
            staged = [self.graph[r.producer] for r in p.refs if not r.external]
            return p.effects + tuple(e for q in staged for e in self._effects(q))
        return p.effects

    def _needed(self, before: int, waits: int, effects: tuple[Effect, ...] | None) -> tuple[list[int], int]:
        """What of `before` must be waited for beyond `waits`, latest first; and all that is waited for then.

        Without `effects`, everything must.
        """
        needed: list[int] = []
        missing = before & ~waits
        if effects is not None:
            missing &= self.effectful
        while missing:
            latest = missing.bit_length() - 1  # whatever a later one waits for is implied by it
            missing ^= 1 << latest
            if effects is None or conflict(effects, self.effects[latest]):
                needed.append(latest)
                waits |= self.walked[self.order[latest].id][1]
                missing &= ~waits
        return needed, waits
