"""Tests that every engine keeps the contract of `engines.base.Engine`."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from teola_plugin.engines import profiles
from teola_plugin.engines.base import Engine, EngineLoad
from teola_plugin.engines.conformance import EngineConformance, StoreConformance
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.errors import EngineError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import (
    Chunk,
    Done,
    EmbedText,
    Failed,
    Generate,
    IngestRow,
    Prompt,
    Request,
    Result,
    ScorePair,
    SearchVector,
    Version,
    Warmup,
)
from teola_plugin.runtime.virtual_time import run_virtual

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


class TestFakeEmbedderThatIsTold(Conformance):
    async def make(self) -> Engine:
        return FakeEmbedder(dimension=2, answer=lambda text, role: (len(text), role == "query"))


class TestFakeRerankerThatIsTold(Conformance):
    async def make(self) -> Engine:
        return FakeReranker(answer=lambda query, text: len(query) - len(text))


class TestFakeReranker(Conformance):
    async def make(self) -> Engine:
        return FakeReranker()


class TestFakeStore(Conformance, StoreConformance):
    async def make(self) -> Engine:
        return FakeStore()


@pytest.mark.postgres
class TestPgVector(Conformance):
    async def make(self) -> Engine:
        from teola_plugin.engines.pgvector import PgVectorEngine

        return PgVectorEngine("store")


@pytest.mark.postgres
class TestPgVectorOfADsn(Conformance, StoreConformance):
    """A server that others use too: each test makes a new engine on it."""

    @pytest.fixture(autouse=True)
    def _use(self, postgres_dsn: str) -> None:
        self.dsn = postgres_dsn

    async def make(self) -> Engine:
        from teola_plugin.engines.pgvector import PgVectorEngine

        return PgVectorEngine("store", dsn=self.dsn, dimension=3, pool_size=2)

    async def make_other(self) -> Engine:
        return await self.make()

    def bad_payload(self, kind: PrimitiveKind) -> Any:
        row = IngestRow("conformance", Chunk("bad", "too long a vector"), (1.0,) * 4)
        return row if kind is K.INGESTION else SearchVector("conformance", (float("nan"),) * 3)


@pytest.mark.models
class TestEmbedding(Conformance):
    async def make(self) -> Engine:
        from teola_plugin.engines.sentence_transformers import EmbeddingEngine

        return EmbeddingEngine("embedder")


@pytest.mark.models
class TestReranking(Conformance):
    async def make(self) -> Engine:
        from teola_plugin.engines.sentence_transformers import RerankingEngine

        return RerankingEngine("reranker")


# ------------------------------------------------------------ the suite finds what breaks the contract


class Broken(FakeEmbedder):
    """Breaks one rule of the contract."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.held: list[threading.Thread] = []

    async def start(self) -> None:
        await super().start()
        if self.rule == "leaves a thread":
            self.over = threading.Event()
            self.held.append(threading.Thread(target=self.over.wait, daemon=True))
            self.held[0].start()

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        bad = any(not isinstance(request.payload, EmbedText) for request in batch)
        async for result in super().execute(batch):
            if self.rule == "loses an end" and result.request_id == batch[-1].id:
                continue
            if self.rule == "fails all" and bad:
                result = Failed(result.request_id, EngineError("all of it"))
            if self.rule == "cannot be pickled" and isinstance(result, Done):
                result = replace(result, value=lambda: None)
            if self.rule == "asks to retry" and isinstance(result, Failed):
                result = Failed(result.request_id, EngineError(str(result.error), retryable=True))
            yield result
            if self.rule == "ends twice":
                yield result

    def size(self, request: Request) -> int:
        return 0 if self.rule == "has no size" else 1

    def load(self) -> EngineLoad:
        return EngineLoad(1) if self.rule == "always busy" else super().load()

    def versions(self) -> dict[str, str]:
        return {} if self.rule == "has no versions" else {"engine": "broken"}


RULES = {
    "loses an end": "test_every_request_ends_once",
    "ends twice": "test_every_request_ends_once",
    "fails all": "test_a_bad_request_fails_alone",
    "asks to retry": "test_a_bad_request_fails_alone",
    "cannot be pickled": "test_results_can_be_pickled",
    "has no size": "test_load_and_sizes",
    "always busy": "test_a_caller_may_leave_early",
    "has no versions": "test_describes_itself",
    "leaves a thread": "test_leaves_no_process_and_no_thread",
}


@pytest.mark.parametrize("rule", RULES)
def test_suite_fails_an_engine_that_breaks_a_rule(rule: str) -> None:
    made: list[Broken] = []

    class Suite(Conformance):
        async def make(self) -> Engine:
            made.append(Broken(rule))
            return made[-1]

    try:
        with pytest.raises(Exception):
            getattr(Suite(), RULES[rule])()
    finally:
        for engine in made:
            for thread in engine.held:
                engine.over.set()
                thread.join()


class BrokenStore(FakeStore):
    """Breaks one rule of versions."""

    def __init__(self, rule: str) -> None:
        super().__init__("store")
        self.rule = rule
        self.before: dict[str, Version | None] = {}

    def _version(self, collection: str) -> Version | None:
        found = super()._version(collection)
        assert found is not None
        if self.rule == "tells none":
            return None
        if self.rule == "counts batches":
            return replace(found, counter=self.batches)
        if self.rule == "counts rows":
            return replace(found, identity="same", counter=len(self._rows(collection)))
        if self.rule == "begins anew":
            return replace(found, identity="same", counter=bool(self._rows(collection)))
        return found

    def _done(self, request: Request, value: Any) -> Done:
        """Return the result with a wrong version: that of the end of a search, or of the search before."""
        end = super()._done(request, value)
        if self.rule == "tells the next version" and end.version is not None:
            return replace(end, version=self._version(request.payload.collection))
        if self.rule == "tells an old version" and end.version is not None:
            before = self.before.get(request.payload.collection, end.version)
            self.before[request.payload.collection] = end.version
            return replace(end, version=before)
        return end


VERSION_RULES = {
    "tells none": "test_a_search_tells_the_version_that_it_is_true_for",
    "tells an old version": "test_a_search_tells_the_version_that_it_is_true_for",
    "counts batches": "test_a_search_tells_the_version_that_it_is_true_for",
    "counts rows": "test_each_write_makes_another_version",
    "begins anew": "test_nothing_old_comes_again_with_a_collection_made_anew",
    "tells the next version": "test_searches_beside_writes_tell_no_version_of_other_rows",
}


@pytest.mark.parametrize("rule", VERSION_RULES)
def test_suite_fails_a_store_that_breaks_a_version_rule(rule: str) -> None:
    class Suite(Conformance, StoreConformance):
        def run(self, work: Any) -> Any:
            return run_virtual(work)

        async def make(self) -> Engine:
            store = BrokenStore(rule)
            store._profile = profiles.rtx3090()["store"]
            return store

    with pytest.raises((AssertionError, ExceptionGroup)):
        getattr(Suite(), VERSION_RULES[rule])()
