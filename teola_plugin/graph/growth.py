"""Prompts that grow with a list: a prompt that is computed from the outputs of a MAP by pure calls alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from teola_plugin.graph.graph import Graph
from teola_plugin.graph.primitive import Primitive, PrimitiveKind
from teola_plugin.graph.refs import Ref


@dataclass(frozen=True, slots=True)
class Growth:
    """A prompt variable of `prefilling` that `calls`, in this order, compute from the outputs of the MAP `holder`."""

    holder: str
    prefilling: Primitive
    calls: tuple[Primitive, ...]
    variable: str
    end: int
    """Number of parts of the prompt up to the variable, which is included."""

    def renamed(self, names: Mapping[str, str], bind: Mapping[str, Ref]) -> Growth:
        """Return the same for a subplan: with `names` for its ids, and `bind` for its external references."""
        prefilling, *calls = (p.rename(dict(names), dict(bind)) for p in (self.prefilling, *self.calls))
        return Growth(names[self.holder], prefilling, tuple(calls), self.variable, self.end)


def growths(graph: Graph) -> tuple[Growth, ...]:
    """Return the growths of all prefillings that are marked to grow with a MAP.

    Prefillings whose mark does not fit the graph are left out. The graph's cached ancestors are dropped at the end.
    """
    marked = [(p, p.attributes.grows_with) for p in graph if p.prefills and p.attributes.grows_with]
    candidates = [growth(graph, p, holder) for p, holder in marked]
    graph.forget_ancestors()
    return tuple(candidate for candidate in candidates if candidate is not None)


def growth(graph: Graph, p: Primitive, holder: str) -> Growth | None:
    """Return how the prompt of `p` grows with the MAP `holder`; None if more than pure calls lie between them."""
    refs = dict(p.inputs)
    if not any(_is_reached_by_calls(graph, ref.producer, holder) for ref in refs.values()):
        return None  # true of most prompts, and quicker to check than what follows
    bits, ancestors = graph.bits, graph.ancestor_masks
    for position, part in enumerate(p.prompt):
        ref = refs.get(part.variable)
        if ref is None or ref.external or not (ancestors[ref.producer] | bits[ref.producer]) & bits[holder]:
            continue
        calls = _calls_between(graph, holder, ref.producer)
        return Growth(holder, p, calls, part.variable, position + 1) if calls else None
    return None


def _is_reached_by_calls(graph: Graph, name: str, holder: str) -> bool:
    """Return True if a path of CALL primitives alone leads from `holder` to `name`, which is one itself."""
    p = graph.get(name)
    if p is None or p.kind is not PrimitiveKind.CALL:
        return False
    return any(ref.producer == holder or _is_reached_by_calls(graph, ref.producer, holder) for _, ref in p.inputs)


def _calls_between(graph: Graph, holder: str, last: str) -> tuple[Primitive, ...]:
    """Return the primitives between the two, `last` included; () if one of them is not a CALL."""
    if graph[last].kind is not PrimitiveKind.CALL:
        return ()
    ancestors = graph.ancestor_masks
    until_last = ancestors[last] | graph.bits[last]
    calls = [q for q in graph if ancestors[q.id] & graph.bits[holder] and graph.bits[q.id] & until_last]
    if any(q.kind is not PrimitiveKind.CALL or q.speculative for q in calls):
        return ()
    return tuple(calls)
