"""Prompts that grow with a list: how a prompt follows from the outputs of a MAP, by pure calls alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from teola_plugin.graph.graph import Graph
from teola_plugin.graph.kinds import PrimitiveKind
from teola_plugin.graph.primitive import Primitive
from teola_plugin.graph.refs import Ref


@dataclass(frozen=True, slots=True)
class Growth:
    """`variable` of the prompt of `prefilling` is what `calls`, in this order, make of the outputs of `holder`."""

    holder: str
    prefilling: Primitive
    calls: tuple[Primitive, ...]
    variable: str
    end: int
    """Parts of the prompt up to the variable, with it."""

    def renamed(self, names: Mapping[str, str], bind: Mapping[str, Ref]) -> Growth:
        """In a part of a query; `names` are those of its primitives there, `bind` has what it is given."""
        prefilling, *calls = (p.rename(dict(names), dict(bind)) for p in (self.prefilling, *self.calls))
        return Growth(names[self.holder], prefilling, tuple(calls), self.variable, self.end)


def growths(graph: Graph) -> tuple[Growth, ...]:
    """Of all prefillings that say what they grow with."""
    marked = ((p, p.attributes.grows_with) for p in graph if p.prefills)
    found = (growth(graph, p, holder) for p, holder in marked if holder)
    made = tuple(one for one in found if one is not None)
    graph.forget_ancestors()
    return made


def growth(graph: Graph, p: Primitive, holder: str) -> Growth | None:
    """How the prompt of `p` grows with the MAP `holder`; None where more than pure calls lies between the two."""
    refs = dict(p.inputs)
    if not any(_by_calls(graph, ref.producer, holder) for ref in refs.values()):
        return None  # which most are, and the rest takes longer
    bits, above = graph.bits, graph.above
    below = bits[holder]
    for place, part in enumerate(p.prompt):
        ref = refs.get(part.variable)
        if ref is None or ref.external or not (above[ref.producer] | bits[ref.producer]) & below:
            continue
        calls = _calls(graph, holder, ref.producer)
        return Growth(holder, p, calls, part.variable, place + 1) if calls else None
    return None


def _by_calls(graph: Graph, name: str, holder: str) -> bool:
    """Whether a way of calls alone leads from the holder to `name`."""
    p = graph.get(name)
    if p is None or p.kind is not PrimitiveKind.CALL:
        return False
    return any(ref.producer == holder or _by_calls(graph, ref.producer, holder) for _, ref in p.inputs)


def _calls(graph: Graph, holder: str, last: str) -> tuple[Primitive, ...]:
    """What lies between the two, with the last; nothing where it is more than calls, or the list itself."""
    if graph[last].kind is not PrimitiveKind.CALL:
        return ()
    below, wanted = graph.bits[holder], graph.above[last] | graph.bits[last]
    found = []
    for q in graph:
        if graph.above[q.id] & below and graph.bits[q.id] & wanted:
            if q.kind is not PrimitiveKind.CALL or q.tentative:
                return ()
            found.append(q)
    return tuple(found)
