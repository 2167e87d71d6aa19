"""Prompts that grow with a list: how a prompt follows from the outputs of a MAP, by pure calls alone."""

from __future__ import annotations

from dataclasses import dataclass

from teola_plugin.graph.graph import Graph
from teola_plugin.graph.kinds import PrimitiveKind
from teola_plugin.graph.primitive import Primitive

GROWS_WITH = "grows_with"
"""Option of a prefilling: the id of a MAP. While its list is being made, the prompt so far may be prefilled."""


@dataclass(frozen=True, slots=True)
class Growth:
    """`variable` of the prompt of `prefilling` is what `calls`, in this order, make of the outputs of `holder`."""

    holder: str
    prefilling: Primitive
    calls: tuple[Primitive, ...]
    variable: str
    end: int
    """Parts of the prompt up to the variable, with it."""


def growths(graph: Graph) -> tuple[Growth, ...]:
    """Of all prefillings that say what they grow with."""
    marked = ((p, p.option(GROWS_WITH)) for p in graph if p.leads_group)
    found = (growth(graph, p, holder) for p, holder in marked if holder is not None)
    return tuple(one for one in found if one is not None)


def growth(graph: Graph, p: Primitive, holder: str) -> Growth | None:
    """How the prompt of `p` grows with the MAP `holder`; None where more than pure calls lies between the two."""
    below = graph.bits[holder]
    refs = dict(p.inputs)
    for place, part in enumerate(p.prompt):
        ref = refs.get(part.variable)
        if ref is None or ref.external or not (graph.above[ref.producer] | graph.bits[ref.producer]) & below:
            continue
        wanted = graph.above[ref.producer] | graph.bits[ref.producer]
        calls = tuple([q for q in graph if graph.bits[q.id] & wanted and graph.above[q.id] & below])
        if not calls or any(q.kind is not PrimitiveKind.CALL or q.tentative for q in calls):
            return None  # without a call, it is a list, and that grows at no end of a text
        return Growth(holder, p, calls, part.variable, place + 1)
    return None
