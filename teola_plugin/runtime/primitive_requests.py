"""Primitive + its inputs -> payloads for its engine, and the values of the requests -> the primitive's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from teola_plugin.graph import EngineProfile, Primitive, PrimitiveKind, runs_on_loop
from teola_plugin.graph.build import COLLECTION
from teola_plugin.requests.draft_texts import texts_of
from teola_plugin.requests.payloads import (
    Chunk,
    EmbedText,
    IngestRow,
    ScorePair,
    SearchText,
    SearchVector,
    Warmup,
)

Calls = Mapping[str, Callable[..., Any]]
"""Callables of the client by key; see `Primitive.call`."""

_K = PrimitiveKind


def payloads(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """One payload per request. Raises what the client's callables raise, TypeError for values of the wrong kind."""
    return _BUILD[p.kind](p, inputs, calls)


def drafts(p: Primitive, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts that its answer may repeat, as the graph says: literals, and those of its inputs that are text."""
    known = (inputs.get(one.variable) if one.variable else one.text for one in p.attributes.drafts)
    return tuple(text for text in known if isinstance(text, str) and text)


def all_drafts(profile: EngineProfile, payload: Any, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Texts that go along with a request: those that are named, then, to an engine that takes drafts, those that it
    tells of itself."""
    return tuple(dict.fromkeys((*named, *texts_of(payload)))) if profile.drafts else tuple(named)


def value(p: Primitive, results: Sequence[Any]) -> Any:
    """The primitive's value: a list when it is batchable (or reranks), else its single result."""
    return list(results) if p.batchable or p.kind is _K.RERANKING else results[0]


def _texts(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    given = inputs["texts"]
    role = p.attributes.role or "query"
    found = []
    for item in given if p.batchable else [given]:
        text = item.text if isinstance(item, Chunk) else item
        if not isinstance(text, str):
            raise TypeError(f"{p.id} embeds text, but got {type(text).__name__}")
        found.append(EmbedText(text, role))
    return found


def _rows(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    collection = _collection(p, inputs)
    return [IngestRow(collection, c, v) for c, v in zip(inputs["chunks"], inputs["vectors"], strict=True)]


def _searches(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    if p.attributes.wrapped:  # the user's own retriever: one call of the object
        return [calls[p.call](inputs)]
    if "vectors" not in inputs:
        return _searches_by_words(p, inputs)
    vectors = inputs["vectors"] if p.batchable else [inputs["vectors"]]
    said = p.attributes
    k = 4 if said.k is None else said.k
    return [SearchVector(_collection(p, inputs), vector, k, said.filter) for vector in vectors]


def _collection(p: Primitive, inputs: Mapping[str, Any]) -> str:
    """That of the graph; where only the query says it, that of the query."""
    return str(inputs.get(COLLECTION, p.attributes.collection))


def _searches_by_words(p: Primitive, inputs: Mapping[str, Any]) -> list[Any]:
    k = 4 if p.attributes.k is None else p.attributes.k
    found = []
    for query in inputs["queries"] if p.batchable else [inputs["query"]]:
        if not isinstance(query, str):
            raise TypeError(f"{p.id} searches by words, but got {type(query).__name__}")
        found.append(SearchText(query, k))
    return found


def _pairs(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [ScorePair(inputs["query"], text) for text in inputs["texts"]]


def _generate(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [calls[p.call](inputs)]


def _tool(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [calls[p.call](inputs)]


def _warmup(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [Warmup(calls[p.call](inputs).prompt)]


_BUILD: dict[PrimitiveKind, Callable[[Primitive, Mapping[str, Any], Calls], list[Any]]] = {
    _K.EMBEDDING: _texts,
    _K.INGESTION: _rows,
    _K.SEARCHING: _searches,
    _K.RERANKING: _pairs,
    _K.PREFILLING: _generate,
    _K.FULL_PREFILLING: _generate,
    _K.PARTIAL_PREFILLING: _warmup,
    _K.TOOL: _tool,
}


def needs_client(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> bool:
    """Whether code of the client makes its payloads or its value that may take its time."""
    return bool(p.call) and p.call in calls and not runs_on_loop(calls[p.call], inputs)
