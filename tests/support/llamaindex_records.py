"""Objects of LlamaIndex made by their public constructors, and the fields that the records of their parts must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core import Settings, SummaryIndex
from llama_index.core.base.base_selector import SingleSelection
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform.base import DecomposeQueryTransform, HyDEQueryTransform
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.output_parsers.selection import SelectionOutputParser
from llama_index.core.postprocessor import LLMRerank, SimilarityPostprocessor
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import (
    Accumulate,
    CompactAndRefine,
    Generation,
    Refine,
    SimpleSummarize,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.no_text import NoText
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever, TransformRetriever
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.selectors import LLMSingleSelector, PydanticSingleSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.core.vector_stores.types import VectorStoreQueryMode

from support.llamaindex_engines import Library
from teola_plugin.shims.llamaindex import engines, queries, retrieval, workflows
from teola_plugin.shims.llamaindex import synthesizers as writers
from teola_plugin.shims.llamaindex.records import Parts, is_older_than

QA, OTHER = PromptTemplate("{context_str} {query_str}"), PromptTemplate("{existing_answer} {context_msg} {query_str}")
PARSED = PromptTemplate("{context_list} {query_str}", output_parser=SelectionOutputParser())
Kind = type[Parts]
Made = tuple[Any, dict[str, Any]]
"""An object, and the fields that the record of its parts must have."""


def retriever_query_engine(x: Library) -> Made:
    given = {"retriever": x.index.as_retriever(), "response_synthesizer": TreeSummarize(llm=x.llm)}
    steps = [SimilarityPostprocessor()]
    return RetrieverQueryEngine(**given, node_postprocessors=steps), {**given, "node_postprocessors": steps}


def citation_query_engine(x: Library) -> Made:
    given = {"retriever": x.index.as_retriever(), "response_synthesizer": TreeSummarize(llm=x.llm)}
    own = {"text_splitter": SentenceSplitter(), "metadata_mode": MetadataMode.LLM}
    return CitationQueryEngine(**given, **own), {**given, **own, "node_postprocessors": [], "multimodal": False}


def transform_query_engine(x: Library) -> Made:
    given = {"query_engine": x.rag(), "query_transform": HyDEQueryTransform(x.llm), "transform_metadata": {"a": 1}}
    return TransformQueryEngine(**given), given


def retry_source_query_engine(x: Library) -> Made:
    given = {"query_engine": x.rag(), "evaluator": RelevancyEvaluator(x.llm), "max_retries": 2}
    return RetrySourceQueryEngine(llm=x.llm, **given), given


def router_query_engine(x: Library) -> Made:
    tools, given = x.tools(), {"selector": LLMSingleSelector.from_defaults(x.llm), "summarizer": TreeSummarize(x.llm)}
    found = {"query_engines": [one.query_engine for one in tools], "metadatas": [one.metadata for one in tools]}
    return RouterQueryEngine(query_engine_tools=tools, llm=x.llm, **given), {**given, **found}


def sub_question_query_engine(x: Library) -> Made:
    tools = x.tools()
    given = {"question_gen": LLMQuestionGenerator.from_defaults(x.llm), "response_synthesizer": TreeSummarize(x.llm)}
    found = {
        "query_engines": {one.metadata.name: one.query_engine for one in tools},
        "metadatas": [one.metadata for one in tools],
    }
    return SubQuestionQueryEngine(query_engine_tools=tools, **given), {**given, **found}


def multi_step_query_engine(x: Library) -> Made:
    made = MultiStepQueryEngine(
        x.rag(), HyDEQueryTransform(x.llm), response_synthesizer=TreeSummarize(x.llm, streaming=True)
    )
    return made, {"streaming": True}


def vector_index_retriever(x: Library) -> Made:
    own = {"similarity_top_k": 3, "filters": None, "node_ids": ["n1"], "doc_ids": ["d"]}
    found = {
        "vector_store": x.index.vector_store,
        "embed_model": x.index._embed_model,
        "docstore": x.index.docstore,
        "vector_store_query_mode": VectorStoreQueryMode.DEFAULT,
        "vector_store_kwargs": {"a": 1},
    }
    return VectorIndexRetriever(x.index, **own, vector_store_kwargs={"a": 1}), {**own, **found}


def summary_index(x: Library) -> SummaryIndex:
    return SummaryIndex([TextNode(text="oats"), TextNode(text="ivy")])


def summary_index_retriever(x: Library) -> Made:
    index = summary_index(x)
    return index.as_retriever(), {"index": index}


def query_fusion_retriever(x: Library) -> Made:
    given = {"retrievers": [x.index.as_retriever(), x.index.as_retriever()], "llm": x.llm, "num_queries": 2}
    own = {"query_gen_prompt": "{num_queries} {query}", "mode": "simple"}
    made = QueryFusionRetriever(**given, **own, retriever_weights=[1.0, 3.0])
    return made, {**given, **own, "retriever_weights": [0.25, 0.75]}


def transform_retriever(x: Library) -> Made:
    given = {"retriever": x.index.as_retriever(), "query_transform": HyDEQueryTransform(x.llm)}
    return TransformRetriever(**given, transform_metadata={"a": 1}), {**given, "transform_metadata": {"a": 1}}


def writing(x: Library, cls: Any, **own: Any) -> Made:
    """Create a synthesizer with its own templates, passed under the names of the record's fields."""
    made = cls(llm=x.llm, streaming=True, **own)
    common = {"llm": x.llm, "output_cls": None, "streaming": True, "multimodal": False}
    return made, {**common, "prompt_helper": made._prompt_helper, **own}


def refining(x: Library, cls: Any) -> Made:
    padding = {} if is_older_than("0.14.22") else {"response_padding_size": 7}
    made, found = writing(x, cls, text_qa_template=QA, refine_template=OTHER, **padding)
    other = {"response_padding_size": padding.get("response_padding_size"), "structured_answer_filtering": False}
    return made, {**found, **other, "default_program": True}


def generation(x: Library) -> Made:
    made, found = writing(x, Generation, simple_template=QA)
    found["input_prompt"] = found.pop("simple_template")
    return made, found


def hyde(x: Library) -> Made:
    given = {"llm": x.llm, "hyde_prompt": QA, "include_original": False}
    return HyDEQueryTransform(**given), given


def decompose(x: Library) -> Made:
    given = {"llm": x.llm, "decompose_query_prompt": QA}
    return DecomposeQueryTransform(**given), given


def selector(x: Library) -> Made:
    given = {"llm": x.llm, "prompt": PARSED}
    return LLMSingleSelector(**given), given


def selector_by_call(x: Library) -> Made:
    made = PydanticSingleSelector.from_defaults(llm=x.calling)  # type: ignore[arg-type]
    return made, {"program": made._selector_program}


def program(x: Library) -> Made:
    given = {"output_cls": SingleSelection, "llm": x.calling, "prompt": QA, "tool_choice": None}
    made = FunctionCallingProgram(**given)
    return made, {**given, "allow_parallel_tool_calls": False}


def question_generator(x: Library) -> Made:
    given = {"llm": x.llm, "prompt": PARSED}
    return LLMQuestionGenerator(**given), given


def reranker(x: Library) -> Made:
    own = {"format_node_batch_fn": lambda nodes: "", "parse_choice_select_answer_fn": lambda text, n: ([], [])}
    given = {"llm": x.llm, "choice_select_prompt": QA}
    return LLMRerank(**given, **own), {**given, **own}


def judge(x: Library) -> Made:
    given = {"llm": x.llm, "eval_template": QA, "refine_template": OTHER, "raise_error": True}
    return RelevancyEvaluator(**given), given


def index(x: Library) -> Made:
    found = {"embed_model": x.index._embed_model, "vector_store": x.index.vector_store, "insert_batch_size": 2048}
    return x.index, found


def queried_index(x: Library) -> Made:
    found = {"docstore": x.index.docstore, "index_struct": x.index.index_struct, "object_map": x.index._object_map}
    return x.index, {**found, "embed_model": x.index._embed_model, "vector_store": x.index.vector_store}


def query_engine_tool(x: Library) -> Made:
    engine = x.rag()
    return QueryEngineTool.from_defaults(engine), {"part": engine}


def retriever_tool(x: Library) -> Made:
    retriever = x.index.as_retriever()
    return RetrieverTool.from_defaults(retriever), {"part": retriever}


def router_retriever(x: Library) -> Made:
    selector = LLMSingleSelector.from_defaults(x.llm)
    tool = RetrieverTool.from_defaults(x.index.as_retriever(), description="what grows")
    given = {"selector": selector, "retrievers": [tool.retriever], "metadatas": [tool.metadata]}
    return RouterRetriever(selector, [tool], llm=x.llm), given


MADE: dict[Kind, Callable[[Library], Made]] = {
    engines.RetrieverQueryEngineParts: retriever_query_engine,
    engines.CitationQueryEngineParts: citation_query_engine,
    engines.TransformQueryEngineParts: transform_query_engine,
    engines.RetrySourceQueryEngineParts: retry_source_query_engine,
    engines.RouterQueryEngineParts: router_query_engine,
    engines.SubQuestionQueryEngineParts: sub_question_query_engine,
    engines.QueryEngineParts: lambda x: (RetryQueryEngine(x.rag(), RelevancyEvaluator(x.llm)), {}),
    engines.MultiStepQueryEngineParts: multi_step_query_engine,
    engines.AnsweringParts: lambda x: ((made := x.rag()), {"response_synthesizer": made._response_synthesizer}),
    retrieval.VectorIndexRetrieverParts: vector_index_retriever,
    retrieval.SummaryIndexRetrieverParts: summary_index_retriever,
    retrieval.QueryFusionRetrieverParts: query_fusion_retriever,
    retrieval.TransformRetrieverParts: transform_retriever,
    retrieval.RouterRetrieverParts: router_retriever,
    writers.SynthesizerParts: lambda x: writing(x, NoText),
    writers.RefineParts: lambda x: refining(x, Refine),
    writers.CompactAndRefineParts: lambda x: refining(x, CompactAndRefine),
    writers.AccumulateParts: lambda x: writing(x, Accumulate, text_qa_template=QA),
    writers.TreeSummarizeParts: lambda x: writing(x, TreeSummarize, summary_template=QA),
    writers.SimpleSummarizeParts: lambda x: writing(x, SimpleSummarize, text_qa_template=QA),
    writers.GenerationParts: generation,
    queries.HyDEQueryTransformParts: hyde,
    queries.DecomposeQueryTransformParts: decompose,
    queries.LLMSelectorParts: selector,
    queries.PydanticSelectorParts: selector_by_call,
    queries.FunctionCallingProgramParts: program,
    queries.LLMQuestionGeneratorParts: question_generator,
    retrieval.PostprocessorParts: lambda x: (SimilarityPostprocessor(), {}),
    retrieval.LLMRerankParts: reranker,
    engines.RelevancyEvaluatorParts: judge,
    engines.SettingsParts: lambda x: (
        Settings,
        {
            "llm": x.llm,
            "embed_model": Settings._embed_model,
            "node_parser": Settings._node_parser,
            "transformations": Settings._transformations,
        },
    ),
    engines.VectorStoreIndexParts: index,
    engines.QueriedIndexParts: queried_index,
    workflows.QueryEngineToolParts: query_engine_tool,
    workflows.RetrieverToolParts: retriever_tool,
}
