"""A vector store in memory with exact cosine search, for the fake pool."""

from __future__ import annotations

import copy
import itertools
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.fake.base import NO_FAULTS, BatchedFake, FakeBatch, Faults
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.json_values import build_metadata_test
from teola_plugin.requests.payloads import Chunk, Done, Hit, IngestRow, Request, SearchVector, Vector, Version

_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Accepted(IngestRow):
    """A row as it was when the store took it, whatever its owner does with it since."""

    order: int = 0
    """Its number among all writes of the store."""


@dataclass(frozen=True, slots=True)
class _Searched:
    hits: tuple[Hit, ...]
    version: Version | None


@dataclass(slots=True)
class _Collection:
    rows: dict[str, tuple[Chunk, Vector]] = field(default_factory=dict)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    version: int = 0
    """The counter of its `Version`."""
    written: dict[str, int] = field(default_factory=dict)
    """The order of the last write or deletion, by id."""
    cleared: int = 0
    """The order of its last deletion."""

    def put(self, row: _Accepted) -> None:
        """Write a row, unless a later write came first: a large batch may end after a small one that began later."""
        chunk = row.chunk
        if row.order < max(self.cleared, self.written.get(chunk.id, 0)):
            return
        self.written[chunk.id] = row.order
        before, after = self.rows.get(chunk.id), (chunk, _unit(row.vector))
        if before is None or before[1] != after[1] or repr(before[0]) != repr(after[0]):  # `==` takes True for 1
            self.rows[chunk.id] = after
            self.version += 1

    def delete(self, ids: Sequence[str], order: int) -> int:
        """Delete rows by id, and refuse writes of them that were accepted before. Return the number of deleted rows."""
        deleted = [i for i in dict.fromkeys(ids) if self.rows.pop(i, None) is not None]
        self.written.update(dict.fromkeys(ids, order))
        self.version += bool(deleted)
        return len(deleted)

    def clear(self, order: int) -> None:
        """Delete all rows, as the collection itself is deleted. It gets another identity, so that no version comes
        again."""
        self.cleared = order
        if self.rows:
            self.rows.clear()
            self.identity, self.version = uuid.uuid4().hex, self.version + 1


class FakeStore(BatchedFake):
    """Collections in memory. A row is visible once its ingestion is done; the same chunk id replaces the row."""

    kinds = frozenset({PrimitiveKind.INGESTION, PrimitiveKind.SEARCHING})

    def __init__(
        self,
        name: str = "store",
        profile: EngineProfile | None = None,
        *,
        faults: Faults = NO_FAULTS,
        shares: FakeStore | None = None,
    ) -> None:
        """`shares`: another replica, with which the collections are shared."""
        super().__init__(name, profile or profiles.noop()["store"], faults)
        self._collections: dict[str, _Collection] = {} if shares is None else shares._collections
        self._orders: Iterator[int] = itertools.count(1) if shares is None else shares._orders

    async def version(self, collection: str) -> Version | None:
        """Return the version of a collection, which is equal while its rows are; None with `Faults.no_version`."""
        return self._version(collection)

    def _version(self, collection: str) -> Version | None:
        """Return a collection's version now; `absent` if nothing was ever written to it, None if a fault hides
        versions."""
        if self.faults.no_version:
            return None
        entry = self._collections.get(collection)
        return Version(entry.identity, entry.version) if entry is not None and entry.version else Version("absent", 0)

    async def count(self, collection: str) -> int:
        return len(self._rows(collection))

    async def collections(self) -> list[str]:
        return sorted(name for name, entry in self._collections.items() if entry.rows)

    async def get(self, collection: str, ids: Sequence[str]) -> list[Chunk]:
        """Return the chunks with these ids, in their order. Unknown ids are left out.

        They are copies: what a caller changes in them does not change the store.
        """
        rows = self._rows(collection)
        return [_copy_chunk(rows[i][0]) for i in ids if i in rows]

    async def find(self, collection: str, filter: Sequence[tuple[str, Any]]) -> list[Chunk]:
        """Return the chunks whose metadata meets a filter, in the order of insertion."""
        matches = build_metadata_test(filter)
        return [_copy_chunk(chunk) for chunk, _ in self._rows(collection).values() if matches(chunk.metadata)]

    async def delete(self, collection: str, ids: Sequence[str]) -> int:
        """Delete rows, also those that are being written. Return their number."""
        return self._collection(collection).delete(ids, next(self._orders))

    async def delete_collection(self, collection: str) -> None:
        self._collection(collection).clear(next(self._orders))

    def _collection(self, name: str) -> _Collection:
        return self._collections.setdefault(name, _Collection())

    def _rows(self, collection: str) -> dict[str, tuple[Chunk, Vector]]:
        entry = self._collections.get(collection)
        return entry.rows if entry is not None else {}

    def _admit(self, run: FakeBatch) -> None:
        """Copy the rows of a batch when the store takes it, so that later changes by their owner have no effect."""
        super()._admit(run)
        for request in list(run.pending.values()):
            if isinstance(request.payload, IngestRow):
                try:
                    run.pending[request.id] = replace(request, payload=self._accept(request.payload))
                except Exception as error:
                    run.fail(request.id, self._error(f"bad request {request.id}: {error!r}"))

    def _accept(self, row: IngestRow) -> _Accepted:
        return _Accepted(row.collection, _copy_chunk(row.chunk), tuple(row.vector), next(self._orders))

    def _value(self, request: Request) -> Any:
        """Return a search's hits and version, or the id of the row to write. Raise ValueError for a vector of zeros."""
        payload: IngestRow | SearchVector = request.payload
        if isinstance(payload, SearchVector):
            return _Searched(self._search(payload), self._version(payload.collection))
        if not math.isclose(math.hypot(*payload.vector), 0.0):
            return payload.chunk.id
        raise ValueError(f"the vector of chunk {payload.chunk.id!r} is zero")

    def _commit(self, request: Request, value: Any) -> Any:
        if isinstance(request.payload, _Accepted):
            self._collection(request.payload.collection).put(request.payload)
        return value

    def _done(self, request: Request, value: Any) -> Done:
        if isinstance(value, _Searched):
            return Done(request.id, value.hits, version=value.version)
        return super()._done(request, value)

    def _search(self, query: SearchVector) -> tuple[Hit, ...]:
        """Return the `k` rows nearest to a vector by cosine that meet the filter, best first."""
        needle, matches = _unit(query.vector), build_metadata_test(query.filter)
        scored = [
            (sum(map(mul, needle, vector)), chunk)
            for chunk, vector in self._rows(query.collection).values()
            if matches(chunk.metadata)
        ]
        scored.sort(key=lambda scored_hit: (-scored_hit[0], scored_hit[1].id))
        return tuple(Hit(chunk.id, chunk.text, _copied(chunk.metadata), score) for score, chunk in scored[: query.k])


def _copy_chunk(chunk: Chunk) -> Chunk:
    """Return a copy of a chunk that shares nothing mutable with it."""
    return Chunk(chunk.id, chunk.text, _copied(chunk.metadata))


def _copied(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if type(value) in _SCALARS else copy.deepcopy(value) for key, value in metadata.items()}


def _unit(vector: Vector) -> tuple[float, ...]:
    norm = math.hypot(*vector) or 1.0
    return tuple(x / norm for x in vector)
