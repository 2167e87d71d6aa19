"""Tests of the demo's chains on real engines: equal results, and all four passes change the plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from differential.recording import observe
from support.slow_engines import with_slow_profile

from teola_plugin import accelerate
from teola_plugin.adapters import demo_app
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cli.demo.measure import tokens_cached_by_warmups
from teola_plugin.engines.base import Engine
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.observe import html_page
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Message, Prompt, Sampling
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_queue import Enqueue, QueuedRequest, ReplicaUp, RequestsEnded, RunBatch

pytestmark = [pytest.mark.vllm, pytest.mark.postgres, pytest.mark.models]
QUESTION = "When is the else clause of a try statement executed?"
DOCUMENT = topics["compound"][:12000]
"""About 60 chunks: more than any machine embeds at its best in one batch, so that there are stages."""


@pytest.fixture(scope="module")
def parts(real_pool: EnginePool) -> dict[str, Any]:
    store = TeolaVectorStore(pool=real_pool, embedding=TeolaEmbeddings(pool=real_pool), collection="real")
    return {
        "llm": ChatTeola(pool=real_pool, max_tokens=24),
        "store": store,
        "reranker": TeolaRerank(pool=real_pool, top_n=3),
        "indexer": TeolaIndexer(store=store),
    }


@pytest.fixture
def fresh(real_pool: EnginePool) -> Callable[[], None]:
    def empty() -> None:
        real_pool.admin("store", "delete_collection", "real").result(30)
        real_pool.reset()

    empty()
    return empty


def uploaded(p: dict[str, Any]) -> Any:
    return demo_app.uploaded_document_qa(p["llm"], p["store"], p["reranker"], p["indexer"])


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
def test_chain_with_an_upload_equals_the_original(
    way: str, parts: dict[str, Any], real_pool: EnginePool, fresh: Callable[[], None], tmp_path: Path
) -> None:
    given = {"question": QUESTION, "documents": DOCUMENT}
    plain = observe(uploaded(parts), way, given)
    fresh()
    fast = accelerate(uploaded(parts), pool=real_pool, passes=DEFAULT_PASSES)
    with with_slow_profile(real_pool, "reranker", PrimitiveKind.RERANKING, 0.03):  # the tiny one takes about 5 ms
        accelerated = observe(fast, way, given)
        fired = fast.plan(given).fired
    assert accelerated.result == plain.result
    assert accelerated.prompts == plain.prompts
    assert accelerated.events == plain.events
    paper = {"prune-dependencies", "stage-decomposition", "prefilling-split", "decoding-pipelining"}
    assert set(fired) == paper | {"draft-decoding"}, "a refinement's draft is the answer before it"
    trace = fast.last_trace()
    assert trace is not None and tokens_cached_by_warmups(trace) > 0
    page = html_page([trace])
    assert "<svg" in page and DOCUMENT[:40] not in page, "documents stay out of traces"


def test_eight_concurrent_searches_equal_the_original(
    parts: dict[str, Any], real_pool: EnginePool, fresh: Callable[[], None]
) -> None:
    parts["indexer"].invoke(DOCUMENT)
    chain = demo_app.search_and_answer(parts["llm"], parts["store"], parts["reranker"])
    fast = accelerate(chain, pool=real_pool, passes=DEFAULT_PASSES)
    given = [
        {"question": f"What is {word}?"} for word in ("try", "else", "finally", "raise", "with", "as", "if", "for")
    ]

    async def all_of(one: Any) -> list[Any]:
        return list(await asyncio.gather(*(one.ainvoke(x) for x in given)))

    assert asyncio.run(all_of(fast)) == [chain.invoke(x) for x in given]


def test_chain_without_gain_equals_the_original(
    parts: dict[str, Any], real_pool: EnginePool, fresh: Callable[[], None]
) -> None:
    parts["indexer"].invoke(DOCUMENT)
    chain = demo_app.nothing_to_gain(parts["llm"], parts["store"])
    plain, accelerated = observe(chain, "invoke", QUESTION), observe(accelerate(chain), "invoke", QUESTION)
    assert accelerated.result == plain.result
    assert accelerated.events == plain.events


def test_vllm_admits_requests_in_the_order_of_figure_7(session_llm: Any) -> None:
    """Room for two prefillings: A and H go first, and vLLM, given our priorities, starts them first, too."""
    engine: Engine = session_llm.engine
    k = PrimitiveKind.PREFILLING
    scheduler = EngineScheduler(EngineProfile(batching=engine.profile.batching, max_batch=1024, max_requests=4), ())
    for query, name, depth in [("q1", "A", 3), ("q1", "B", 1), ("q2", "G", 1), ("q2", "H", 3)]:
        scheduler.handle(Enqueue(0.0, query, name, k, (QueuedRequest(name, 512),), depth))
    order: list[tuple[str, int]] = []
    out = scheduler.handle(ReplicaUp(0.0, "0"))
    while out:
        batches = [i for i in out if isinstance(i, RunBatch)]
        admitted = [pair for b in batches for pair in zip(b.requests, b.priorities, strict=True)]
        order += admitted
        out = [i for name, _ in admitted for i in scheduler.handle(RequestsEnded(1.0, (name,)))]
    assert [name for name, _ in order] == ["A", "H", "B", "G"]
    assert {"A", "H"} == {name for name, _ in order[:2]}
    first = session_llm.run(_first_pieces(engine, dict(order)))
    assert set(first[:2]) == {"A", "H"}


async def _first_pieces(engine: Any, priorities: dict[str, int]) -> list[str]:
    """Return the order in which vLLM serves four requests that reach it at once, with our priorities.

    Shallow requests are sent first. Each prompt fills most of a step, so that they cannot be prefilled together.
    """
    from teola_plugin.requests.payloads import Piece, Request

    seen: list[str] = []
    filler = "what a lambda is and how it is called " * 130

    async def one(name: str) -> None:
        payload = Generate(Prompt((Message("user", f"{name} {filler}"),)), Sampling(max_tokens=2))
        request = Request(
            f"figure7-{name}", PrimitiveKind.PREFILLING, payload, priority=priorities[name], stream=True, tenant=name
        )
        async for result in engine.execute([request]):
            if isinstance(result, Piece) and name not in seen:
                seen.append(name)

    blocker = asyncio.ensure_future(one_blocker(engine, filler))
    await asyncio.sleep(0.02)
    await asyncio.gather(*(one(name) for name in ("B", "G", "A", "H")), blocker)
    return seen


async def one_blocker(engine: Any, filler: str) -> None:
    """Keep vLLM busy for a step, so that the four requests wait together."""
    from teola_plugin.requests.payloads import Request

    payload = Generate(Prompt((Message("user", filler * 2),)), Sampling(max_tokens=2))
    async for _ in engine.execute(
        [Request("figure7-blocker", PrimitiveKind.PREFILLING, payload, priority=0, tenant="x")]
    ):
        pass
