"""Tests of engines that compute in a thread: a model that hangs, that ends its process, or that refuses one item."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from teola_plugin.engines.sentence_transformers import torch_worker
from teola_plugin.engines.sentence_transformers.static_batching import StaticBatchingEngine
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Done, EmbedText, Failed, Request

K = PrimitiveKind


class Model:
    """Embeds a text as its length; does otherwise with three of them."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.hangs = threading.Event()

    def compute(self, payloads: Sequence[EmbedText]) -> Sequence[Any]:
        for payload in payloads:
            if payload.text == "hang":
                self.hangs.set()
                self.over.wait(60)
            if payload.text == "exit":
                raise SystemExit(1)
            if payload.text == "bad":
                raise ValueError("not this one")
        return [[float(len(payload.text))] for payload in payloads]

    def close(self) -> None: ...


class Lengths(StaticBatchingEngine):
    kinds = frozenset({K.EMBEDDING})
    takes = EmbedText

    def __init__(self) -> None:
        super().__init__("embedder", "lengths")
        self.loaded: list[Model] = []

    def _load(self) -> Model:
        self.loaded.append(Model())
        return self.loaded[-1]

    def _fault(self, payload: EmbedText) -> str:
        return ""

    def _sample(self, number: int) -> EmbedText:
        return EmbedText("x")

    def versions(self) -> dict[str, str]:
        return {"lengths": "1"}


async def embed(engine: Lengths, *texts: str) -> list[Done | Failed]:
    batch = [Request(text, K.EMBEDDING, EmbedText(text)) for text in texts]
    ends = {end.request_id: end async for end in engine.execute(batch)}
    return [ends[text] for text in texts]


async def test_model_that_exits_is_reloaded_on_restart() -> None:
    engine = Lengths()
    await engine.start()
    ends = await embed(engine, "exit", "good")
    assert all(isinstance(end, Failed) and isinstance(end.error, EngineUnavailable) for end in ends)
    assert "SystemExit" in str(ends[0].error) and ends[0].error.retryable  # type: ignore[union-attr]
    await engine.restart()
    assert (await embed(engine, "good"))[0] == Done("good", [4.0])
    await engine.stop()


def test_pool_survives_a_model_that_exits() -> None:
    with EnginePool.local([Lengths()]) as pool:
        with pytest.raises(EngineUnavailable, match="SystemExit"):
            pool.call(K.EMBEDDING, "embedder", [EmbedText("exit")]).result(10)
        assert pool.call(K.EMBEDDING, "embedder", [EmbedText("good")]).result(10) == [[4.0]]


async def test_engine_whose_model_hangs_stops_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_worker, "LAST_BATCH", 0.1)
    engine = Lengths()
    await engine.start()
    model = engine.loaded[0]
    try:
        hanging = asyncio.create_task(embed(engine, "hang"))
        assert await asyncio.to_thread(model.hangs.wait, 10)
        await asyncio.wait_for(engine.restart(), 20)
        [end] = await hanging
        assert isinstance(end, Failed) and isinstance(end.error, EngineUnavailable)
        assert (await embed(engine, "good"))[0] == Done("good", [4.0])
        left = [thread for thread in threading.enumerate() if thread.name == "teola-embedder"]
        assert len(left) == 2 and all(thread.daemon for thread in left), "it would keep the process from its end"
        await engine.stop()
    finally:
        model.over.set()


async def test_text_that_the_model_refuses_fails_alone() -> None:
    engine = Lengths()
    await engine.start()
    first, bad, last = await embed(engine, "a", "bad", "aaa")
    assert (first, last) == (Done("a", [1.0]), Done("aaa", [3.0]))
    assert isinstance(bad, Failed) and "not this one" in str(bad.error) and bad.error.hint
    await engine.stop()
