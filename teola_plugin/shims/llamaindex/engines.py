"""Query engines: what they are made of, and their own code between two calls of models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.evaluation import BaseEvaluator
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryGuidelineQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.tools.types import ToolMetadata

from teola_plugin.shims.llamaindex.copies import clone, own_splitter
from teola_plugin.shims.llamaindex.records import Parts, attribute, before, derived


@dataclass(frozen=True, slots=True)
class QueryEngineParts(Parts):
    """Of every query engine."""

    OF: ClassVar[tuple[type, ...]] = (RetryQueryEngine, RetryGuidelineQueryEngine)
    METHODS: ClassVar[tuple[str, ...]] = ("_query", "_aquery")


@dataclass(frozen=True, slots=True)
class RetrievalParts(Parts):
    """Of an engine that retrieves, and postprocesses what it has found."""

    retriever: BaseRetriever = attribute("_retriever", BaseRetriever)
    node_postprocessors: Sequence[BaseNodePostprocessor] = attribute("_node_postprocessors", list, tuple)
    response_synthesizer: BaseSynthesizer = attribute("_response_synthesizer", BaseSynthesizer)


@dataclass(frozen=True, slots=True)
class RetrieverQueryEngineParts(RetrievalParts):
    OF: ClassVar = (RetrieverQueryEngine,)


@dataclass(frozen=True, slots=True)
class CitationQueryEngineParts(RetrievalParts):
    OF: ClassVar = (CitationQueryEngine,)
    METHODS: ClassVar = ("_create_citation_nodes",)

    text_splitter: Any = attribute("text_splitter")
    metadata_mode: MetadataMode = attribute("_metadata_mode", MetadataMode)
    multimodal: bool = attribute("_multimodal", bool, default=before("0.14.23", False))


def citation_sources(engine: CitationQueryEngine, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """The nodes cut into numbered sources, without events. The ids are new with every call."""
    own = clone(engine, text_splitter=own_splitter(engine.text_splitter))
    made: list[NodeWithScore] = own._create_citation_nodes(nodes)
    return made


@dataclass(frozen=True, slots=True)
class TransformQueryEngineParts(QueryEngineParts):
    OF: ClassVar = (TransformQueryEngine,)

    query_engine: BaseQueryEngine = attribute("_query_engine", BaseQueryEngine)
    query_transform: BaseQueryTransform = attribute("_query_transform", BaseQueryTransform)
    transform_metadata: dict[str, Any] | None = attribute("_transform_metadata", dict, NoneType)


@dataclass(frozen=True, slots=True)
class RetrySourceQueryEngineParts(Parts):
    OF: ClassVar = (RetrySourceQueryEngine,)

    query_engine: BaseQueryEngine = attribute("_query_engine", BaseQueryEngine)
    evaluator: BaseEvaluator = attribute("_evaluator", BaseEvaluator)
    max_retries: int = attribute("max_retries", int)


@dataclass(frozen=True, slots=True)
class RouterQueryEngineParts(Parts):
    OF: ClassVar = (RouterQueryEngine,)

    selector: BaseSelector = attribute("_selector", BaseSelector)
    query_engines: Sequence[BaseQueryEngine] = attribute("_query_engines", list, tuple)
    metadatas: Sequence[ToolMetadata] = attribute("_metadatas", list, tuple)
    summarizer: BaseSynthesizer = attribute("_summarizer", BaseSynthesizer)


@dataclass(frozen=True, slots=True)
class SubQuestionQueryEngineParts(Parts):
    OF: ClassVar = (SubQuestionQueryEngine,)
    METHODS: ClassVar = ("_construct_node",)

    question_gen: BaseQuestionGenerator = attribute("_question_gen", BaseQuestionGenerator)
    query_engines: dict[str, BaseQueryEngine] = attribute("_query_engines", dict)
    metadatas: Sequence[ToolMetadata] = attribute("_metadatas", list, tuple)
    response_synthesizer: BaseSynthesizer = attribute("_response_synthesizer", BaseSynthesizer)


def sub_question_node(
    engine: SubQuestionQueryEngine, question: str, tool: str, answer: str, sources: Sequence[NodeWithScore]
) -> NodeWithScore:
    """What the last answer is made from: a question to an engine, and what that said."""
    asked = SubQuestion(sub_question=question, tool_name=tool)
    return engine._construct_node(SubQuestionAnswerPair(sub_q=asked, answer=answer, sources=list(sources)))


@dataclass(frozen=True, slots=True)
class MultiStepQueryEngineParts(QueryEngineParts):
    OF: ClassVar = (MultiStepQueryEngine,)

    streaming: bool = derived(lambda engine: engine._response_synthesizer._streaming)
    """Whether its last answer comes in pieces."""


def runs_in_loop(part: Any) -> bool:
    """Whether an engine, retriever or synthesizer makes the calls of its lists in a loop, in its sync entries, too.

    Without the attribute it has no such way.
    """
    return bool(getattr(part, "_use_async", getattr(part, "use_async", False)))


@dataclass(frozen=True, slots=True)
class AnsweringParts(Parts):
    """Of an engine of any class, which may have a synthesizer of its own."""

    response_synthesizer: BaseSynthesizer | None = attribute(
        "_response_synthesizer", BaseSynthesizer, NoneType, default=None
    )


# ------------------------------------------------------------ chat engines


def history_writer(response: StreamingAgentChatResponse) -> threading.Thread | asyncio.Task[Any] | None:
    """Return the thread or task that reads a streamed answer to its end and writes it to the history.

    None if there is none, or if it has ended. Touches `write_response_to_history_thread`, which the response has since
    llama-index-core 0.14.17. Without it: the `_args` of the threads that are running, where LlamaIndex's own threads
    keep the response's method.
    """
    if response.awrite_response_to_history_task is not None:
        return response.awrite_response_to_history_task
    if hasattr(response, "write_response_to_history_thread"):
        return response.write_response_to_history_thread
    return next((thread for thread in threading.enumerate() if _writes_history_of(thread, response)), None)


def _writes_history_of(thread: threading.Thread, response: StreamingAgentChatResponse) -> bool:
    targets = [getattr(argument, "func", None) for argument in getattr(thread, "_args", ())]
    return any(getattr(target, "__self__", None) is response for target in targets)
