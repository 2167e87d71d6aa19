"""Tests of the servers that `engines=` treats as dedicated, and of the pool that it creates."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin.adapters.automatic_engines import ServedPool
from teola_plugin.adapters.engine_specs import ServerSpec, is_private
from teola_plugin.engines.fake import FakeEmbedder, FakeReranker
from teola_plugin.errors import EngineUnavailable, RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, ScorePair

PRIVATE = (
    *("http://localhost:8000/v1", "http://127.0.0.1:8000/v1", "http://[::1]:8000/v1", "http://0.0.0.0:8000"),
    *("http://10.1.2.3/v1", "http://192.168.0.7:80", "http://172.16.0.1/v1", "http://100.64.0.1/v1"),
    *(
        "http://vllm:8000/v1",
        "http://gpu.local/v1",
        "http://llm.default.svc.cluster.local:8000/v1",
        "http://a.internal",
    ),
    *("http://[fd00::1]:8000/v1", "http://user:password@localhost/v1"),
)
PUBLIC = (
    *("https://api.openai.com/v1", "https://eu.api.openai.com/v1", "http://8.8.8.8/v1", "https://172.15.0.1/v1"),
    *("https://localhost.example.com/v1", "https://10.0.0.1.nip.io/v1", "http://[2001:4860::1]/v1", "", "nonsense.x"),
)


@pytest.mark.parametrize("url", PRIVATE)
def test_private_addresses_are_private(url: str) -> None:
    assert is_private(url)


@pytest.mark.parametrize("url", PUBLIC)
def test_public_addresses_are_not_private(url: str) -> None:
    assert not is_private(url)


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


def test_served_pool_has_one_engine_per_server_and_model(stub: OpenAIStub) -> None:
    served = ServedPool()
    assert served.pool is None
    pool, name = served.engine_for(ServerSpec(MODEL, False, stub.base_url))
    try:
        assert (pool, name) == served.engine_for(ServerSpec(MODEL, False, stub.base_url))
        assert served.engine_for(ServerSpec("another", False, stub.base_url)) == (pool, "llm2")
        assert served.engine_for(ServerSpec(MODEL, True, stub.base_url)) == (pool, "llm3")
        assert pool.engine_names == ("llm", "llm2", "llm3")
        assert [pool.profiles[one].dedicated for one in pool.engine_names] == [False, False, True]
        with pytest.raises(EngineUnavailable, match="does not serve"):
            served.engine_for(ServerSpec("nobody knows it", True, stub.base_url))
        assert pool.engine_names == ("llm", "llm2", "llm3"), "what did not start is not there"
    finally:
        pool.close()
    assert served.engine_for(ServerSpec(MODEL, False, stub.base_url))[0] is not pool, "a closed pool is made anew"
    assert served.pool is not None
    served.pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system forks no processes")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_process_has_no_served_pool(stub: OpenAIStub) -> None:
    from teola_plugin.adapters.automatic_engines import PROCESS

    pool, _ = PROCESS.engine_for(ServerSpec(MODEL, False, stub.base_url))
    child = os.fork()
    if not child:
        os._exit(0 if PROCESS.pool is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert PROCESS.pool is pool


# ------------------------------------------------------------ engines that come later


def test_engine_can_be_added_to_a_running_pool() -> None:
    texts, pairs = [EmbedText("lambs eat grass")], [ScorePair("what?", "grass")]
    with EnginePool.local([FakeEmbedder("embedder")]) as pool:
        first = pool.call(PrimitiveKind.EMBEDDING, "embedder", texts).result()
        pool.add(FakeReranker("reranker"))
        assert len(pool.call(PrimitiveKind.RERANKING, "reranker", pairs).result()) == 1
        assert list(pool.call(PrimitiveKind.EMBEDDING, "embedder", texts).result()[0]) == list(first[0])
        assert set(pool.profiles) == {"embedder", "reranker"}
        with pytest.raises(RegistrationError, match="has a 'reranker'"):
            pool.add(FakeReranker("reranker"))


def test_engine_can_be_added_before_the_pool_starts() -> None:
    pool = EnginePool.local([FakeEmbedder("embedder")])
    pool.add(FakeReranker("reranker"))
    with pool:
        assert pool.call(PrimitiveKind.RERANKING, "reranker", [ScorePair("what?", "grass")]).result()
