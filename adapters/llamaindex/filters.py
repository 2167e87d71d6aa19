"""What a LlamaIndex query asks for beyond the nearest rows: told to the engine where it can, else decided here.

The engine knows equality of metadata keys. Everything else (ranges, `in`, `or`, document ids, ...) is decided by
LlamaIndex's own filter function on the rows found, as `SimpleVectorStore` does; so more rows are asked for than wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from teola_plugin.requests.payloads import Stored

Row = TypeVar("Row", bound=Stored)
Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which rows may be found."""

    equalities: Pairs = ()
    """For the engine: metadata keys and the values they must equal."""
    predicate: Callable[[Stored], bool] | None = None
    """For here; None where the engine does it all."""

    def admits(self, row: Stored) -> bool:
        return all(row.metadata.get(key) == value for key, value in self.equalities) and (
            self.predicate is None or self.predicate(row)
        )

    def matching(self, rows: Sequence[Row]) -> list[Row]:
        """Of rows that the engine found, those that may stay."""
        return [row for row in rows if self.predicate is None or self.predicate(row)]


def filter_of(query: VectorStoreQuery, *, anywhere: bool = False) -> RowFilter:
    """`anywhere`: the query's `node_ids` restrict nothing.

    An index hands its retrievers the ids of all nodes that it lists; with a store that keeps texts it lists those that
    point elsewhere alone, and means all.
    """
    return row_filter(query.filters, node_ids=None if anywhere else query.node_ids, doc_ids=query.doc_ids)


def of_document(ref_doc_id: str) -> RowFilter:
    """The rows of a document."""
    return row_filter(None, doc_ids=[ref_doc_id])


def row_filter(
    filters: MetadataFilters | None, *, node_ids: Sequence[str] | None = None, doc_ids: Sequence[str] | None = None
) -> RowFilter:
    pairs, rest = _split(filters)
    tests: list[Callable[[Stored], bool]] = []
    if rest is not None:
        tests.append(lambda row: _matches(row.metadata, rest))
    if node_ids:
        ids = frozenset(node_ids)
        tests.append(lambda row: row.id in ids)
    if doc_ids and len(doc_ids) == 1:
        pairs = (*pairs, ("ref_doc_id", doc_ids[0]))
    elif doc_ids:
        documents = frozenset(doc_ids)
        tests.append(lambda row: row.metadata.get("ref_doc_id") in documents)
    return RowFilter(tuple(sorted(pairs)), (lambda row: all(test(row) for test in tests)) if tests else None)


def _split(filters: MetadataFilters | None) -> tuple[Pairs, MetadataFilters | None]:
    """Equalities that must all hold, and the rest."""
    if filters is None or not filters.filters:
        return (), None
    if filters.condition not in (FilterCondition.AND, None):
        return (), filters
    equal = [one for one in filters.filters if _is_equality(one)]
    rest = [one for one in filters.filters if not _is_equality(one)]
    pairs = {(one.key, one.value) for one in equal if isinstance(one, MetadataFilter)}
    return tuple(pairs), MetadataFilters(filters=rest) if rest else None  # type: ignore[return-value]


def _is_equality(one: MetadataFilter | MetadataFilters) -> bool:
    """Not for None, which equals nothing in LlamaIndex, and not for a list."""
    plain = isinstance(one, MetadataFilter) and one.operator == FilterOperator.EQ
    return plain and isinstance(one.value, str | int | float)  # type: ignore[union-attr]


def _matches(metadata: Mapping[str, Any], filters: MetadataFilters) -> bool:
    return build_metadata_filter_fn(lambda _: metadata, filters)("")
