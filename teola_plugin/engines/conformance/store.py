"""The contract of versions of collections as tests: subclass `StoreConformance`, and pytest runs them all."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.engines.conformance.engine import EngineConformance, collect, ends
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, IngestRow, Request, SearchVector, Version

_K = PrimitiveKind


class StoreConformance(EngineConformance):
    """Tests for engines that search collections and have `version`: equal versions must mean equal rows.

    `payloads` must have two rows or more for INGESTION, with distinct ids.
    """

    async def make_other(self) -> Engine | None:
        """Return another engine on the same collections, not started; None if there is none."""
        return None

    def test_a_search_tells_the_version_that_it_is_true_for(self) -> None:
        """Require that a search returns the version of the rows that it saw, and that a write changes that version."""

        async def check() -> None:
            async with self.running() as engine:
                collection, rows = self._rows()
                before, hits = await self._search(engine, collection)
                assert before == await self._version(engine, collection) and hits == ()
                await self._write(engine, rows)
                after, hits = await self._search(engine, collection)
                assert len(hits) == len(rows)
                assert after == await self._version(engine, collection) != before
                assert await self._search(engine, collection) == (after, hits), "nothing was written between"

        self.run(check())

    def test_each_write_makes_another_version(self) -> None:
        """Require a new version for each ingestion, replacement and deletion, by this engine or another, with growing
        counters."""

        async def check() -> None:
            async with self.running() as engine, self._writer(engine) as writer:
                collection, [first, second, *_] = self._rows()
                seen = [await self._version(engine, collection)]
                changed = replace(first, chunk=replace(first.chunk, text=f"{first.chunk.text} changed"))
                for step in (
                    lambda: self._write(writer, [first]),
                    lambda: self._write(writer, [second]),
                    lambda: self._write(engine, [changed]),
                    lambda: writer.delete(collection, [first.chunk.id]),
                    lambda: self._write(writer, [first]),
                ):
                    await step()
                    seen.append(await self._version(engine, collection))
                    assert (await self._search(engine, collection))[0] == seen[-1]
                assert len(set(seen)) == len(seen), "a version came again"
                counters = [version.counter for version in seen[1:]]
                assert counters == sorted(counters) and len({version.identity for version in seen[1:]}) == 1

        self.run(check())

    def test_nothing_old_comes_again_with_a_collection_made_anew(self) -> None:
        """Require that a collection that is deleted and created again never repeats a version."""

        async def check() -> None:
            async with self.running() as engine, self._writer(engine) as writer:
                collection, rows = self._rows()
                seen: list[Version] = []
                for _ in range(3):
                    await self._write(writer, rows)
                    seen += [await self._version(engine, collection), (await self._search(engine, collection))[0]]
                    await writer.delete_collection(collection)
                    seen += [await self._version(engine, collection), (await self._search(engine, collection))[0]]
                assert seen[::2] == seen[1::2] and len(set(seen)) == 6

        self.run(check())

    def test_what_writes_nothing_leaves_the_version(self) -> None:
        """Require that deleting unknown rows and resetting the engine leave the version as it is."""

        async def check() -> None:
            async with self.running() as engine:
                collection, rows = self._rows()
                await self._write(engine, rows)
                before = await self._version(engine, collection)
                await engine.delete(collection, ["nobody"])  # type: ignore[attr-defined]
                await engine.reset()
                assert await self._version(engine, collection) == before

        self.run(check())

    def test_searches_beside_writes_tell_no_version_of_other_rows(self) -> None:
        """However a search falls among writes: searches of one version found the same."""

        async def check() -> None:
            async with self.running() as engine, self._writer(engine) as writer:
                collection, rows = self._rows()
                hits_by_version: dict[Version, Any] = {}

                async def write() -> None:
                    for n in range(10):
                        await self._write(writer, rows if n % 2 else rows[:1])
                        await writer.delete(collection, [row.chunk.id for row in rows[n % 2 :]])

                async with asyncio.TaskGroup() as group:
                    writing = group.create_task(write())
                    while not writing.done():
                        version, hits = await self._search(engine, collection)
                        assert hits_by_version.setdefault(version, hits) == hits, version
                assert len(hits_by_version) > 1, "no search fell between two writes"

        self.run(check())

    # ------------------------------------------------------------ helpers

    @asynccontextmanager
    async def _writer(self, engine: Engine) -> AsyncIterator[Any]:
        """Provide the other engine, or the same if there is no other."""
        other = await self.make_other()
        if other is None:
            yield engine
            return
        await other.start()
        try:
            yield other
        finally:
            await other.stop()

    def _rows(self) -> tuple[str, list[IngestRow]]:
        """Return the name of a new collection, and rows for it."""
        collection = f"conformance {uuid.uuid4()}"
        return collection, [replace(row, collection=collection) for row in self.payloads(_K.INGESTION)]

    async def _write(self, engine: Engine, rows: Sequence[IngestRow]) -> None:
        await self._values(engine, [_request(_K.INGESTION, row) for row in rows])

    async def _search(self, engine: Engine, collection: str) -> tuple[Version, Any]:
        """Return the version and the hits of a search for the nearest 100 rows of a collection."""
        vector = self.payloads(_K.INGESTION)[0].vector
        request = _request(_K.SEARCHING, SearchVector(collection, vector, k=100))
        end = ends(await collect(engine, [request]), [request])[request.id]
        assert isinstance(end, Done), end
        assert isinstance(end.version, Version), "a search must tell its version"
        return end.version, end.value

    async def _version(self, engine: Any, collection: str) -> Version:
        version = await engine.version(collection)
        assert isinstance(version, Version)
        return version


def _request(kind: PrimitiveKind, payload: IngestRow | SearchVector) -> Request:
    return Request(f"conformance-{uuid.uuid4().hex}", kind, payload)
