"""`TeolaVectorStore`: a collection of a vector store engine of the pool, and its retriever."""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from teola_plugin.adapters.calls import check_engine, joined, search_on_engine, store_engine, to_list
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.listening import ConfigScoped, call_context
from teola_plugin.adapters.langchain.rows import latest, to_chunks, to_documents, to_filter
from teola_plugin.adapters.routing import EngineRoute
from teola_plugin.engines.vector_store import StoreSearch
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Chunk, Hit, IngestRow, SearchVector
from teola_plugin.runtime.claims import RemoteValue
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.query_run import Claiming
from teola_plugin.tracer.langchain.classes import leaf_of, worker_of
from teola_plugin.tracer.leaf import EmbeddingLeaf, RetrievalLeaf

MOST_PARTS = 8
"""Parts of a list whose storing overlaps with its embedding, at most; each costs a transaction."""
LEAST_ROWS = 16
"""Rows of a part, at least."""


class Store(Protocol):
    """The store that is written to."""

    def ingest(self, chunks: Sequence[Chunk], vectors: Sequence[Any]) -> CallHandle: ...

    def administer(self, method: str, *args: Any) -> Future[Any]: ...


class PipelinedWrite:
    """A write of one step: `chunks`, each of an id of its own, into `store`."""

    def __init__(self, store: Store, embedding: TeolaEmbeddings, chunks: Sequence[Chunk]) -> None:
        self._store, self._embedding = store, embedding
        size = max(LEAST_ROWS, -(-len(chunks) // MOST_PARTS))
        self._parts = [chunks[at : at + size] for at in range(0, len(chunks), size)]
        self._vectors: list[CallHandle] = []
        self._writes: list[tuple[Sequence[Chunk], CallHandle]] = []

    def __len__(self) -> int:
        return len(self._parts)

    def stored_chunks(self) -> Future[Any]:
        """Return the chunks of these ids that the store has. If there are any, write all at once."""
        return self._store.administer("get", [chunk.id for part in self._parts for chunk in part])

    def _embed(self) -> None:
        self._vectors = [self._embedding.begin_documents([chunk.text for chunk in part]) for part in self._parts]

    def _store_part(self, number: int, vectors: Sequence[Any]) -> None:
        part = self._parts[number]
        self._writes.append((part, self._store.ingest(part, vectors)))

    def _written(self) -> list[str]:
        return [chunk.id for part, _ in self._writes for chunk in part]

    def write(self) -> None:
        """Embed and store all of them. Raises what the engines raise."""
        self._embed()
        try:
            for number, vectors in enumerate(self._vectors):
                self._store_part(number, vectors.result())
            for _, rows in self._writes:
                rows.result()
        except BaseException:
            self._stop()
            for _, rows in self._writes:
                _wait_for(rows)
            if ids := self._written():
                self._store.administer("delete", ids).result()
            raise

    async def awrite(self) -> None:
        """`write` in a loop."""
        self._embed()
        try:
            for number, vectors in enumerate(self._vectors):
                self._store_part(number, await vectors)
            for _, rows in self._writes:
                await rows
        except BaseException:
            self._stop()
            await asyncio.shield(asyncio.ensure_future(self._take_back()))
            raise

    async def _take_back(self) -> None:
        """Delete the rows that were written before a part failed, so that all of the write fails.

        It first waits until all writes that were begun have ended, well or not. Raise what deleting raises.
        """
        await asyncio.gather(*(rows for _, rows in self._writes), return_exceptions=True)
        if ids := self._written():
            await asyncio.wrap_future(self._store.administer("delete", ids))

    def _stop(self) -> None:
        for vectors in self._vectors:
            vectors.cancel()


def _wait_for(rows: CallHandle) -> None:
    """Wait until a write has ended, well or not: its error was raised by another one already."""
    try:
        rows.result()
    except Exception:  # told by another one already
        return


Scored = list[tuple[Document, float]]
_OF_OTHER_SEARCHES = frozenset({"fetch_k", "lambda_mult", "score_threshold"})
"""Search arguments of LangChain that some search types read and the others ignore."""
_CHOOSE_ROWS = frozenset(
    {"collection", "collection_name", "embeddings", "expr", "filter", "filters", "index_name", "namespace"}
    | {"partition", "partition_name", "tenant", "vectors", "where"}
)
"""Arguments by which other stores choose the rows to write or delete: without them the result would differ."""


class TeolaVectorStore(VectorStore):
    """One collection of the pool's engine `engine`.

    `embedding` is a `TeolaEmbeddings`, or any LangChain embeddings. Scores are cosine similarities, in [-1, 1], higher
    is nearer. Documents without an id get one from their text and metadata, so adding them again changes nothing.
    Filters are dicts of metadata keys and the values they must equal, or conditions with `$eq`, `$ne`, `$in`, `$nin`
    and `$and`; values are equal as in JSON, so 1 equals 1.0 and not True. Writing ignores arguments of other stores
    that choose no rows (`batch_size`, ...); searching raises `RegistrationError` for unknown arguments.
    """

    def __init__(
        self, *, pool: EnginePool, embedding: Embeddings, engine: str = "store", collection: str = "default"
    ) -> None:
        check_engine(pool, engine)
        self.pool = pool
        self.engine = engine
        self.collection = collection
        self._embedding = embedding

    @property
    def embeddings(self) -> Embeddings:
        return self._embedding

    # ------------------------------------------------------------ writing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Embed and store texts; return an id for each. Of several with one id, the last is stored.

        Raise `RegistrationError` for unknown arguments that would choose rows.
        """
        _refuse_row_choices(kwargs, "add_texts", ["metadatas", "ids"])
        chunks = to_chunks(texts, metadatas, ids)
        self.write(latest(chunks))
        return [chunk.id for chunk in chunks]

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Embed and store texts as `add_texts` does, in a loop."""
        _refuse_row_choices(kwargs, "aadd_texts", ["metadatas", "ids"])
        chunks = to_chunks(texts, metadatas, ids)
        await self.awrite(latest(chunks))
        return [chunk.id for chunk in chunks]

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        return self.add_texts(**_columns(documents, kwargs))

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        return await self.aadd_texts(**_columns(documents, kwargs))

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Embed chunks and store them. The vectors come here only where they must."""
        write = self._pipelined(chunks)
        if write is not None and not write.stored_chunks().result():
            write.write()
            return
        texts = [chunk.text for chunk in chunks]
        shared = self._shared_embeddings()
        vectors = (
            shared.begin_documents(texts, keep_remote=True).result()
            if shared
            else self._embedding.embed_documents(texts)
        )
        self.ingest(chunks, vectors).result()

    async def awrite(self, chunks: Sequence[Chunk]) -> None:
        """`write` in a loop."""
        write = self._pipelined(chunks)
        if write is not None and not await _waited(write.stored_chunks()):
            await write.awrite()
            return
        texts = [chunk.text for chunk in chunks]
        shared = self._shared_embeddings()
        embedded = (
            shared.begin_documents(texts, keep_remote=True) if shared else self._embedding.aembed_documents(texts)
        )
        await self.ingest(chunks, await embedded)

    def _shared_embeddings(self) -> TeolaEmbeddings | None:
        """The embeddings, if their engine is in the same shared pool."""
        return self._own_embeddings() if self.pool.shared else None

    def _own_embeddings(self) -> TeolaEmbeddings | None:
        """The embeddings, if their engine is in the same pool, and nobody has overridden what they do."""
        own_embeddings = worker_of(self._embedding)
        if not isinstance(own_embeddings, TeolaEmbeddings) or own_embeddings.pool is not self.pool:
            return None
        return own_embeddings if isinstance(leaf_of(own_embeddings, {}), EmbeddingLeaf) else None

    def _pipelined(self, chunks: Sequence[Chunk]) -> PipelinedWrite | None:
        """Return how chunks are written where a graph runs ahead; None where they are written all at once."""
        (run, _), own_embeddings = call_context(self.pool), None if self.pool.shared else self._own_embeddings()
        if run is None or run.claiming is not Claiming.ALLOWED or own_embeddings is None or len(chunks) <= LEAST_ROWS:
            return None
        return PipelinedWrite(self, own_embeddings, chunks)

    def ingest(self, chunks: Sequence[Chunk], vectors: Sequence[Sequence[float] | RemoteValue]) -> CallHandle:
        """Write chunks with their vectors, one request each; a row of the same id is replaced.

        The requests are started, and the call returns at once; wait for the handle. Raise `ValueError` unless there is
        one vector for each chunk.
        """
        rows = [IngestRow(self.collection, c, _vector_payload(v)) for c, v in zip(chunks, vectors, strict=True)]
        return self._start_requests(PrimitiveKind.INGESTION, rows)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Remove rows by id, or the whole collection when `ids` is None; ids that are not there are passed over."""
        self._delete(ids, kwargs).result()
        return True

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        await _waited(self._delete(ids, kwargs))
        return True

    def _delete(self, ids: list[str] | None, kwargs: Mapping[str, Any]) -> Any:
        """Start to delete rows by id, or the whole collection if `ids` is None; return a future.

        Raise `RegistrationError` for arguments that other stores have to choose rows: they must not be ignored here.
        """
        if ids is None:
            _refuse(kwargs, "delete", ["ids"])
            return self.administer("delete_collection")
        _refuse_row_choices(kwargs, "delete", ["ids"])
        return self.administer("delete", list(ids))

    # ------------------------------------------------------------ reading

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return to_documents(self.administer("get", list(ids)).result())

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return to_documents(await _waited(self.administer("get", list(ids))))

    def count(self) -> int:
        """Rows of the collection; 0 when it does not exist."""
        return int(self.administer("count").result())

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return _unscored(self.similarity_search_with_score(query, k, **kwargs))

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return _unscored(await self.asimilarity_search_with_score(query, k, **kwargs))

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> Scored:
        return _scored(self.search_vector(self._embedding.embed_query(query), k, **kwargs).result()[0])

    async def asimilarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> Scored:
        return _scored((await self.search_vector(await self._embedding.aembed_query(query), k, **kwargs))[0])

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return to_documents(self.search_vector(embedding, k, **kwargs).result()[0])

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return to_documents((await self.search_vector(embedding, k, **kwargs))[0])

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return `k` of the `fetch_k` nearest that differ from each other.

        Hits carry no vectors: they are embedded again.
        """
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, **kwargs)

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Search as `max_marginal_relevance_search` does, in a loop."""
        vector = await self._embedding.aembed_query(query)
        return await self.amax_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Search as `max_marginal_relevance_search`, with the vector of the query."""
        nearest = self.similarity_search_by_vector(embedding, fetch_k, **kwargs)
        vectors = self._embedding.embed_documents([document.page_content for document in nearest])
        return _diverse(embedding, nearest, vectors, k, lambda_mult)

    async def amax_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Search as `max_marginal_relevance_search_by_vector` does, in a loop."""
        nearest = await self.asimilarity_search_by_vector(embedding, fetch_k, **kwargs)
        vectors = await self._embedding.aembed_documents([document.page_content for document in nearest])
        return _diverse(embedding, nearest, vectors, k, lambda_mult)

    def search_vector(
        self, vector: Sequence[float], k: int = 4, *, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> CallHandle:
        """Start one search request. Raise `RegistrationError` for arguments that no search of LangChain has."""
        unknown = {name: value for name, value in kwargs.items() if name not in _OF_OTHER_SEARCHES}
        _refuse(unknown, "search", ["k", "filter"])
        request = SearchVector(self.collection, tuple(vector), k, to_filter(filter))
        return self._start_requests(PrimitiveKind.SEARCHING, [request])

    def _start_requests(self, kind: PrimitiveKind, payloads: Sequence[Any]) -> CallHandle:
        """Start a request of the store's engine for each payload, in the query that the caller belongs to, if any."""
        run, request_context = call_context(self.pool)
        handle: CallHandle = self.pool.call(kind, self.engine, payloads, run=run, request_context=request_context)
        return handle

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda similarity: min(1.0, max(0.0, similarity))

    def administer(self, method: str, *args: Any) -> Future[Any]:
        """One of the store's own operations (`get`, `count`, `delete`, `delete_collection`) on this collection.

        Return a future with its result, which also has the engine's error. `args` follow the collection's name.
        """
        future: Future[Any] = self.pool.admin(self.engine, method, self.collection, *args)
        return future

    # ------------------------------------------------------------ making

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> TeolaVectorStore:
        """Return a store with these texts added. `kwargs` are those of the class (`pool`, ...) and of `add_texts`."""
        store, of_adding = cls._construct(embedding, kwargs)
        store.add_texts(texts, metadatas, ids=ids, **of_adding)
        return store

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> TeolaVectorStore:
        """Return a store with these texts added, as `from_texts` does, in a loop."""
        store, of_adding = cls._construct(embedding, kwargs)
        await store.aadd_texts(texts, metadatas, ids=ids, **of_adding)
        return store

    @classmethod
    def _construct(cls, embedding: Embeddings, kwargs: Mapping[str, Any]) -> tuple[TeolaVectorStore, dict[str, Any]]:
        """Return a store, and the arguments that its class does not take."""
        parameters = inspect.signature(cls).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        of_class = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
        unknown_arguments = {name: value for name, value in kwargs.items() if name not in of_class}
        _refuse_row_choices(unknown_arguments, "from_texts", ["metadatas", "ids", *parameters])
        return cls(embedding=embedding, **of_class), unknown_arguments

    def as_retriever(self, **kwargs: Any) -> TeolaRetriever:
        tags = super().as_retriever(tags=kwargs.pop("tags", None)).tags
        return TeolaRetriever(vectorstore=self, tags=tags, **kwargs)


class TeolaRetriever(ConfigScoped, VectorStoreRetriever):
    """The retriever of a `TeolaVectorStore`; `search_type` and `search_kwargs` (`k`, `filter`) as in LangChain."""

    @property
    def pool(self) -> Any:
        """Return the pool of its store."""
        return getattr(self.vectorstore, "pool", None)

    def _joined(self, run_manager: Any) -> AbstractContextManager[None]:
        """Let engine calls in the body belong to the query of the retriever's caller."""
        return joined(*call_context(self.vectorstore.pool, run_manager))  # type: ignore[attr-defined]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        """Search as LangChain's retriever does; the engines' requests belong to the caller's query."""
        with self._joined(run_manager):
            return super()._get_relevant_documents(query, run_manager=run_manager, **kwargs)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        """Search as `_get_relevant_documents` does, in a loop."""
        with self._joined(run_manager):
            return await super()._aget_relevant_documents(query, run_manager=run_manager, **kwargs)

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> RetrievalLeaf | None:
        """Describe the search to tracers, which plan the query's embedding and the search from it.

        None for searches that are no plain similarity search, or whose engines are not of one pool: these are not
        planned.
        """
        store, options = self.vectorstore, {**self.search_kwargs, **kwargs}
        if self.search_type != "similarity" or not options.keys() <= {"k", "filter"}:
            return None
        embeddings = worker_of(store.embeddings)
        if not isinstance(store, TeolaVectorStore) or not isinstance(embeddings, TeolaEmbeddings):
            return None
        if embeddings.pool is not store.pool:
            return None
        try:
            conditions = to_filter(options.get("filter"))
        except RegistrationError:
            return None
        k = options.get("k", 4)
        return RetrievalLeaf(store.engine, embeddings.engine, store.collection, k, conditions, to_documents)


class StoreSearches:
    """The worker of a store of the user's that a `VectorStoreEngine` serves: it makes the searches of retrievers."""

    def __init__(self, store: VectorStore, route: EngineRoute) -> None:
        """Raise `RegistrationError` if the engine does not serve this very store."""
        self._route, self._engine = route, store_engine(store, *route)

    def wrap_search(self, method: str, original: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the search of a retriever over the store, as `original` makes it, with the engine's calls.

        None for an async search by async methods of the store's own, which run on the caller's loop.
        """
        if method == "_get_relevant_documents":
            return lambda retriever, *args, **kwargs: self._search(original, retriever, args, kwargs)
        return None if _has_async_search(type(self._engine.store)) else self._asearch(original)

    def _search(
        self, original: Callable[..., Any], retriever: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Document]:
        """Run the retriever's own code on a stand-in for its store."""
        run, request_context = call_context(self._route.pool, kwargs.get("run_manager"))
        with joined(run, request_context):
            documents: list[Document] = original(self._on_stand_in(retriever, run, request_context), *args, **kwargs)
            return documents

    def _asearch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a coroutine function that does as `_search`. LangChain runs the store's sync code on a thread."""

        async def search(retriever: Any, *args: Any, **kwargs: Any) -> Any:
            run, request_context = call_context(self._route.pool, kwargs.get("run_manager"))
            with joined(run, request_context):
                return await original(self._on_stand_in(retriever, run, request_context), *args, **kwargs)

        return search

    def _on_stand_in(self, retriever: VectorStoreRetriever, run: Any, request_context: Any) -> Any:
        """Return the retriever over a stand-in for its store; the retriever itself if there can be none."""

        def submit(search: StoreSearch) -> Any:
            return search_on_engine(*self._route, search, run, request_context)

        stand_in = self._engine.make_stand_in(submit)
        if stand_in is None:
            return retriever
        search_type, search_kwargs = retriever.search_type, retriever.search_kwargs
        return VectorStoreRetriever.model_construct(
            vectorstore=stand_in, search_type=search_type, search_kwargs=search_kwargs
        )


def _has_async_search(cls: type[VectorStore]) -> bool:
    """Return True if a store's class has an async search of its own."""
    return any(getattr(cls, name) is not getattr(VectorStore, name) for name in _ASYNC_SEARCHES)


_ASYNC_SEARCHES = (
    "asimilarity_search",
    "asimilarity_search_with_score",
    "asimilarity_search_with_relevance_scores",
    "_asimilarity_search_with_relevance_scores",
    "amax_marginal_relevance_search",
)


def _vector_payload(vector: Sequence[float] | RemoteValue) -> Any:
    if isinstance(vector, RemoteValue):
        return vector
    return tuple(vector if isinstance(vector, list | tuple) else to_list(vector))


def _columns(documents: Sequence[Document], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `add_texts`; explicit ids go before the documents' own."""
    return {
        **kwargs,
        "texts": [document.page_content for document in documents],
        "metadatas": [document.metadata for document in documents],
        "ids": kwargs.get("ids") or [document.id for document in documents],
    }


def _refuse(kwargs: Mapping[str, Any], method: str, supported: list[str]) -> None:
    for name in kwargs:
        raise unknown_name(f"argument of {method}", name, supported)


def _refuse_row_choices(kwargs: Mapping[str, Any], method: str, supported: list[str]) -> None:
    """Raise `RegistrationError` for arguments that choose rows, and for those that look like a misspelt known one."""
    for name in kwargs:
        if name in _CHOOSE_ROWS or difflib.get_close_matches(name, supported, cutoff=0.8):
            raise unknown_name(f"argument of {method}", name, supported)


def _scored(hits: Sequence[Hit]) -> Scored:
    return list(zip(to_documents(hits), [hit.score for hit in hits], strict=True))


def _unscored(scored: Scored) -> list[Document]:
    return [document for document, _ in scored]


def _diverse(
    query: list[float], documents: list[Document], vectors: list[list[float]], k: int, lambda_mult: float
) -> list[Document]:
    """Return `k` of the documents, chosen for nearness to the query and distance from each other.

    `lambda_mult` weighs the two: 1 is nearness alone, 0 distance alone.
    """
    import numpy as np
    from langchain_core.vectorstores.utils import maximal_marginal_relevance

    indices = maximal_marginal_relevance(np.array(query), vectors, lambda_mult, k) if documents else []
    return [documents[i] for i in indices]


def _waited(future: Future[Any]) -> asyncio.Future[Any]:
    """Return a future that the running loop can await for one that another thread completes.

    Async methods await the store's own operations with it: `get` before a write and in `aget_by_ids`, and the
    deletions of `adelete`. Searches return a handle that can be awaited itself.
    """
    return asyncio.wrap_future(future)
