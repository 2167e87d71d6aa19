"""Tests of a workflow on real engines: an uploaded document, PostgreSQL with pgvector, MiniLM, vLLM."""

from __future__ import annotations

import asyncio
from pydoc_data.topics import topics

import pytest

from teola_plugin.pool import EnginePool
from teola_plugin.workflow import PER_QUERY, Indexing, QueryExpansion, Reranking, Searching, Synthesis, Workflow

pytestmark = [pytest.mark.vllm, pytest.mark.postgres, pytest.mark.models]
QUESTION = "When is the else clause of a try statement executed?"
DOCUMENT = topics["compound"][:8000]
RAG = Workflow(
    "real",
    Indexing("index", chunk_size=24, chunk_overlap=4, collection=PER_QUERY)
    >> QueryExpansion("queries", n=3, max_tokens=32)
    >> Searching("found", query="queries", k=8, collection=PER_QUERY)
    >> Reranking("best", passages="found", k=3)
    >> Synthesis("answer", context="best", mode="refine", max_tokens=16),
)
GIVEN = {"question": QUESTION, "documents": DOCUMENT}


@pytest.mark.parametrize(
    "mode", ["refine", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("tree", "compact"))]
)
def test_workflow_answers_alike_with_and_without_passes(real_pool: EnginePool, mode: str) -> None:
    real_pool.reset()
    plain = RAG.deploy(real_pool, passes=()).run(GIVEN, {"mode": mode})
    real_pool.reset()
    stream = RAG.deploy(real_pool).stream(GIVEN, {"mode": mode})
    text = "".join(stream)
    fast = stream.result()
    assert fast.outputs["queries"] == plain.outputs["queries"]
    assert [hit.text for hit in fast.sources] == [hit.text for hit in plain.sources]
    assert text == fast.answer == plain.answer
    assert all(hit.text in " ".join(DOCUMENT.split()) for hit in fast.sources)


async def test_concurrent_queries_keep_their_documents(real_pool: EnginePool) -> None:
    before = set(await asyncio.wrap_future(real_pool.admin("store", "collections")))
    app = RAG.deploy(real_pool)
    given = [{"question": "What is sold?", "documents": f"In barn {i} hay and straw are sold."} for i in range(4)]
    results = await asyncio.gather(*(app.arun(one) for one in given))
    assert [[hit.text for hit in one.sources] for one in results] in (
        [[one["documents"]] for one in given],
        [[] for _ in given],  # the tiny model may write no query at all
    )
    for _ in range(100):
        left = set(await asyncio.wrap_future(real_pool.admin("store", "collections"))) - before
        if not left:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"collections are left: {left}")
