"""LlamaIndex engines of every kind that can be planned, on the pool of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.indices.query.query_transform.base import DecomposeQueryTransform, HyDEQueryTransform
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.postprocessor import LLMRerank, LongContextReorder, SimilarityPostprocessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever
from llama_index.core.schema import TextNode
from llama_index.core.selectors import (
    LLMMultiSelector,
    LLMSingleSelector,
    PydanticMultiSelector,
    PydanticSingleSelector,
)
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate

WORDS = "oat ivy boat sail mill barn rope tide corn dock herd mast seed wave plow keel"
MODES = ("compact", "refine", "tree_summarize", "accumulate", "compact_accumulate", "simple_summarize", "generation")
SUB_QUESTIONS = """```json
{"items": [{"sub_question": "what grows", "tool_name": "farm"}, {"sub_question": "what sails", "tool_name": "port"},
 {"sub_question": "what is old", "tool_name": "farm"}]}
```"""

CALLS = {
    "SingleSelection": '{"name": "SingleSelection", "arguments": {"index": 2, "reason": "a"}}',
    "MultiSelection": '{"name": "MultiSelection", "arguments": {"selections": '
    '[{"index": 1, "reason": "a"}, {"index": 2, "reason": "b"}]}}',
}


def reply(payload: Generate) -> str:
    """Return the model's answer: a list where the prompt requests one, else a text that depends on the prompt alone."""
    text = payload.prompt.flat()
    if payload.prompt.tools:
        return CALLS["MultiSelection" if "MultiSelection" in payload.prompt.tools else "SingleSelection"]
    if "search queries" in text:
        return "what grows\nwhat sails\nwhat is old"
    if "sub_question" in text:
        return SUB_QUESTIONS
    if "top choices" in text:
        return '[{"choice": 1, "reason": "a"}, {"choice": 2, "reason": "b"}]'
    if "most relevant to the question" in text:
        return '[{"choice": 2, "reason": "a"}]'
    if "Relevance:" in text:
        return "Doc: 2, Relevance: 8\nDoc: 1, Relevance: 5"
    return f"said {sum(map(ord, text)) % 9973} of {len(text)}"


@dataclass(frozen=True)
class Library:
    """An index, and the models from which engines over it are made."""

    index: VectorStoreIndex
    llm: TeolaLLM
    reranker: TeolaRerank

    def rag(self, mode: str = "compact", k: int = 3, **more: Any) -> RetrieverQueryEngine:
        retriever = self.index.as_retriever(similarity_top_k=k)
        return RetrieverQueryEngine.from_args(retriever, llm=self.llm, response_mode=mode, **more)  # type: ignore[arg-type]

    def fusion(self, mode: str = "reciprocal_rerank", *, use_async: bool = False, llm: Any = None) -> Any:
        both = [self.index.as_retriever(similarity_top_k=k) for k in (4, 2)]
        return QueryFusionRetriever(
            both, llm=llm or self.llm, num_queries=3, similarity_top_k=5, use_async=use_async, mode=mode
        )  # type: ignore[arg-type]

    def fused(self, mode: str = "compact", **more: Any) -> RetrieverQueryEngine:
        return RetrieverQueryEngine.from_args(self.fusion(), llm=self.llm, response_mode=mode, **more)  # type: ignore[arg-type]

    def tools(self) -> list[QueryEngineTool]:
        return [
            QueryEngineTool.from_defaults(self.rag(), name="farm", description="what grows"),
            QueryEngineTool.from_defaults(self.rag("tree_summarize", 5), name="port", description="what sails"),
        ]

    @property
    def calling(self) -> TeolaLLM:
        """Return the LLM with function calling enabled."""
        return self.llm.model_copy(update={"is_function_calling_model": True})

    def router_by_call(self, *, several: bool = False) -> RouterQueryEngine:
        kind = PydanticMultiSelector if several else PydanticSingleSelector
        return RouterQueryEngine(kind.from_defaults(llm=self.calling), self.tools(), llm=self.llm)  # type: ignore[arg-type]

    def searching_router(self, selector: Any = None, *makers: Any) -> RouterRetriever:
        """Return a router of two or more retrievers."""
        retrievers = [make() for make in makers] or [self.index.as_retriever(similarity_top_k=k) for k in (4, 2)]
        tools = [
            RetrieverTool.from_defaults(retriever, description=f"the {i}th") for i, retriever in enumerate(retrievers)
        ]
        return RouterRetriever(selector or LLMSingleSelector.from_defaults(self.llm), tools, llm=self.llm)


def library(pool: EnginePool, collection: str, passages: int = 12) -> Library:
    """Create an index of `passages` passages in the collection, and the models that go with it."""
    words = WORDS.split()
    nodes = [
        TextNode(
            id_=f"n{i}",
            text=f"Passage {i}. " + " ".join(words[(i * j + j) % 16] for j in range(180)),
            metadata={"file": f"f{i % 3}"},
        )
        for i in range(passages)
    ]
    store = TeolaVectorStore(pool=pool, collection=collection)
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=TeolaEmbedding(pool=pool))
    return Library(index, TeolaLLM(pool=pool, context_window=1500, max_tokens=64), TeolaRerank(pool=pool, top_n=3))


@contextmanager
def settings(llm: Any) -> Iterator[None]:
    """In the body, make `llm` the default LLM of LlamaIndex's `Settings`."""
    before = Settings._llm
    Settings._llm = llm
    try:
        yield
    finally:
        Settings._llm = before


@contextmanager
def own_loop() -> Iterator[None]:
    """In the body, give this thread an event loop, and close it afterwards."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


ENGINES: dict[str, Callable[[Library], Any]] = {
    **{f"fusion, {mode}": lambda x, mode=mode: x.fused(mode) for mode in MODES},  # type: ignore[misc]
    "tree": lambda x: x.rag("tree_summarize", 6),
    "accumulated": lambda x: x.rag("accumulate"),
    "reranked": lambda x: x.fused(node_postprocessors=[x.reranker]),
    "chosen by the model": lambda x: x.rag(
        k=6,
        node_postprocessors=[
            SimilarityPostprocessor(similarity_cutoff=-1.0),
            LLMRerank(llm=x.llm, choice_batch_size=2, top_n=3),
            LongContextReorder(),
        ],
    ),
    "cited": lambda x: CitationQueryEngine(
        retriever=x.fusion(), llm=x.llm, citation_chunk_size=64, citation_chunk_overlap=8
    ),
    "hyde": lambda x: TransformQueryEngine(x.rag(), HyDEQueryTransform(x.llm)),
    "decomposed": lambda x: TransformQueryEngine(x.fused(), DecomposeQueryTransform(x.llm)),
    "sub-questions": lambda x: SubQuestionQueryEngine.from_defaults(
        x.tools(), llm=x.llm, question_gen=LLMQuestionGenerator.from_defaults(x.llm), use_async=False, verbose=False
    ),
    "router": lambda x: RouterQueryEngine(LLMSingleSelector.from_defaults(x.llm), x.tools(), llm=x.llm),
    "router, several": lambda x: RouterQueryEngine(LLMMultiSelector.from_defaults(x.llm), x.tools(), llm=x.llm),
}
"""Engines that acceleration makes faster, by name."""


def response_parts(response: Any) -> Any:
    """Return all parts of a response that can be compared.

    Ids of nodes are left out, since engines draw them at random.
    """
    nodes = [(n.score, n.node.metadata, n.node.get_content()) for n in response.source_nodes]
    return type(response).__name__, str(response), nodes, str((response.metadata or {}).get("selector_result"))


def chat_mock(max_tokens: int) -> MockFunctionCallingLLM:
    """Return LlamaIndex's mock of a chat model that calls tools. Skip the test where the mock is no chat model."""
    model = MockFunctionCallingLLM(max_tokens=max_tokens, is_chat_model=True)
    if not model.metadata.is_chat_model:
        pytest.skip("this version of llama-index-core has no mock of a chat model that calls tools")
    return model
