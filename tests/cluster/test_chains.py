"""Tests of accelerated chains on the cluster, compared with the original in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from differential.chains import CHAINS, TEXTS, Parts, parts
from differential.recording import WAYS, observe

from teola_plugin import accelerate
from teola_plugin.engines.fake import fake_engines
from teola_plugin.pool import EnginePool

COLLECTION = "docs-of-chains"


@pytest.fixture(scope="module")
def local_parts() -> Iterator[tuple[EnginePool, Parts]]:
    with EnginePool.local(fake_engines()) as pool:
        made = parts(pool, COLLECTION)
        made.store.add_texts(TEXTS)
        yield pool, made


@pytest.fixture(scope="module")
def cluster_parts(fakes_address: str) -> Iterator[tuple[EnginePool, Parts]]:
    with EnginePool.connect(fakes_address, pool="fakes") as pool:
        made = parts(pool, COLLECTION)
        made.store.add_texts(TEXTS)
        yield pool, made


@pytest.mark.parametrize("way", [way for way in WAYS if way in ("invoke", "ainvoke", "abatch")])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_on_a_cluster_equal_the_original(
    name: str, way: str, local_parts: tuple[EnginePool, Parts], cluster_parts: tuple[EnginePool, Parts]
) -> None:
    make, given = CHAINS[name]
    for pool, _ in (local_parts, cluster_parts):
        pool.admin("store", "delete_collection", "uploads").result(30)
    plain = observe(make(local_parts[1]), way, given)
    accelerated = observe(accelerate(make(cluster_parts[1]), pool=cluster_parts[0]), way, given)
    assert accelerated.result == plain.result
    if not plain.failed:
        assert accelerated.prompts == plain.prompts
        assert accelerated.events == plain.events


@pytest.mark.parametrize("name", ["string_prompt", "retrieve_prompt_answer"])
def test_streams_on_a_cluster_add_up_to_the_original(
    name: str, local_parts: tuple[EnginePool, Parts], cluster_parts: tuple[EnginePool, Parts]
) -> None:
    """Pieces travel in parcels by time, so there are fewer of them."""
    make, given = CHAINS[name]
    plain = list(make(local_parts[1]).stream(given))
    fast = list(accelerate(make(cluster_parts[1]), pool=cluster_parts[0]).stream(given))
    assert len(fast) >= 1 and type(fast[0]) is type(plain[0])
    assert _sum(fast) == _sum(plain)


def _sum(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return getattr(total, "content", total)
