"""Equality of values of metadata, and filters on it: as PostgreSQL's jsonb has it, where Python would differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from teola_plugin.requests.payloads import OneOf


def comparable(value: Any) -> Any:
    """Equal for values that are equal as JSON: 1 and 1.0, a tuple and a list, but not True and 1, nor 1 and "1".

    What JSON cannot say is compared as Python does.
    """
    if isinstance(value, bool) or value is None:
        return ("constant", repr(value))
    if isinstance(value, int | float):
        return ("number", Decimal(int(value)) if isinstance(value, int) else Decimal(repr(float(value))))
    if isinstance(value, Mapping):
        return {_key(key): comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    return value


def _key(key: Any) -> Any:
    """Keys of JSON are text."""
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
