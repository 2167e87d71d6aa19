"""Composites that are looked into: their parts, and copies of them with other parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableParallel,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.history import RunnableWithMessageHistory

from teola_plugin.tracer.langchain.classes import PLANNED_CHAIN, find_override, is_accelerated
from teola_plugin.tracer.langchain.equivalents import is_framework_function, retriever_per_query

Node = Runnable[Any, Any]


def parts(node: Node) -> Iterator[tuple[str, Node]]:
    """The parts of a composite that is looked into, and where they are; as the tracer walks."""
    if is_accelerated(node):
        return
    if isinstance(node, RunnableSequence):
        yield from ((f".steps[{i}]", step) for i, step in enumerate(node.steps))
    elif isinstance(node, RunnableAssign):
        yield ".mapper", node.mapper
    elif isinstance(node, RunnableParallel):
        yield from ((f'.steps__["{key}"]', step) for key, step in node.steps__.items())
    elif isinstance(node, RunnableBinding) or type(node) is RunnableEach:
        yield ".bound", node.bound
    elif (retriever := retriever_per_query(node)) is not None:
        yield ".retriever", retriever


def with_parts(node: Node, inner: Mapping[str, Node]) -> Node:
    """A copy of a composite with other `parts`."""
    return node.model_copy(update=_fields(node, inner))  # type: ignore[attr-defined, no-any-return]


def _fields(node: Node, inner: Mapping[str, Node]) -> dict[str, Any]:
    """Return the fields by which a copy of a composite gets the new parts `inner`, in the order of `parts`."""
    parts_in_order = list(inner.values())
    if isinstance(node, RunnableSequence):
        return {"first": parts_in_order[0], "middle": parts_in_order[1:-1], "last": parts_in_order[-1]}
    if isinstance(node, RunnableAssign):
        return {"mapper": parts_in_order[0]}
    if isinstance(node, RunnableParallel):
        return {"steps__": dict(zip(node.steps__, parts_in_order, strict=True))}
    return {next(iter(inner)).removeprefix("."): parts_in_order[0]}


# ------------------------------------------------------------ composites that call their parts one after the other


_RETRIEVERS = "langchain_classic.retrievers"
_COMPRESSORS = f"{_RETRIEVERS}.document_compressors"
_CHAINS = "langchain_classic.chains"

MULTI_QUERY = f"{_RETRIEVERS}.multi_query.MultiQueryRetriever"
ENSEMBLE = f"{_RETRIEVERS}.ensemble.EnsembleRetriever"
MERGER = f"{_RETRIEVERS}.merger_retriever.MergerRetriever"
EXTRACTOR = f"{_COMPRESSORS}.chain_extract.LLMChainExtractor"
FILTER = f"{_COMPRESSORS}.chain_filter.LLMChainFilter"
LLM_CHAIN = f"{_CHAINS}.llm.LLMChain"

FIELDS: dict[str, tuple[str, ...]] = {
    MULTI_QUERY: ("retriever", "llm_chain"),
    ENSEMBLE: ("retrievers",),
    MERGER: ("retrievers",),
    EXTRACTOR: ("llm_chain",),
    FILTER: ("llm_chain",),
    f"{_COMPRESSORS}.base.DocumentCompressorPipeline": ("transformers",),
    f"{_RETRIEVERS}.contextual_compression.ContextualCompressionRetriever": ("base_retriever", "base_compressor"),
    LLM_CHAIN: ("llm",),
    f"{_CHAINS}.combine_documents.stuff.StuffDocumentsChain": ("llm_chain",),
    f"{_CHAINS}.combine_documents.map_reduce.MapReduceDocumentsChain": ("llm_chain", "reduce_documents_chain"),
    f"{_CHAINS}.combine_documents.map_rerank.MapRerankDocumentsChain": ("llm_chain",),
    f"{_CHAINS}.combine_documents.reduce.ReduceDocumentsChain": (
        "combine_documents_chain",
        "collapse_documents_chain",
    ),
    f"{_CHAINS}.retrieval_qa.base.RetrievalQA": ("retriever", "combine_documents_chain"),
    f"{_CHAINS}.qa_with_sources.base.QAWithSourcesChain": ("combine_documents_chain",),
    f"{_CHAINS}.qa_with_sources.retrieval.RetrievalQAWithSourcesChain": ("retriever", "combine_documents_chain"),
    f"{_CHAINS}.conversational_retrieval.base.ConversationalRetrievalChain": ("retriever", "combine_docs_chain"),
    f"{_CHAINS}.combine_documents.base.AnalyzeDocumentChain": ("combine_docs_chain",),
    f"{_CHAINS}.sequential.SequentialChain": ("chains",),
}
"""Class -> the fields that hold parts: one, or a list of them."""


def name_of(node: Any) -> str:
    """Return the full name of a composite's class, if nobody changed it; empty for any other object."""
    kind = type(node)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name in FIELDS and not is_accelerated(node) and not find_override(node, kind) else ""


def parts_of(node: Any) -> list[Any]:
    """Return what a known composite calls; nothing if it also calls a function of the user's, or is not known."""
    name = name_of(node)
    if name in (EXTRACTOR, FILTER) and not asks_as_usual(node):
        return []
    values = [getattr(node, field) for field in FIELDS.get(name, ())]
    return [part for one in values for part in (one if isinstance(one, list) else [one])]


def calls_of(node: Any) -> list[Any]:
    """The parts that a known composite calls one after the other, for a sync caller, though it knows with what."""
    name = name_of(node)
    if name == MULTI_QUERY:
        return [node.retriever]
    if name in (ENSEMBLE, MERGER):
        return list(node.retrievers)
    if name == EXTRACTOR:
        return [node.llm_chain] if asks_as_usual(node) else []
    return [node.llm] if name == LLM_CHAIN and isinstance(node.llm, BaseLanguageModel) else []


def asks_as_usual(node: Any) -> bool:
    """Return True if an extractor or filter makes its question by the framework's own function."""
    modules = (EXTRACTOR.rpartition(".")[0], FILTER.rpartition(".")[0])
    return any(is_framework_function(node.get_input, module, "default_get_input") for module in modules)


def chain_with_history(chain: Any) -> Any:
    """Return the accelerated chain inside a `RunnableWithMessageHistory`; None if nothing of it gains."""
    pending: list[Any] = [chain.bound] if isinstance(chain, RunnableWithMessageHistory) else []
    while pending:
        node = pending.pop()
        planned = getattr(vars(node).get("func"), PLANNED_CHAIN, None)
        if hasattr(planned, "__teola_report__"):
            return planned
        pending += [part for _, part in parts(node)]
    return None
