"""Rows that are written while later ones are still being embedded (paper, section 4.2: pipelining).

The framework's own code still adds all nodes at the end; the store then writes only what is not there yet. Rows are
written early only where that cannot show afterwards: ids that are new to the collection, in the order of the nodes.
Rows that the framework does not add in the end, because something failed, are deleted again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from llama_index.core.schema import BaseNode, MetadataMode

from teola_plugin.requests.payloads import IngestRow
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.query_run import during

Vectors = Sequence[Sequence[float]]
_PORTIONS = 8
"""Parts of a list whose storing overlaps with its embedding, at least; each costs a transaction."""


class WritableStore(Protocol):
    """A vector store that rows are written to."""

    pool: Any
    engine: str

    def row(self, node: BaseNode, vector: Sequence[float] | None = None) -> IngestRow: ...

    def ingest(self, rows: Sequence[IngestRow]) -> CallHandle: ...

    def admin(self, method: str, *args: Any) -> Future[Any]: ...


class PipelinedWrite:
    """The write of one list of nodes into one store."""

    def __init__(self, store: WritableStore, nodes: Sequence[BaseNode] = ()) -> None:
        self.store = store
        self.nodes = list(nodes)
        """The nodes that are being embedded, as far as they are known."""
        self._embedded: list[BaseNode] = []
        self._vectors_by_start: dict[int, Vectors] = {}
        self._next = 0
        self._ready: list[IngestRow] = []
        self._writing: list[IngestRow] = []
        self._call: CallHandle | None = None
        self._written: dict[str, IngestRow] = {}
        self._added: set[str] = set()
        self._closed = False
        self._lock = threading.Lock()

    # ------------------------------------------------------------ which rows

    def expect(self, texts: Sequence[str]) -> bool:
        """Return True if the rows of these texts can be written while later ones are embedded."""
        ids = self._candidates(texts)
        return bool(ids) and self._all_new(self._find_stored(ids).result())

    async def aexpect(self, texts: Sequence[str]) -> bool:
        """`expect` in a loop."""
        ids = self._candidates(texts)
        return bool(ids) and self._all_new(await asyncio.wrap_future(self._find_stored(ids)))

    def _candidates(self, texts: Sequence[str]) -> list[str]:
        """Return the ids of the nodes with these texts; none if it is not certain which nodes these are."""
        ids = [node.node_id for node in self.nodes]
        if self._embedded or len(set(ids)) < len(ids) or any(node.embedding is not None for node in self.nodes):
            return []
        if [node.get_content(metadata_mode=MetadataMode.EMBED) for node in self.nodes] != list(texts):
            return []
        self._embedded = self.nodes
        return ids

    def _find_stored(self, ids: list[str]) -> Future[list[Any]]:
        return self.store.admin("get", ids)

    def _all_new(self, stored: list[Any]) -> bool:
        if stored:
            self._embedded = []
        return not stored

    # ------------------------------------------------------------ writing

    def put(self, start: int, vectors: Vectors) -> None:
        """Add the vectors of the nodes from `start` on. May be called in any order of batches, from any thread."""
        with self._lock:
            if self._closed:  # a batch that ends after another has failed
                return
            self._vectors_by_start[start] = vectors
            try:
                self._take_ready_rows()
            except Exception:  # a node that cannot be stored: the framework raises when it adds it
                self._closed = True

    def _take_ready_rows(self) -> None:
        """Make rows of the vectors that came in order, and write them if enough are ready and no write is under way.

        Callers hold the lock.
        """
        while (vectors := self._vectors_by_start.pop(self._next, None)) is not None:
            nodes = self._embedded[self._next : self._next + len(vectors)]
            self._ready += [self.store.row(node, vector) for node, vector in zip(nodes, vectors, strict=True)]
            self._next += len(vectors)
        if len(self._ready) >= self._portion_size and (
            self._call is None or (self._call.done and self._note_written())
        ):
            self._write()

    @property
    def _portion_size(self) -> int:
        """The number of rows that are written at once: a batch that suits the store, but not all of a short list."""
        efficient: int = self.store.pool.profiles[self.store.engine].max_efficient_batch
        return max(1, min(efficient, len(self._embedded) // _PORTIONS))

    def _write(self) -> None:
        if self._ready:
            self._writing, self._ready = self._ready, []
            self._call = self.store.ingest(self._writing)

    def _note_written(self) -> bool:
        """Note the rows that the last write has stored. Return False if it failed: then no more are written early."""
        if self._writing and self._call is not None:
            try:
                self._call.result()
            except Exception:  # the framework raises when it adds the rows
                return False
            self._written |= {row.chunk.id: row for row in self._writing}
            self._writing = []
        return True

    def remaining(self, rows: Sequence[IngestRow]) -> list[IngestRow]:
        """Return those of the rows that the framework adds that are not stored yet. Waits for the write under way."""
        with self._lock:
            self._note_written()
            self._added |= {row.chunk.id for row in rows}
            return [row for row in rows if self._written.get(row.chunk.id) != row]

    async def aremaining(self, rows: Sequence[IngestRow]) -> list[IngestRow]:
        """`remaining` in a loop."""
        await self._wait_for_call()
        return self.remaining(rows)

    async def _wait_for_call(self) -> None:
        if self._call is not None:
            await asyncio.gather(self._call, return_exceptions=True)

    # ------------------------------------------------------------ the end

    def close(self) -> list[str]:
        """Write no more rows. Return the ids of rows that were written but never added. Waits for the last write."""
        with self._lock:
            self._closed = True
            started = [row.chunk.id for row in self._writing]
            self._note_written()
            return [i for i in dict.fromkeys([*self._written, *started]) if i not in self._added]

    async def aclose(self) -> list[str]:
        """`close` in a loop."""
        with self._lock:
            self._closed = True
        await self._wait_for_call()
        return self.close()


current_write: ContextVar[PipelinedWrite | None] = ContextVar("teola_current_write", default=None)
"""The write of the index or the pipeline that the running code builds or runs."""


@contextmanager
def pipelining(write: PipelinedWrite) -> Iterator[None]:
    """Write rows early in the body; delete those again that the body has not added."""
    try:
        with during(current_write, write):
            yield
    finally:
        if ids := write.close():
            write.store.admin("delete", ids).result()


@asynccontextmanager
async def apipelining(write: PipelinedWrite) -> AsyncIterator[None]:
    """`pipelining` in a loop."""
    try:
        with during(current_write, write):
            yield
    finally:
        if ids := await write.aclose():
            await asyncio.wrap_future(write.store.admin("delete", ids))
