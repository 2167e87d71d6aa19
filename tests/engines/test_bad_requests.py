"""Tests that a bad request fails alone and at once: eight in a row, and then a good one is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support.ports import PortReports, entry, event, port

from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Attributes, Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import (
    EmbedText,
    Generate,
    Message,
    Prompt,
    Request,
    Sampling,
    ScorePair,
    SearchVector,
)

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

K = PrimitiveKind
BROKEN = "caf\ud83d"
"""Half of an emoji: what is left when text is cut by UTF-16 units."""
BAD_TEXTS: list[Any] = [BROKEN, "\udfff" * 100, "\ud800", 7, None, b"bytes", ["a list"], {"a": "dict"}]


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as made:
        yield made


def chat(text: Any) -> Generate:
    return Generate(Prompt((Message("user", text),)), Sampling(max_tokens=4))


def check_bad_requests_fail(pool: EnginePool, kind: K, engine: str, bad: list[Any], good: Any) -> None:
    for payload in bad:
        with pytest.raises(EngineError) as caught:
            pool.call(kind, engine, [payload]).result(5)
        assert caught.value.engine == engine and caught.value.hint
        assert "primitive" in str(caught.value), "it does not say whose it is"
    assert pool.call(kind, engine, [good]).result(5)


def test_fake_llm_fails_bad_requests_alone(pool: EnginePool) -> None:
    bad = [Generate(Prompt(text=text)) for text in BAD_TEXTS if text] + [Generate(None), "no payload"]  # type: ignore[arg-type]
    check_bad_requests_fail(pool, K.PREFILLING, "llm", bad, chat("what?"))


def test_fake_embedder_fails_bad_requests_alone(pool: EnginePool) -> None:
    class Unsaid:
        """No text, and its length is nobody's business."""

        text = 7

    check_bad_requests_fail(
        pool, K.EMBEDDING, "embedder", [EmbedText(t) for t in BAD_TEXTS[3:]] + [Unsaid()], EmbedText("x")
    )


def test_fake_store_fails_bad_requests_alone(pool: EnginePool) -> None:
    vectors: list[Any] = ["text", None, 7, [[1.0], [2.0]], ["1"], {"a": 1}, [None], object()]
    check_bad_requests_fail(
        pool, K.SEARCHING, "store", [SearchVector("c", vector) for vector in vectors], SearchVector("c", [1.0] * 32)
    )


def test_bad_requests_of_a_batch_fail_and_good_ones_succeed(pool: EnginePool) -> None:
    handles = [pool.call(K.EMBEDDING, "embedder", [EmbedText(text)]) for text in ["a", *BAD_TEXTS[3:], "b"]]
    assert handles[0].result(5) and handles[-1].result(5)
    for handle in handles[1:-1]:
        with pytest.raises(EngineError):
            handle.result(5)


@pytest.mark.parametrize("passes", [(), DEFAULT_PASSES])
def test_vectors_of_wrong_type_fail_only_their_query(passes: tuple[str, ...]) -> None:
    """The embedder's answer leads to a search that cannot be named: this must not be the embedder's end."""

    class Odd(type(fake_engines()[1])):  # type: ignore[misc]
        def _value(self, request: Request) -> Any:
            return {"no": "vector"} if request.payload.text == "bad" else super()._value(request)

    found = Graph(
        [
            Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input"))),
            Primitive("s", K.SEARCHING, "store", named(vectors=Ref("e")), attributes=Attributes(collection="c")),
        ],
        Ref("s"),
    )
    llm, _, *others = fake_engines()
    with EnginePool.local([llm, Odd("embedder"), *others]) as pool:
        for _ in range(8):
            run = pool.runtime.submit(Query({"input": "bad"}), found, {})
            with pytest.raises(Exception, match="store"):
                run.output.result(5)
        assert pool.runtime.submit(Query({"input": "good"}), found, {}).output.result(5) == ()


# ---------------------------------------------------------------- the real engines


@pytest.mark.models
@pytest.mark.parametrize("kind", [K.EMBEDDING, K.RERANKING], ids=lambda kind: kind.value)
def test_real_embedder_and_reranker_fail_bad_requests_alone(kind: K) -> None:
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine

    embeds = kind is K.EMBEDDING
    engine: Any = EmbeddingEngine(cores="0") if embeds else RerankingEngine(cores="0")

    async def check() -> None:
        await engine.start()
        try:
            listener = PortReports()
            one = port(engine, listener)
            bad: list[Any] = [EmbedText(t) if embeds else ScorePair("q", t) for t in BAD_TEXTS]
            good = EmbedText("x") if embeds else ScorePair("q", "x")
            for number, payload in enumerate(bad):
                one.enqueue([_entry(f"bad{number}", kind, payload)], event("p"))
            one.enqueue([_entry("good", kind, good)], event("p"))
            while len(listener.ends) < 9:
                await asyncio.sleep(0.01)
            assert listener.error("good") is None
            for number in range(8):
                error = listener.error(f"bad{number}")
                assert isinstance(error, EngineError) and error.hint
                assert "str" in str(error) or "surrogate" in str(error) or "len()" in str(error)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.vllm
def test_vllm_engine_fails_bad_requests_alone(session_llm: SessionLlm) -> None:
    async def check() -> None:
        listener = PortReports()
        one = port(session_llm.engine, listener)
        bad = [chat(text) for text in BAD_TEXTS[:3]] + [Generate(Prompt(text=text)) for text in BAD_TEXTS if text]
        bad.append(Generate(Prompt(text=_Unreadable("x"))))
        for number, payload in enumerate(bad):
            one.enqueue([_entry(f"bad{number}", K.PREFILLING, payload)], event("p"))
        one.enqueue([_entry("good", K.PREFILLING, chat("what?"))], event("p"))
        while len(listener.ends) <= len(bad):
            await asyncio.sleep(0.01)
        assert listener.text("good")
        for number, payload in enumerate(bad):
            error = listener.error(f"bad{number}")
            assert isinstance(error, EngineError) and error.hint, payload
        assert "surrogate" in str(listener.error("bad0")) and "U+D83D" in str(listener.error("bad0"))
        assert await session_llm.engine.healthy()

    session_llm.run(asyncio.wait_for(check(), 60))


def _entry(name: str, kind: K, payload: Any) -> Any:
    made = entry(name, payload)
    made.request = Request(name, kind, payload, query="q")
    return made


def _gone() -> str:
    raise ImportError("a class that this process knows and the engine's does not")


class _Unreadable(str):
    def __reduce__(self) -> Any:
        return _gone, ()


async def test_replica_of_shared_pool_fails_bad_requests_alone() -> None:
    """The host only estimates sizes. Errors in a payload are found where the engine runs."""
    from teola_plugin.cluster.host.replica_host import ReplicaHost
    from teola_plugin.cluster.wire import pack, unpack

    host = ReplicaHost({"name": "llm", "kind": "fake", "options": {}}, "0")
    await host.start()
    requests = [Request("bad", K.PREFILLING, EmbedText("x")), Request("good", K.PREFILLING, chat("what?"))]
    ends = {end.request_id: end for end in unpack(await host.run(pack(requests)))}
    assert ends["good"].value.text
    assert isinstance(ends["bad"].error, EngineError) and ends["bad"].error.hint
    assert not isinstance(ends["bad"].error, EngineUnavailable), "the replica would be started again"
