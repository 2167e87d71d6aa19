"""One query's intermediate values, held until their last reader is done (paper, section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teola_plugin.graph import Ref, read_path


class QueryStore:
    """Values by producer. Reading again, after a failure, gives the same value."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._values: dict[str, Any] = {f"${name}": value for name, value in inputs.items()}

    def put(self, producer: str, value: Any) -> None:
        self._values[producer] = value

    def read(self, ref: Ref) -> Any:
        """The value under `ref`. Raises KeyError, IndexError or TypeError as the container does."""
        return read_path(self._values[ref.producer], ref.path)

    def __contains__(self, producer: str) -> bool:
        return producer in self._values

    def drop(self, producer: str) -> None:
        self._values.pop(producer, None)

    def clear(self) -> None:
        self._values.clear()
