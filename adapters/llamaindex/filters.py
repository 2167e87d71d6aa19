"""Filters of a LlamaIndex query: conditions that the engine evaluates, and tests of the rows that it finds.

The engine compares values for equality, as JSON does. Everything else (ranges, texts, `or`, ...) is decided by
LlamaIndex's own filter function on these rows, as `SimpleVectorStore` does; so more rows are requested than needed.
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

from teola_plugin.errors import RegistrationError
from teola_plugin.requests.json_values import build_metadata_test
from teola_plugin.requests.payloads import OneOf, Stored

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
