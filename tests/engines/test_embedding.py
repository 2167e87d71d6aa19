"""The embedding engine on the packaged MiniLM."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path

import pytest

from teola_plugin.engines.conformance import EngineConformance
from teola_plugin.engines.devices.assignment import parse_cores
from teola_plugin.engines.sentence_transformers.embedding import EmbeddingEngine, packaged_minilm
from teola_plugin.engines.sentence_transformers.static_batching import text_size
from teola_plugin.engines.sentence_transformers.torch_worker import TorchWorker
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, EmbedText, Failed, Request, ScorePair

pytestmark = pytest.mark.models
np = pytest.importorskip("numpy")

SENTENCE = "the value of an object is set when its class was made and read by a method name ünï 中文"


def texts(count: int) -> list[str]:
    """Return texts of 1 to 200 words, so that batches are padded."""
    draw, words = random.Random(count), SENTENCE.split()
    return [" ".join(draw.choice(words) for _ in range(draw.choice((1, 5, 30, 200)))) for _ in range(count)]


def request(number: int, payload: object) -> Request:
    return Request(f"embed-{number}", PrimitiveKind.EMBEDDING, payload)


async def embed(engine: EmbeddingEngine, payloads: list[object]) -> list[Done | Failed]:
    ends = {end.request_id: end async for end in engine.execute([request(i, p) for i, p in enumerate(payloads)])}
    return [ends[f"embed-{i}"] for i in range(len(payloads))]


@pytest.fixture
async def engine():
    engine = EmbeddingEngine(cores="0")
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(autouse=True, scope="module")
def tqdm_thread() -> None:
    """Start tqdm's thread, which stays for the whole process and is not the engine's to stop."""
    from tqdm.autonotebook import trange

    trange(0, disable=True)


class TestEmbeddingEngine(EngineConformance):
    async def make(self):
        return EmbeddingEngine("minilm", cores="0")

    def payloads(self, kind):
        return [EmbedText("short"), EmbedText("long " * 150, "document"), EmbedText(""), EmbedText("Größe 中文")]

    def bad_payload(self, kind):
        return EmbedText("\ud800")  # only the tokenizer finds out, with the whole batch in its hands


@pytest.mark.parametrize("bad", [EmbedText(5), EmbedText("x", "answer"), EmbedText("\ud800"), "bare", None], ids=repr)
async def test_bad_text_fails_alone(engine, bad):
    *good, failed = await embed(engine, [*map(EmbedText, texts(9)), bad])
    assert all(isinstance(end, Done) for end in good)
    assert isinstance(failed, Failed) and not failed.error.retryable and failed.error.engine == engine.name


async def test_large_mixed_batch_equals_sentence_transformers(engine):
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(packaged_minilm(), device="cpu")
    given = texts(40)
    ends = await embed(engine, [EmbedText(text, ("query", "document")[i % 2]) for i, text in enumerate(given)])
    for end, text in zip(ends, given, strict=True):
        assert end.value.dtype == np.float32 and end.value.shape == (384,)
        np.testing.assert_allclose(end.value, plain.encode(text, show_progress_bar=False), atol=1e-5)


async def test_prompts_are_added_by_role():
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(packaged_minilm(), device="cpu")
    engine = EmbeddingEngine(cores="0", prompts={"query": "query: ", "document": "passage: "})
    await engine.start()
    document, query, again = await embed(engine, [EmbedText("tea", "document"), EmbedText("tea"), EmbedText("tea")])
    await engine.stop()
    np.testing.assert_allclose(query.value, plain.encode("query: tea", show_progress_bar=False), atol=1e-5)
    np.testing.assert_allclose(document.value, plain.encode("passage: tea", show_progress_bar=False), atol=1e-5)
    np.testing.assert_allclose(again.value, query.value, atol=1e-6)


async def test_event_loop_stays_responsive_while_model_computes(engine):
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await embed(engine, [EmbedText(text) for text in texts(40)])
    counting.cancel()
    assert turns > 100


async def test_cancel_ends_a_request_before_its_batch_is_computed(engine):
    batch = [request(i, EmbedText(text)) for i, text in enumerate(texts(40))]
    results = engine.execute(batch)
    first = asyncio.create_task(anext(results))
    await asyncio.sleep(0)
    await engine.cancel("embed-7")
    assert isinstance(await first, Failed) and first.result().request_id == "embed-7"
    rest = [result async for result in results]
    assert len(rest) == 39 and all(isinstance(result, Done) for result in rest)


async def test_stop_fails_requests_in_flight():
    engine = EmbeddingEngine(cores="0")
    await engine.start()
    running = asyncio.create_task(embed(engine, [EmbedText(text) for text in texts(40)]))
    await asyncio.sleep(0)
    await engine.stop()
    assert all(isinstance(end.error, EngineUnavailable) and end.error.retryable for end in await running)


async def test_request_id_already_in_flight_is_refused(engine):
    results = [result async for result in engine.execute([request(1, EmbedText("a")), request(1, EmbedText("b"))])]
    assert sorted(type(result).__name__ for result in results) == ["Done", "Failed"]


async def test_missing_model_raises_with_its_path(tmp_path: Path):
    engine = EmbeddingEngine("lost", tmp_path / "nowhere", options={"local_files_only": True})
    with pytest.raises(EngineUnavailable, match="nowhere") as caught:
        await engine.start()
    assert caught.value.engine == "lost"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("teola-lost")]


async def test_measure_fills_the_profile(engine):
    profile = await engine.measure(budget=0.4)
    points = profile.curves[PrimitiveKind.EMBEDDING].points
    assert engine.profile is profile and points[0][0] == 1
    assert 4 <= profile.max_efficient_batch <= 256
    assert profile.device == "cpu:0"
    again = EmbeddingEngine(cores="0")
    again.adopt(profile)
    assert again.profile == profile


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
async def test_core_pinning_is_limited_to_its_thread():
    import torch

    before, mask = torch.get_num_threads(), os.sched_getaffinity(0)
    worker = TorchWorker("pinned", (0,))
    assert await worker.run(lambda: (os.sched_getaffinity(0), torch.get_num_threads())) == ({0}, 1)
    assert os.sched_getaffinity(0) == mask and torch.get_num_threads() == before
    assert await asyncio.to_thread(torch.get_num_threads) == before
    await worker.close()


@pytest.mark.parametrize(
    ("given", "cores"), [(None, ()), ("", ()), ("3", (3,)), ("0-2,5", (0, 1, 2, 5)), ([2, 1, 2], (1, 2))]
)
def test_core_lists_are_parsed(given, cores):
    assert parse_cores(given) == cores


def test_short_texts_share_a_slot() -> None:
    """A batch therefore contains as much work of short texts as of long ones."""
    sizes = [text_size(EmbedText("word " * words)) for words in (1, 50, 100, 1000)]
    assert sizes == sorted(sizes) and 0 < sizes[0] < 0.1 and 0.2 < sizes[1] < 0.4 and sizes[-1] == 1.0
    assert text_size(ScorePair("word " * 50, "word " * 50)) > sizes[1]
