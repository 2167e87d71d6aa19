"""Tests of the reranking engine on the tiny random cross encoder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from teola_plugin.engines.bundled import reranker as tiny_reranker
from teola_plugin.engines.conformance import EngineConformance
from teola_plugin.engines.sentence_transformers import RerankingEngine
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Request, ScorePair

pytestmark = pytest.mark.models

QUERIES = ("what is a class?", "how do I open a file")


def pairs() -> list[ScorePair]:
    from pydoc_data.topics import topics

    return [ScorePair(query, topics[name][:400]) for query in QUERIES for name in sorted(topics)[:20]]


async def score(engine: RerankingEngine, given: list[ScorePair]) -> list[float]:
    batch = [Request(f"rerank-{i}", PrimitiveKind.RERANKING, pair) for i, pair in enumerate(given)]
    ends = {end.request_id: end async for end in engine.execute(batch)}
    return [ends[request.id].value for request in batch]


@pytest.fixture(autouse=True, scope="module")
def tqdm_thread() -> None:
    """Start tqdm's thread, which stays for the whole process and is not the engine's to stop."""
    from tqdm.autonotebook import trange

    trange(0, disable=True)


class TestRerankingEngine(EngineConformance):
    async def make(self):
        return RerankingEngine(cores="0")

    def payloads(self, kind):
        return [ScorePair("q", "short"), ScorePair("a query", "long " * 400), ScorePair("", ""), ScorePair("ü", "中文")]

    def bad_payload(self, kind):
        return ScorePair("\ud800", "text")  # only the tokenizer finds out, with the whole batch in its hands


@pytest.mark.parametrize(
    "bad", [ScorePair("q", 5), ScorePair(None, "text"), ScorePair("\ud800", "text"), ("q", "text"), None], ids=repr
)
async def test_bad_pair_fails_alone(bad):
    engine = RerankingEngine(cores="0")
    await engine.start()
    batch = [Request(f"r{i}", PrimitiveKind.RERANKING, pair) for i, pair in enumerate([*pairs()[:9], bad])]
    ends = {end.request_id: end async for end in engine.execute(batch)}
    await engine.stop()
    failed = ends.pop("r9")
    assert isinstance(failed, Failed) and not failed.error.retryable
    assert len(ends) == 9 and all(isinstance(end, Done) for end in ends.values())


async def test_scores_equal_the_cross_encoder_and_differ_by_query():
    from sentence_transformers import CrossEncoder

    engine = RerankingEngine(cores="0")
    await engine.start()
    scores = await score(engine, pairs())
    await engine.stop()
    plain = CrossEncoder(str(tiny_reranker.make()), device="cpu")
    for pair, found in zip(pairs(), scores, strict=True):
        assert found == pytest.approx(float(plain.predict((pair.query, pair.text), show_progress_bar=False)), abs=1e-5)
    assert max(scores) - min(scores) > 0.5
    one, other = scores[:20], scores[20:]
    assert sorted(range(20), key=one.__getitem__) != sorted(range(20), key=other.__getitem__)  # the query matters


async def test_model_with_several_labels_is_refused(tmp_path: Path):
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(tiny_reranker.make()), num_labels=3, model_kwargs={"ignore_mismatched_sizes": True}).save(
        str(tmp_path / "three")
    )
    engine = RerankingEngine("three", tmp_path / "three", cores="0")
    await engine.start()
    ends = [end async for end in engine.execute([Request("r", PrimitiveKind.RERANKING, ScorePair("q", "t"))])]
    await engine.stop()
    assert "one score a pair" in str(ends[0].error)


def test_tiny_reranker_is_identical_in_every_process(tmp_path: Path):
    make = "import sys; from teola_plugin.engines.bundled import reranker; reranker.make(sys.argv[1])"
    folders = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(folders):  # hash order must not matter
        subprocess.run([sys.executable, "-c", make, str(folder)], env={"PYTHONHASHSEED": str(seed)}, check=True)
    one, other = ({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in f.iterdir()} for f in folders)
    assert one == other
    assert one.keys() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "other"]  # nothing half-made is left
