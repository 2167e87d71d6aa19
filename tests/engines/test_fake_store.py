"""Tests of the fake store's versions in virtual time: a version belongs to the moment of its hits."""

from __future__ import annotations

import asyncio
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.conformance import collect, ends
from teola_plugin.engines.fake import FakeStore, Faults
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Done, IngestRow, Request, SearchVector, Version
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind


def row(name: str) -> Request:
    return Request(f"row {name}", K.INGESTION, IngestRow("docs", Chunk(name, name), (1.0, 2.0)))


async def one(store: FakeStore, request: Request) -> Done:
    end = ends(await collect(store, [request]), [request])[request.id]
    assert isinstance(end, Done)
    return end


def searching(name: str) -> Request:
    return Request(f"search {name}", K.SEARCHING, SearchVector("docs", (1.0, 2.0)))


def test_hits_and_version_come_from_the_same_snapshot() -> None:
    """A deletion while the search is under way changes neither, and the version tells that the hits are old."""

    async def check() -> None:
        store = FakeStore("store", profiles.rtx3090()["store"])
        await one(store, row("a"))
        before = await store.version("docs")
        search: Any = asyncio.create_task(one(store, searching("beside a deletion")))
        await asyncio.sleep(0)
        await store.delete("docs", ["a"])
        found = await search
        assert ([hit.id for hit in found.value], found.version) == (["a"], before)
        assert found.version != await store.version("docs")

    run_virtual(check())


def test_store_without_versions_returns_none() -> None:
    async def check() -> None:
        store = FakeStore(faults=Faults(no_version=True))
        await one(store, row("a"))
        found = await one(store, searching("any"))
        assert found.version is None and len(found.value) == 1 and await store.version("docs") is None

    run_virtual(check())


def test_versions_of_stores_and_recreated_collections_all_differ() -> None:
    async def check() -> None:
        found: list[Version | None] = []
        for store in (FakeStore(), FakeStore()):
            for _ in range(2):
                await one(store, row("a"))
                found.append(await store.version("docs"))
                await store.delete_collection("docs")
        assert len(set(found)) == 4 and None not in found

    run_virtual(check())
