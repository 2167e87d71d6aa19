"""Equality of metadata values, and filters on metadata, with the rules of PostgreSQL's jsonb."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from teola_plugin.requests.payloads import OneOf


def comparable(value: Any) -> Any:
    """Return a value that is equal for values that are equal as JSON: 1 and 1.0, but not True and 1, nor 1 and "1".

    Values that JSON does not have are compared as Python compares them.
    """
    if isinstance(value, bool) or value is None:
        return ("constant", repr(value))
    if isinstance(value, int | float):
        return ("number", Decimal(int(value)) if isinstance(value, int) else Decimal(repr(float(value))))
    if isinstance(value, Mapping):
        return {_key(key): comparable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(entry) for entry in value]
    return value


def _key(key: Any) -> Any:
    """Return a key as JSON has it: as text."""
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else key


def build_metadata_test(filter: Sequence[tuple[str, Any]]) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that is True for metadata that meets all conditions of a `SearchVector.filter`.

    The vector store on PostgreSQL evaluates the same conditions in SQL.
    """
    one_of = [(key, OneOf.from_condition(condition)) for key, condition in filter]
    conditions = [(key, [comparable(value) for value in one.values], one.negated) for key, one in one_of]

    def matches(metadata: Mapping[str, Any]) -> bool:
        return all((comparable(metadata.get(key)) in values) is not negated for key, values, negated in conditions)

    return matches
