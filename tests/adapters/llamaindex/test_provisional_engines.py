"""Query engines whose answers begin before the reranker has spoken: the same answers, whatever it says then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeReranker, fake_engines
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore

TEXTS = [f"passage {i} about lambda and class and functions" for i in range(24)]
MODES = ("compact", "simple_summarize", "refine", "tree_summarize", "accumulate")


def a_pool(*, right: bool) -> EnginePool:
    """Everything takes a fiftieth of the time, but for the reranker. If it is wrong to guess at its order, then wholly:
    none of the first three passages stays among them, so that no answer to one of them is of use."""
    machine = scaled(rtx3090(), 0.02)
    slow = replace(machine["reranker"], curves={PrimitiveKind.RERANKING: Curve.linear(0.12, 0.0)})
    rank = FakeReranker("reranker", slow, lambda _, text: 0.5 if right else float(TEXTS.index(text) * 5 % 24))
    return EnginePool.local([*(one for one in fake_engines(machine) if one.name != "reranker"), rank])


@pytest.fixture(scope="module", params=[True, False], ids=["right", "wrong"])
def index(request: pytest.FixtureRequest) -> Iterator[tuple[EnginePool, VectorStoreIndex, bool]]:
    with a_pool(right=request.param) as pool:
        store = TeolaVectorStore(pool=pool, collection="docs")
        made = VectorStoreIndex.from_vector_store(store, embed_model=TeolaEmbedding(pool=pool))
        made.insert_nodes([TextNode(id_=str(i), text=text) for i, text in enumerate(TEXTS)])
        yield pool, made, request.param


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_same(index: tuple[EnginePool, VectorStoreIndex, bool], mode: str) -> None:
    pool, made, right = index
    rerank: Any = TeolaRerank(pool=pool, top_n=3)
    llm = TeolaLLM(pool=pool, max_tokens=20)
    engine = made.as_query_engine(llm=llm, similarity_top_k=12, node_postprocessors=[rerank], response_mode=mode)
    fast = accelerate(engine, pool=pool)
    assert "provisionally, on the order before rerank" in fast.explain()
    told = []
    for question in ("what is a lambda", "what is a class", "which functions are there"):
        plain, answer = engine.query(question), fast.query(question)
        assert str(answer) == str(plain)
        assert [node.node.node_id for node in answer.source_nodes] == [node.node.node_id for node in plain.source_nodes]
        told.append(fast.last_trace().summary())
    assert sum(one["provisional_answers"] for one in told) > 0
    assert right or not any(one["provisional_claimed"] for one in told)
