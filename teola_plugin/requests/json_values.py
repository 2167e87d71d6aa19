"""When two values of metadata are equal: as PostgreSQL's jsonb has it, where Python would say otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


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
