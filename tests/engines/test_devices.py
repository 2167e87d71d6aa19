"""Tests of engines on GPUs, with a stand-in for `torch.cuda`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cuda import GIB, FakeCuda

from teola_plugin.engines.devices import cards
from teola_plugin.engines.devices.assignment import assign_devices
from teola_plugin.engines.devices.cards import weight_bytes
from teola_plugin.engines.fake import FakeEmbedder
from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine
from teola_plugin.engines.sentence_transformers.static_batching import WORK_BYTES, StaticBatchingEngine
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.errors import ConfigError, EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.graph.device import normalize
from teola_plugin.passes import PassContext
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText

K = PrimitiveKind
Cards = Callable[..., FakeCuda]


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Simulate GPUs with this many free GiB. `have(80, 40)` gives two."""
    monkeypatch.delenv(cards.VISIBLE, raising=False)

    def made(*free: float, total: float = 80.0) -> FakeCuda:
        fake = FakeCuda(list(free), total)
        monkeypatch.setattr(cards, "cuda", lambda: fake)
        return fake

    return made


class OnDevice:
    """A model that embeds every text as the device it was loaded on."""

    def __init__(self, device: str) -> None:
        self.device = device

    def compute(self, payloads: Sequence[Any]) -> Sequence[str]:
        return [self.device] * len(payloads)

    def close(self) -> None: ...


class Where(StaticBatchingEngine):
    """Loads no model, and notes whether it did."""

    kinds = frozenset({K.EMBEDDING})
    takes = EmbedText

    def __init__(self, name: str = "embedder", **options: Any) -> None:
        super().__init__(name, "nothing", **options)
        self.loads = 0

    def _load(self) -> OnDevice:
        self.loads += 1
        return OnDevice(self.device)

    def _fault(self, payload: EmbedText) -> str:
        return ""

    def _sample(self, number: int) -> EmbedText:
        return EmbedText("x")

    def versions(self) -> dict[str, str]:
        return {"where": "1"}


def computed(pool: EnginePool, engine: str = "embedder") -> str:
    return str(pool.call(K.EMBEDDING, engine, [EmbedText("x")]).result(10)[0])


# ------------------------------------------------------------ where an engine computes


@pytest.mark.parametrize(
    ("free", "options", "device", "known_as"),
    [
        ((), {}, "cpu", ""),
        ((), {"cores": "0"}, "cpu", "cpu:0"),
        ((60,), {}, "cuda:0", "cuda:0"),
        ((10, 60, 50), {}, "cuda:1", "cuda:1"),
        ((0, 60), {}, "cuda:1", "cuda:1"),
        ((10, 60), {"device": "cuda"}, "cuda:0", "cuda:0"),
        ((10, 60), {"device": "cuda:0"}, "cuda:0", "cuda:0"),
        ((10, 60), {"device": "cpu"}, "cpu", ""),
        ((10, 60), {"cores": "0"}, "cpu", "cpu:0"),
        ((10, 60), {"cores": "0", "device": "cuda:1"}, "cuda:1", "cuda:1"),
    ],
)
def test_pool_computes_on_the_card_with_free_memory(
    have: Cards, free: tuple[float, ...], options: dict[str, Any], device: str, known_as: str
) -> None:
    have(*free)
    with EnginePool.local(embedder=Where(**options)) as pool:
        assert computed(pool) == device and pool.profiles["embedder"].device == known_as


async def test_engine_without_pool_computes_on_the_card_with_free_memory(have: Cards) -> None:
    have(10, 60)
    engine = Where()
    assert engine.profile.device == "", "it is not known before"
    await engine.start()
    assert engine.device == "cuda:1"
    await engine.restart()
    assert engine.device == "cuda:1" and engine.loads == 2
    await engine.stop()


async def test_engine_without_pool_raises_for_a_missing_card(have: Cards) -> None:
    have(60)
    with pytest.raises(ConfigError, match=r"cuda:3.*is 1: cuda:0 \(Card 0, 60\.0 of 80\.0 GiB free\)"):
        await Where(device="cuda:3").start()


def test_engines_are_spread_over_two_cards_and_overlap(have: Cards) -> None:
    have(60, 60)
    with EnginePool.local({"a": Where("a"), "b": Where("b"), "c": Where("c", device="cuda")}) as pool:
        assert [pool.profiles[name].device for name in "abc"] == ["cuda:1", "cuda:0", "cuda:0"]
        context = PassContext(pool.profiles)
        assert context.overlap("a", "c") and context.overlap("a", "b") and not context.overlap("b", "c")


def test_profile_names_the_physical_card(have: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that see one card each both call it cuda:0."""
    have(60)
    names = []
    for visible in ("2", "GPU-5ebe9f43"):
        monkeypatch.setenv(cards.VISIBLE, visible)
        engine = Where()
        assign_devices([engine])
        assert engine.device == "cuda:0"
        names.append(engine.profile.device)
    assert names == ["cuda:2", "cuda:GPU-5ebe9f43"]


def test_missing_device_raises_before_any_engine_starts(have: Cards) -> None:
    have()
    other, wrong = FakeEmbedder("other", 4), Where(device="cuda")
    began: list[str] = []
    start = other.start

    async def noted() -> None:
        began.append("other")
        await start()

    other.start = noted  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"embedder is to compute on cuda:0, and there is no GPU: torch") as caught:
        EnginePool.local({"other": other, "embedder": wrong}).start()
    assert not began and not wrong.loads and "device='cpu'" in caught.value.hint


def test_engine_warns_and_uses_cpu_if_all_cards_are_full(have: Cards, caplog: pytest.LogCaptureFixture) -> None:
    have(3, 2)
    with caplog.at_level("WARNING"), EnginePool.local(embedder=Where()) as pool:
        assert computed(pool) == "cpu"
    assert "embedder computes on the CPU: no GPU has 4.0 GiB free" in caplog.text


def test_torch_is_not_queried_if_all_engines_use_the_cpu(have: Cards) -> None:
    fake = have(60)
    with EnginePool.local({"a": Where("a", device="cpu"), "b": Where("b", cores="0")}):
        assert not fake.queried_cards


def test_closing_a_pool_empties_the_cache_of_torch(have: Cards) -> None:
    fake = have(60)
    with EnginePool.local(embedder=Where()):
        assert not fake.empty_cache_calls
    assert fake.empty_cache_calls == 1


@pytest.mark.models
@pytest.mark.parametrize("name", ["SentenceTransformer", "CrossEncoder"])
async def test_model_is_loaded_on_the_assigned_card(have: Cards, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The library's own class, which here can load on the CPU alone, is asked for the card."""
    import sentence_transformers

    have(10, 60)
    devices: list[str] = []

    class OnTheCpu(getattr(sentence_transformers, name)):  # type: ignore[misc]
        def __init__(self, *args: Any, device: str, **options: Any) -> None:
            devices.append(device)
            super().__init__(*args, device="cpu", **options)

    monkeypatch.setattr(sentence_transformers, name, OnTheCpu)
    engine = EmbeddingEngine() if name == "SentenceTransformer" else RerankingEngine()
    await engine.start()
    try:
        assert devices == ["cuda:1"] == [engine.device]
        if isinstance(engine, EmbeddingEngine):
            assert engine._loaded is not None and engine._loaded.batch_size == 32  # type: ignore[attr-defined]
        assert engine.versions()["gpu"] == "Card 1"
    finally:
        await engine.stop()


# ------------------------------------------------------------ memory


def test_weights_are_counted_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "sub" / "more.safetensors").write_bytes(b"x" * 500)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 9000)  # the same again, in the older format
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 9000)  # the same again, for another library
    assert weight_bytes(tmp_path) == 1500
    assert weight_bytes(tmp_path / "nowhere") is None
    demand = EmbeddingEngine(model=tmp_path).demand()
    assert (demand.needs, demand.work) == (1500, WORK_BYTES)


@pytest.mark.parametrize("share", [0.0, 1.5, -1])
def test_memory_share_outside_zero_to_one_raises(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization is"):
        assign_devices([Where(gpu_memory_utilization=share)])


async def told_to_vllm(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings with which the host process is told to start vLLM."""
    monkeypatch.setattr("teola_plugin.engines.vllm.engine.HOST", "support.echo_host")
    monkeypatch.setattr("teola_plugin.engines.vllm.args.check_installed", lambda engine: "0.32.0")
    with pytest.raises(EngineUnavailable) as caught:
        await engine.start()
    await engine.stop()
    found = re.search(r"<(\{.*\})>", str(caught.value))
    assert found is not None, str(caught.value)
    return json.loads(found[1])  # type: ignore[no-any-return]


async def test_vllm_gets_the_memory_share_left_by_other_engines(have: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    have(80)
    engine = VllmEngine("llm", "some/model", engine_args={"max_model_len": 64})
    assign_devices([engine, Where(gpu_memory_utilization=0.25), Where("reranker", gpu_memory_utilization=0.05)])
    settings = await told_to_vllm(engine, monkeypatch)
    assert settings == {"engine_args": {"max_model_len": 64, "gpu_memory_utilization": 0.62}, "visible": None}


async def test_memory_share_set_by_the_user_is_kept_for_vllm(have: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    have(80)
    engine = VllmEngine("llm", "some/model", engine_args={"gpu_memory_utilization": 0.5})
    assign_devices([engine, Where(gpu_memory_utilization=0.25)])
    assert (await told_to_vllm(engine, monkeypatch))["engine_args"] == {"gpu_memory_utilization": 0.5}


async def test_vllm_runs_on_the_card_with_free_memory(have: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    have(20, 80)
    monkeypatch.setenv(cards.VISIBLE, "4,7")
    engine, other = VllmEngine("llm", "some/model"), Where()
    assign_devices([engine, other])
    assert other.device == "cuda:0"
    assert await told_to_vllm(engine, monkeypatch) == {"engine_args": {}, "visible": "7"}


async def test_vllm_as_only_gpu_engine_gets_no_device_settings(have: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = have(80, 80)
    engine = VllmEngine("llm", "some/model")
    assign_devices([engine, Where(device="cpu")])
    assert await told_to_vllm(engine, monkeypatch) == {"engine_args": {}, "visible": None}
    assert not fake.queried_cards


@pytest.mark.parametrize(
    ("kind", "args", "environ", "name"),
    [
        ("cuda", {}, {}, "cuda:0"),
        ("cuda", {"tensor_parallel_size": 2}, {}, "cuda:0,1"),
        ("cuda", {"tensor_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": "3,5,7"}, "cuda:3,5"),
        ("cpu", {}, {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, "cpu:0,1"),
        ("cpu", {}, {}, "cpu"),
    ],
)
def test_vllm_device_name_lists_its_cards(
    monkeypatch: pytest.MonkeyPatch, kind: str, args: dict[str, Any], environ: dict[str, str], name: str
) -> None:
    from teola_plugin.engines.vllm.host import _device

    for variable in (cards.VISIBLE, "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    assert normalize(_device(kind, args)) == name


def test_engines_too_large_for_a_card_raise_before_start(have: Cards) -> None:
    have(80)
    llm, where = VllmEngine("llm", "some/model", engine_args={"gpu_memory_utilization": 0.9}), Where()
    where._share = 0.2
    with pytest.raises(ConfigError, match=r"88\.0 GiB are asked for on cuda:0.*llm 72\.0.*embedder 16\.0"):
        EnginePool.local({"llm": llm, "embedder": where}).start()
    assert not where.loads


@pytest.mark.parametrize(
    ("args", "cores", "stored", "cards_wanted", "needs"),
    [
        ({}, None, "bfloat16", 1, 4),
        ({"tensor_parallel_size": 2}, None, "bfloat16", 2, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, None, "bfloat16", 4, 1),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, None, "bfloat16", 4, 2),
        ({"kv_cache_memory_bytes": GIB}, None, "bfloat16", 1, 5),
        ({"cpu_offload_gb": 8}, None, "bfloat16", 1, 0),
        ({}, None, "float32", 1, 2),
        ({"dtype": "float32"}, None, "float32", 1, 4),
        ({}, "0-3", "bfloat16", 1, 0),
    ],
)
def test_vllm_demand_follows_its_weights_and_arguments(
    tmp_path: Path, args: dict[str, Any], cores: str | None, stored: str, cards_wanted: int, needs: int
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4 * GIB)  # takes no room
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": stored}))
    demand = VllmEngine("llm", tmp_path, engine_args=args, cores=cores).demand()
    assert (demand.cards, demand.needs) == (cards_wanted, needs * GIB)
    assert demand.device == ("cpu" if cores else "")


# ------------------------------------------------------------ on a GPU


@pytest.fixture
def gpu() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch


@pytest.mark.models
async def test_vectors_on_gpu_equal_vectors_on_cpu(gpu: Any) -> None:
    from numpy.testing import assert_allclose

    from teola_plugin.requests.payloads import Request

    async def vectors(engine: EmbeddingEngine) -> list[Any]:
        await engine.start()
        texts = [Request(f"r{n}", K.EMBEDDING, EmbedText(f"text number {n} " * n)) for n in range(1, 40)]
        ends = {end.request_id: end async for end in engine.execute(texts)}
        placed = {weight.device.type for weight in engine.model.parameters()}
        await engine.stop()
        return [placed, *(ends[request.id].value for request in texts)]  # type: ignore[union-attr]

    before = gpu.cuda.memory_reserved()
    there, *values = await vectors(EmbeddingEngine())
    here, *wanted = await vectors(EmbeddingEngine(device="cpu"))
    assert there == {"cuda"} and here == {"cpu"}
    for value, other in zip(values, wanted, strict=True):
        assert_allclose(value, other, atol=1e-3)
    assert gpu.cuda.memory_reserved() <= before + 32 * 2**20
