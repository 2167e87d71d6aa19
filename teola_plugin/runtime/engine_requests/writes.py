"""How often collections have been written to, so that a search made before a write is not used after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from teola_plugin.requests.payloads import IngestRow, SearchVector


class Writes:
    """The numbers of writes of this process, ingestions and deletions, by engine and collection."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note_end(self, engine: str, payload: Any) -> None:
        """Count a request that has ended, well or not."""
        if isinstance(payload, IngestRow):
            self._counts[engine, payload.collection] += 1

    def note_call(self, engine: str, method: str, args: Sequence[Any]) -> bool:
        """Count a call of an engine's method, with the collection first. Return True if it may have written."""
        writes = method.startswith(("delete", "forget")) and bool(args) and isinstance(args[0], str)
        if writes:
            self._counts[engine, args[0]] += 1
        return writes

    def version(self, engine: str, payload: Any) -> int:
        """Return the number of writes to the collection of a search; -1 for any other request."""
        return self._counts[engine, payload.collection] if isinstance(payload, SearchVector) else -1
