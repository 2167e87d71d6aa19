"""The fake embedder, the fake reranker, and one fake of each kind for a pool."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.fake.base import NO_FAULTS, BatchedFake, FakeEngine, Faults
from teola_plugin.engines.fake.llm import FakeLLM
from teola_plugin.engines.fake.store import FakeStore
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import EmbedText, ScorePair
from teola_plugin.requests.request import Request

Embed = Callable[[str, str], Sequence[float]]
"""(text, role: query or document) -> its vector."""
Score = Callable[[str, str], float]
"""(query, text) -> how well they go together."""


class FakeEmbedder(BatchedFake):
    """Unit vectors by hashed bag of words: texts that share words are near each other.

    `answer` gives others, of `dimension` numbers: a pure function of text and role, as equal ones are asked for once.
    """

    kinds = frozenset({PrimitiveKind.EMBEDDING})

    def __init__(
        self,
        name: str = "embedder",
        profile: EngineProfile | None = None,
        dimension: int = 32,
        answer: Embed | None = None,
        *,
        faults: Faults = NO_FAULTS,
    ) -> None:
        super().__init__(name, profile or profiles.noop()["embedder"], faults)
        self.dimension = dimension
        self._answer = answer

    def _value(self, request: Request) -> tuple[float, ...]:
        payload: EmbedText = request.payload
        if self._answer is None:
            return embed_words(payload.text, payload.role, self.dimension)
        vector = tuple(map(float, self._answer(payload.text, payload.role)))
        if len(vector) != self.dimension:
            raise ValueError(f"answer gave {len(vector)} numbers, the engine's dimension is {self.dimension}")
        return vector


AGREES = 0.6
"""Share of `own_score` that is the embedder's: see there."""


class FakeReranker(BatchedFake):
    """Scores a pair by the words it shares, in [0, 1]. `answer` gives other scores: a pure function of the pair.

    Words are what a `FakeEmbedder` goes by, too, so that the two mostly agree. Real ones do not: where that
    counts, take `own_score`.
    """

    kinds = frozenset({PrimitiveKind.RERANKING})

    def __init__(
        self,
        name: str = "reranker",
        profile: EngineProfile | None = None,
        answer: Score | None = None,
        *,
        faults: Faults = NO_FAULTS,
    ) -> None:
        super().__init__(name, profile or profiles.noop()["reranker"], faults)
        self._answer = answer

    def _value(self, request: Request) -> float:
        payload: ScorePair = request.payload
        if self._answer is not None:
            return float(self._answer(payload.query, payload.text))
        query, text = bag_of_words(payload.query), bag_of_words(payload.text)
        shared = sum(weight for word, weight in query.items() if word in text)
        return shared / math.sqrt((sum(query.values()) or 1.0) * (sum(text.values()) or 1.0))


def own_score(query: str, text: str) -> float:
    """A score in [0, 1], for a `FakeReranker` that has a mind of its own: `FakeReranker("reranker", answer=own_score)`.

    A part is the likeness that a `FakeEmbedder` sees, the rest is drawn from the pair. The part is such that the orders
    before and behind the reranker agree about as often as with MiniLM and the bundled cross-encoder: hardly ever.
    """
    alike = sum(a * b for a, b in zip(embed_words(query), embed_words(text, "document"), strict=True))
    drawn = _bits(f"{query}\0{text}") / 2**32
    return (AGREES * (alike + 1) + (1 - AGREES) * drawn) / (1 + AGREES)


def fake_engines(machine: Mapping[str, EngineProfile] | None = None, **faults: Faults) -> list[FakeEngine]:
    """One fake each of `llm`, `embedder`, `reranker` and `store`; `faults` by engine name. No latency by default."""
    found: Mapping[str, Any] = machine or profiles.noop()
    kinds: dict[str, type[Any]] = {
        "llm": FakeLLM,
        "embedder": FakeEmbedder,
        "reranker": FakeReranker,
        "store": FakeStore,
    }
    return [make(name, found[name], faults=faults.get(name, NO_FAULTS)) for name, make in kinds.items()]


@lru_cache(maxsize=4096)
def bag_of_words(text: str) -> dict[str, float]:
    """Return the distinct words of a text with their weights: longer words weigh more. Do not modify the result."""
    return {word: min(len(word), 8) / 4 for word in re.findall(r"\w+", text.lower())}


@lru_cache(maxsize=4096)
def embed_words(text: str, role: str = "query", dimension: int = 32) -> tuple[float, ...]:
    """The unit vector of a text: a pure function of role and text, the same in every process."""
    vector = [0.0] * dimension
    for word, weight in (*bag_of_words(text).items(), (f"\0{role}", 0.05)):
        bits = _bits(word)
        vector[bits % dimension] += weight if bits & 0x10000 else -weight
    norm = math.sqrt(sum(x * x for x in vector))
    return tuple(x / norm for x in vector)


@lru_cache(maxsize=65536)
def _bits(word: str) -> int:
    return zlib.crc32(word.encode())
