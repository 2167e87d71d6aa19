"""The least time each cookbook pattern can take on one's own models: its data dependencies, with what each call took.

Calls that need nothing of each other overlap, whatever their number; nothing is guessed, and no answer is read before
it is whole. What a chain's own function or branch chooses is not known before it has chosen.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.langchain.kits import Keywords, Kit


class Took:
    """Seconds of the calls of one plain run, in its order."""

    def __init__(self, kit: Kit) -> None:
        assert kit.slow is not None and isinstance(kit.keywords, Keywords) and isinstance(kit.web, Keywords)
        self.written, self.dense = list(kit.slow.took["write"]), max(kit.slow.took["embed"], default=0.0)
        self.sparse, self.web = kit.keywords.seconds, kit.web.seconds

    @property
    def sides(self) -> float:
        """All that is written but the answer, at once."""
        return max(self.written[:-1])

    @property
    def answer(self) -> float:
        return self.written[-1]


def hybrid(t: Took) -> float:
    return max(t.dense, t.sparse, t.written[0] + t.sparse) + t.answer


OWN_BOUNDS: dict[str, Callable[[Took], float]] = {
    "multi-query": lambda t: t.sides + t.dense + t.answer,
    "multi-query retriever": lambda t: t.sides + t.dense + t.answer,
    "queries times searches": lambda t: t.sides + max(t.dense, t.sparse, t.web) + t.answer,
    "RAG-fusion": lambda t: t.sides + t.dense + t.answer,
    "hybrid": hybrid,
    "ensemble": lambda t: max(t.dense, t.sparse) + t.answer,
    "merged searches": lambda t: max(t.dense, t.sparse, t.web) + t.answer,
    "extraction": lambda t: t.dense + t.sides + t.answer,
    "relevance filter": lambda t: t.dense + t.sides + t.answer,
    "map-reduce": lambda t: t.dense + t.sides + t.answer,
    "map-reduce chain": lambda t: t.dense + t.sides + t.answer,
    "aspects": lambda t: t.dense + t.sides + t.answer,
}
"""Seconds by pattern, for those with calls side by side."""
