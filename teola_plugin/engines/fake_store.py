"""A vector store in memory with exact cosine search, for the fake pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.base import Request
from teola_plugin.engines.fake_base import NO_FAULTS, BatchedFake, Faults
from teola_plugin.engines.payloads import Chunk, Hit, IngestRow, SearchVector, Vector
from teola_plugin.graph import EngineProfile, PrimitiveKind


@dataclass(slots=True)
class _Collection:
    rows: dict[str, tuple[Chunk, Vector]] = field(default_factory=dict)
    version: int = 0


class FakeStore(BatchedFake):
    """Collections in memory. A row is visible once its ingestion is done; the same chunk id replaces the row."""

    kinds = frozenset({PrimitiveKind.INGESTION, PrimitiveKind.SEARCHING})

    def __init__(
        self, name: str = "store", profile: EngineProfile | None = None, *, faults: Faults = NO_FAULTS
    ) -> None:
        super().__init__(name, profile or profiles.noop()["store"], faults)
        self._collections: dict[str, _Collection] = {}

    async def version(self, collection: str) -> int:
        """Grows with every change of the collection, also across its deletion; 0 before the first."""
        return self._collections.get(collection, _Collection()).version

    async def count(self, collection: str) -> int:
        return len(self._rows(collection))

    async def collections(self) -> list[str]:
        return sorted(name for name, found in self._collections.items() if found.rows)

    async def get(self, collection: str, ids: Sequence[str]) -> list[Chunk]:
        """The chunks with these ids, in their order; unknown ids are left out."""
        rows = self._rows(collection)
        return [rows[i][0] for i in ids if i in rows]

    async def find(self, collection: str, wanted: Sequence[tuple[str, Any]]) -> list[Chunk]:
        """The chunks whose metadata has these values, in the order of insertion."""
        chunks = [chunk for chunk, _ in self._rows(collection).values()]
        return [chunk for chunk in chunks if _has(chunk, wanted)]

    async def delete(self, collection: str, ids: Sequence[str]) -> int:
        """Deletes rows; says how many there were."""
        rows = self._rows(collection)
        gone = [i for i in dict.fromkeys(ids) if rows.pop(i, None) is not None]
        if gone:
            self._collections[collection].version += 1
        return len(gone)

    async def delete_collection(self, collection: str) -> None:
        if self._rows(collection):
            found = self._collections[collection]
            found.rows.clear()
            found.version += 1

    def _rows(self, collection: str) -> dict[str, tuple[Chunk, Vector]]:
        found = self._collections.get(collection)
        return found.rows if found is not None else {}

    def _value(self, request: Request) -> Any:
        payload: IngestRow | SearchVector = request.payload
        if isinstance(payload, SearchVector):
            return self._search(payload)
        if not math.isclose(math.hypot(*payload.vector), 0.0):
            return payload.chunk.id
        raise ValueError(f"the vector of chunk {payload.chunk.id!r} is zero")

    def _commit(self, request: Request, value: Any) -> Any:
        payload = request.payload
        if isinstance(payload, IngestRow):
            found = self._collections.setdefault(payload.collection, _Collection())
            row = (payload.chunk, _unit(payload.vector))
            if found.rows.get(payload.chunk.id) != row:
                found.rows[payload.chunk.id] = row
                found.version += 1
        return value

    def _search(self, wanted: SearchVector) -> tuple[Hit, ...]:
        needle = _unit(wanted.vector)
        scored = [
            (sum(map(mul, needle, vector)), chunk)
            for chunk, vector in self._rows(wanted.collection).values()
            if _has(chunk, wanted.filter)
        ]
        scored.sort(key=lambda found: (-found[0], found[1].id))
        return tuple(Hit(chunk.id, chunk.text, chunk.metadata, score) for score, chunk in scored[: wanted.k])


def _has(chunk: Chunk, wanted: Sequence[tuple[str, Any]]) -> bool:
    return all(chunk.metadata.get(key) == value for key, value in wanted)


def _unit(vector: Vector) -> tuple[float, ...]:
    norm = math.hypot(*vector) or 1.0
    return tuple(x / norm for x in vector)
