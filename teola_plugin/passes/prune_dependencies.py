"""Pass 1: remove order edges of the template that neither data nor effects require (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import IMPURE_KINDS, Effect, Graph, GraphEdit, Primitive, PrimitiveKind, conflict, is_impure
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.stage_decomposition import CONCAT

_ORDERED_KINDS = IMPURE_KINDS | {PrimitiveKind.AGGREGATE}
"""Kinds that may have effects, or must keep an order, although no field of the primitive says so."""


@dataclass(frozen=True, slots=True)
class PruneDependencies:
    """Keep an order edge only between conflicting effects, before user code, and after a partial prefilling.

    If two primitives with conflicting effects were ordered only through a third one whose edges are removed, a direct
    edge replaces them. User code waits for all that it waited for before. Values of `speculative_refs` may be dropped
    at run time, so no order is taken as implied by them.
    """

    name: ClassVar[str] = "prune-dependencies"
    once: ClassVar[bool] = True

    def run(self, graph: Graph, context: PassContext) -> Graph:
        """Remove order edges that are not required; return the same graph if all are."""
        if not any(p.after for p in graph):
            return graph
        edit = GraphEdit(graph)
        pruning = _Pruning(graph)
        for p in graph:
            if p.after or p.speculative_refs or p.effects or p.kind in _ORDERED_KINDS or p.fragment is not None:
                after = pruning.prune(p)
                if after != p.after:
                    edit.replace(p.with_(after=after))
            else:
                pruning.skip(p)
        return edit.freeze()


class _Pruning:
    """A walk over a graph in topological order. Sets of primitives are bit masks over their positions in it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = tuple(graph)
        self.ancestors: dict[str, tuple[int, int]] = {}
        """Masks of the primitive and its ancestors, by the template's edges and by those that stay."""
        self.effects: dict[int, tuple[Effect, ...]] = {}
        self.effectful = 0

    def skip(self, p: Primitive) -> None:
        """Walk past a primitive that has data edges only, which all stay."""
        template_mask = pruned_mask = 1 << len(self.ancestors)
        for name in self.graph.parents(p.id):
            template, pruned = self.ancestors[name]
            template_mask |= template
            pruned_mask |= pruned
        self.ancestors[p.id] = template_mask, pruned_mask

    def prune(self, p: Primitive) -> tuple[str, ...]:
        """Walk past `p` and return its new order edges: those that stay, in their old order, then the direct ones."""
        position, template_mask, pruned_mask = len(self.ancestors), 0, 0
        for _, ref in p.inputs:
            masks = self.ancestors.get(ref.producer)
            if masks is not None:  # otherwise an external value
                template_mask |= masks[0]
                pruned_mask |= masks[1]
        after: tuple[str, ...] = ()
        impure, effects = is_impure(p), self._effects(p)
        if p.after or impure or effects:
            for name in p.after:
                template_mask |= self.ancestors[name][0]
            partial = PrimitiveKind.PARTIAL_PREFILLING
            always = p.after if impure else [name for name in p.after if self.graph[name].kind is partial]
            for name in always:
                pruned_mask |= self.ancestors[name][1]
            required, pruned_mask = self._required(template_mask, pruned_mask, None if impure else effects)
            names = [self.order[i].id for i in required]
            after = tuple([name for name in p.after if name in always or name in names])
            after += tuple([name for name in reversed(names) if name not in p.after])
        self.ancestors[p.id] = template_mask | 1 << position, pruned_mask | 1 << position
        if effects:
            self.effects[position] = effects
            self.effectful |= 1 << position
        return after

    def _effects(self, p: Primitive) -> tuple[Effect, ...]:
        """Return the effects of a primitive; those of all stages for the AGGREGATE that joins stages."""
        if p.kind is PrimitiveKind.AGGREGATE and p.call == CONCAT:
            # The AGGREGATE behind stages has the effects of all stages; a stage may be an AGGREGATE of stages itself.
            staged = [self.graph[r.producer] for r in p.refs if not r.external]
            return p.effects + tuple(e for q in staged for e in self._effects(q))
        return p.effects

    def _required(
        self, template_mask: int, pruned_mask: int, effects: tuple[Effect, ...] | None
    ) -> tuple[list[int], int]:
        """Return the order edges that a primitive needs beyond its pruned ancestors.

        Args:
            template_mask: Ancestors with the template's edges.
            pruned_mask: Ancestors with the edges that stay in any case.
            effects: Effects of the primitive; None if it must wait for all of `template_mask`.

        Returns:
            Positions of the primitives to wait for, latest first, and `pruned_mask` with their ancestors added.
        """
        required: list[int] = []
        missing = template_mask & ~pruned_mask
        if effects is not None:
            missing &= self.effectful
        while missing:
            latest = missing.bit_length() - 1  # an edge to the latest one implies edges to its ancestors
            missing ^= 1 << latest
            if effects is None or conflict(effects, self.effects[latest]):
                required.append(latest)
                pruned_mask |= self.ancestors[self.order[latest].id][1]
                missing &= ~pruned_mask
        return required, pruned_mask
