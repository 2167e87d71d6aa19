"""Answers that begin before the reranker has spoken, on a shared pool."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig

TEXTS = ["red apples", "green apples and pears", "apples", "a boat on a river", "green apples"]
ENGINES: dict[str, Any] = {
    "llm": {"kind": "fake", "options": {"seconds": 0.1}},
    "embedder": {"kind": "fake"},
    "reranker": {"kind": "fake", "options": {"seconds": 0.2}},
    "store": {"kind": "fake"},
    "writer": {"kind": "fake", "options": {"like": "llm", "seconds": 0.4}},
}
LIST = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}


@pytest.fixture(scope="module")
def pool(ray_address: str) -> Any:
    deploy.up(PoolConfig.model_validate({"name": "provisional", "engines": ENGINES}), ray_address)
    with EnginePool.connect(ray_address, pool="provisional") as pool:
        yield pool


def joined(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def test_answers_are_the_same_alone_and_beside_others(pool: EnginePool) -> None:
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="docs")
    store.add_texts(TEXTS)
    search = store.as_retriever(search_kwargs={"k": 4})
    chain = (
        RunnablePassthrough.assign(documents=(lambda given: given["query"]) | search)
        | RunnablePassthrough.assign(context=TeolaRerank(pool=pool, top_n=2).as_runnable() | joined)
        | ChatPromptTemplate.from_template("Context: {context}\nQuestion: {query}")
        | ChatTeola(pool=pool, max_tokens=12)
        | StrOutputParser()
    )
    fast = accelerate(chain, pool=pool)
    begun = 0
    for query in ("green apples", "a boat", "red"):
        assert fast.invoke({"query": query}) == chain.invoke({"query": query})
        begun += fast.last_trace().summary()["provisional_answers"]
    assert begun > 0
    queries = [{"query": f"apples {n}"} for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(fast.invoke, queries)) == list(threads.map(chain.invoke, queries))


def union(found: list[list[Document]]) -> list[Document]:
    return list({document.page_content: document for documents in found for document in documents}.values())


def test_an_answer_begins_on_what_the_question_itself_finds(pool: EnginePool) -> None:
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="others")
    store.add_texts(TEXTS)
    write: Runnable[Any, Any] = (
        ChatPromptTemplate.from_template("Others like {query}")
        | ChatTeola(pool=pool, engine="writer", max_tokens=96).bind(json_schema=LIST)
        | StrOutputParser()
        | RunnableLambda(json.loads)
    )
    search = itemgetter("queries") | store.as_retriever(search_kwargs={"k": 4}).map() | RunnableLambda(union)
    chain = (
        RunnablePassthrough.assign(queries=write)
        | RunnablePassthrough.assign(documents=search)
        | RunnablePassthrough.assign(context=TeolaRerank(pool=pool, top_n=2).as_runnable() | joined)
        | ChatPromptTemplate.from_template("Context: {context}\nQuestion: {query}")
        | ChatTeola(pool=pool, max_tokens=12)
        | StrOutputParser()
    )
    fast = accelerate(chain, pool=pool)
    assert "on what the question itself finds" in fast.explain()
    begun = 0
    for query in ("green apples", "a boat on a river"):
        assert fast.invoke({"query": query}) == chain.invoke({"query": query})
        begun += fast.last_trace().summary()["provisional_answers"]
    assert begun > 0
