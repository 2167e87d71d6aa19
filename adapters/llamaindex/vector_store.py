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
_DEPTH_FACTOR = 4
"""The factor by which the number of requested rows grows while too few of them meet the filters."""


class TeolaVectorStore(PoolBacked, BasePydanticVectorStore):
    """One collection of the pool's engine `engine`: `TeolaVectorStore(pool=pool, collection="docs")`.

    It stores whole nodes, so they come back equal. Similarities are cosines, in [-1, 1], higher is nearer. A node
    whose id is stored already is replaced. Filters match as in `SimpleVectorStore`, so 1 and 0 find
    True and False; a value of a type that a filter cannot compare is no match. The engine evaluates equality (`==`,
    `!=`, `in`, `nin`); all other filters are evaluated on the rows that it finds. Query modes other than `default`
    raise `RegistrationError`.
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
        """Return the row of a node; `vector` is its embedding if it has none of its own yet.

        Raise `ValueError` for a node without an embedding.
        """
        return to_row(self.collection, node, node.get_embedding() if vector is None else vector)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Write nodes that have embeddings. Return their ids."""
        rows, write = [self.row(node) for node in nodes], self._current_write()
        self.ingest(rows if write is None else write.remaining(rows)).result()
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        rows, write = [self.row(node) for node in nodes], self._current_write()
        await self.ingest(rows if write is None else await write.aremaining(rows))
        return [node.node_id for node in nodes]

    def _current_write(self) -> PipelinedWrite | None:
        """Return the write into this very store that runs beside the embedding, if there is one."""
        write = current_write.get()
        return write if write is not None and write.store is self else None

    def ingest(self, rows: Sequence[IngestRow]) -> CallHandle:
        """Write rows, one request each; of several with one id, the last counts."""
        latest = {row.chunk.id: row for row in rows}
        return self.request(PrimitiveKind.INGESTION, list(latest.values()))

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove the nodes of a document."""
        rows = self._read_rows(None, of_document(ref_doc_id)).result()
        self.admin("delete", [row.id for row in rows]).result()

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        rows = await _wait_for(self._read_rows(None, of_document(ref_doc_id)))
        await _wait_for(self.admin("delete", [row.id for row in rows]))

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
            nodes = await self.aget_nodes(node_ids, filters)
            await _wait_for(self.admin("delete", [node.node_id for node in nodes]))

    def clear(self) -> None:
        """Remove the whole collection."""
        self.admin("delete_collection").result()

    async def aclear(self) -> None:
        await _wait_for(self.admin("delete_collection"))

    # ------------------------------------------------------------ reading

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return nodes by their ids (in that order, without unknown ones), by filters, or those that meet both."""
        admitted = row_filter(filters)
        return [to_node(row) for row in self._read_rows(node_ids, admitted).result() if admitted.admits(row)]

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        admitted = row_filter(filters)
        return [to_node(row) for row in await _wait_for(self._read_rows(node_ids, admitted)) if admitted.admits(row)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        first = self._first_listed(query).result() if query.node_ids else []
        admitted = self._filter(query, first)
        for k in _search_depths(query.similarity_top_k, admitted):
            [hits] = self._search(self._payload(query, k, admitted)).result()
            hits_admitted = admitted.matching(hits)
            if admitted.predicate is None or len(hits_admitted) >= query.similarity_top_k or len(hits) < k:
                break
        return self.result_of(hits_admitted[: query.similarity_top_k])

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        first = await _wait_for(self._first_listed(query)) if query.node_ids else []
        admitted = self._filter(query, first)
        for k in _search_depths(query.similarity_top_k, admitted):
            [hits] = await self._search(self._payload(query, k, admitted))
            hits_admitted = admitted.matching(hits)
            if admitted.predicate is None or len(hits_admitted) >= query.similarity_top_k or len(hits) < k:
                break
        return self.result_of(hits_admitted[: query.similarity_top_k])

    def search_payload(self, query: VectorStoreQuery) -> SearchVector | None:
        """Return the request that `query` makes; None if its filters may take more than one request.

        Raise `RegistrationError` for a mode that is not supported and for a query without an embedding.
        """
        admitted = self._filter(query)
        return self._payload(query, query.similarity_top_k, admitted) if admitted.predicate is None else None

    def result_of(self, hits: Sequence[Hit]) -> VectorStoreQueryResult:
        """Return the result of `query` for the rows that the engine found."""
        return to_result(hits)

    def count(self) -> int:
        """Return the number of rows in the collection; 0 if it does not exist."""
        return int(self.admin("count").result())

    # ------------------------------------------------------------ calls

    def _filter(self, query: VectorStoreQuery, first: Sequence[Chunk] = ()) -> RowFilter:
        """Return the filter of a query. `first`: the row of the first of its `node_ids`, if there are any."""
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise RegistrationError(
                f"TeolaVectorStore cannot search in the mode {VectorStoreQueryMode(query.mode).value!r}.",
                hint="use vector_store_query_mode='default', and rerank or fuse what is found",
            )
        return filter_of(query, anywhere=any(map(points_elsewhere, first)))

    def _first_listed(self, query: VectorStoreQuery) -> Future[list[Chunk]]:
        return self.admin("get", (query.node_ids or [])[:1])

    def _payload(self, query: VectorStoreQuery, k: int, admitted: RowFilter) -> SearchVector:
        if query.query_embedding is None:
            raise RegistrationError(
                "TeolaVectorStore was given a query without an embedding.",
                hint="search through a retriever with an embed_model, or set query_embedding",
            )
        return SearchVector(self.collection, tuple(query.query_embedding), k, admitted.conditions)

    def _search(self, payload: SearchVector) -> CallHandle:
        return self.request(PrimitiveKind.SEARCHING, [payload])

    def _read_rows(self, node_ids: Sequence[str] | None, admitted: RowFilter) -> Future[list[Chunk]]:
        """Return rows by id, or all that meet the conditions that the engine evaluates."""
        if node_ids is not None:
            return self.admin("get", list(node_ids))
        return self.admin("find", admitted.conditions)

    def admin(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the engine that is no request, on this collection."""
        future: Future[Any] = self.pool.admin(self.engine, method, self.collection, *args)
        return future


def _search_depths(k: int, admitted: RowFilter) -> Iterator[int]:
    """Yield the numbers of rows to request, one after the other until enough rows meet the filter."""
    if admitted.predicate is None:
        yield k
    while admitted.predicate is not None:
        k *= _DEPTH_FACTOR
        yield k


async def _wait_for(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
