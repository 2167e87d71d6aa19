"""Tests that `reset` and `forget` reach every engine that drafts, in one process and in a shared pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.graph import PrimitiveKind, RequestContext
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Generation, Prompt, Sampling

DRAFTS = {"tokens": 8, "lookup": False}
WRITER = {"factory": "teola_plugin.engines.fake.llm:FakeLLM", "options": {"drafts": DRAFTS}}


@pytest.fixture(params=["in one process", "shared"])
def pool(request: pytest.FixtureRequest) -> Iterator[EnginePool]:
    if request.param == "in one process":
        with EnginePool.local({"llm": FakeLLM("llm", drafts=DRAFTS)}) as made:
            yield made
        return
    address = request.getfixturevalue("ray_address")
    deploy.up(PoolConfig.model_validate({"name": "writers", "engines": {"llm": WRITER}}), address)
    try:
        with EnginePool.connect(address, pool="writers") as made:
            yield made
    finally:
        deploy.down("writers", address)


def accepted(pool: EnginePool, tenant: str) -> int:
    generate = Generate(Prompt(text="The same question as ever, of enough words."), Sampling(max_tokens=64))
    request_context = RequestContext(tenant=tenant, app="a")
    [made] = pool.call(PrimitiveKind.PREFILLING, "llm", [generate], request_context=request_context).result(30)
    assert isinstance(made, Generation)
    return made.accepted


def test_outputs_are_drafted_until_the_pool_forgets_them(pool: EnginePool) -> None:
    first = accepted(pool, "one")
    assert accepted(pool, "one") > first
    assert accepted(pool, "two") == first and accepted(pool, "two") > first
    pool.forget("one")
    assert accepted(pool, "one") == first, "its own are forgotten"
    assert accepted(pool, "two") > first, "another's are not"
    pool.reset()
    assert accepted(pool, "one") == accepted(pool, "two") == first, "all of them are"
