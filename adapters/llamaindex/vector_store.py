"""LlamaIndex vector stores: `TeolaVectorStore`, and the queries of a user's own store that an engine makes.

A `TeolaVectorStore` is a collection of a vector store engine of the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from llama_index.core.schema import BaseNode, ImageNode, IndexNode, MetadataMode, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn, metadata_dict_to_node, node_to_metadata_dict
from pydantic import ConfigDict

from teola_plugin.adapters.calls import asearch_on_engine, search_on_engine, store_engine
from teola_plugin.adapters.llamaindex.pipelined_write import PipelinedWrite, current_write
from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked
from teola_plugin.adapters.routing import EngineRoute
from teola_plugin.adapters.snapshots import own_copy
from teola_plugin.engines.vector_store import StoreSearch
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.json_values import build_metadata_test
from teola_plugin.requests.payloads import Chunk, Hit, IngestRow, OneOf, SearchVector, Stored
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.query_run import current_run
from teola_plugin.shims.llamaindex.interceptors import body_of, is_async_method, is_intercepted
from teola_plugin.shims.llamaindex.models import NODE_CONTENT, NODE_TYPE

Row = TypeVar("Row", bound=Stored)
MetadataTest = Callable[[Mapping[str, Any]], bool]
EngineFilter = tuple[tuple[str, Any], ...]
"""As in `SearchVector.filter`."""
_OF_LISTS = {FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL}
_OF_EQUALITY = {FilterOperator.EQ, FilterOperator.NE, FilterOperator.IN, FilterOperator.NIN}
_NEGATED = {FilterOperator.NE, FilterOperator.NIN}
_MAX_EXACT = 2**53
"""Up to this size a number is equal to the same numbers in Python and in JSON."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter of rows, in two parts that both hold for each row that it admits."""

    conditions: EngineFilter = ()
    """Conditions that the engine evaluates."""
    predicate: Callable[[Stored], bool] | None = None
    """A test of the rows that the engine finds; None if the engine evaluates everything."""

    def admits(self, row: Stored) -> bool:
        """Return True for a row that meets both parts, even if the engine has not evaluated its part."""
        return build_metadata_test(self.conditions)(row.metadata) and (self.predicate is None or self.predicate(row))

    def matching(self, rows: Sequence[Row]) -> list[Row]:
        """Return those of the rows found by the engine that meet the test."""
        return [row for row in rows if self.predicate is None or self.predicate(row)]


def filter_of(query: VectorStoreQuery, *, anywhere: bool = False) -> RowFilter:
    """Return the filter of a query. `anywhere`: ignore the query's `node_ids`.

    An index gives its retrievers the ids of all nodes that it lists. With a store that keeps texts it lists only nodes
    that point elsewhere, although it means all nodes.
    """
    return row_filter(query.filters, node_ids=None if anywhere else query.node_ids, doc_ids=query.doc_ids)


def of_document(ref_doc_id: str) -> RowFilter:
    """Return the filter of the rows of a document."""
    return row_filter(None, doc_ids=[ref_doc_id])


def row_filter(
    filters: MetadataFilters | None, *, node_ids: Sequence[str] | None = None, doc_ids: Sequence[str] | None = None
) -> RowFilter:
    """Return the filter of rows that meet LlamaIndex's filters. Raise `RegistrationError` for a malformed one."""
    conditions, remaining = _split(filters)
    tests: list[Callable[[Stored], bool]] = []
    if remaining is not None:
        matches = _build_test(remaining)
        tests.append(lambda row: matches(row.metadata))
    if node_ids:
        ids = frozenset(node_ids)
        tests.append(lambda row: row.id in ids)
    if doc_ids and len(doc_ids) == 1:
        conditions = (*conditions, ("ref_doc_id", doc_ids[0]))
    elif doc_ids:
        documents = frozenset(doc_ids)
        tests.append(lambda row: row.metadata.get("ref_doc_id") in documents)
    ordered = sorted(dict.fromkeys(conditions), key=repr)  # values of one key may be of types that have no order
    return RowFilter(tuple(ordered), (lambda row: all(test(row) for test in tests)) if tests else None)


def _split(filters: MetadataFilters | None) -> tuple[EngineFilter, MetadataFilters | None]:
    """Return the conditions that the engine evaluates, and the remaining filters."""
    if filters is None or not filters.filters:
        return (), None
    if filters.condition not in (FilterCondition.AND, None):
        return (), filters
    conditions = {id(one): _engine_condition(one) for one in filters.filters}
    remaining = [one for one in filters.filters if conditions[id(one)] is None]
    for_engine = tuple([condition for condition in conditions.values() if condition is not None])
    return for_engine, MetadataFilters(filters=remaining) if remaining else None


def _engine_condition(one: MetadataFilter | MetadataFilters) -> tuple[str, Any] | None:
    """Return the filter as a condition for the engine; None if it is no equality, or JSON has another equality.

    LlamaIndex compares as Python does, and its filters have no booleans: 1 finds True, too, and 0 finds False.
    """
    if not isinstance(one, MetadataFilter) or one.operator not in _OF_EQUALITY:
        return None
    values: Any = one.value if one.operator in _OF_LISTS else [one.value]
    if not isinstance(values, list) or not all(map(_is_equal_as_json, values)):
        return None
    equal_values = tuple([same for value in values for same in _equal_values(value)])
    if one.operator == FilterOperator.EQ and len(equal_values) == 1:
        return one.key, equal_values[0]
    return one.key, OneOf(equal_values, negated=one.operator in _NEGATED)


def _is_equal_as_json(value: Any) -> bool:
    """Return False for None, which equals nothing in LlamaIndex, and for numbers that JSON compares by their digits."""
    return isinstance(value, str) or (isinstance(value, int | float) and abs(value) <= _MAX_EXACT)


def _equal_values(value: str | float) -> tuple[Any, ...]:
    """Return the values of JSON that are equal to a value in Python."""
    return (value,) if isinstance(value, str) or value not in (0, 1) else (int(value), bool(value))


def _build_test(filters: MetadataFilters) -> MetadataTest:
    """Return LlamaIndex's own test of metadata, for which a value of an unlike type is no match instead of an error."""
    tests = [_build_single_test(one) for one in filters.filters]
    condition = filters.condition or FilterCondition.AND

    def matches(metadata: Mapping[str, Any]) -> bool:
        results = [test(metadata) for test in tests]
        if condition == FilterCondition.AND:
            return all(results)
        return any(results) is (condition == FilterCondition.OR)

    return matches


def _build_single_test(one: MetadataFilter | MetadataFilters) -> MetadataTest:
    """Return LlamaIndex's own test of metadata for one filter; it is False where the filter cannot compare the value.

    Raise `RegistrationError` for a list operator whose value is no list.
    """
    if isinstance(one, MetadataFilter) and one.operator in _OF_LISTS and not isinstance(one.value, list | str):
        raise RegistrationError(
            f"the filter of {one.key!r} compares by {one.operator.value!r} with {one.value!r}, which is no list.",
            hint=f"write value=[{one.value!r}], or use another operator",
        )
    single_filter = MetadataFilters(filters=[one])

    def matches(metadata: Mapping[str, Any]) -> bool:
        try:
            return bool(build_metadata_filter_fn(lambda _: metadata, single_filter)(""))
        except TypeError:
            return False

    return matches


_LISTED_TYPES = (IndexNode.class_name(), ImageNode.class_name())


def to_row(collection: str, node: BaseNode, vector: Sequence[float]) -> IngestRow:
    """Return the row of a node: its text, and everything else in the metadata, by LlamaIndex's own functions."""
    metadata = node_to_metadata_dict(node, remove_text=True)
    chunk = Chunk(node.node_id, node.get_content(metadata_mode=MetadataMode.NONE), metadata)
    return IngestRow(collection, chunk, tuple(vector))


def to_node(row: Stored) -> BaseNode:
    """Return the node of a row; a row that LlamaIndex has not written becomes a `TextNode`."""
    if NODE_CONTENT in row.metadata:
        return metadata_dict_to_node(own_copy(dict(row.metadata)), text=row.text)
    return TextNode(id_=row.id, text=row.text, metadata=own_copy(dict(row.metadata)))


def points_elsewhere(row: Stored) -> bool:
    """Return True for a node of the kinds that an index lists by id even if the store keeps its text."""
    return row.metadata.get(NODE_TYPE) in _LISTED_TYPES


def to_result(hits: Iterable[Hit]) -> VectorStoreQueryResult:
    """Return the nodes, cosine similarities and ids of hits, best first."""
    hits = list(hits)
    return VectorStoreQueryResult(
        nodes=[to_node(hit) for hit in hits], similarities=[hit.score for hit in hits], ids=[hit.id for hit in hits]
    )


class StoreQueries:
    """The worker of a store of the user's that a `VectorStoreEngine` serves: it makes the store's queries."""

    def __init__(self, store: BasePydanticVectorStore, route: EngineRoute) -> None:
        """Raise `RegistrationError` if the engine does not serve this very store."""
        self._route, self._engine = route, store_engine(store, *route)

    def __teola_body__(self, method: str, original: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the function that makes a query; None for one that the store makes on the caller's loop by itself.

        Such are queries by async code of the store's class, unless their client is one whose searches share calls. A
        class without any runs its sync code on the loop, so that no other task writes meanwhile: these queries leave
        the loop only if nobody writes.
        """
        if not is_async_method(method):
            return partial(self._query, original)
        if is_intercepted(type(self._engine.store), method):
            return partial(self._aquery_by_client, original) if self._engine.shares_async_calls else None
        return self._aquery if self._engine.read_only else None

    def _query(self, original: Callable[..., Any], store: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the store's own code on a stand-in whose client shares calls, or on a thread of the engine."""

        def submit(search: StoreSearch) -> Any:
            return search_on_engine(*self._route, search, current_run.get())

        stand_in = self._engine.make_client_stand_in(submit)
        if stand_in is not None:
            return original(stand_in, *args, **kwargs)
        return submit(self._engine.search_as_a_whole("query", original, *args, **kwargs))

    async def _aquery_by_client(self, original: Callable[..., Any], store: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the store's own async code on a stand-in whose async client shares calls."""

        async def submit(search: StoreSearch) -> Any:
            return await asearch_on_engine(*self._route, search, current_run.get())

        with self._engine.async_client_replaced(submit) as stand_in:
            return await original(stand_in, *args, **kwargs)

    async def _aquery(self, store: Any, *args: Any, **kwargs: Any) -> Any:
        """Query as the store's sync code does, on a thread."""
        return await asyncio.to_thread(self._query, body_of(type(store), "query"), store, *args, **kwargs)


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
        """Remove nodes as `delete_nodes` does, in a loop."""
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
        """Return nodes as `get_nodes` does, in a loop."""
        admitted = row_filter(filters)
        return [to_node(row) for row in await _wait_for(self._read_rows(node_ids, admitted)) if admitted.admits(row)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Return the nearest nodes that meet the query's filters, best first.

        Filters that the engine does not evaluate are tested on the rows found; more rows are then requested until
        enough of them meet the filters.
        """
        first = self._first_listed(query).result() if query.node_ids else []
        admitted = self._filter(query, first)
        for k in _search_depths(query.similarity_top_k, admitted):
            [hits] = self._search(self._payload(query, k, admitted)).result()
            hits_admitted = admitted.matching(hits)
            if admitted.predicate is None or len(hits_admitted) >= query.similarity_top_k or len(hits) < k:
                break
        return self.result_of(hits_admitted[: query.similarity_top_k])

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Return the nearest nodes as `query` does, in a loop."""
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
        """Return the engine's request for the `k` nearest rows. Raise `RegistrationError` without an embedding."""
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
    """Wait on this loop for a future that another thread completes."""
    return await asyncio.wrap_future(future)
