"""`TeolaVectorStore`: a collection of a vector store engine of the pool, as a LlamaIndex vector store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from pydantic import ConfigDict

from teola_plugin.adapters.llamaindex.filters import RowFilter, filter_of, of_document, row_filter
from teola_plugin.adapters.llamaindex.pipelined_write import PipelinedWrite, current_write
from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked
from teola_plugin.adapters.llamaindex.rows import points_elsewhere, to_node, to_result, to_row
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Hit, IngestRow, SearchVector
from teola_plugin.runtime.handles import CallHandle

T = TypeVar("T")
_MORE = 4
"""How many times more rows are asked for when filters have left too few."""


class TeolaVectorStore(PoolBacked, BasePydanticVectorStore):
    """One collection of the pool's engine `engine`: `TeolaVectorStore(pool=pool, collection="docs")`.

    It stores nodes whole, so they come back equal. Similarities are cosines, in [-1, 1], higher is nearer. A node
    whose id is there is replaced. Filters match as in `SimpleVectorStore`, so 1 and 0 find True and False; a value of a
    type that a filter cannot compare is no match. The engine evaluates equality (`==`, `!=`, `in`, `nin`); all other
    filters are decided on the rows found. Query modes other than `default` raise `RegistrationError`.
    """

    engine: str = "store"
    collection: str = "default"
    stores_text: bool = True
    is_embedding_query: bool = True

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @classmethod
    def class_name(cls) -> str:
        return "TeolaVectorStore"

    @property
    def client(self) -> Any:
        """The engine pool."""
        return self.pool

    # ------------------------------------------------------------ writing

    def row(self, node: BaseNode, vector: Sequence[float] | None = None) -> IngestRow:
        """What the engine is asked to write for a node; `vector` is its embedding if it has none of its own yet.

        Raises `ValueError` for a node without an embedding.
        """
        return to_row(self.collection, node, node.get_embedding() if vector is None else vector)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Write nodes that have embeddings; returns their ids."""
        rows, write = [self.row(node) for node in nodes], self._pipelined()
        self.ingest(rows if write is None else write.left(rows)).result()
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        rows, write = [self.row(node) for node in nodes], self._pipelined()
        await self.ingest(rows if write is None else await write.aleft(rows))
        return [node.node_id for node in nodes]

    def _pipelined(self) -> PipelinedWrite | None:
        """The rows that were written into this very collection while others were being embedded."""
        write = current_write.get()
        return write if write is not None and write.store is self else None

    def ingest(self, rows: Sequence[IngestRow]) -> CallHandle:
        """Write rows, one request each; of several with one id, the last counts."""
        latest = {row.chunk.id: row for row in rows}
        return self.request(PrimitiveKind.INGESTION, list(latest.values()))

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove the nodes of a document."""
        rows = self._stored(None, of_document(ref_doc_id)).result()
        self.admin("delete", [row.id for row in rows]).result()

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        rows = await _waited(self._stored(None, of_document(ref_doc_id)))
        await _waited(self.admin("delete", [row.id for row in rows]))

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove nodes by their ids, by filters, or those that meet both; without either, none."""
        if node_ids or filters:
            self.admin("delete", [node.node_id for node in self.get_nodes(node_ids, filters)]).result()

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        if node_ids or filters:
            found = await self.aget_nodes(node_ids, filters)
            await _waited(self.admin("delete", [node.node_id for node in found]))

    def clear(self) -> None:
        """Remove the whole collection."""
        self.admin("delete_collection").result()

    async def aclear(self) -> None:
        await _waited(self.admin("delete_collection"))

    # ------------------------------------------------------------ reading

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Nodes by their ids (in that order; unknown ones are left out), by filters, or those that meet both."""
        asked = row_filter(filters)
        return [to_node(row) for row in self._stored(node_ids, asked).result() if asked.admits(row)]

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        asked = row_filter(filters)
        return [to_node(row) for row in await _waited(self._stored(node_ids, asked)) if asked.admits(row)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        first = self._first(query).result() if query.node_ids else []
        asked = self._filter(query, first)
        for k in _depths(query.similarity_top_k, asked):
            [hits] = self._search(self._payload(query, k, asked)).result()
            found = asked.matching(hits)
            if asked.predicate is None or len(found) >= query.similarity_top_k or len(hits) < k:
                break
        return self.result_of(found[: query.similarity_top_k])

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        first = await _waited(self._first(query)) if query.node_ids else []
        asked = self._filter(query, first)
        for k in _depths(query.similarity_top_k, asked):
            [hits] = await self._search(self._payload(query, k, asked))
            found = asked.matching(hits)
            if asked.predicate is None or len(found) >= query.similarity_top_k or len(hits) < k:
                break
        return self.result_of(found[: query.similarity_top_k])

    def search_payload(self, query: VectorStoreQuery) -> SearchVector | None:
        """What `query` asks the engine for; None where its filters may take more than one request.

        Raises `RegistrationError` for a mode that is not supported and for a query without an embedding.
        """
        asked = self._filter(query)
        return self._payload(query, query.similarity_top_k, asked) if asked.predicate is None else None

    def result_of(self, hits: Sequence[Hit]) -> VectorStoreQueryResult:
        """What `query` returns for the engine's value."""
        return to_result(hits)

    def count(self) -> int:
        """Rows of the collection; 0 when it does not exist."""
        return int(self.admin("count").result())

    # ------------------------------------------------------------ calls

    def _filter(self, query: VectorStoreQuery, first: Sequence[Chunk] = ()) -> RowFilter:
        """`first`: the first node of `node_ids`, if there are any."""
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise RegistrationError(
                f"TeolaVectorStore cannot search in the mode {VectorStoreQueryMode(query.mode).value!r}.",
                hint="use vector_store_query_mode='default', and rerank or fuse what is found",
            )
        return filter_of(query, anywhere=any(map(points_elsewhere, first)))

    def _first(self, query: VectorStoreQuery) -> Future[list[Chunk]]:
        return self.admin("get", (query.node_ids or [])[:1])

    def _payload(self, query: VectorStoreQuery, k: int, asked: RowFilter) -> SearchVector:
        if query.query_embedding is None:
            raise RegistrationError(
                "TeolaVectorStore was given a query without an embedding.",
                hint="search through a retriever with an embed_model, or set query_embedding",
            )
        return SearchVector(self.collection, tuple(query.query_embedding), k, asked.conditions)

    def _search(self, payload: SearchVector) -> CallHandle:
        return self.request(PrimitiveKind.SEARCHING, [payload])

    def _stored(self, node_ids: Sequence[str] | None, asked: RowFilter) -> Future[list[Chunk]]:
        """Rows by id, or all that have the metadata which the engine can be told."""
        if node_ids is not None:
            return self.admin("get", list(node_ids))
        return self.admin("find", asked.conditions)

    def admin(self, method: str, *args: Any) -> Future[Any]:
        """Run a method of the engine that is no request, on this collection."""
        future: Future[Any] = self.pool.admin(self.engine, method, self.collection, *args)
        return future


def _depths(k: int, asked: RowFilter) -> Iterator[int]:
    """How many hits to ask for, until enough are left."""
    if asked.predicate is None:
        yield k
    while asked.predicate is not None:
        k *= _MORE
        yield k


async def _waited(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
