"""Tests that fake engines keep the engine contract with realistic latencies (test_conformance.py: without)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.base import Engine
from teola_plugin.engines.conformance import EngineConformance, StoreConformance
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, embed_words
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import (
    Chunk,
    EmbedText,
    Generate,
    IngestRow,
    Message,
    Prompt,
    Sampling,
    ScorePair,
    SearchVector,
    Warmup,
)
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind


class VirtualConformance(EngineConformance):
    """The conformance suite in virtual time, on fakes with the latencies of real engines."""

    def run(self, work: Any) -> Any:
        return run_virtual(work)


class TestFakeLLM(VirtualConformance):
    async def make(self) -> Engine:
        return FakeLLM("llm", profiles.rtx3090()["llm"])

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        prompts = [Prompt((Message("user", f"Tell me about {what}. " * 20),)) for what in ("oats", "ivy")]
        if kind in (K.PREFILLING, K.FULL_PREFILLING):
            return [Generate(prompt, Sampling(max_tokens=8)) for prompt in prompts]
        return [Warmup(prompt) for prompt in prompts] if kind is K.PARTIAL_PREFILLING else []


class TestDraftingFakeLLM(TestFakeLLM):
    async def make(self) -> Engine:
        return FakeLLM("llm", profiles.drafting(profiles.rtx3090())["llm"])


class TestFakeEmbedder(VirtualConformance):
    async def make(self) -> Engine:
        return FakeEmbedder("embedder", profiles.rtx3090()["embedder"])

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        return [EmbedText("lambs eat oats"), EmbedText("ivy on a wall"), EmbedText("lambs eat oats", "document")]


class TestFakeReranker(VirtualConformance):
    async def make(self) -> Engine:
        return FakeReranker("reranker", profiles.rtx3090()["reranker"])

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        return [ScorePair("what do lambs eat", text) for text in ("lambs eat oats", "ivy on a wall")]


class TestFakeStore(VirtualConformance, StoreConformance):
    async def make(self) -> Engine:
        return FakeStore("store", profiles.rtx3090()["store"])

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        texts = ("lambs eat oats", "ivy on a wall")
        if kind is K.INGESTION:
            return [IngestRow("docs", Chunk(text, text), embed_words(text, "document")) for text in texts]
        return [SearchVector("nothing is here", embed_words(text)) for text in texts]
