"""Chains that are equivalent to retrievers, compressors and older chains of langchain_classic. They are never run.

The graph is planned with the equivalent chain, while the original runs, unchanged, and finds its requests made. So an
equivalent has the requests and the value of the original, but not its events. Classes go by name: langchain_classic
need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.runnables.base import RunnableEach
from langchain_core.stores import InMemoryByteStore, InMemoryStore

from teola_plugin.shims.langchain import keeps_documents_as_bytes, stuffing
from teola_plugin.tracer.langchain.classes import find_override, is_accelerated, is_pool_backed, leaf_of, worker_of
from teola_plugin.tracer.langchain.prompts import prompt_shape
from teola_plugin.tracer.leaf import EmbeddingLeaf, Leaf, RerankingLeaf
from teola_plugin.tracer.symbols import NotUnderstood

Node = Runnable[Any, Any]
Builder = Callable[[Any], Node | None]
"""Builds the equivalent of an object; None if the object is configured in a way that has none."""


def equivalent_chain(node: object) -> Node | None:
    """Return a chain with the requests and the value of `node`; None for an unknown class or a subclass of one."""
    return _build_equivalent(node, _WHOLE)


def equivalent_beginning(node: object) -> Node | None:
    """Return a chain with the requests that `node` makes first, whatever it does then; None as `equivalent_chain`."""
    return _build_equivalent(node, _BEGINNING)


def retriever_per_query(node: Any) -> Node | None:
    """Return the retriever that a multi-query retriever calls for each of its queries; None for any other object."""
    is_multi_query = _builder(node, _WHOLE) is _multi_query and not _is_llm_chain(node.llm_chain)
    return node.retriever if is_multi_query else None


def is_framework_function(function: Callable[..., Any], module: str, name: str) -> bool:
    """Return True if it is the function `name` of `module`, without importing the module."""
    return getattr(function, "__module__", "") == module and getattr(function, "__qualname__", "") == name


def _build_equivalent(node: object, builders: Mapping[str, Builder]) -> Node | None:
    """Return the equivalent of an object by the table `builders`; None if it has none, or is not understood."""
    builder = _builder(node, builders)
    try:
        return None if builder is None else builder(node)
    except NotUnderstood:
        return None


def _builder(node: object, builders: Mapping[str, Builder]) -> Builder | None:
    """Return the function that builds the equivalent chain of an object; None if there is none.

    There is none for an object of another class, subclasses included, for an accelerated object, and for one on which a
    method was replaced, because it may behave differently.
    """
    kind = type(node)
    builder = builders.get(_full_name(kind))
    return None if builder is None or is_accelerated(node) or find_override(node, kind) else builder


def _full_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ------------------------------------------------------------ steps


class PureStep(RunnableLambda[Any, Any]):
    """A step that is the framework's own pure code."""


class InputAsDict(PureStep):
    """The input of a chain, as a dictionary: the value of its one key may come bare."""

    def __init__(self, key: str | None) -> None:
        super().__init__(lambda value: value if isinstance(value, dict) or key is None else {key: value})


class SequentialEach(RunnableEach[Any, Any]):
    """A step for each item. The original's sync code makes one call after the other, the graph all at once."""


class EngineStep(RunnableLambda[Any, Any]):
    """A step on an engine, for an object that is no Runnable."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__(_raise_never_run)
        self._leaf = leaf

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf:
        return self._leaf


def _raise_never_run(value: Any) -> Any:
    raise AssertionError("an equivalent is planned with, and never run")


def _pick_keys(*names: str, **steps: Node) -> Node:
    """Return a dictionary of these keys and nothing else: older chains pick what their prompts name."""
    return RunnableParallel({**{name: RunnableLambda(itemgetter(name)) for name in names}, **steps})


# ------------------------------------------------------------ retrievers


def _multi_query(node: Any) -> Node | None:
    """Write queries, search for each, and return the union."""
    if _is_llm_chain(node.llm_chain):
        return None
    lists: Node = RunnableParallel(question=RunnablePassthrough()) | node.llm_chain | node.retriever.map()
    if node.include_original:
        both = RunnableParallel(written=lists, own=node.retriever)
        lists = both | PureStep(lambda results: [*results["written"], results["own"]])
    return lists | PureStep(
        lambda results: node.unique_union([document for documents in results for document in documents])
    )


def _is_llm_chain(node: object) -> bool:
    """Return True for the older kind of chain, which has memory and callbacks of its own."""
    return type(node).__name__ == "LLMChain"


def _ensemble(node: Any) -> Node:
    """Call all retrievers with the same query, and fuse their ranks."""
    lists: Node = RunnableParallel({f"ranked{i}": retriever for i, retriever in enumerate(node.retrievers)})
    return lists | PureStep(lambda ranked: node.weighted_reciprocal_rank([list(one) for one in ranked.values()]))


def _contextual_compression(node: Any) -> Node | None:
    """Retrieve documents, and have the compressor shorten, filter or rerank them; None for an unknown compressor."""
    compressor = _compressor_step(node.base_compressor)
    if compressor is None:
        return None
    documents: Node = RunnableParallel(documents=node.base_retriever, query=RunnablePassthrough())
    return documents | compressor


def _parent_documents(node: Any) -> Node | None:
    """Search for pieces, then look up the documents that they belong to, if these are in memory."""

    def look_up(pieces: list[Document]) -> list[Document]:
        ids = [piece.metadata[node.id_key] for piece in pieces if node.id_key in piece.metadata]
        return [document for document in node.docstore.mget(list(dict.fromkeys(ids))) if document is not None]

    pieces = _pieces(node)
    return pieces | PureStep(lambda pieces: look_up(pieces)) if pieces and _is_in_memory(node.docstore) else None


def _pieces(node: Any) -> Node | None:
    """Search for pieces of documents."""
    if node.search_type.value != "similarity" or not hasattr(node.vectorstore, "as_retriever"):
        return None
    retriever: Node = node.vectorstore.as_retriever(search_kwargs=node.search_kwargs)
    return retriever if is_pool_backed(retriever) else None


def _is_in_memory(store: Any) -> bool:
    """Return True for LangChain's store in memory, also below the encoder that `byte_store=` puts above it."""
    if _full_name(type(store)) == f"{_STORAGE}.encoder_backed.EncoderBackedStore":
        return type(store.store) is InMemoryByteStore and keeps_documents_as_bytes(store)
    return type(store) is InMemoryStore


# ------------------------------------------------------------ compressors: `{"query", "documents"}` to documents


def _compressor_step(compressor: Any) -> Node | None:
    """Return the step; None for an unknown compressor, a subclass, or one that holds an object without an engine.

    The engines' part is a step of its own; choosing by its results is the compressor's own code.
    """
    if is_pool_backed(compressor):
        return compressor.as_runnable() if hasattr(compressor, "as_runnable") else None
    kind = type(compressor)
    builder = _COMPRESSORS.get(_full_name(kind))
    return None if builder is None or find_override(compressor, kind) else builder(compressor)


class _PrecomputedModel:
    """A cross encoder, or an embedding model, whose results are known already."""

    def __init__(self, values: Any, query_vector: Any = None) -> None:
        self._values, self._query_vector = values, query_vector

    def score(self, pairs: Any) -> Any:
        return self._values

    def embed_documents(self, texts: Any) -> Any:
        return self._values

    def embed_query(self, text: str) -> Any:
        return self._query_vector


def _cross_encoder(node: Any) -> Node | None:
    """Score documents by an engine that reranks, and let the original compressor choose by the scores.

    Return None if its model is not on the pool.
    """
    leaf = leaf_of(node.model, {})
    if not isinstance(leaf, RerankingLeaf):
        return None

    def select(documents: Any, scores: Any) -> list[Document]:
        scored = node.model_copy(update={"model": _PrecomputedModel(leaf.select(documents, scores))})
        return list(scored.compress_documents(documents, ""))

    return EngineStep(replace(leaf, select=select))


def _embeddings_filter(node: Any) -> Node | None:
    """Embed documents and query at once. The query most likely was embedded before, for the search."""
    embeddings = node.embeddings
    leaf = leaf_of(embeddings, {})
    is_known_measure = is_framework_function(node.similarity_fn, "langchain_community.utils.math", "cosine_similarity")
    if not isinstance(leaf, EmbeddingLeaf) or not is_known_measure:
        return None
    to_vector, to_text = leaf.result, getattr(worker_of(embeddings), "sent", str)
    document_leaf = replace(
        leaf, role="document", batchable=True, result=lambda vectors: [to_vector(vector) for vector in vectors]
    )
    texts = PureStep(lambda documents: [to_text(document.page_content) for document in documents])
    query = PureStep(lambda text: to_text(text))

    def select(values: Any) -> list[Document]:
        """Return the documents that the original filter keeps, by vectors that are computed already."""
        model = _PrecomputedModel(values["vectors"], values["vector"])
        embedded = node.model_copy(update={"embeddings": model})
        similar = embedded.compress_documents(values["documents"], values["query"]) if values["documents"] else []
        return [Document(document.page_content, id=document.id, metadata=document.metadata) for document in similar]

    return RunnablePassthrough.assign(
        vectors=RunnableLambda(itemgetter("documents")) | texts | EngineStep(document_leaf),
        vector=RunnableLambda(itemgetter("query")) | query | EngineStep(leaf),
    ) | PureStep(select)


def _llm_extractor(node: Any) -> Node | None:
    """Have a model shorten each document."""

    def select(values: Any) -> list[Document]:
        pairs = zip(values["documents"], values["said"], strict=True)
        return [Document(page_content=text, metadata=document.metadata) for document, text in pairs if text]

    return _call_for_each_document(node, f"{_COMPRESSOR_MODULE}.chain_extract", select)


def _llm_filter(node: Any) -> Node | None:
    """Ask a model of each document whether it is relevant."""

    def select(values: Any) -> list[Document]:
        pairs = zip(values["documents"], values["said"], strict=True)
        return [document for document, is_relevant in pairs if is_relevant is True]

    return _call_for_each_document(node, f"{_COMPRESSOR_MODULE}.chain_filter", select)


def _call_for_each_document(node: Any, module: str, select: Callable[[Any], list[Document]]) -> Node | None:
    """Call the compressor's model once for each document, and let `select` make the result of what the model said.

    Return None unless the compressor, of this `module`, formats its inputs in the framework's own way.
    """
    if not is_framework_function(node.get_input, module, "default_get_input") or _is_llm_chain(node.llm_chain):
        return None
    inputs = PureStep(lambda values: [node.get_input(values["query"], document) for document in values["documents"]])
    return RunnablePassthrough.assign(said=inputs | SequentialEach(bound=node.llm_chain)) | PureStep(select)


def _compressor_pipeline(node: Any) -> Node | None:
    """Run one compressor after the other."""
    steps = [_compressor_step(compressor) for compressor in node.transformers]
    if not steps or None in steps:
        return None
    pipeline: Node = RunnablePassthrough()
    for step in steps[:-1]:
        assert step is not None
        pipeline = pipeline | RunnablePassthrough.assign(documents=step)
    return pipeline | steps[-1]  # type: ignore[operator]


# ------------------------------------------------------------ chains with a `_call` of their own, and known prompts


def _is_exactly(node: Any, name: str) -> bool:
    """Return True for an object of this very class of langchain_classic.chains, unchanged, without a memory.

    One with a memory also reads and writes that, which its equivalent would not.
    """
    kind = type(node)
    return _full_name(kind) == f"{_CHAINS}.{name}" and not find_override(node, kind) and not node.memory


def _chain_input(node: Any) -> Node:
    return InputAsDict(node.input_keys[0] if len(node.input_keys) == 1 else None)


def _with_answer(node: Any, answer: Node | None) -> Node | None:
    """Return the input of a chain with its answer under its output key."""
    return None if answer is None else _chain_input(node) | RunnablePassthrough.assign(**{node.output_key: answer})


def _llm_answer(chain: Any, **computed: Node) -> Node | None:
    """Return the answer of an `LLMChain` to a dictionary; `computed` are variables that are made on the way."""
    if not _is_exactly(chain, "llm.LLMChain") or chain.llm_kwargs or not chain.prompt.input_variables:
        return None
    names = [name for name in chain.prompt.input_variables if name not in computed]
    answer: Node = _pick_keys(*names, **computed) | chain.prompt | chain.llm | chain.output_parser
    return answer


def _stuffed_answer(node: Any) -> Node | None:
    """Return the answer of a `StuffDocumentsChain` to the documents under its input key."""
    if not _is_exactly(node, "combine_documents.stuff.StuffDocumentsChain"):
        return None
    documents = RunnableLambda(itemgetter(node.input_key))
    joined = documents | _join_documents(node.document_prompt, node.document_separator)
    return _llm_answer(node.llm_chain, **{node.document_variable_name: joined})


def _join_documents(prompt: BasePromptTemplate[str], separator: str) -> Node:
    """Format each document by the prompt, and join the texts. Raise `NotUnderstood` unless the prompt is pure."""
    prompt_shape(prompt)
    return PureStep(lambda documents: separator.join(format_document(document, prompt) for document in documents))


def _retrieval_qa(node: Any) -> Node | None:
    """Retrieve documents, put them into the prompt, answer."""
    combine_chain = node.combine_documents_chain
    stuffed_answer = _stuffed_answer(combine_chain)
    if stuffed_answer is None or not _is_exactly(node, "retrieval_qa.base.RetrievalQA"):
        return None
    query = RunnableLambda(itemgetter(node.input_key))
    documents: Node = query | node.retriever
    chain = _chain_input(node)
    if node.return_source_documents:
        chain = chain | RunnablePassthrough.assign(source_documents=documents)
        documents = RunnableLambda(itemgetter("source_documents"))
    answer = _pick_keys(question=query, **{combine_chain.input_key: documents}) | stuffed_answer
    return chain | RunnablePassthrough.assign(**{node.output_key: answer})


def _map_documents(node: Any) -> Node | None:
    """Do the first half of a `MapReduceDocumentsChain`; how it reduces depends on counted tokens."""
    answer = _llm_answer(node.llm_chain)
    if answer is None or not _is_exactly(node, "combine_documents.map_reduce.MapReduceDocumentsChain"):
        return None
    shared_names = [name for name in node.llm_chain.prompt.input_variables if name != node.document_variable_name]

    def inputs(values: dict[str, Any]) -> list[dict[str, Any]]:
        shared = {name: values[name] for name in shared_names}
        documents = values[node.input_key]
        return [{node.document_variable_name: document.page_content, **shared} for document in documents]

    picked = _pick_keys(node.input_key, *shared_names)
    return _chain_input(node) | picked | PureStep(inputs) | SequentialEach(bound=answer)


def _format_docs(node: Any) -> Node | None:
    """Do what `format_docs` does, the function inside `create_stuff_documents_chain`."""
    function = None if "afunc" in vars(node) else stuffing(vars(node).get("func"))
    if function is None:
        return None
    documents: Node = RunnableLambda(itemgetter(function.variable))
    return documents | _join_documents(function.prompt, function.separator)


# ------------------------------------------------------------ tables


_RETRIEVERS = "langchain_classic.retrievers"
_COMPRESSOR_MODULE = f"{_RETRIEVERS}.document_compressors"
_CHAINS = "langchain_classic.chains"
_STORAGE = "langchain_classic.storage"
_PARENT_RETRIEVERS = (
    f"{_RETRIEVERS}.multi_vector.MultiVectorRetriever",
    f"{_RETRIEVERS}.parent_document_retriever.ParentDocumentRetriever",
)
_COMPRESSORS: dict[str, Builder] = {
    f"{_COMPRESSOR_MODULE}.cross_encoder_rerank.CrossEncoderReranker": _cross_encoder,
    f"{_COMPRESSOR_MODULE}.embeddings_filter.EmbeddingsFilter": _embeddings_filter,
    f"{_COMPRESSOR_MODULE}.chain_extract.LLMChainExtractor": _llm_extractor,
    f"{_COMPRESSOR_MODULE}.chain_filter.LLMChainFilter": _llm_filter,
    f"{_COMPRESSOR_MODULE}.base.DocumentCompressorPipeline": _compressor_pipeline,
}
_WHOLE: dict[str, Builder] = {
    f"{_RETRIEVERS}.multi_query.MultiQueryRetriever": _multi_query,
    f"{_RETRIEVERS}.ensemble.EnsembleRetriever": _ensemble,
    f"{_RETRIEVERS}.contextual_compression.ContextualCompressionRetriever": _contextual_compression,
    **dict.fromkeys(_PARENT_RETRIEVERS, _parent_documents),
    f"{_CHAINS}.llm.LLMChain": lambda node: _with_answer(node, _llm_answer(node) if node.return_final_only else None),
    f"{_CHAINS}.combine_documents.stuff.StuffDocumentsChain": lambda node: _with_answer(node, _stuffed_answer(node)),
    f"{_CHAINS}.retrieval_qa.base.RetrievalQA": _retrieval_qa,
    "langchain_core.runnables.base.RunnableLambda": _format_docs,
}
_BEGINNING: dict[str, Builder] = {
    **dict.fromkeys(_PARENT_RETRIEVERS, _pieces),
    f"{_CHAINS}.combine_documents.map_reduce.MapReduceDocumentsChain": _map_documents,
}
