"""Pool-backed objects and parsers -> components; one function a leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from teola_plugin.tracer.draft import DERIVED, ClientCall, Draft, Names, mark_fallible
from teola_plugin.tracer.langchain.classes import changed
from teola_plugin.tracer.langchain.labels import labels_of
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


_TAKE_ALL = (StrOutputParser, CommaSeparatedListOutputParser, NumberedListOutputParser, MarkdownListOutputParser)
"""Those that make something of any text; the others may raise."""

_BY_NAME = {
    "langchain_classic.retrievers.multi_query.LineListOutputParser": "lines",
    "langchain_classic.retrievers.document_compressors.chain_extract.NoOutputParser": "",
    "langchain_classic.output_parsers.boolean.BooleanOutputParser": "",
}
"""The same, of packages that need not be there: class -> spelling."""


def lower_leaf(draft: Draft, leaf: Leaf, value: Value, name: Callable[[str], str], scope: Names) -> Ref:
    """Adds the components of a pool-backed object that is called with `value`; the ref of what it returns.

    `name` completes a short word to the wanted name. Raises `NotUnderstood` before anything is added.
    """
    value = simplify(value)
    if isinstance(leaf, GenerationLeaf):
        return _generation(draft, leaf, value, name("model"), scope)
    if isinstance(leaf, WrappedLeaf):
        return _wrapped(draft, leaf, value, name("model" if leaf.kind == "generation" else "retrieve"), scope)
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


def _generation(draft: Draft, leaf: GenerationLeaf, value: Value, wanted: str, scope: Names) -> Ref:
    if isinstance(value, Record):
        raise NotUnderstood("a model is called with a dictionary, which it does not take")
    name = draft.name(wanted, *DERIVED, "message")
    if isinstance(value, Prompted):
        inputs = tuple((key, draft.materialize(inner, name, scope)) for key, inner in value.inputs)
        parts, render = value.parts, value.render
    else:
        inputs, parts, render = named(value=value), (PromptPart.var("value"),), _bare

    def payload(given: Mapping[str, Any]) -> Any:
        return leaf.payload(render(given))

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
    made = draft.add(component, payload)
    draft.list_spellings[f"{name}.message"] = ""
    message = _as(leaf.message, lambda generation: leaf.message(generation))
    return draft.call(f"{name}.message", message, scope, generation=made)


def _as(does: object, call: ClientCall) -> ClientCall:
    """`call`, which does what `does` does: where that may run on the pool's loop, so may this."""
    return on_loop(call) if runs_on_loop(does) else call


def _wrapped(draft: Draft, leaf: WrappedLeaf, value: Value, wanted: str, scope: Names) -> Ref:
    """One request; its input is formatted at the client, and whole, so there is no prompt to split."""
    if isinstance(value, Record) or (leaf.kind == "retrieval" and not isinstance(value, Ref)):
        raise NotUnderstood("is called with a dictionary or a prompt, which it does not take")
    name = draft.name(wanted, *DERIVED)
    if isinstance(value, Prompted):
        inputs = tuple((key, draft.materialize(inner, name, scope)) for key, inner in value.inputs)
        render = value.render
    else:
        inputs, render = named(value=value), _bare
    role = Role.GENERATION if leaf.kind == "generation" else Role.SEARCHING
    said = Attributes(wrapped=leaf.key)
    component = Component(name, role, inputs, leaf.engine, effects=leaf.effects, scope=scope, attributes=said)
    return draft.add(component, lambda given: leaf.payload(render(given)))


def _bare(given: Mapping[str, Any]) -> Any:
    from teola_plugin.requests.payloads import UNKNOWN

    return given.get("value", UNKNOWN)


def _retrieval(draft: Draft, leaf: RetrievalLeaf, query: Ref, wanted: str, scope: Names) -> Ref:
    name = draft.name(wanted, *DERIVED, "documents")
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
    documents = _as(leaf.documents, lambda hits: leaf.documents(hits))
    return draft.call(f"{name}.documents", documents, scope, hits=hits)


def _text_search(draft: Draft, leaf: TextSearchLeaf, query: Ref, wanted: str, scope: Names) -> Ref:
    name = draft.name(wanted, "documents")
    said = Attributes(k=leaf.k)
    hits = draft.add(Component(name, Role.SEARCHING, named(query=query), leaf.engine, scope=scope, attributes=said))
    documents = _as(leaf.documents, lambda hits: leaf.documents(hits))
    return draft.call(f"{name}.documents", documents, scope, hits=hits)


def _store(draft: Draft, leaf: StoreLeaf, query: Ref, wanted: str, scope: Names) -> Ref:
    name = draft.name(wanted, "text", "vector")
    text = draft.call(f"{name}.text", lambda query: leaf.text(query), scope, query=query)
    said = Attributes(role="query")
    embedding = Component(
        f"{name}.vector", Role.EMBEDDING, named(texts=text), leaf.embedder, scope=scope, attributes=said
    )
    vector = draft.add(embedding)
    search = Component(name, Role.CALL, named(vector=vector), effects=(leaf.effect,), scope=scope)
    return draft.add(search, lambda vector: leaf.search(vector))


def _reranking(draft: Draft, leaf: RerankingLeaf, value: Value, wanted: str, scope: Names) -> Ref:
    asked, given = read_key(value, "query"), read_key(value, "documents")
    if not isinstance(asked, Ref) or not isinstance(given, Ref):
        raise NotUnderstood("its query or its documents are a dictionary or a prompt")
    name = draft.name(wanted, "texts", "select")
    texts = draft.call(f"{name}.texts", lambda documents: leaf.texts(documents), scope, documents=given)
    inputs = named(texts=texts, query=asked)
    scores = draft.add(Component(name, Role.RERANKING, inputs, leaf.engine, batchable=True, scope=scope))
    return draft.call(
        f"{name}.select",
        lambda documents, scores: leaf.select(documents, scores),
        scope,
        documents=given,
        scores=scores,
    )


def _indexing(draft: Draft, leaf: IndexingLeaf, documents: Ref, wanted: str, scope: Names) -> Ref:
    name = draft.name(wanted, *DERIVED, "collection")
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
    return draft.call(f"{name}.collection", _as(leaf.result, lambda ids: leaf.result(ids)), scope, ids=ids)


def _embedding(draft: Draft, leaf: EmbeddingLeaf, texts: Ref, wanted: str, scope: Names) -> Ref:
    name = draft.name(wanted, "result")
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
    return draft.call(f"{name}.result", _as(leaf.result, lambda vectors: leaf.result(vectors)), scope, vectors=vectors)


def lower_parser(
    draft: Draft, parser: BaseOutputParser[Any], value: Value, name: Callable[[str], str], scope: Names
) -> Ref:
    """A CALL of the parser's own code, without events. Raises `NotUnderstood` for one that is not known to be pure."""
    value = simplify(value)
    if isinstance(value, Ref) and (labels := labels_of(parser)):
        draft.labels[value.producer] = labels
    named = _BY_NAME.get(f"{type(parser).__module__}.{type(parser).__qualname__}")
    known: tuple[type, str] | None = None if named is None else (type(parser), named)
    known = known or next(((cls, kind) for cls, kind in PARSERS if isinstance(parser, cls)), None)
    if known is None:
        raise NotUnderstood(f"{type(parser).__name__} is not known to be pure")
    if other := changed(parser, known[0]):
        raise NotUnderstood(f"{other} overrides how the text is parsed")
    if not isinstance(value, Ref):
        raise NotUnderstood("parses a dictionary or a prompt, which it does not take")
    wanted = draft.name(name("parse"))
    draft.list_spellings[wanted] = known[1]

    def parse(value: Any) -> Any:
        return _parsed(parser, value)

    call = parse if isinstance(parser, _TAKE_ALL) else mark_fallible(parse)
    if type(parser) is StrOutputParser:
        simple(plain_size)(call)
    return draft.call(wanted, call, scope, value=value)


def _parsed(parser: BaseOutputParser[Any], value: Any) -> Any:
    if isinstance(value, BaseMessage):
        return parser.parse_result([ChatGeneration(message=value)])
    return parser.parse_result([Generation(text=value)])
