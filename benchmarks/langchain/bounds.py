"""The least time each cookbook pattern can take on a pool: its data dependencies, written by hand (see `bound`).

Token counts are those of the pattern's own texts, roughly: a prompt's few words around its variables are left out.
What a function or a branch chooses counts as known: nothing waits for a choice but what reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from benchmarks.langchain.cookbook import ANSWER, ASKED, GRADE, PASSAGE, QUERIES, SEVERAL
from benchmarks.langchain.kits import CHUNK_TOKENS as CHUNK
from benchmarks.rag.apps import tokens_of
from benchmarks.rag.bound import Machine
from teola_plugin.graph import EngineProfile, PrimitiveKind

K = PrimitiveKind
QUESTION, FEW_SHOT = tokens_of(ASKED), 110
WEB = 18
"""A search on the web takes as long as the decoding of so many tokens, see `kits.web`."""


class Costs:
    """Seconds of a pattern's pieces on idle engines."""

    def __init__(self, profiles: dict[str, EngineProfile]) -> None:
        machine = Machine(profiles)
        self.prefill, self.rerank = machine.prefill, machine.rerank
        self.dense = machine.embed(1) + machine.search(1)
        self.sparse = machine.search(10)
        self.embed, self.ingest = machine.embed, machine.ingest
        self._decoding = profiles["llm"]

    def decode(self, tokens: int) -> float:
        return self._decoding.seconds(K.DECODING, tokens)

    def write(self, prompt: int, tokens: int) -> float:
        return self.prefill(prompt) + self.decode(tokens)

    def answer(self, late: int) -> float:
        """An answer, when all of the prompt but its last tokens has been prefilled before."""
        return self.write(late + QUESTION, ANSWER)

    def queries(self) -> list[float]:
        """When each of three questions has been written and searched with."""
        start = self.prefill(tokens_of(SEVERAL))
        return [start + self.decode(QUERIES * i // 3) + self.dense for i in (1, 2, 3)]

    def one_by_one(self, ready: list[float], tokens: int) -> Iterator[float]:
        """When each has been prefilled: one prefilling at a time."""
        return accumulate(ready, lambda before, at: max(before, at) + self.prefill(tokens), initial=0.0)


def several(c: Costs, own: int = 0) -> float:
    *_, before, _ = c.one_by_one(c.queries(), 4 * CHUNK)
    return max(before, c.queries()[-1]) + c.answer((4 + own) * CHUNK)


def decomposition(c: Costs) -> float:
    *_, last = c.one_by_one(c.queries(), 4 * CHUNK)
    return last + c.decode(ANSWER) + c.answer(3 * ANSWER)


def corrective(c: Costs) -> float:
    graded = c.dense + c.prefill(4 * (CHUNK + tokens_of(GRADE))) + c.decode(1)
    return max(graded, c.write(QUESTION, QUERIES) + c.decode(WEB)) + c.answer(2 * CHUNK)


def upload(c: Costs) -> float:
    indexed = c.embed(120) + c.ingest(120)
    return max(indexed, c.queries()[-1]) + c.rerank(12) + c.answer(3 * CHUNK)


def refine(c: Costs) -> float:
    return c.dense + c.answer(CHUNK) + 2 * c.write(ANSWER, ANSWER)


def refine_chain(c: Costs) -> float:
    """In these prompts the passage stands behind the answer so far, so none of it can be known before."""
    return c.dense + c.answer(CHUNK) + 2 * c.write(ANSWER + CHUNK, ANSWER)


BOUNDS: dict[str, Callable[[Costs], float]] = {
    "multi-query": several,
    "multi-query retriever": lambda c: several(c, own=4),
    "RAG-fusion": lambda c: c.queries()[-1] + c.answer(5 * CHUNK),
    "HyDE": lambda c: c.write(QUESTION, PASSAGE) + c.dense + c.answer(4 * CHUNK),
    "step-back": lambda c: c.write(FEW_SHOT + QUESTION, QUERIES) + c.dense + c.answer(4 * CHUNK),
    "decomposition": decomposition,
    "corrective": corrective,
    "guarded": lambda c: max(c.write(QUESTION, 1), c.dense + c.answer(4 * CHUNK)),
    "routed": lambda c: max(c.write(QUESTION, 1), c.dense) + c.answer(4 * CHUNK),
    "hybrid": lambda c: c.write(QUESTION, ANSWER) + c.sparse + c.answer(4 * CHUNK),
    "ensemble": lambda c: max(c.dense, c.sparse) + c.answer(4 * CHUNK),
    "compression": lambda c: c.dense + c.rerank(16) + c.answer(3 * CHUNK),
    "upload": upload,
    "conversational": lambda c: c.write(QUESTION, QUERIES) + c.dense + c.answer(4 * CHUNK),
    "map-reduce": lambda c: c.dense + c.write(6 * CHUNK, ANSWER) + c.answer(6 * ANSWER),
    "refine": refine,
    "refine chain": refine_chain,
    "aspects": lambda c: c.dense + c.write(3 * 2 * CHUNK, ANSWER) + c.answer(3 * ANSWER),
    "RAG with sources": lambda c: c.dense + c.answer(4 * CHUNK),
}
"""Seconds by pattern, for those with something to gain."""
