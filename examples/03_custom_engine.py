"""An engine of your own: a reranker that counts shared words. The conformance suite says whether it is right.

    python examples/03_custom_engine.py

prints the suite's report, then the engine at work::

    ..........s.....                                                         [100%]
    ...
    1.00  lambs eat oats
    0.33  horses eat hay
"""

from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from teola_plugin import EngineError, EnginePool
from teola_plugin.engines.base import Done, Engine, EngineLoad, Failed, Request, Result
from teola_plugin.engines.conformance import EngineConformance
from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import ScorePair


class WordOverlap:
    """Scores a text by the share of the query's words that it holds."""

    kinds = frozenset({PrimitiveKind.RERANKING})
    profile = EngineProfile({PrimitiveKind.RERANKING: Curve.linear(0.0, 1e-5)})

    def __init__(self, name: str = "reranker") -> None:
        self.name = name
        self._running = False

    async def start(self) -> None:
        self._running = True

    async def stop(self) -> None:
        self._running = False

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            if self._running and request.kind in self.kinds and isinstance(request.payload, ScorePair):
                words = set(request.payload.query.split())
                yield Done(request.id, len(words & set(request.payload.text.split())) / max(1, len(words)))
            else:
                yield Failed(request.id, EngineError(f"{self.name} cannot do {request.id}.", engine=self.name))

    async def cancel(self, request_id: str) -> None:
        """Nothing waits here."""

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def reset(self) -> None:
        """Nothing is remembered."""

    def versions(self) -> Mapping[str, str]:
        return {"word overlap": "1"}


class TestWordOverlap(EngineConformance):
    async def make(self) -> Engine:
        return WordOverlap()

    def payloads(self, kind: PrimitiveKind) -> Sequence[ScorePair]:
        return [ScorePair("what lambs eat", text) for text in ("lambs eat oats", "ivy on a wall")]


if __name__ == "__main__":
    status = pytest.main([__file__, "-q", "-p", "no:cacheprovider"])
    with EnginePool.local([WordOverlap()]) as pool:
        texts = ["lambs eat oats", "horses eat hay"]
        pairs = [ScorePair("lambs eat oats", text) for text in texts]
        for text, score in zip(texts, pool.call(PrimitiveKind.RERANKING, "reranker", pairs).result(), strict=True):
            print(f"{score:.2f}  {text}")
    raise SystemExit(status)
