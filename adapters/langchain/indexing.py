"""`TeolaIndexer`: documents in, chunked, embedded and ingested; collection name out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from langchain_text_splitters import RecursiveCharacterTextSplitter, TextSplitter
from pydantic import ConfigDict, Field, PrivateAttr

from teola_plugin.adapters.calls import joined
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.listening import call_context
from teola_plugin.adapters.langchain.rows import latest, to_chunks
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.adapters.snapshots import data_key
from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Chunk
from teola_plugin.shims.langchain import splitter_sizes
from teola_plugin.tracer.langchain.classes import worker_of
from teola_plugin.tracer.leaf import IndexingLeaf

Documents = Document | str | Sequence[Document | str]

_STEP = 64
"""Chunks between two steps of the progress bar."""


class TeolaIndexer(RunnableSerializable[Documents, str]):
    """A step of a chain that puts documents into `store`, e.g. files that come with the query.

    ::

        index = TeolaIndexer(store=TeolaVectorStore(pool=pool, embedding=embeddings, collection="uploads"))

    Input: a `Document`, a text, or a list of them. Output: the name of the collection, once everything can be found.
    `splitter` may be any LangChain `TextSplitter`; by default texts are split at about 256 characters with 30 of
    overlap. Chunk ids come from the content, so indexing the same documents again adds nothing.
    """

    store: TeolaVectorStore = Field(exclude=True, repr=False)
    splitter: TextSplitter = Field(
        default_factory=lambda: RecursiveCharacterTextSplitter(chunk_size=256, chunk_overlap=30),
        exclude=True,
        repr=False,
    )
    progress: bool = False
    """Show a progress bar in the terminal."""
    name: str | None = "TeolaIndexer"

    _last: LastChunks = PrivateAttr(default_factory=lambda: LastChunks())

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    def invoke(self, input: Documents, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return self._call_with_config(self._index, input, config, **kwargs)

    async def ainvoke(self, input: Documents, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return await self._acall_with_config(self._aindex, input, config, **kwargs)

    def _index(self, documents: Documents, run_manager: Any) -> str:
        """Chunk, embed and store documents; return the name of the collection when all of them can be found."""
        with joined(*call_context(self.store.pool, run_manager)):
            for chunks in self._parts(self.chunk(documents)):
                self.store.write(chunks)
        return self.store.collection

    async def _aindex(self, documents: Documents, run_manager: Any) -> str:
        """Chunk, embed and store documents as `_index` does, in a loop."""
        with joined(*call_context(self.store.pool, run_manager)):
            for chunks in self._parts(self.chunk(documents)):
                await self.store.awrite(chunks)
        return self.store.collection

    def chunk(self, documents: Documents) -> tuple[Chunk, ...]:
        """The chunks of the documents, in order, each content once. Pure."""
        return self._last.of(_documents(documents), self.splitter, self._split)

    def _split(self, documents: list[Document]) -> tuple[Chunk, ...]:
        pieces = self.splitter.split_documents(documents)
        texts = [piece.page_content for piece in pieces]
        return tuple(latest(to_chunks(texts, [piece.metadata for piece in pieces], None)))

    def estimate(self, documents: Documents) -> int:
        """Expected number of chunks, from the lengths alone; of documents, where the splitter tells no sizes."""
        sizes, texts = splitter_sizes(self.splitter), [document.page_content for document in _documents(documents)]
        if sizes is None:
            return len(texts)
        size, overlap, length = sizes
        lengths = [length(text) for text in texts]
        return sum(max(1, math.ceil((n - overlap) / max(1, size - overlap))) for n in lengths if n)

    def _parts(self, chunks: Sequence[Chunk]) -> Iterable[Sequence[Chunk]]:
        """Return all chunks at once, or step by step for a progress bar."""
        if not chunks:
            return ()
        if not self.progress:
            return (chunks,)
        from rich.progress import track

        steps = [chunks[i : i + _STEP] for i in range(0, len(chunks), _STEP)]
        return track(steps, description=f"indexing into {self.store.collection}")

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> IndexingLeaf | None:
        """Describe the step to tracers: how documents become chunks, and which engines embed and store them.

        None, so that the step runs only as written, with arguments or a progress bar, or if the engines are not of one
        pool.
        """
        embedding = worker_of(self.store.embeddings)
        if kwargs or self.progress or not isinstance(embedding, TeolaEmbeddings):
            return None
        if embedding.pool is not self.store.pool:
            return None
        return IndexingLeaf(
            store=self.store.engine,
            embedder=embedding.engine,
            collection=self.store.collection,
            chunk=self.chunk,
            estimate=self.estimate,
            result=lambda _: self.store.collection,
        )


class LastChunks:
    """The chunks of the last documents: in an accelerated chain both the graph and the plain code ask for them.

    Whoever comes later gets them for documents, and a splitter, that nobody can tell from those they were made of.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made_of: Hashable = None
        self._chunks: tuple[Chunk, ...] = ()

    def of(
        self,
        documents: list[Document],
        splitter: TextSplitter,
        split: Callable[[list[Document]], tuple[Chunk, ...]],
    ) -> tuple[Chunk, ...]:
        """Return the chunks of documents, and split them only if they are not those of the call before.

        Thread-safe. A second caller waits while the first one splits.
        """
        made_of = _made_of(documents, splitter)
        if made_of is None:
            return split(documents)
        with self._lock:  # who comes second waits: the same work twice at once would take both longer
            if made_of != self._made_of:
                self._made_of, self._chunks = None, split(documents)
                if _made_of(documents, splitter) == made_of:  # or somebody has changed them meanwhile
                    self._made_of = made_of
            return self._chunks

    def __deepcopy__(self, memo: dict[int, Any]) -> LastChunks:
        return LastChunks()


def _made_of(documents: list[Document], splitter: TextSplitter) -> Hashable | None:
    """Return all that chunks depend on; None where that cannot be told."""
    try:
        document_keys = [(type(one), data_key(one.id), one.page_content, data_key(one.metadata)) for one in documents]
    except TypeError:
        return None
    settings = tuple((name, _setting(value)) for name, value in vars(splitter).items())
    return _Very(splitter), settings, tuple(document_keys)


def _setting(value: Any) -> Hashable:
    """Return a key that is equal for equal settings of a splitter: by content for plain data, else by identity."""
    try:
        return data_key(value)
    except TypeError:
        return _Very(value)


class _Very:
    """The very object; it lives as long as it is compared with."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Very) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _documents(documents_or_text: Any) -> list[Document]:
    """Return a step's input as a list of documents. Raise `RegistrationError` for what is neither document nor text."""
    items = [documents_or_text] if isinstance(documents_or_text, str | Document) else documents_or_text
    if not isinstance(items, Sequence) or not all(isinstance(item, str | Document) for item in items):
        raise RegistrationError(
            f"the indexer got {type(documents_or_text).__name__}, not documents.",
            hint="give it a Document, a text, or a list",
        )
    return [Document(page_content=item) if isinstance(item, str) else item for item in items]
