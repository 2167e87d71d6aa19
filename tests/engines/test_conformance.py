"""Every engine keeps the contract of `engines.base.Engine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from teola_plugin.engines.base import Engine
from teola_plugin.engines.conformance import EngineConformance
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.engines.payloads import (
    Chunk,
    EmbedText,
    Generate,
    IngestRow,
    Prompt,
    ScorePair,
    SearchVector,
    Warmup,
)
from teola_plugin.graph import PrimitiveKind

K = PrimitiveKind
TEXTS = ("A cat sleeps.", "Tea is brewed at low heat.", "", "Ünïcode 中文")
PAYLOADS: dict[PrimitiveKind, Sequence[Any]] = {
    K.EMBEDDING: [EmbedText(text, role) for text in TEXTS for role in ("query", "document")],
    K.RERANKING: [ScorePair("what sleeps?", text) for text in TEXTS],
    K.INGESTION: [
        IngestRow("conformance", Chunk(f"id{n}", text, {"n": n}), (1.0, float(n), 0.5)) for n, text in enumerate(TEXTS)
    ],
    # Another collection than the one that is written beside: what is found does not depend on the order.
    K.SEARCHING: [SearchVector("conformance, empty", (1.0, 2.0, float(n)), k=2) for n in range(3)],
    K.PREFILLING: [Generate(Prompt(text=f"Say something about {text}")) for text in TEXTS],
    K.PARTIAL_PREFILLING: [Warmup(Prompt(text=f"Say something about {text}")) for text in TEXTS],
}


class Conformance(EngineConformance):
    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        return PAYLOADS.get(kind, ())


class TestFakeLLM(Conformance):
    async def make(self) -> Engine:
        return FakeLLM()


class TestFakeEmbedder(Conformance):
    async def make(self) -> Engine:
        return FakeEmbedder()


class TestFakeReranker(Conformance):
    async def make(self) -> Engine:
        return FakeReranker()


class TestFakeStore(Conformance):
    async def make(self) -> Engine:
        return FakeStore()


@pytest.mark.postgres
class TestPgVector(Conformance):
    async def make(self) -> Engine:
        from teola_plugin.engines.vector_pgvector import PgVectorEngine

        return PgVectorEngine("store")


@pytest.mark.postgres
class TestPgVectorOfADsn(Conformance):
    """A server that others use too: each test makes a new engine on it."""

    @pytest.fixture(autouse=True)
    def _use(self, postgres_dsn: str) -> None:
        self.dsn = postgres_dsn

    async def make(self) -> Engine:
        from teola_plugin.engines.vector_pgvector import PgVectorEngine

        return PgVectorEngine("store", dsn=self.dsn, dimension=3, pool_size=2)

    def bad_payload(self, kind: PrimitiveKind) -> Any:
        row = IngestRow("conformance", Chunk("bad", "too long a vector"), (1.0,) * 4)
        return row if kind is K.INGESTION else SearchVector("conformance", (float("nan"),) * 3)


@pytest.mark.models
class TestEmbedding(Conformance):
    async def make(self) -> Engine:
        from teola_plugin.engines.embedding import EmbeddingEngine

        return EmbeddingEngine("embedder")


@pytest.mark.models
class TestReranking(Conformance):
    async def make(self) -> Engine:
        from teola_plugin.engines.reranking import RerankingEngine

        return RerankingEngine("reranker")
