"""Components that index documents and find passages: chunking, embedding, ingestion, searching, reranking."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from teola_plugin.errors import RegistrationError
from teola_plugin.graph import ITEM, Attributes, Effect, PrimitiveKind, Ref, Role, named, on_loop, simple
from teola_plugin.graph import Component as Part
from teola_plugin.graph.refs import Inputs
from teola_plugin.requests.payloads import Chunk, Hit
from teola_plugin.workflow.component import Component
from teola_plugin.workflow.decomposition import Decomposition
from teola_plugin.workflow.settings import on_engine, reads, setting
from teola_plugin.workflow.values import Estimate, Kind, Value, documents_of, text_size

_K = PrimitiveKind
PER_QUERY = "per query"
"""A collection of each query's own: what is uploaded with one is seen by no other, and deleted after it."""
THIS_QUERY = "this.collection"
"""Where a query brings the name of that collection."""
_SAMPLE = 4096
"""Characters of a document from which it is told how many chunks it gives."""
_RRF = 60
"""Reciprocal rank fusion: what is added to a rank (Cormack, Clarke, Buettcher 2009)."""


class Splitter(Protocol):
    """What splits a text, e.g. a text splitter of LangChain, a node parser of LlamaIndex."""

    def split_text(self, text: str) -> list[str]: ...


@dataclass(frozen=True)
class WordWindows:
    """Splits a text into windows of `chunk_size` words, of which `chunk_overlap` are those at the end of the last."""

    chunk_size: int
    chunk_overlap: int

    def split_text(self, text: str) -> list[str]:
        words = text.split()
        step = self.chunk_size - self.chunk_overlap
        starts = range(0, max(1, len(words) - self.chunk_overlap), step)
        return [" ".join(words[at : at + self.chunk_size]) for at in starts] if words else []


@dataclass(frozen=True, kw_only=True)
class Chunking(Component):
    """Documents -> chunks. Equal chunks are kept once; a chunk's id comes from its content.

    `splitter`: called with `chunk_size=` and `chunk_overlap=`, it gives what splits texts: `WordWindows` (sizes in
    words), LangChain's `RecursiveCharacterTextSplitter` (characters), LlamaIndex's `SentenceSplitter` (tokens).
    """

    documents: str = reads("documents", Kind.DOCUMENTS, Kind.TEXT, Kind.TEXTS)
    chunk_size: int = setting(256, "length of a chunk, as the splitter counts", least=1)
    chunk_overlap: int = setting(30, "what a chunk repeats of the one before", least=0)
    splitter: Callable[..., Splitter] = WordWindows

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.name, self.chunk_size, self.chunk_overlap)

    def decompose(self, made: Decomposition) -> Value:
        split, estimate = chunker(self.splitter, self.chunk_size, self.chunk_overlap)
        documents = made.ref("documents")
        part = Part(made.part(), Role.CHUNKING, named(documents=documents))
        return Value(made.add(part, split), Kind.CHUNKS, Estimate(documents, estimate))


@dataclass(frozen=True, kw_only=True)
class Embedding(Component):
    """A text -> its vector; texts or chunks -> theirs. Texts are embedded as queries, chunks as documents, unless
    `role` says otherwise."""

    texts: str = reads("question", Kind.TEXT, Kind.TEXTS, Kind.CHUNKS)
    engine: str = on_engine("embedder", _K.EMBEDDING)
    role: Literal["", "query", "document"] = ""

    def decompose(self, made: Decomposition) -> Value:
        texts = made.read("texts")
        role = self.role or ("document" if texts.kind is Kind.CHUNKS else "query")
        part = Part(
            made.part(),
            Role.EMBEDDING,
            named(texts=texts.ref),
            self.engine,
            batchable=_several(texts),
            expected=_number(texts.width),
            attributes=Attributes(role=role),
        )
        return Value(made.add(part, width=texts.width), Kind.VECTORS if _several(texts) else Kind.VECTOR, texts.width)


@dataclass(frozen=True, kw_only=True)
class Ingestion(Component):
    """Chunks and their vectors -> rows of a collection; the rows' ids.

    `collection=PER_QUERY`: a collection of the query's own, deleted after it.
    """

    chunks: str = reads("chunks", Kind.CHUNKS)
    vectors: str = reads("vectors", Kind.VECTORS)
    collection: str = "documents"
    engine: str = on_engine("store", _K.INGESTION)

    def decompose(self, made: Decomposition) -> Value:
        chunks = made.read("chunks")
        part = Part(
            made.part(),
            Role.INGESTION,
            named(chunks=chunks.ref, vectors=made.ref("vectors")) + own_collection(made, self.collection),
            self.engine,
            batchable=True,
            expected=_number(chunks.width),
            effects=(resource(self.engine, self.collection, writes=True),),
            attributes=Attributes(collection=said(self.collection)),
        )
        return Value(made.add(part, width=chunks.width), Kind.ROWS, chunks.width)

    def collections(self) -> tuple[tuple[str, str], ...]:
        return ((self.engine, self.collection),)


@dataclass(frozen=True, kw_only=True)
class Indexing(Component):
    """Documents -> rows of a collection: chunking, embedding and ingestion in one; the rows' ids."""

    documents: str = reads("documents", Kind.DOCUMENTS, Kind.TEXT, Kind.TEXTS)
    chunk_size: int = setting(256, "length of a chunk, as the splitter counts", least=1)
    chunk_overlap: int = setting(30, "what a chunk repeats of the one before", least=0)
    collection: str = "documents"
    engine: str = on_engine("store", _K.INGESTION)
    embedder: str = on_engine("embedder", _K.EMBEDDING)
    splitter: Callable[..., Splitter] = WordWindows

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.name, self.chunk_size, self.chunk_overlap)

    def decompose(self, made: Decomposition) -> Value:
        split, estimate = chunker(self.splitter, self.chunk_size, self.chunk_overlap)
        documents = made.ref("documents")
        width = Estimate(documents, estimate)
        part = Part(
            made.part(),
            Role.INDEXING,
            named(documents=documents) + own_collection(made, self.collection),
            self.engine,
            self.embedder,
            effects=(resource(self.engine, self.collection, writes=True),),
            attributes=Attributes(collection=said(self.collection)),
        )
        return Value(made.add(part, split, width=width), Kind.ROWS, width)

    def collections(self) -> tuple[tuple[str, str], ...]:
        return ((self.engine, self.collection),)


@dataclass(frozen=True, kw_only=True)
class Searching(Component):
    """A question (a text, or its vector) -> the nearest passages of a collection, best first.

    For a list of questions, the passages of all of them, each once, ordered by reciprocal rank fusion. `filter`:
    metadata that passages must have.
    """

    query: str = reads("question", Kind.TEXT, Kind.TEXTS, Kind.VECTOR, Kind.VECTORS)
    k: int = setting(4, "passages for each question", least=1)
    collection: str = "documents"
    filter: tuple[tuple[str, Any], ...] = ()
    engine: str = on_engine("store", _K.SEARCHING)
    embedder: str = on_engine("embedder", _K.EMBEDDING)

    def decompose(self, made: Decomposition) -> Value:
        query = made.read("query")
        several, count = _several(query), _number(query.width)
        if query.written:  # a search for each, so that it begins as the model has written its question

            def one(body: Decomposition) -> Value:
                return Value(self._search(body, Value(Ref(ITEM), Kind.TEXT), "one"), Kind.PASSAGES)

            found = made.hold("", Role.MAP, named(items=query.ref), made.made_by_hand(one), expected=count)
        else:
            found = self._search(made, query)
        if not several:
            return Value(found, Kind.PASSAGES, self.k)
        most = None if count is None else self.k * count
        return Value(made.call("fused", fused, lists=found), Kind.PASSAGES, most)

    def _search(self, made: Decomposition, query: Value, suffix: str = "") -> Ref:
        vectors = query.kind in (Kind.VECTOR, Kind.VECTORS)
        part = Part(
            made.part(suffix),
            Role.SEARCHING if vectors else Role.RETRIEVAL,
            (("vectors" if vectors else "query", query.ref), *own_collection(made, self.collection)),
            self.engine,
            "" if vectors else self.embedder,
            batchable=_several(query),
            expected=_number(query.width),
            effects=(resource(self.engine, self.collection),),
            attributes=Attributes(collection=said(self.collection), k=self.k, filter=tuple(self.filter)),
        )
        return made.add(part, width=query.width)

    def collections(self) -> tuple[tuple[str, str], ...]:
        return ((self.engine, self.collection),)


@dataclass(frozen=True, kw_only=True)
class WebSearch(Component):
    """A question -> the best results of a search of the web, or of documents by their words, best first."""

    query: str = reads("question", Kind.TEXT)
    k: int = setting(4, "results that are asked for", least=1)
    engine: str = on_engine("web", _K.SEARCHING)

    def decompose(self, made: Decomposition) -> Value:
        asked = named(query=made.ref("query"))
        part = Part(made.part(), Role.SEARCHING, asked, self.engine, attributes=Attributes(k=self.k))
        return Value(made.add(part), Kind.PASSAGES, self.k)


@dataclass(frozen=True, kw_only=True)
class Reranking(Component):
    """Passages -> the `k` that go best with the question, best first, each with the reranker's score."""

    query: str = reads("question", Kind.TEXT)
    passages: str = reads("passages", Kind.PASSAGES)
    k: int = setting(3, "passages that are kept", least=1)
    engine: str = on_engine("reranker", _K.RERANKING)

    def decompose(self, made: Decomposition) -> Value:
        passages = made.read("passages")
        part = Part(
            made.part("scores"),
            Role.RERANKING,
            named(query=made.ref("query"), texts=made.call("texts", texts_of, passages=passages.ref)),
            self.engine,
            batchable=True,
            expected=_number(passages.width),
        )
        k = self.k

        @simple(text_size)
        def kept(passages: Sequence[Hit], scores: Sequence[float]) -> tuple[Hit, ...]:
            order = sorted(range(len(passages)), key=lambda i: -scores[i])
            return tuple(replace(passages[i], score=scores[i]) for i in order[:k])

        scores = made.add(part)
        most = _number(passages.width)
        width = k if most is None else min(k, most)
        return Value(made.call("kept", kept, passages=passages.ref, scores=scores), Kind.PASSAGES, width)


# ------------------------------------------------------------ what they have in common


def _several(value: Value) -> bool:
    return value.kind in (Kind.TEXTS, Kind.CHUNKS, Kind.VECTORS, Kind.LIST)


def _number(width: int | Estimate | None) -> int | None:
    return width if isinstance(width, int) else None


def check_sizes(name: str, size: int, overlap: int) -> None:
    """Raises `RegistrationError` for chunks that would repeat all of the one before."""
    if overlap >= size:
        raise RegistrationError(
            f"{name}.chunk_overlap is {overlap}; expected less than chunk_size, which is {size}.",
            hint=f"e.g. {name}.chunk_overlap={size // 8}",
        )


def said(collection: str) -> str:
    """As a graph says it."""
    return "" if collection == PER_QUERY else collection


def resource(store: str, collection: str, *, writes: bool = False) -> Effect:
    return Effect(f"collection:{store}/{collection}", writes)


def own_collection(made: Decomposition, collection: str) -> Inputs:
    """The input that says the collection, where each query has its own."""
    return (("collection", made.of_query(THIS_QUERY)),) if collection == PER_QUERY else ()


@on_loop
def texts_of(passages: Sequence[Hit]) -> list[str]:
    return [passage.text for passage in passages]


@simple(text_size)
def fused(lists: Sequence[Sequence[Hit]]) -> tuple[Hit, ...]:
    """Passages of several searches, each once, by the sum of `1 / (60 + rank)` over the searches."""
    points: dict[str, float] = {}
    first: dict[str, Hit] = {}
    for hits in lists:
        for rank, hit in enumerate(hits, 1):
            points[hit.id] = points.get(hit.id, 0.0) + 1 / (_RRF + rank)
            first.setdefault(hit.id, hit)
    return tuple(sorted(first.values(), key=lambda hit: -points[hit.id]))


def chunker(
    splitter: Callable[..., Splitter], size: int, overlap: int
) -> tuple[Callable[[Any], tuple[Chunk, ...]], Callable[[Any], int]]:
    """What makes chunks of documents, and what expects how many, from the documents' lengths alone."""
    ready = splitter(chunk_size=size, chunk_overlap=overlap)

    def split(documents: Any) -> tuple[Chunk, ...]:
        found: dict[str, Chunk] = {}
        for document in documents_of(documents):
            for text in ready.split_text(document.text):
                chunk = _chunk(text, dict(document.metadata))
                found.setdefault(chunk.id, chunk)
        return tuple(found.values())

    def estimate(documents: Any) -> int:
        texts = [document.text for document in documents_of(documents) if document.text]
        sample = max(texts, key=len, default="")[:_SAMPLE]
        length = len(sample) / max(1, len(ready.split_text(sample)))  # in characters, whatever the splitter counts
        return sum(max(1, round(len(text) / length)) for text in texts)

    return split, estimate


def _chunk(text: str, metadata: dict[str, Any]) -> Chunk:
    content = json.dumps([text, metadata], sort_keys=True, default=str)
    return Chunk(hashlib.sha256(content.encode()).hexdigest()[:32], text, metadata)
