"""Query engines as the LlamaIndex documentation builds them, over the objects of a `Kit`.

Each is a function from a kit to an engine; `PATTERNS` has what to call it with and whether anything can be gained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llama_index.core import PromptHelper, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import Response
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.tools import QueryEngineTool

from benchmarks.llamaindex.kits import Kit

Engine = BaseQueryEngine
ASKED = "What does the report say about the terms that would have to change first, and what are its reasons?"


@dataclass(frozen=True)
class Pattern:
    make: Callable[[Kit], Engine]
    given: str = ASKED
    gain: bool = True
    """Whether anything could be sooner; if not, it is measured how much later."""


def synthesizer(kit: Kit, mode: ResponseMode, chunk_tokens: int, **options: Any) -> BaseSynthesizer:
    """One that packs at most so many tokens into a prompt."""
    helper = PromptHelper(3900, 256, chunk_overlap_ratio=0.0, chunk_size_limit=chunk_tokens)
    return get_response_synthesizer(
        kit.llm, prompt_helper=helper, response_mode=mode, callback_manager=kit.manager, **options
    )


def tools(*engines: Engine) -> list[QueryEngineTool]:
    described = (("reports", "The yearly reports."), ("notes", "Notes on the reports."), ("all", "Everything."))
    return [
        QueryEngineTool.from_defaults(engine, name=name, description=text)
        for engine, (name, text) in zip(engines, described, strict=False)
    ]


def indexes(kit: Kit) -> tuple[VectorStoreIndex, VectorStoreIndex]:
    return kit.reports, kit.notes


# ------------------------------------------------------------ the paper's two


def naive_rag(kit: Kit) -> Engine:
    """The 3 nearest passages, a leaf for each, a summary of them."""
    tree = synthesizer(kit, ResponseMode.TREE_SUMMARIZE, 400)
    return kit.reports.as_query_engine(similarity_top_k=3, response_synthesizer=tree)


def advanced_rag(kit: Kit) -> Engine:
    """Three queries, 16 passages for each, the best 3 of all; an answer from the first, refined with the others."""
    fusion = QueryFusionRetriever(
        [kit.reports.as_retriever(similarity_top_k=16)],
        llm=kit.llm,
        num_queries=3,
        similarity_top_k=48,
        mode=FUSION_MODES.RECIPROCAL_RANK,
        callback_manager=kit.manager,
    )
    refine = get_response_synthesizer(kit.llm, response_mode=ResponseMode.REFINE, callback_manager=kit.manager)
    return RetrieverQueryEngine(fusion, refine, node_postprocessors=[kit.reranker(3)])


# ------------------------------------------------------------ the documentation's


def fusion(kit: Kit) -> Engine:
    """Two collections, four queries: eight searches."""
    both = [index.as_retriever(similarity_top_k=4) for index in indexes(kit)]
    retriever = QueryFusionRetriever(
        both,
        llm=kit.llm,
        num_queries=4,
        similarity_top_k=4,
        mode=FUSION_MODES.RECIPROCAL_RANK,
        callback_manager=kit.manager,
    )
    return RetrieverQueryEngine.from_args(retriever, llm=kit.llm)


def hyde(kit: Kit) -> Engine:
    transform = HyDEQueryTransform(llm=kit.llm, include_original=True)
    return TransformQueryEngine(kit.reports.as_query_engine(similarity_top_k=3), transform)


def sub_questions(kit: Kit) -> Engine:
    engines = [index.as_query_engine(similarity_top_k=2) for index in indexes(kit)]
    generator = LLMQuestionGenerator.from_defaults(llm=kit.llm)
    return SubQuestionQueryEngine.from_defaults(
        tools(*engines), llm=kit.llm, question_gen=generator, verbose=False, use_async=True
    )


def router(kit: Kit) -> Engine:
    engines = [index.as_query_engine(similarity_top_k=2) for index in indexes(kit)]
    return RouterQueryEngine(LLMSingleSelector.from_defaults(llm=kit.llm), tools(*engines), llm=kit.llm)


def router_multi(kit: Kit) -> Engine:
    engines = [index.as_query_engine(similarity_top_k=2) for index in indexes(kit)]
    return RouterQueryEngine(LLMMultiSelector.from_defaults(llm=kit.llm), tools(*engines), llm=kit.llm)


def citation(kit: Kit) -> Engine:
    return CitationQueryEngine.from_args(kit.reports, llm=kit.llm, similarity_top_k=4, citation_chunk_size=128)


def multi_step(kit: Kit) -> Engine:
    base = kit.reports.as_query_engine(similarity_top_k=2)
    return MultiStepQueryEngine(base, StepDecomposeQueryTransform(kit.llm), index_summary="Answers about reports")


def retry(kit: Kit) -> Engine:
    """Judged, and asked again until the judge is content."""
    return RetryQueryEngine(kit.reports.as_query_engine(similarity_top_k=2), RelevancyEvaluator(llm=kit.llm))


def accumulate(kit: Kit) -> Engine:
    """An answer from each passage."""
    return kit.reports.as_query_engine(similarity_top_k=4, response_mode="accumulate")


def compact(kit: Kit) -> Engine:
    """Retrieve, answer: each step needs the whole of the one before."""
    return kit.reports.as_query_engine(similarity_top_k=3)


PATTERNS: dict[str, Pattern] = {
    "naive RAG": Pattern(naive_rag),
    "advanced RAG": Pattern(advanced_rag),
    "fusion": Pattern(fusion),
    "HyDE": Pattern(hyde),
    "sub-questions": Pattern(sub_questions),
    "router, several": Pattern(router_multi, "What would have to change first, and why?"),
    "multi-step": Pattern(multi_step),
    "retry": Pattern(retry),
    "accumulate": Pattern(accumulate),
    "router": Pattern(router),
    "citation": Pattern(citation, gain=False),
    "compact": Pattern(compact, gain=False),
}


def shown(response: Any) -> tuple[str, list[tuple[str, Any]]]:
    """What the user sees: the text, and the passages with their scores. Some nodes are made anew in every query."""
    assert isinstance(response, Response)
    return str(response), [(node.node.get_content(), node.score) for node in response.source_nodes]
