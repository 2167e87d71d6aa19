"""The fake embedder, reranker, web search and tools, and one fake of each kind for a pool."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.fake.base import NO_FAULTS, BatchedFake, FakeEngine, Faults
from teola_plugin.engines.fake.llm import FakeLLM
from teola_plugin.engines.fake.store import FakeStore
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import CallTool, Chunk, EmbedText, Hit, Request, ScorePair, SearchText

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
        """Return the vector of a text. Raise ValueError if `answer` gives another number of dimensions."""
        payload: EmbedText = request.payload
        if self._answer is None:
            return embed_words(payload.text, payload.role, self.dimension)
        vector = tuple(map(float, self._answer(payload.text, payload.role)))
        if len(vector) != self.dimension:
            raise ValueError(f"answer gave {len(vector)} numbers, the engine's dimension is {self.dimension}")
        return vector


AGREES = 0.6
"""Share of the embedder's similarity in `own_score`."""


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
        """Return the score of a query and a text, by default the weight of their common words over their lengths."""
        payload: ScorePair = request.payload
        if self._answer is not None:
            return float(self._answer(payload.query, payload.text))
        query, text = bag_of_words(payload.query), bag_of_words(payload.text)
        shared = sum(weight for word, weight in query.items() if word in text)
        return shared / math.sqrt((sum(query.values()) or 1.0) * (sum(text.values()) or 1.0))


def own_score(query: str, text: str) -> float:
    """Return a score in [0, 1] that differs from the embedder's order: `FakeReranker("reranker", answer=own_score)`.

    A part is the similarity of a `FakeEmbedder`, the rest is drawn from the pair. The orders before and after the
    reranker agree about as often as with MiniLM and the bundled cross-encoder: hardly ever.
    """
    similarity = sum(a * b for a, b in zip(embed_words(query), embed_words(text, "document"), strict=True))
    drawn = _bits(f"{query}\0{text}") / 2**32
    return (AGREES * (similarity + 1) + (1 - AGREES) * drawn) / (1 + AGREES)


def fake_engines(machine: Mapping[str, EngineProfile] | None = None, **faults: Faults) -> list[FakeEngine]:
    """Return one fake each of `llm`, `embedder`, `reranker` and `store`, by default without latency.

    `faults`: faults by engine name.
    """
    profiles_by_name: Mapping[str, Any] = machine or profiles.noop()
    kinds: dict[str, type[Any]] = {
        "llm": FakeLLM,
        "embedder": FakeEmbedder,
        "reranker": FakeReranker,
        "store": FakeStore,
    }
    return [make(name, profiles_by_name[name], faults=faults.get(name, NO_FAULTS)) for name, make in kinds.items()]


@lru_cache(maxsize=4096)
def bag_of_words(text: str) -> dict[str, float]:
    """Return the distinct words of a text with their weights: longer words weigh more. Do not modify the result."""
    return {word: min(len(word), 8) / 4 for word in re.findall(r"\w+", text.lower())}


@lru_cache(maxsize=4096)
def embed_words(text: str, role: str = "query", dimension: int = 32) -> tuple[float, ...]:
    """Return the unit vector of a text: a pure function of role and text, the same in every process."""
    vector = [0.0] * dimension
    for word, weight in (*bag_of_words(text).items(), (f"\0{role}", 0.05)):
        bits = _bits(word)
        vector[bits % dimension] += weight if bits & 0x10000 else -weight
    norm = math.sqrt(sum(x * x for x in vector))
    return tuple(x / norm for x in vector)


@lru_cache(maxsize=65536)
def _bits(word: str) -> int:
    return zlib.crc32(word.encode())


SearchAnswer = Callable[[str, int], Iterable[Hit]]
"""(query, k) -> hits, best first."""


class FakeWebSearch(BatchedFake):
    """Finds the documents that share words with the query, in the order of those words' weights.

    `documents` are texts or chunks. `answer` gives other hits: a pure function of query and k. The default profile
    takes no time; see `profiles.web_search`.
    """

    kinds = frozenset({PrimitiveKind.SEARCHING})

    def __init__(
        self,
        name: str = "web",
        profile: EngineProfile | None = None,
        documents: Iterable[str | Chunk] = (),
        answer: SearchAnswer | None = None,
        *,
        faults: Faults = NO_FAULTS,
    ) -> None:
        super().__init__(name, profile or profiles.web_search(0.0), faults)
        self._documents = [
            one if isinstance(one, Chunk) else Chunk(f"text:{n}", one) for n, one in enumerate(documents)
        ]
        self._answer = answer

    def _value(self, request: Request) -> tuple[Hit, ...]:
        """Return the best `k` hits for a query. Raise TypeError for a payload other than `SearchText`."""
        payload = request.payload
        if not isinstance(payload, SearchText):
            raise TypeError(f"it searches by SearchText, not {type(payload).__name__}")
        if self._answer is not None:
            return tuple(self._answer(payload.query, payload.k))[: payload.k]
        scored = [(_shared(payload.query, chunk.text), chunk) for chunk in self._documents]
        best = sorted((one for one in scored if one[0]), key=lambda one: -one[0])[: payload.k]
        return tuple(
            Hit(chunk.id, chunk.text, {"source": chunk.id, "title": "", **chunk.metadata}, score)
            for score, chunk in best
        )


class FakeTools(BatchedFake):
    """Functions that are called when their time in the profile is over. `read_only` names those that change nothing."""

    kinds = frozenset({PrimitiveKind.TOOL})

    def __init__(
        self,
        name: str = "tools",
        tools: Mapping[str, Callable[..., Any]] | None = None,
        profile: EngineProfile | None = None,
        *,
        faults: Faults = NO_FAULTS,
    ) -> None:
        super().__init__(name, profile or profiles.tools(0.0), faults)
        self._tools = dict(tools or {})

    def _value(self, request: Request) -> CallTool:
        """Return the call itself: the function runs when the batch ends. Raise ValueError if there is no such tool."""
        payload = request.payload
        if not isinstance(payload, CallTool) or payload.tool not in self._tools:
            raise ValueError(f"{payload!r} is no call of {', '.join(self._tools)}")
        return payload

    def _commit(self, request: Request, value: CallTool) -> Any:
        return self._tools[value.tool](**value.arguments)


def _shared(query: str, text: str) -> float:
    query_words, text_words = bag_of_words(query), bag_of_words(text)
    return sum(weight for word, weight in query_words.items() if word in text_words) / math.sqrt(len(text_words) or 1)
