"""Components that index documents: chunking, embedding, ingestion."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from teola_plugin.errors import RegistrationError
from teola_plugin.graph import Attributes, Effect, PrimitiveKind, Role, named
from teola_plugin.graph import Component as Part
from teola_plugin.graph.refs import Inputs
from teola_plugin.requests.payloads import Chunk
from teola_plugin.workflow.component import Component
from teola_plugin.workflow.decomposition import Decomposition
from teola_plugin.workflow.settings import on_engine, reads, setting
from teola_plugin.workflow.values import Estimate, Kind, Value, documents_of

_K = PrimitiveKind
PER_QUERY = "per query"
"""A collection of each query's own: what is uploaded with one is seen by no other, and deleted after it."""
THIS_QUERY = "this.collection"
"""Where a query brings the name of that collection."""
_SAMPLE = 4096
"""Characters of a document from which it is told how many chunks it gives."""


class Splitter(Protocol):
    """An object that splits texts, e.g. a text splitter of LangChain or a node parser of LlamaIndex."""

    def split_text(self, text: str) -> list[str]: ...


@dataclass(frozen=True)
class WordWindows:
    """Splits a text into windows of `chunk_size` words, of which `chunk_overlap` are those at the end of the last."""

    chunk_size: int
    chunk_overlap: int

    def split_text(self, text: str) -> list[str]:
        """Return the windows of a text; none for an empty one. Words are separated by white space."""
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
    chunk_size: int = setting(256, "length of a chunk, as the splitter counts", minimum=1)
    chunk_overlap: int = setting(30, "what a chunk repeats of the one before", minimum=0)
    splitter: Callable[..., Splitter] = WordWindows

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.name, self.chunk_size, self.chunk_overlap)

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the chunking of the documents, with an estimate of the number of chunks."""
        split, estimate = chunker(self.splitter, self.chunk_size, self.chunk_overlap)
        documents = decomposition.ref("documents")
        part = Part(decomposition.part(), Role.CHUNKING, named(documents=documents))
        return Value(decomposition.add(part, split), Kind.CHUNKS, Estimate(documents, estimate))


@dataclass(frozen=True, kw_only=True)
class Embedding(Component):
    """A text -> its vector; texts or chunks -> theirs. Texts are embedded as queries, chunks as documents, unless
    `role` says otherwise."""

    texts: str = reads("question", Kind.TEXT, Kind.TEXTS, Kind.CHUNKS)
    engine: str = on_engine("embedder", _K.EMBEDDING)
    role: Literal["", "query", "document"] = ""

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the embedding of a text, or of each text or chunk of a list."""
        texts = decomposition.read("texts")
        role = self.role or ("document" if texts.kind is Kind.CHUNKS else "query")
        part = Part(
            decomposition.part(),
            Role.EMBEDDING,
            named(texts=texts.ref),
            self.engine,
            batchable=several(texts),
            expected=number(texts.width),
            attributes=Attributes(role=role),
        )
        return Value(
            decomposition.add(part, width=texts.width), Kind.VECTORS if several(texts) else Kind.VECTOR, texts.width
        )


@dataclass(frozen=True, kw_only=True)
class Ingestion(Component):
    """Chunks and their vectors -> rows of a collection; the rows' ids.

    `collection=PER_QUERY`: a collection of the query's own, deleted after it.
    """

    chunks: str = reads("chunks", Kind.CHUNKS)
    vectors: str = reads("vectors", Kind.VECTORS)
    collection: str = "documents"
    engine: str = on_engine("store", _K.INGESTION)

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the ingestion of chunks with their vectors, which writes to the collection."""
        chunks = decomposition.read("chunks")
        part = Part(
            decomposition.part(),
            Role.INGESTION,
            named(chunks=chunks.ref, vectors=decomposition.ref("vectors"))
            + own_collection(decomposition, self.collection),
            self.engine,
            batchable=True,
            expected=number(chunks.width),
            effects=(resource(self.engine, self.collection, writes=True),),
            attributes=Attributes(collection=static_collection(self.collection)),
        )
        return Value(decomposition.add(part, width=chunks.width), Kind.ROWS, chunks.width)

    def collections(self) -> tuple[tuple[str, str], ...]:
        return ((self.engine, self.collection),)


@dataclass(frozen=True, kw_only=True)
class Indexing(Component):
    """Documents -> rows of a collection: chunking, embedding and ingestion in one; the rows' ids."""

    documents: str = reads("documents", Kind.DOCUMENTS, Kind.TEXT, Kind.TEXTS)
    chunk_size: int = setting(256, "length of a chunk, as the splitter counts", minimum=1)
    chunk_overlap: int = setting(30, "what a chunk repeats of the one before", minimum=0)
    collection: str = "documents"
    engine: str = on_engine("store", _K.INGESTION)
    embedder: str = on_engine("embedder", _K.EMBEDDING)
    splitter: Callable[..., Splitter] = WordWindows

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.name, self.chunk_size, self.chunk_overlap)

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add chunking, embedding and ingestion of the documents as one component, which writes to the collection."""
        split, estimate = chunker(self.splitter, self.chunk_size, self.chunk_overlap)
        documents = decomposition.ref("documents")
        width = Estimate(documents, estimate)
        part = Part(
            decomposition.part(),
            Role.INDEXING,
            named(documents=documents) + own_collection(decomposition, self.collection),
            self.engine,
            self.embedder,
            effects=(resource(self.engine, self.collection, writes=True),),
            attributes=Attributes(collection=static_collection(self.collection)),
        )
        return Value(decomposition.add(part, split, width=width), Kind.ROWS, width)

    def collections(self) -> tuple[tuple[str, str], ...]:
        return ((self.engine, self.collection),)


# ------------------------------------------------------------ what they have in common


def several(value: Value) -> bool:
    """Return True if the value is a list in which each item is a request."""
    return value.kind in (Kind.TEXTS, Kind.CHUNKS, Kind.VECTORS, Kind.LIST)


def number(width: int | Estimate | None) -> int | None:
    """Return the number of items if it is the same for every query, else None."""
    return width if isinstance(width, int) else None


def check_sizes(name: str, size: int, overlap: int) -> None:
    """Raises `RegistrationError` for chunks that would repeat all of the one before."""
    if overlap >= size:
        raise RegistrationError(
            f"{name}.chunk_overlap is {overlap}; expected less than chunk_size, which is {size}.",
            hint=f"e.g. {name}.chunk_overlap={size // 8}",
        )


def static_collection(collection: str) -> str:
    """Return the name of the collection in a graph; "" if each query has its own."""
    return "" if collection == PER_QUERY else collection


def resource(store: str, collection: str, *, writes: bool = False) -> Effect:
    return Effect(f"collection:{store}/{collection}", writes)


def own_collection(decomposition: Decomposition, collection: str) -> Inputs:
    """The input that says the collection, where each query has its own."""
    return (("collection", decomposition.of_query(THIS_QUERY)),) if collection == PER_QUERY else ()


def chunker(
    splitter: Callable[..., Splitter], size: int, overlap: int
) -> tuple[Callable[[Any], tuple[Chunk, ...]], Callable[[Any], int]]:
    """Return a function that splits documents into chunks, and one that estimates their number from text lengths."""
    ready = splitter(chunk_size=size, chunk_overlap=overlap)

    def split(documents: Any) -> tuple[Chunk, ...]:
        """Return the chunks of all documents, equal ones once."""
        chunks: dict[str, Chunk] = {}
        for document in documents_of(documents):
            for text in ready.split_text(document.text):
                chunk = _chunk(text, dict(document.metadata))
                chunks.setdefault(chunk.id, chunk)
        return tuple(chunks.values())

    def estimate(documents: Any) -> int:
        """Estimate the number of chunks of all documents, from how the beginning of the longest one is split.

        Only the first 4,096 characters (`_SAMPLE`) of the longest document are split.
        """
        texts = [document.text for document in documents_of(documents) if document.text]
        sample = max(texts, key=len, default="")[:_SAMPLE]
        length = len(sample) / max(1, len(ready.split_text(sample)))  # in characters, whatever the splitter counts
        return sum(max(1, round(len(text) / length)) for text in texts)

    return split, estimate


def _chunk(text: str, metadata: dict[str, Any]) -> Chunk:
    content = json.dumps([text, metadata], sort_keys=True, default=str)
    return Chunk(hashlib.sha256(content.encode()).hexdigest()[:32], text, metadata)
