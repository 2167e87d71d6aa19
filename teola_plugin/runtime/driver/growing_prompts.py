"""Prompts of a live query that may grow with a list, and how far each is known (see `incremental_prefilling`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from teola_plugin.graph import INPUT, Graph, Growth, InstancePath, Ref, growths


@dataclass(slots=True, eq=False)
class GrowingPrompt:
    """A prompt of a live query."""

    growth: Growth
    plan: Growth
    """The same as the plan has it: what one query shows of it holds for others."""
    seen: int = 0
    """Outputs of the list that the latest text is made of."""
    ready: int = 0
    """Outputs that were there when it was looked at last, of this list:"""
    outputs: list[Ref] = field(default_factory=list)
    whole: str | None = None
    """That text; of no outputs at first."""
    text: str = ""
    """How the prompt will begin, as far as it can be guessed from the texts so far."""
    over: bool = False
    looking: bool = False
    """Whether the client's code is making the next text."""
    warmup: str = ""
    """The primitive that is prefilling what was known last; empty when there is none under way."""
    warmups: int = 0


_known: WeakKeyDictionary[Graph, tuple[Growth, ...]] = WeakKeyDictionary()


def growing_prompts(graph: Graph, part: str = "", given: str = INPUT) -> list[GrowingPrompt]:
    """The prompts of a query with this e-graph that may grow, or of a part with this name, whose input is `given`."""
    found = _known.get(graph)
    if found is None:
        found = _known[graph] = growths(graph)
    if not part or not found:
        return [GrowingPrompt(one, one) for one in found]
    names = {p.id: InstancePath(part).child(p.id) for p in graph}
    return [GrowingPrompt(one.renamed(names, {INPUT: Ref(given)}), one) for one in found]
