"""Query engines, chat engines and indexes: their parts, their code between model calls, and methods to override."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core import Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.data_structs import IndexDict
from llama_index.core.evaluation import BaseEvaluator, RelevancyEvaluator
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    CustomQueryEngine,
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
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.tools.types import ToolMetadata
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import DISPATCHER_SPAN_DECORATED_ATTR

from teola_plugin.shims.llamaindex.copies import clone, silent_splitter
from teola_plugin.shims.llamaindex.records import Parts, Unreadable, attribute, default_before, derived


@dataclass(frozen=True, slots=True)
class QueryEngineParts(Parts):
    """The parts of every query engine."""

    OF: ClassVar[tuple[type, ...]] = (RetryQueryEngine, RetryGuidelineQueryEngine)
    METHODS: ClassVar[tuple[str, ...]] = ("_query", "_aquery")


@dataclass(frozen=True, slots=True)
class RetrievalParts(Parts):
    """The parts of an engine that retrieves nodes, postprocesses them and answers from them."""

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
    multimodal: bool = attribute("_multimodal", bool, default=default_before("0.14.23", False))


def citation_sources(engine: CitationQueryEngine, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Cut nodes into numbered sources, without events. Every call creates new ids."""
    quiet_engine = clone(engine, text_splitter=silent_splitter(engine.text_splitter))
    sources: list[NodeWithScore] = quiet_engine._create_citation_nodes(nodes)
    return sources


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
    """Return the node that tells the final synthesizer a sub-question and its answer."""
    sub_question = SubQuestion(sub_question=question, tool_name=tool)
    return engine._construct_node(SubQuestionAnswerPair(sub_q=sub_question, answer=answer, sources=list(sources)))


@dataclass(frozen=True, slots=True)
class MultiStepQueryEngineParts(QueryEngineParts):
    OF: ClassVar = (MultiStepQueryEngine,)

    streaming: bool = derived(lambda engine: engine._response_synthesizer._streaming)
    """True if its final answer is streamed."""


def runs_in_loop(part: Any) -> bool:
    """Return True if an object makes the calls of a list in an event loop even in its sync entries.

    `part` is an engine, retriever or synthesizer. Those without the attribute never do.
    """
    return bool(getattr(part, "_use_async", getattr(part, "use_async", False)))


@dataclass(frozen=True, slots=True)
class AnsweringParts(Parts):
    """The synthesizer of an engine of any class; None if it has none."""

    response_synthesizer: BaseSynthesizer | None = attribute(
        "_response_synthesizer", BaseSynthesizer, NoneType, default=None
    )


# ------------------------------------------------------------ what retries judge answers with


@dataclass(frozen=True, slots=True)
class RelevancyEvaluatorParts(Parts):
    OF: ClassVar = (RelevancyEvaluator,)

    llm: Any = attribute("_llm")
    eval_template: BasePromptTemplate = attribute("_eval_template", BasePromptTemplate)
    refine_template: BasePromptTemplate = attribute("_refine_template", BasePromptTemplate)
    raise_error: bool | None = attribute("_raise_error", bool, NoneType)


@dataclass(frozen=True, slots=True)
class SettingsParts(Parts):
    """The global settings as they are stored.

    Reading the public properties would create defaults and change what is set.
    """

    OF: ClassVar = (type(Settings),)

    llm: Any = attribute("_llm")
    embed_model: Any = attribute("_embed_model")
    node_parser: Any = attribute("_node_parser")
    transformations: Sequence[Any] | None = attribute("_transformations", list, tuple, NoneType)


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


# ------------------------------------------------------------ methods below the public entries


Nodes = Sequence[BaseNode]

# ------------------------------------------------------------ query engines


class QueryHooks:
    """A base class put before a query engine's class to override the methods that retrying engines call."""

    if TYPE_CHECKING:

        def __teola_query__(self, query: QueryBundle, original: Callable[[Any], Any]) -> Any: ...
        async def __teola_aquery__(self, query: QueryBundle, original: Callable[[Any], Awaitable[Any]]) -> Any: ...

    def _query(self, query_bundle: QueryBundle) -> Any:
        """Hand the query to `__teola_query__`, with a function that runs the original's method on this engine or
        another."""
        original = super()._query  # type: ignore[misc]
        return self.__teola_query__(
            query_bundle, lambda node: (original if node is self else node._query)(query_bundle)
        )

    async def _aquery(self, query_bundle: QueryBundle) -> Any:
        """Hand the query to `__teola_aquery__`, with a function that runs the original's method on this engine or
        another."""
        original = super()._aquery  # type: ignore[misc]
        return await self.__teola_aquery__(
            query_bundle, lambda node: (original if node is self else node._aquery)(query_bundle)
        )


def query_below(engine: BaseQueryEngine, query: QueryBundle) -> Any:
    """Run `query` without the events of the entry."""
    return engine._query(query)


def multi_step_aquery(engine: MultiStepQueryEngine, query: QueryBundle) -> Coroutine[Any, Any, Any]:
    """Return the coroutine of LlamaIndex's own async method, without the span."""
    coroutine: Coroutine[Any, Any, Any] = inspect.unwrap(MultiStepQueryEngine._aquery)(engine, query)
    return coroutine


def with_aquery(engine: BaseQueryEngine, function: Callable[[Any, QueryBundle], Awaitable[Any]]) -> Any:
    """Return a copy whose async entry calls `function` inside the original's span."""

    async def _aquery(self: Any, query_bundle: QueryBundle) -> Any:
        return await function(self, query_bundle)

    copied, kind = copy.copy(engine), type(engine)
    spanned: Any = get_dispatcher(kind.__module__).span(_aquery)
    vars(copied)["_aquery"] = spanned.__get__(copied, kind)
    return copied


def without_span(method: Any) -> Any:
    """Mark a method so that no class wraps it in a span, since what it calls has one; return it."""
    setattr(method, DISPATCHER_SPAN_DECORATED_ATTR, True)
    return method


# ------------------------------------------------------------ indexes


@dataclass(frozen=True, slots=True)
class VectorStoreIndexParts(Parts):
    OF: ClassVar = (VectorStoreIndex,)
    METHODS: ClassVar = ("_add_nodes_to_index", "_async_add_nodes_to_index")

    embed_model: Any = attribute("_embed_model")
    vector_store: Any = attribute("_vector_store")
    insert_batch_size: int = attribute("_insert_batch_size", int)


@dataclass(frozen=True, slots=True)
class QueriedIndexParts(Parts):
    """The parts of an index of which its engines and retrievers are made."""

    OF: ClassVar = (VectorStoreIndex,)
    METHODS: ClassVar = ("as_query_engine", "as_retriever")

    embed_model: Any = attribute("_embed_model")
    vector_store: Any = attribute("_vector_store")
    docstore: Any = attribute("_docstore")
    index_struct: Any = attribute("_index_struct")
    object_map: Any = attribute("_object_map")


def make_query_engine(index: VectorStoreIndex, llm: Any, arguments: Mapping[str, Any]) -> BaseQueryEngine:
    """Return what `index.as_query_engine(llm, **arguments)` makes. Neither the LLM nor `Settings` change.

    The method itself sets the LLM's callback manager. Raises `Unreadable` if it would create defaults of `Settings`.
    """
    if Settings._callback_manager is None:
        raise Unreadable("Settings has no callback manager yet")
    stand_in = clone(llm)
    engine: Any = index.as_query_engine(stand_in, **arguments)
    if engine._response_synthesizer._llm is stand_in:
        engine._response_synthesizer._llm = llm
    return engine  # type: ignore[no-any-return]


class IndexHooks:
    """A base class put before an index's class: `__teola_add__` and `__teola_aadd__` embed and store nodes.

    These get the nodes, and a function that adds some of them to an index: to this one, or to another of its state.
    """

    if TYPE_CHECKING:

        def __teola_add__(self, nodes: Nodes, add: Callable[[Any, Nodes], None]) -> None: ...
        async def __teola_aadd__(self, nodes: Nodes, add: Callable[[Any, Nodes], Awaitable[None]]) -> None: ...

    def _add_nodes_to_index(
        self, index_struct: IndexDict, nodes: Nodes, show_progress: bool = False, **insert_kwargs: Any
    ) -> None:
        """Hand the nodes to `__teola_add__`, with a function by which the original embeds and stores some of them."""
        original = super()._add_nodes_to_index  # type: ignore[misc]

        def add(index: Any, some: Nodes) -> None:
            method = original if index is self else index._add_nodes_to_index
            method(index_struct, some, show_progress, **insert_kwargs)

        self.__teola_add__(nodes, add)

    async def _async_add_nodes_to_index(
        self, index_struct: IndexDict, nodes: Nodes, show_progress: bool = False, **insert_kwargs: Any
    ) -> None:
        """Hand the nodes to `__teola_aadd__`, with a function by which the original embeds and stores some of them."""
        original = super()._async_add_nodes_to_index  # type: ignore[misc]

        async def add(index: Any, some: Nodes) -> None:
            method = original if index is self else index._async_add_nodes_to_index
            await method(index_struct, some, show_progress, **insert_kwargs)

        await self.__teola_aadd__(nodes, add)


# ------------------------------------------------------------ classes that users complete

QUERY_METHODS: dict[type, tuple[str, str]] = {
    CustomQueryEngine: ("custom_query", "acustom_query"),
    BaseQueryEngine: ("_query", "_aquery"),
    BaseRetriever: ("_retrieve", "_aretrieve"),
}
"""For each class that LlamaIndex leaves to its users to complete: the methods that answer a query, sync and async."""
PROMPT_METHODS = ("_get_prompts", "_update_prompts", "_get_prompt_modules", "model_post_init")
"""Further methods of such classes, which no query calls."""
