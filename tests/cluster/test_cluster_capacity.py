"""Tests that pools which need more than their cluster has are refused at once, with the numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import EngineConfig, PoolConfig
from teola_plugin.cluster.deployment import room
from teola_plugin.cluster.deployment.room import Reservation, shortage
from teola_plugin.errors import EngineUnavailable


def ask(engine: str, replicas: int = 1, **settings: Any) -> Reservation:
    return Reservation.of(engine, EngineConfig.model_validate({"kind": "fake", **settings}), replicas)


def node(gpus: float = 0, cpus: float = 8, **others: float) -> dict[str, float]:
    return {"GPU": gpus, "CPU": cpus, "memory": 1e9, **others}


@pytest.mark.parametrize(
    ("asks", "nodes"),
    [
        ([], []),
        ([ask("llm", 3)], [node()]),
        ([ask("llm", gpus=2)], [node(2)]),
        ([ask("llm", 2, gpus=1), ask("embedder", 2, gpus=0.5)], [node(2), node(1)]),
        ([ask("small", 2, gpus=1), ask("llm", gpus=2)], [node(2), node(2)]),
        ([ask("a", 2, gpus=0.6), ask("b", 2, gpus=0.4)], [node(2)]),
        ([ask("a", cpus=6), ask("b", cpus=2)], [node()]),
        ([ask("a", resources={"fast": 1}), ask("b", cpus=8)], [node(), node(fast=1)]),
        # the largest one has to leave the largest node to the second
        ([ask("a", gpus=1, cpus=1), ask("b", gpus=1, cpus=8)], [node(1, 8), node(1, 4)]),
        ([ask("a", 1024, cpus=1)], [node(cpus=1024)]),
    ],
)
def test_reservations_that_fit_report_no_shortage(asks: list[Reservation], nodes: list[dict[str, float]]) -> None:
    assert shortage(asks, nodes) == ""


@pytest.mark.parametrize(
    ("asks", "nodes", "says"),
    [
        ([ask("llm", gpus=1)], [], "a replica of 'llm' asks for 1 GPU on one node; there are no nodes"),
        ([ask("llm", gpus=2)], [node(1), node(1)], "asks for 2 GPU on one node; the nodes have GPU 1/1"),
        ([ask("llm", gpus=1, cpus=9)], [node(1)], "asks for 9 CPU and 1 GPU on one node; the nodes have CPU 8, GPU 1"),
        (
            [ask("llm", 2, gpus=1), ask("embedder", gpus=0.5)],
            [node(2)],
            "2.5 GPU are asked for (llm 2 x 1, embedder 1 x 0.5), 2 are there",
        ),
        ([ask("store", 3, cpus=4)], [node()], "12 CPU are asked for (store 3 x 4), 8 are there"),
        ([ask("a", 2, resources={"fast": 1})], [node(fast=1)], "2 fast are asked for (a 2 x 1), 1 are there"),
        ([ask("llm", 3, gpus=2)], [node(3), node(3)], "(GPU: llm 3 x 2) do not fit on the nodes together"),
        ([ask("a", 3, gpus=0.6)], [node(2)], "the replicas (GPU: a 3 x 0.6) do not fit"),
        ([ask("a", cpus=8), ask("b", gpus=1, cpus=1)], [node(1), node(0, 4)], "do not fit on the nodes together"),
    ],
)
def test_shortage_names_the_missing_resource(asks: list[Reservation], nodes: list[dict[str, float]], says: str) -> None:
    assert says in shortage(asks, nodes)


# ------------------------------------------------------------ on Ray


def pool(name: str, **engines: Any) -> PoolConfig:
    made = {key: {"kind": "fake", "options": {"like": "embedder"}, **value} for key, value in engines.items()}
    return PoolConfig.model_validate({"name": name, "engines": made})


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds, "it was not said at once"


def test_too_many_gpus_raise_at_once(ray_address: str) -> None:
    with within(30), pytest.raises(EngineUnavailable) as caught:
        deploy.up(pool("greedy", llm={"gpus": 1, "replicas": 2}, embedder={"gpus": 0.5}), ray_address)
    assert "2.5 GPU are asked for (llm 2 x 1, embedder 1 x 0.5), 2 are there" in str(caught.value)
    assert not caught.value.retryable and "replicas" in caught.value.hint
    with within(30), pytest.raises(EngineUnavailable, match=r"'llm' asks for 3 GPU on one node; the nodes have GPU 2"):
        deploy.up(pool("greedy", llm={"gpus": 3}), ray_address)
    with within(30), pytest.raises(EngineUnavailable, match=r"'llm' asks for 99 CPU"):
        deploy.up(pool("greedy", llm={"cpus": 99}), ray_address)
    assert "greedy" not in str(actor_names(ray_address)), "nothing of it is left"


def actor_names(address: str) -> list[str]:
    import ray

    return [str(found["name"]) for found in ray.util.list_named_actors(all_namespaces=True)]


def test_resources_held_by_other_pools_are_not_free(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RELEASE_TIMEOUT_S", 0.5)
    deploy.up(pool("first", llm={"gpus": 1.0}), ray_address)
    try:
        deploy.up(pool("first", llm={"gpus": 1.0}), ray_address)  # it is there, and asks for nothing more
        with (
            within(30),
            pytest.raises(EngineUnavailable, match=r"what is free, 2 GPU .* 1 are there") as no,
        ):
            deploy.up(pool("second", llm={"gpus": 1.0, "replicas": 2}), ray_address)
        assert no.value.retryable
        with (
            within(60),
            pytest.raises(EngineUnavailable, match=r"what is free, .*'llm' asks for 1 GPU") as full,
        ):
            deploy.scale("first", "llm", 3, ray_address)
        assert "the nodes have GPU 0" in str(full.value)
        assert deploy.scale("first", "llm", 2, ray_address) == 2
    finally:
        end(ray_address, "first")


def end(address: str, name: str) -> None:
    """End the pool without `down`, which would disconnect this process."""
    import ray

    from teola_plugin.cluster import connection
    from teola_plugin.cluster.names import directory_name

    ray.get(connection.actor(directory_name(name)).stop.remote(), timeout=120)
    deploy._kill(ray, name)


@pytest.mark.long
@pytest.mark.parametrize("newer", [False, True], ids=["v1", "v2"])
def test_deployment_waits_for_an_autoscaling_cluster(newer: bool, tmp_path: Path) -> None:
    """The cluster has Ray's own autoscaler, which starts nodes as processes of this machine."""
    from support.growing_cluster import growing_cluster

    lines: list[str] = []
    with growing_cluster(newer, head={"CPU": 1}, worker={"CPU": 1, "GPU": 1}) as address:
        assert room._can_grow()
        deploy.up(pool("growing", llm={"gpus": 1}), address, on_waiting=lines.append)
        end(address, "growing")
    assert any("waiting for the cluster to grow: a replica of 'llm' asks for 1 GPU" in line for line in lines)
