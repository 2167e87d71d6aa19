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
ObjectAndFields = tuple[Any, dict[str, Any]]
"""An object, and the fields that the record of its parts must have."""


def retriever_query_engine(x: Library) -> ObjectAndFields:
    arguments = {"retriever": x.index.as_retriever(), "response_synthesizer": TreeSummarize(llm=x.llm)}
    steps = [SimilarityPostprocessor()]
    return RetrieverQueryEngine(**arguments, node_postprocessors=steps), {**arguments, "node_postprocessors": steps}


def citation_query_engine(x: Library) -> ObjectAndFields:
    arguments = {"retriever": x.index.as_retriever(), "response_synthesizer": TreeSummarize(llm=x.llm)}
    options = {"text_splitter": SentenceSplitter(), "metadata_mode": MetadataMode.LLM}
    return CitationQueryEngine(**arguments, **options), {
        **arguments,
        **options,
        "node_postprocessors": [],
        "multimodal": False,
    }


def transform_query_engine(x: Library) -> ObjectAndFields:
    arguments = {"query_engine": x.rag(), "query_transform": HyDEQueryTransform(x.llm), "transform_metadata": {"a": 1}}
    return TransformQueryEngine(**arguments), arguments


def retry_source_query_engine(x: Library) -> ObjectAndFields:
    arguments = {"query_engine": x.rag(), "evaluator": RelevancyEvaluator(x.llm), "max_retries": 2}
    return RetrySourceQueryEngine(llm=x.llm, **arguments), arguments


def router_query_engine(x: Library) -> ObjectAndFields:
    tools, arguments = (
        x.tools(),
        {"selector": LLMSingleSelector.from_defaults(x.llm), "summarizer": TreeSummarize(x.llm)},
    )
    fields = {"query_engines": [one.query_engine for one in tools], "metadatas": [one.metadata for one in tools]}
    return RouterQueryEngine(query_engine_tools=tools, llm=x.llm, **arguments), {**arguments, **fields}


def sub_question_query_engine(x: Library) -> ObjectAndFields:
    tools = x.tools()
    arguments = {
        "question_gen": LLMQuestionGenerator.from_defaults(x.llm),
        "response_synthesizer": TreeSummarize(x.llm),
    }
    fields = {
        "query_engines": {one.metadata.name: one.query_engine for one in tools},
        "metadatas": [one.metadata for one in tools],
    }
    return SubQuestionQueryEngine(query_engine_tools=tools, **arguments), {**arguments, **fields}


def multi_step_query_engine(x: Library) -> ObjectAndFields:
    created = MultiStepQueryEngine(
        x.rag(), HyDEQueryTransform(x.llm), response_synthesizer=TreeSummarize(x.llm, streaming=True)
    )
    return created, {"streaming": True}


def vector_index_retriever(x: Library) -> ObjectAndFields:
    options = {"similarity_top_k": 3, "filters": None, "node_ids": ["n1"], "doc_ids": ["d"]}
    fields = {
        "vector_store": x.index.vector_store,
        "embed_model": x.index._embed_model,
        "docstore": x.index.docstore,
        "vector_store_query_mode": VectorStoreQueryMode.DEFAULT,
        "vector_store_kwargs": {"a": 1},
    }
    return VectorIndexRetriever(x.index, **options, vector_store_kwargs={"a": 1}), {**options, **fields}


def summary_index(x: Library) -> SummaryIndex:
    return SummaryIndex([TextNode(text="oats"), TextNode(text="ivy")])


def summary_index_retriever(x: Library) -> ObjectAndFields:
    index = summary_index(x)
    return index.as_retriever(), {"index": index}


def query_fusion_retriever(x: Library) -> ObjectAndFields:
    arguments = {"retrievers": [x.index.as_retriever(), x.index.as_retriever()], "llm": x.llm, "num_queries": 2}
    options = {"query_gen_prompt": "{num_queries} {query}", "mode": "simple"}
    created = QueryFusionRetriever(**arguments, **options, retriever_weights=[1.0, 3.0])
    return created, {**arguments, **options, "retriever_weights": [0.25, 0.75]}


def transform_retriever(x: Library) -> ObjectAndFields:
    arguments = {"retriever": x.index.as_retriever(), "query_transform": HyDEQueryTransform(x.llm)}
    return TransformRetriever(**arguments, transform_metadata={"a": 1}), {**arguments, "transform_metadata": {"a": 1}}


def create_synthesizer(x: Library, cls: Any, **options: Any) -> ObjectAndFields:
    """Create a synthesizer with its own templates, passed under the names of the record's fields."""
    created = cls(llm=x.llm, streaming=True, **options)
    common = {"llm": x.llm, "output_cls": None, "streaming": True, "multimodal": False}
    return created, {**common, "prompt_helper": created._prompt_helper, **options}


def create_refining_synthesizer(x: Library, cls: Any) -> ObjectAndFields:
    padding = {} if is_older_than("0.14.22") else {"response_padding_size": 7}
    created, fields = create_synthesizer(x, cls, text_qa_template=QA, refine_template=OTHER, **padding)
    other = {"response_padding_size": padding.get("response_padding_size"), "structured_answer_filtering": False}
    return created, {**fields, **other, "default_program": True}


def generation(x: Library) -> ObjectAndFields:
    created, fields = create_synthesizer(x, Generation, simple_template=QA)
    fields["input_prompt"] = fields.pop("simple_template")
    return created, fields


def hyde(x: Library) -> ObjectAndFields:
    arguments = {"llm": x.llm, "hyde_prompt": QA, "include_original": False}
    return HyDEQueryTransform(**arguments), arguments


def decompose(x: Library) -> ObjectAndFields:
    arguments = {"llm": x.llm, "decompose_query_prompt": QA}
    return DecomposeQueryTransform(**arguments), arguments


def selector(x: Library) -> ObjectAndFields:
    arguments = {"llm": x.llm, "prompt": PARSED}
    return LLMSingleSelector(**arguments), arguments


def selector_by_call(x: Library) -> ObjectAndFields:
    created = PydanticSingleSelector.from_defaults(llm=x.calling)  # type: ignore[arg-type]
    return created, {"program": created._selector_program}


def program(x: Library) -> ObjectAndFields:
    arguments = {"output_cls": SingleSelection, "llm": x.calling, "prompt": QA, "tool_choice": None}
    created = FunctionCallingProgram(**arguments)
    return created, {**arguments, "allow_parallel_tool_calls": False}


def question_generator(x: Library) -> ObjectAndFields:
    arguments = {"llm": x.llm, "prompt": PARSED}
    return LLMQuestionGenerator(**arguments), arguments


def reranker(x: Library) -> ObjectAndFields:
    options = {"format_node_batch_fn": lambda nodes: "", "parse_choice_select_answer_fn": lambda text, n: ([], [])}
    arguments = {"llm": x.llm, "choice_select_prompt": QA}
    return LLMRerank(**arguments, **options), {**arguments, **options}


def judge(x: Library) -> ObjectAndFields:
    arguments = {"llm": x.llm, "eval_template": QA, "refine_template": OTHER, "raise_error": True}
    return RelevancyEvaluator(**arguments), arguments


def index(x: Library) -> ObjectAndFields:
    fields = {"embed_model": x.index._embed_model, "vector_store": x.index.vector_store, "insert_batch_size": 2048}
    return x.index, fields


def queried_index(x: Library) -> ObjectAndFields:
    fields = {"docstore": x.index.docstore, "index_struct": x.index.index_struct, "object_map": x.index._object_map}
    return x.index, {**fields, "embed_model": x.index._embed_model, "vector_store": x.index.vector_store}


def query_engine_tool(x: Library) -> ObjectAndFields:
    engine = x.rag()
    return QueryEngineTool.from_defaults(engine), {"part": engine}


def retriever_tool(x: Library) -> ObjectAndFields:
    retriever = x.index.as_retriever()
    return RetrieverTool.from_defaults(retriever), {"part": retriever}


def router_retriever(x: Library) -> ObjectAndFields:
    selector = LLMSingleSelector.from_defaults(x.llm)
    tool = RetrieverTool.from_defaults(x.index.as_retriever(), description="what grows")
    arguments = {"selector": selector, "retrievers": [tool.retriever], "metadatas": [tool.metadata]}
    return RouterRetriever(selector, [tool], llm=x.llm), arguments


OBJECTS: dict[Kind, Callable[[Library], ObjectAndFields]] = {
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
    writers.SynthesizerParts: lambda x: create_synthesizer(x, NoText),
    writers.RefineParts: lambda x: create_refining_synthesizer(x, Refine),
    writers.CompactAndRefineParts: lambda x: create_refining_synthesizer(x, CompactAndRefine),
    writers.AccumulateParts: lambda x: create_synthesizer(x, Accumulate, text_qa_template=QA),
    writers.TreeSummarizeParts: lambda x: create_synthesizer(x, TreeSummarize, summary_template=QA),
    writers.SimpleSummarizeParts: lambda x: create_synthesizer(x, SimpleSummarize, text_qa_template=QA),
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
