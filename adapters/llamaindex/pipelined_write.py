"""Rows that are written while later ones are still being embedded (paper, section 4.2: pipelining).

The framework's own code still adds all nodes at the end; the store then writes only what is not there yet. Rows are
written early only where that cannot show afterwards: ids that are new to the collection, in the order of the nodes.
What the framework does not add in the end, because something failed, is taken out again.
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
from teola_plugin.runtime.handles import CallHandle

Vectors = Sequence[Sequence[float]]
_PORTIONS = 8
"""Parts of a list whose storing overlaps with its embedding, at least; each costs a transaction."""


class Store(Protocol):
    """What is written to."""

    pool: Any
    engine: str

    def row(self, node: BaseNode, vector: Sequence[float] | None = None) -> IngestRow: ...

    def ingest(self, rows: Sequence[IngestRow]) -> CallHandle: ...

    def admin(self, method: str, *args: Any) -> Future[Any]: ...


class PipelinedWrite:
    """Of one list of nodes, into one store."""

    def __init__(self, store: Store, nodes: Sequence[BaseNode] = ()) -> None:
        self.store = store
        self.nodes = list(nodes)
        """What is being embedded, as far as it is known."""
        self._embedded: list[BaseNode] = []
        self._came: dict[int, Vectors] = {}
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
        """Whether the rows of these texts can be written as their vectors come."""
        ids = self._candidates(texts)
        return bool(ids) and self._all_new(self._known(ids).result())

    async def aexpect(self, texts: Sequence[str]) -> bool:
        """`expect` in a loop."""
        ids = self._candidates(texts)
        return bool(ids) and self._all_new(await asyncio.wrap_future(self._known(ids)))

    def _candidates(self, texts: Sequence[str]) -> list[str]:
        """Ids of the nodes that the texts belong to; none where that is not clear."""
        ids = [node.node_id for node in self.nodes]
        if self._embedded or len(set(ids)) < len(ids) or any(node.embedding is not None for node in self.nodes):
            return []
        if [node.get_content(metadata_mode=MetadataMode.EMBED) for node in self.nodes] != list(texts):
            return []
        self._embedded = self.nodes
        return ids

    def _known(self, ids: list[str]) -> Future[list[Any]]:
        return self.store.admin("get", ids)

    def _all_new(self, found: list[Any]) -> bool:
        if found:
            self._embedded = []
        return not found

    # ------------------------------------------------------------ writing

    def put(self, start: int, vectors: Vectors) -> None:
        """The vectors of the nodes from `start` on. Batches may come in any order, from any thread."""
        with self._lock:
            if self._closed:  # a batch that ends after another has failed
                return
            self._came[start] = vectors
            try:
                self._advance()
            except Exception:  # a node that cannot be stored: the framework's own adding will tell
                self._closed = True

    def _advance(self) -> None:
        while (found := self._came.pop(self._next, None)) is not None:
            nodes = self._embedded[self._next : self._next + len(found)]
            self._ready += [self.store.row(node, vector) for node, vector in zip(nodes, found, strict=True)]
            self._next += len(found)
        if len(self._ready) >= self._portion and (self._call is None or (self._call.done and self._ended())):
            self._write()

    @property
    def _portion(self) -> int:
        """Rows that are written at once: as many as the store likes, but not all of a short list."""
        efficient: int = self.store.pool.profiles[self.store.engine].max_efficient_batch
        return max(1, min(efficient, len(self._embedded) // _PORTIONS))

    def _write(self) -> None:
        if self._ready:
            self._writing, self._ready = self._ready, []
            self._call = self.store.ingest(self._writing)

    def _ended(self) -> bool:
        """Take note of what was written; False if it failed, and then nothing more is written early."""
        if self._writing and self._call is not None:
            try:
                self._call.result()
            except Exception:  # the framework's own adding will tell
                return False
            self._written |= {row.chunk.id: row for row in self._writing}
            self._writing = []
        return True

    def left(self, rows: Sequence[IngestRow]) -> list[IngestRow]:
        """Of the rows that the framework adds, those that are not there yet. Waits for what is being written."""
        with self._lock:
            self._ended()
            self._added |= {row.chunk.id for row in rows}
            return [row for row in rows if self._written.get(row.chunk.id) != row]

    async def aleft(self, rows: Sequence[IngestRow]) -> list[IngestRow]:
        """`left` in a loop."""
        await self._settled()
        return self.left(rows)

    async def _settled(self) -> None:
        if self._call is not None:
            await asyncio.gather(self._call, return_exceptions=True)

    # ------------------------------------------------------------ the end

    def unwanted(self) -> list[str]:
        """Nothing more is written. Ids of rows that were and never added; waits for what is being written."""
        with self._lock:
            self._closed = True
            begun = [row.chunk.id for row in self._writing]
            self._ended()
            return [i for i in dict.fromkeys([*self._written, *begun]) if i not in self._added]

    async def aunwanted(self) -> list[str]:
        """`unwanted` in a loop."""
        with self._lock:
            self._closed = True
        await self._settled()
        return self.unwanted()


current_write: ContextVar[PipelinedWrite | None] = ContextVar("teola_current_write", default=None)
"""Of the index that the running code builds, or the pipeline that it runs."""


@contextmanager
def pipelining(write: PipelinedWrite) -> Iterator[None]:
    token = current_write.set(write)
    try:
        yield
    finally:
        current_write.reset(token)
        if ids := write.unwanted():
            write.store.admin("delete", ids).result()


@asynccontextmanager
async def apipelining(write: PipelinedWrite) -> AsyncIterator[None]:
    """`pipelining` in a loop."""
    token = current_write.set(write)
    try:
        yield
    finally:
        current_write.reset(token)
        if ids := await write.aunwanted():
            await asyncio.wrap_future(write.store.admin("delete", ids))
