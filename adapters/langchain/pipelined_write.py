"""Rows that are stored while later ones of the same step are still being embedded (paper, section 4.2: pipelining).

The plain object has come to its step, and these are its own chunks. Rows are written in parts only where that cannot
show afterwards: ids that are new to the collection. Should anything fail, what was written is taken out again, so the
store holds what it would hold without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.requests.payloads import Chunk
from teola_plugin.runtime.handles import CallHandle

MOST_PARTS = 8
"""Parts of a list whose storing overlaps with its embedding, at most; each costs a transaction."""
LEAST_ROWS = 16
"""Rows of a part, at least."""


class Store(Protocol):
    """The store that is written to."""

    def ingest(self, chunks: Sequence[Chunk], vectors: Sequence[Any]) -> CallHandle: ...

    def administer(self, method: str, *args: Any) -> Future[Any]: ...


class PipelinedWrite:
    """A write of one step: `chunks`, each of an id of its own, into `store`."""

    def __init__(self, store: Store, embedding: TeolaEmbeddings, chunks: Sequence[Chunk]) -> None:
        self._store, self._embedding = store, embedding
        size = max(LEAST_ROWS, -(-len(chunks) // MOST_PARTS))
        self._parts = [chunks[at : at + size] for at in range(0, len(chunks), size)]
        self._vectors: list[CallHandle] = []
        self._writes: list[tuple[Sequence[Chunk], CallHandle]] = []

    def __len__(self) -> int:
        return len(self._parts)

    def stored_chunks(self) -> Future[Any]:
        """Return the chunks of these ids that the store has. If there are any, write all at once."""
        return self._store.administer("get", [chunk.id for part in self._parts for chunk in part])

    def _embed(self) -> None:
        self._vectors = [self._embedding.begin_documents([chunk.text for chunk in part]) for part in self._parts]

    def _store_part(self, number: int, vectors: Sequence[Any]) -> None:
        part = self._parts[number]
        self._writes.append((part, self._store.ingest(part, vectors)))

    def _written(self) -> list[str]:
        return [chunk.id for part, _ in self._writes for chunk in part]

    def write(self) -> None:
        """Embed and store all of them. Raises what the engines raise."""
        self._embed()
        try:
            for number, vectors in enumerate(self._vectors):
                self._store_part(number, vectors.result())
            for _, rows in self._writes:
                rows.result()
        except BaseException:
            self._stop()
            for _, rows in self._writes:
                _waited(rows)
            if ids := self._written():
                self._store.administer("delete", ids).result()
            raise

    async def awrite(self) -> None:
        """`write` in a loop."""
        self._embed()
        try:
            for number, vectors in enumerate(self._vectors):
                self._store_part(number, await vectors)
            for _, rows in self._writes:
                await rows
        except BaseException:
            self._stop()
            await asyncio.shield(asyncio.ensure_future(self._take_back()))
            raise

    async def _take_back(self) -> None:
        await asyncio.gather(*(rows for _, rows in self._writes), return_exceptions=True)
        if ids := self._written():
            await asyncio.wrap_future(self._store.administer("delete", ids))

    def _stop(self) -> None:
        for vectors in self._vectors:
            vectors.cancel()


def _waited(rows: CallHandle) -> None:
    try:
        rows.result()
    except Exception:  # told by another one already
        return
