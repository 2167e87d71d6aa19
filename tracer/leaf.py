"""Descriptions of pool-backed objects: the models, retrievers, ... whose work is done by engines of a pool.

The tracer sits below the adapters, so it never names their classes. A pool-backed object has a method
`__teola_leaf__(kwargs)`, which returns its leaf for a call with these bound keyword arguments, or None if they change
what the leaf says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from teola_plugin.graph import Component, DraftText, Effect, Role
from teola_plugin.requests.payloads import Chunk, Generate, Generation, Hit

PERMISSION = Effect("permission")
"""Read by calls of the user's own models: user code, which may touch anything, grants it by not raising."""
RUN_TIME_EFFECTS = (PERMISSION,)
"""Effects of an OPAQUE component that stands for a value which code without side effects computes at run time."""
USER_CODE = (Role.OPAQUE, Role.TOOL)
_OWN_STORE = "store:"


def search_effect(searched: object) -> Effect:
    """Return the effect of a search by the user's own retriever or store: it reads what any code may write to."""
    return Effect(f"{_OWN_STORE}{id(searched)}")


def searches_own_store(component: Component) -> bool:
    """Return True if a component, or a body that it runs, searches by a retriever or a store of the user's own."""
    bodies = [body for body in (component.body, component.otherwise) if body is not None]
    is_search = any(effect.resource.startswith(_OWN_STORE) for effect in component.effects)
    return is_search or any(searches_own_store(inner) for body in bodies for inner in body.components)


@dataclass(frozen=True, slots=True)
class GenerationLeaf:
    """A chat model or LLM on the pool."""

    engine: str
    payload: Callable[[Any], Generate]
    """Framework input of the model (messages, a prompt value, a string) -> payload; must be pure."""
    message: Callable[[Generation], Any]
    """What the model returns for a generation, up to run-specific fields such as the message id."""
    items: str = ""
    """How a list is spelled in its output if its schema says so: `json`; empty otherwise."""
    expected: int | None = None
    """Number of items, if its schema fixes it (minItems == maxItems)."""
    forms: tuple[DraftText, ...] = ()
    """Texts that its answers may be or begin with, according to its schema and its tools."""
    simple: bool = False
    """True if the time that `payload` takes is proportional to the text's length."""
    form: Literal["", "whole", "unknown"] = ""
    """See `Attributes.form`."""

    def with_unknown_form(self) -> GenerationLeaf:
        """Return the leaf of a call that may stream, whatever its query does."""
        return replace(self, form="unknown") if self.form else self


@dataclass(frozen=True, slots=True)
class RetrievalLeaf:
    """A retriever whose embedder and store are on the pool. Framework input: the query text."""

    store: str
    embedder: str
    collection: str
    k: int
    filter: tuple[tuple[str, Any], ...]
    documents: Callable[[Sequence[Hit]], Any]

    @property
    def effect(self) -> Effect:
        return Effect(f"collection:{self.store}/{self.collection}", validated=True)


@dataclass(frozen=True, slots=True)
class TextSearchLeaf:
    """A retriever that searches by words, the web or a full text. Framework input: the query text."""

    engine: str
    k: int
    documents: Callable[[Sequence[Hit]], Any]


@dataclass(frozen=True, slots=True)
class StoreLeaf:
    """A retriever over a store of the user's own in this process: an engine embeds, the store's own code searches.

    The original searches, too, so a prefetched search must be quick; the gain is in what depends on it.
    """

    embedder: str
    text: Callable[[str], str]
    """Query -> the text that is embedded for it."""
    search: Callable[[Any], Any]
    """The query's vector -> what the retriever returns."""
    resource: str
    """Name of the part of the store that is read."""

    @property
    def effect(self) -> Effect:
        return Effect(self.resource, validated=True)


@dataclass(frozen=True, slots=True)
class RerankingLeaf:
    """A reranker. Framework input: `{"query": str, "documents": list}`."""

    engine: str
    texts: Callable[[Sequence[Any]], list[str]]
    """The text of each document, as it is scored."""
    select: Callable[[Sequence[Any], Sequence[float]], Any]
    """(documents, scores) -> what the reranker returns."""


@dataclass(frozen=True, slots=True)
class IndexingLeaf:
    """Documents in; chunked, embedded, ingested; collection name out."""

    store: str
    embedder: str
    collection: str
    chunk: Callable[[Any], tuple[Chunk, ...]]
    estimate: Callable[[Any], int]
    """Framework input -> expected number of chunks, without chunking."""
    result: Callable[[Sequence[str]], Any]
    """Row ids -> what the indexing object returns."""

    @property
    def effect(self) -> Effect:
        return Effect(f"collection:{self.store}/{self.collection}", writes=True)


@dataclass(frozen=True, slots=True)
class EmbeddingLeaf:
    """An object that embeds its input: one text, or a list when `batchable`."""

    engine: str
    role: Literal["query", "document"]
    batchable: bool
    result: Callable[[Any], Any] = field(default=lambda vectors: vectors)


@dataclass(frozen=True, slots=True)
class WrappedLeaf:
    """The user's own model, retriever, vector store or embeddings: called as it is, where the original would call it.

    The value of its component is what the object returns (a message, a text, documents, a vector).
    """

    key: str
    """Name of the call site."""
    kind: Literal["generation", "retrieval", "embedding"]
    payload: Callable[[Any], Any]
    """Framework input -> the engine's payload."""
    effects: tuple[Effect, ...] = ()
    engine: str = "wrapped"
    ends: tuple[str, ...] = ()
    """Names of the user code in front of the call, which has ended once the original begins it."""

    def behind_code(self, code: tuple[str, ...]) -> WrappedLeaf:
        """Return the leaf as the first call behind user code: it is not prefetched, but shows when that has ended."""
        return replace(self, effects=(), ends=code)


Leaf = (
    GenerationLeaf
    | RetrievalLeaf
    | TextSearchLeaf
    | StoreLeaf
    | RerankingLeaf
    | IndexingLeaf
    | EmbeddingLeaf
    | WrappedLeaf
)


def is_user_code(component: Component) -> bool:
    """Return True for code that may do anything, so not for code that computes a value at run time and only reads."""
    return component.role in USER_CODE and component.effects != RUN_TIME_EFFECTS
