"""Payloads of a primitive's requests, made from its inputs; and its value, made from their results."""

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
    """Return one payload per request. Raises what the client's callables raise, and TypeError for a wrong value."""
    return _BUILD[p.kind](p, inputs, calls)


def drafts(p: Primitive, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return texts that the primitive's answer may repeat, as the graph says: literals, and inputs that are texts."""
    values = (inputs.get(part.variable) if part.variable else part.text for part in p.attributes.drafts)
    return tuple(text for text in values if isinstance(text, str) and text)


def all_drafts(profile: EngineProfile, payload: Any, texts: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the draft texts of a request: `texts`, and those in its payload if the engine takes drafts."""
    return tuple(dict.fromkeys((*texts, *texts_of(payload)))) if profile.drafts else tuple(texts)


def value(p: Primitive, results: Sequence[Any]) -> Any:
    """Return the primitive's value: a list if it is batchable (or reranks), else its single result."""
    return list(results) if p.batchable or p.kind is _K.RERANKING else results[0]


def _texts(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    texts = inputs["texts"]
    role = p.attributes.role or "query"
    embeddings = []
    for item in texts if p.batchable else [texts]:
        text = item.text if isinstance(item, Chunk) else item
        if not isinstance(text, str):
            raise TypeError(f"{p.id} embeds text, but got {type(text).__name__}")
        embeddings.append(EmbedText(text, role))
    return embeddings


def _rows(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    collection = _collection(p, inputs)
    return [IngestRow(collection, c, v) for c, v in zip(inputs["chunks"], inputs["vectors"], strict=True)]


def _searches(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    if p.attributes.wrapped:  # the user's own retriever: one call of the object
        return [calls[p.call](inputs)]
    k = 4 if p.attributes.k is None else p.attributes.k
    if "vectors" in inputs:
        vectors = inputs["vectors"] if p.batchable else [inputs["vectors"]]
        return [SearchVector(_collection(p, inputs), vector, k, p.attributes.filter) for vector in vectors]
    searches = []
    for query in inputs["queries"] if p.batchable else [inputs["query"]]:
        if not isinstance(query, str):
            raise TypeError(f"{p.id} searches by words, but got {type(query).__name__}")
        searches.append(SearchText(query, k))
    return searches


def _collection(p: Primitive, inputs: Mapping[str, Any]) -> str:
    """Return the collection of a primitive: the query's, if the query names it, else the graph's."""
    return str(inputs.get(COLLECTION, p.attributes.collection))


def _pairs(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [ScorePair(inputs["query"], text) for text in inputs["texts"]]


def _from_client(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """Return the payload of a generation or a tool call, which the client makes."""
    return [calls[p.call](inputs)]


def _warmup(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [Warmup(calls[p.call](inputs).prompt)]


_BUILD: dict[PrimitiveKind, Callable[[Primitive, Mapping[str, Any], Calls], list[Any]]] = {
    _K.EMBEDDING: _texts,
    _K.INGESTION: _rows,
    _K.SEARCHING: _searches,
    _K.RERANKING: _pairs,
    _K.PREFILLING: _from_client,
    _K.FULL_PREFILLING: _from_client,
    _K.PARTIAL_PREFILLING: _warmup,
    _K.TOOL: _from_client,
}


def needs_client(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> bool:
    """Return True if code of the client that may be slow makes the primitive's payloads or its value."""
    return bool(p.call) and p.call in calls and not runs_on_loop(calls[p.call], inputs)
