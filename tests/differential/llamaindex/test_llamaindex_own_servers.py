"""Tests of the user's `OpenAI` and `OpenAILike` on a server: they are known to take several calls at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from differential.llamaindex.compare import settled
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike

from teola_plugin import accelerate
from tests.support.openai_stub import MODEL, OpenAIStub, openai_stub


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


def model(kind: str, stub: OpenAIStub) -> Any:
    common: dict[str, Any] = {"api_base": stub.base_url, "api_key": "none", "max_retries": 0}
    if kind == "OpenAI":
        return OpenAI(model="gpt-4o", **common)
    return OpenAILike(model=MODEL, is_chat_model=kind == "chat", **common)


def engine(llm: Any) -> Any:
    nodes = [TextNode(id_=f"{i}", text=f"Field {i} has oats.") for i in range(4)]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(3))
    return index.as_query_engine(llm=llm, similarity_top_k=4, response_mode="accumulate")


@pytest.mark.parametrize("kind", ["chat", "text", "OpenAI"])
def test_server_gets_all_requests_of_a_list_before_it_answers(stub: OpenAIStub, kind: str) -> None:
    fast = accelerate(engine(model(kind, stub)))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(fast.query, "slowly, what grows?")
        for _ in range(500):
            if len(stub.requests) == 4:
                break
            time.sleep(0.01)
        there = len(stub.requests)
        stub.go.set()
        answer_text = str(answer.result(20))
    settled()
    assert there == 4 == len(stub.requests)
    first = list(stub.requests)
    stub.requests.clear()
    plain = str(engine(model(kind, stub)).query("slowly, what grows?"))
    assert answer_text == plain and sorted(map(str, first)) == sorted(map(str, stub.requests))
