"""Tests of `gpus:` in a pool's YAML: an engine computes on the GPUs that Ray reserves for it. Ray is told of two GPUs.

Where torch has to see them, a stand-in takes its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.cuda import FakeCuda

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.deployment.engine_factory import build_engine
from teola_plugin.cluster.host.replica_host import ReplicaHost
from teola_plugin.cluster.names import engine_spec, replica_options
from teola_plugin.engines.devices.assignment import assign_devices
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.errors import ConfigError
from teola_plugin.graph.device import parse, share_hardware
from teola_plugin.pool import EnginePool

YAML = """
name: cards
engines:
  llm: {kind: vllm, model: some/model, gpus: 0.5}
  told: {kind: vllm, model: some/model, gpus: 0.5, engine_args: {gpu_memory_utilization: 0.3}}
  whole: {kind: vllm, model: some/model, gpus: 1}
  embedder: {kind: embedding, model: some/model, gpus: 0.25}
  reranker: {kind: reranking, model: some/model, gpus: 1}
  said: {kind: embedding, model: some/model, gpus: 1, options: {device: cpu}}
  none: {kind: embedding, model: some/model}
"""
CONFIG = PoolConfig.parse(YAML)


def built(name: str) -> Any:
    return build_engine(engine_spec(name, CONFIG.engines[name]), 0)


@pytest.mark.parametrize(
    ("name", "device", "share"),
    [
        ("embedder", "cuda:0", 0.23),
        ("reranker", "cuda:0", None),
        ("said", "cpu", None),
        ("none", "cpu", None),
        ("llm", "", 0.46),
        ("told", "", 0.3),
        ("whole", "", None),
    ],
)
def test_engine_demands_the_reserved_gpu_share(name: str, device: str, share: float | None) -> None:
    engine = built(name)
    demand = engine.demand()
    assert (demand.device, demand.share) == (device, share)
    if isinstance(engine, VllmEngine):
        assert engine._setup.engine_args.get("gpu_memory_utilization") == share


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("gpus: 1.5", "whole ones"),
        ("gpus: 0.5, engine_args: {gpu_memory_utilization: 0.9}", "0.9 is more than gpus: 0.5 reserves"),
    ],
)
def test_contradictory_gpu_settings_raise(settings: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PoolConfig.parse(f"engines:\n  llm: {{kind: vllm, model: x, {settings}}}\n")


class SeesOneCard:
    """A replica's process in which torch sees the card that Ray gave, and nothing is loaded."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from teola_plugin.engines.devices import cards

        fake = FakeCuda([60] * len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
        cards.cuda = lambda: fake  # type: ignore[assignment]
        self._host = ReplicaHost(spec, "0")
        assign_devices([self._host.engine])  # type: ignore[list-item]

    def tell(self) -> tuple[str, str, str]:
        """Return the GPUs that Ray gave, that the engine computes on, and that clients know."""
        engine: Any = self._host.engine
        engine.versions = dict
        return os.environ["CUDA_VISIBLE_DEVICES"], engine.device, self._host.facts().profile.device


@pytest.fixture
def carried() -> Iterator[None]:
    """Pickle the classes of this module by value, because Ray's processes do not find modules of tests."""
    from ray import cloudpickle

    modules = sys.modules[__name__], sys.modules[FakeCuda.__module__]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


def test_engine_computes_on_the_gpu_assigned_by_ray(ray_address: str, carried: None) -> None:
    import ray

    config = CONFIG.engines["reranker"]
    made = [
        ray.remote(SeesOneCard).options(**replica_options(config)).remote(dict(engine_spec("reranker", config)))
        for _ in range(2)
    ]
    try:
        devices = ray.get([actor.tell.remote() for actor in made], timeout=60)
    finally:
        for actor in made:
            ray.kill(actor)
    assert [device for _, device, _ in devices] == ["cuda:0", "cuda:0"]
    assert sorted(given for given, _, _ in devices) == ["0", "1"]
    for given, _, known in devices:
        assert parse(known).units == {given} and parse(known).host == ray.nodes()[0]["NodeID"]
    assert not share_hardware(devices[0][2], devices[1][2])


@pytest.mark.models
def test_engine_computes_on_half_a_gpu(ray_address: str) -> None:
    """If torch has no usable GPU, the engine reports that, and does not use the CPU instead."""
    torch = pytest.importorskip("torch")
    config = PoolConfig.model_validate({"name": "half", "engines": {"embedder": {"kind": "embedding", "gpus": 0.5}}})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"embedder is to compute on cuda:0, and there is no GPU: torch"):
            deploy.up(config, ray_address)
        return
    deploy.up(config, ray_address)
    with EnginePool.connect(ray_address, pool="half") as pool:
        assert parse(pool.profiles["embedder"].device).kind == "cuda"
