"""Lowering of pool-backed objects and output parsers to components: one function for each kind of leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import (
    BaseOutputParser,
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    MarkdownListOutputParser,
    NumberedListOutputParser,
    PydanticOutputParser,
    StrOutputParser,
)
from langchain_core.outputs import ChatGeneration, Generation

from teola_plugin.graph import Attributes, Component, PromptPart, Ref, Role, named, on_loop, runs_on_loop, simple
from teola_plugin.requests.payloads import UNKNOWN
from teola_plugin.tracer.draft import DERIVED, ClientCall, Draft, Names, mark_fallible
from teola_plugin.tracer.langchain.classes import find_override
from teola_plugin.tracer.leaf import (
    EmbeddingLeaf,
    GenerationLeaf,
    IndexingLeaf,
    Leaf,
    RerankingLeaf,
    RetrievalLeaf,
    StoreLeaf,
    TextSearchLeaf,
    WrappedLeaf,
)
from teola_plugin.tracer.purity.purity import plain_size
from teola_plugin.tracer.symbols import NotUnderstood, Prompted, Record, Value, read_key, simplify

PARSERS: tuple[tuple[type[BaseOutputParser[Any]], str], ...] = (
    (StrOutputParser, ""),
    (CommaSeparatedListOutputParser, "comma"),
    (NumberedListOutputParser, "numbered"),
    (MarkdownListOutputParser, "markdown"),
    (PydanticOutputParser, "json"),
    (JsonOutputParser, "json"),
)
"""Parsers that are pure functions of the text, and how they spell a list."""
_INFALLIBLE_PARSERS = (
    StrOutputParser,
    CommaSeparatedListOutputParser,
    NumberedListOutputParser,
    MarkdownListOutputParser,
)
"""Parsers that accept any text; the others may raise."""
_PARSERS_BY_NAME = {
    "langchain_classic.retrievers.multi_query.LineListOutputParser": "lines",
    "langchain_classic.retrievers.document_compressors.chain_extract.NoOutputParser": "",
    "langchain_classic.output_parsers.boolean.BooleanOutputParser": "",
}
"""Pure parsers of packages that need not be installed: class -> spelling of a list."""
_LABEL_MODULES = "langchain_classic.output_parsers.", "langchain_classic.retrievers.document_compressors."
_LABEL_FIELDS = {"BooleanOutputParser": ("true_val", "false_val"), "NoOutputParser": ("no_output_str",)}
"""Parsers that accept a few labels only -> the fields with these labels."""
_MAX_LABELS = 16
_WRAPPED_NAMES = {"generation": "model", "retrieval": "retrieve", "embedding": "embed"}
"""The word in the names of components that call the user's own objects, by the kind of leaf."""


def lower_leaf(draft: Draft, leaf: Leaf, value: Value, name: Callable[[str], str], scope: Names) -> Ref:
    """Add the components of a pool-backed object that is called with `value`. Return a reference to its result.

    `name` completes a short word to the preferred name. Raise `NotUnderstood` before anything is added.
    """
    value = simplify(value)
    if isinstance(leaf, GenerationLeaf):
        return _generation(draft, leaf, value, name("model"), scope)
    if isinstance(leaf, WrappedLeaf):
        return _wrapped(draft, leaf, value, name(_WRAPPED_NAMES[leaf.kind]), scope)
    if isinstance(leaf, RerankingLeaf):
        return _reranking(draft, leaf, value, name("rerank"), scope)
    if not isinstance(value, Ref):
        raise NotUnderstood("is called with a dictionary or a prompt, which it does not take")
    if isinstance(leaf, RetrievalLeaf):
        return _retrieval(draft, leaf, value, name("retrieve"), scope)
    if isinstance(leaf, TextSearchLeaf):
        return _text_search(draft, leaf, value, name("search"), scope)
    if isinstance(leaf, StoreLeaf):
        return _store(draft, leaf, value, name("retrieve"), scope)
    if isinstance(leaf, IndexingLeaf):
        return _indexing(draft, leaf, value, name("index"), scope)
    return _embedding(draft, leaf, value, name("embed"), scope)


def _generation(draft: Draft, leaf: GenerationLeaf, value: Value, preferred_name: str, scope: Names) -> Ref:
    """Add a generation by an LLM of the pool, and the message that the framework makes of it. Return its ref.

    `value`: the prompt, or the one input that holds it. Raise `NotUnderstood` for a dictionary.
    """
    if isinstance(value, Record):
        raise NotUnderstood("a model is called with a dictionary, which it does not take")
    name = draft.name(preferred_name, *DERIVED, "message")
    if isinstance(value, Prompted):
        inputs = tuple((key, draft.materialize(item, name, scope)) for key, item in value.inputs)
        parts, render = value.parts, value.render
    else:
        inputs, parts, render = named(value=value), (PromptPart.var("value"),), _bare_value

    def payload(variables: Mapping[str, Any]) -> Any:
        return leaf.payload(render(variables))

    if leaf.simple:
        simple(plain_size)(payload)
    component = Component(
        name,
        Role.GENERATION,
        inputs,
        leaf.engine,
        prompt=parts,
        expected=leaf.expected,
        scope=scope,
        attributes=Attributes(items=leaf.items, forms=leaf.forms, form=leaf.form),
    )
    generation = draft.add(component, payload)
    draft.list_spellings[f"{name}.message"] = ""
    message = _on_same_thread(leaf.message, lambda generation: leaf.message(generation))
    return draft.call(f"{name}.message", message, scope, generation=generation)


def _on_same_thread(function: object, call: ClientCall) -> ClientCall:
    """Return `call`, marked to run on the pool's loop if `function`, which it calls, may run there."""
    return on_loop(call) if runs_on_loop(function) else call


def _wrapped(draft: Draft, leaf: WrappedLeaf, value: Value, preferred_name: str, scope: Names) -> Ref:
    """Add one request. Its input is formatted as a whole, at the client, so there is no prompt to split."""
    if isinstance(value, Record) or (leaf.kind != "generation" and not isinstance(value, Ref)):
        raise NotUnderstood("is called with a dictionary or a prompt, which it does not take")
    name = draft.name(preferred_name, *DERIVED)
    if isinstance(value, Prompted):
        inputs = tuple((key, draft.materialize(item, name, scope)) for key, item in value.inputs)
        render = value.render
    else:
        inputs, render = named(value=value), _bare_value
    component = Component(
        name,
        Role.GENERATION if leaf.kind == "generation" else Role.SEARCHING,
        inputs,
        leaf.engine,
        effects=leaf.effects,
        scope=scope,
        attributes=Attributes(wrapped=leaf.key, ends=leaf.ends),
    )

    def payload(value: Any) -> Any:
        request = leaf.payload(value)
        return replace(request, ends=leaf.ends) if leaf.ends else request

    return draft.add(component, simple(plain_size)(lambda variables: payload(render(variables))))


def _bare_value(variables: Mapping[str, Any]) -> Any:
    return variables.get("value", UNKNOWN)


def _retrieval(draft: Draft, leaf: RetrievalLeaf, query: Ref, preferred_name: str, scope: Names) -> Ref:
    """Add a retrieval on engines, embedding and search, and the documents that the framework makes of the hits."""
    name = draft.name(preferred_name, *DERIVED, "documents")
    component = Component(
        name,
        Role.RETRIEVAL,
        named(query=query),
        leaf.store,
        leaf.embedder,
        effects=(leaf.effect,),
        scope=scope,
        attributes=Attributes(collection=leaf.collection, k=leaf.k, filter=leaf.filter),
    )
    hits = draft.add(component)
    documents = _on_same_thread(leaf.documents, lambda hits: leaf.documents(hits))
    return draft.call(f"{name}.documents", documents, scope, hits=hits)


def _text_search(draft: Draft, leaf: TextSearchLeaf, query: Ref, preferred_name: str, scope: Names) -> Ref:
    """Add a search by words on an engine, and the documents that the framework makes of the hits."""
    name = draft.name(preferred_name, "documents")
    attributes = Attributes(k=leaf.k)
    component = Component(name, Role.SEARCHING, named(query=query), leaf.engine, scope=scope, attributes=attributes)
    hits = draft.add(component)
    documents = _on_same_thread(leaf.documents, lambda hits: leaf.documents(hits))
    return draft.call(f"{name}.documents", documents, scope, hits=hits)


def _store(draft: Draft, leaf: StoreLeaf, query: Ref, preferred_name: str, scope: Names) -> Ref:
    """Add a search in a store of this process: an engine embeds the query, and the store's own code searches."""
    name = draft.name(preferred_name, "text", "vector")
    text = draft.call(f"{name}.text", lambda query: leaf.text(query), scope, query=query)
    embedding = Component(
        f"{name}.vector",
        Role.EMBEDDING,
        named(texts=text),
        leaf.embedder,
        scope=scope,
        attributes=Attributes(role="query"),
    )
    vector = draft.add(embedding)
    search = Component(name, Role.CALL, named(vector=vector), effects=(leaf.effect,), scope=scope)
    return draft.add(search, lambda vector: leaf.search(vector))


def _reranking(draft: Draft, leaf: RerankingLeaf, value: Value, preferred_name: str, scope: Names) -> Ref:
    """Add the scoring of documents on an engine, and the choice that the framework makes by the scores.

    `value`: a dictionary with `query` and `documents`. Raise `NotUnderstood` if one of them is no single value.
    """
    query, documents = read_key(value, "query"), read_key(value, "documents")
    if not isinstance(query, Ref) or not isinstance(documents, Ref):
        raise NotUnderstood("its query or its documents are a dictionary or a prompt")
    name = draft.name(preferred_name, "texts", "select")
    texts = draft.call(f"{name}.texts", lambda documents: leaf.texts(documents), scope, documents=documents)
    inputs = named(texts=texts, query=query)
    scores = draft.add(Component(name, Role.RERANKING, inputs, leaf.engine, batchable=True, scope=scope))
    return draft.call(
        f"{name}.select",
        lambda documents, scores: leaf.select(documents, scores),
        scope,
        documents=documents,
        scores=scores,
    )


def _indexing(draft: Draft, leaf: IndexingLeaf, documents: Ref, preferred_name: str, scope: Names) -> Ref:
    """Add the embedding and storing of documents in a collection, and the result that the framework gives for it."""
    name = draft.name(preferred_name, *DERIVED, "collection")
    component = Component(
        name,
        Role.INDEXING,
        named(documents=documents),
        leaf.store,
        leaf.embedder,
        effects=(leaf.effect,),
        scope=scope,
        attributes=Attributes(collection=leaf.collection),
    )
    ids = draft.add(component, leaf.chunk)
    draft.estimates.append((name, documents, leaf.estimate))
    return draft.call(f"{name}.collection", _on_same_thread(leaf.result, lambda ids: leaf.result(ids)), scope, ids=ids)


def _embedding(draft: Draft, leaf: EmbeddingLeaf, texts: Ref, preferred_name: str, scope: Names) -> Ref:
    """Add an embedding on an engine, and the vector or vectors that the framework makes of it."""
    name = draft.name(preferred_name, "result")
    component = Component(
        name,
        Role.EMBEDDING,
        named(texts=texts),
        leaf.engine,
        batchable=leaf.batchable,
        scope=scope,
        attributes=Attributes(role=leaf.role),
    )
    vectors = draft.add(component)
    return draft.call(
        f"{name}.result", _on_same_thread(leaf.result, lambda vectors: leaf.result(vectors)), scope, vectors=vectors
    )


def lower_parser(
    draft: Draft, parser: BaseOutputParser[Any], value: Value, name: Callable[[str], str], scope: Names
) -> Ref:
    """Add a CALL of the parser's own code, without events. Raise `NotUnderstood` unless it is known to be pure."""
    value = simplify(value)
    if isinstance(value, Ref) and (labels := _labels_of(parser)):
        draft.labels[value.producer] = labels
    spelling = _PARSERS_BY_NAME.get(f"{type(parser).__module__}.{type(parser).__qualname__}")
    base: type = type(parser)
    if spelling is None:
        base, spelling = next(((cls, kind) for cls, kind in PARSERS if isinstance(parser, cls)), (base, None))
    if spelling is None:
        raise NotUnderstood(f"{type(parser).__name__} is not known to be pure")
    if override := find_override(parser, base):
        raise NotUnderstood(f"{override} overrides how the text is parsed")
    if not isinstance(value, Ref):
        raise NotUnderstood("parses a dictionary or a prompt, which it does not take")
    component_name = draft.name(name("parse"))
    draft.list_spellings[component_name] = spelling

    def parse(value: Any) -> Any:
        is_message = isinstance(value, BaseMessage)
        return parser.parse_result([ChatGeneration(message=value) if is_message else Generation(text=value)])

    call = parse if isinstance(parser, _INFALLIBLE_PARSERS) else mark_fallible(parse)
    if type(parser) is StrOutputParser:
        simple(plain_size)(call)
    return draft.call(component_name, call, scope, value=value)


def _labels_of(parser: BaseOutputParser[Any]) -> tuple[str, ...]:
    """Return the only texts that a router's or a judge's parser accepts, () for other parsers.

    They are drafts of the answer, which the model verifies: nothing depends on them.
    """
    values: list[Any] = []
    for cls in type(parser).__mro__:
        if not cls.__module__.startswith(_LABEL_MODULES):
            continue
        if cls.__name__ in _LABEL_FIELDS:
            values = [getattr(parser, name, None) for name in _LABEL_FIELDS[cls.__name__]]
            break
        if cls.__name__ == "EnumOutputParser":
            values = [getattr(member, "value", None) for member in getattr(parser, "enum", ())]
            break
    return tuple(value for value in values[:_MAX_LABELS] if isinstance(value, str))
