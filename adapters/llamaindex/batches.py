"""Embedding of many texts: the requests of all batches are sent at the start.

LlamaIndex embeds many texts batch after batch, each with its events and a step of the progress bar. That stays as it
is; but the engine gets the requests of all batches at the start. It fuses them as it likes and need not wait for the
caller.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.adapters.calls import to_list
from teola_plugin.adapters.llamaindex.pipelined_write import PipelinedWrite, current_write
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText, Vector
from teola_plugin.runtime.claims import Caller, ClaimRule, Claims, ClaimTable
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.shims.llamaindex.models import is_paced

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode

Role = Literal["query", "document"]


@dataclass(slots=True, eq=False)
class _PrefetchedBatch:
    """The embedding of one batch, which the planner has requested. An entry of a `ClaimTable`."""

    start: int
    """Number of its first text."""
    handle: CallHandle
    claims: Claims
    is_claimable = True
    is_expected = False

    def forget(self) -> None:
        """See `Claimable`. The vectors go with the batch."""


class _PrefetchedBatches:
    """The prefetched batches of one call, each until the framework's own code claims it."""

    def __init__(self, model: BatchPrefetching, texts: Sequence[str], write: PipelinedWrite | None) -> None:
        size = model.embed_batch_size
        self._model, self._write = model, write
        self._claims = ClaimTable[_PrefetchedBatch]()
        for start in range(0, len(texts), size):
            texts_of_batch = texts[start : start + size]
            batch = _PrefetchedBatch(
                start, model.call(texts_of_batch, "document"), Claims(ClaimRule.ONCE_PER_CALLER, Caller.PLANNER)
            )
            self._claims.add(self._key(texts_of_batch), batch, Caller.PLANNER)

    def _key(self, texts: Sequence[str]) -> Hashable:
        """Return the request key of a batch: the engine's requests."""
        return tuple(self._model.payload(text, "document") for text in texts)

    def claim(self, texts: Sequence[str]) -> _PrefetchedBatch | None:
        """Claim the batch of these texts for the original; None if there is none left."""
        return self._claims.claim(self._key(texts), Caller.ORIGINAL)

    def pass_on(self, start: int, vectors: Sequence[Sequence[float]]) -> None:
        """Hand the vectors of a batch to the write that runs beside the embedding, if there is one."""
        if self._write is not None:
            self._write.put(start, vectors)

    def close(self) -> None:
        """Cancel the batches that nobody claimed."""
        for batch in self._claims:
            if Caller.ORIGINAL not in batch.claims.callers:
                batch.handle.cancel()


_prefetched: ContextVar[_PrefetchedBatches | None] = ContextVar("teola_batches", default=None)


class BatchPrefetching:
    """A mixin before a `BaseEmbedding` class that prefetches batches. It is no `BaseEmbedding`, so it adds no spans."""

    if TYPE_CHECKING:
        embed_batch_size: int

        def request(self, kind: PrimitiveKind, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle: ...

    def payload(self, text: str, role: Role) -> EmbedText:
        """Return the engine's request for a text; `role` is `query` in `get_query_embedding`, else `document`."""
        return EmbedText(text, role)

    def vector_of(self, value: Vector) -> list[float]:
        """Return the engine's vector as LlamaIndex's methods return it."""
        return to_list(value)

    def call(self, texts: Sequence[str], role: Role) -> CallHandle:
        """Start the embedding of texts."""
        return self.request(PrimitiveKind.EMBEDDING, [self.payload(text, role) for text in texts])

    def vectors(self, texts: Sequence[str], role: Role) -> list[list[float]]:
        """Return one vector per text, in order."""
        batches = _prefetched.get() if role == "document" else None
        batch = batches.claim(texts) if batches is not None else None
        handle = self.call(texts, role) if batch is None else batch.handle
        vectors = [self.vector_of(value) for value in handle.result()]
        if batches is not None and batch is not None:
            batches.pass_on(batch.start, vectors)
        return vectors

    async def avectors(self, texts: Sequence[str], role: Role) -> list[list[float]]:
        """`vectors` in a loop."""
        batches = _prefetched.get() if role == "document" else None
        batch = batches.claim(texts) if batches is not None else None
        handle = self.call(texts, role) if batch is None else batch.handle
        vectors = [self.vector_of(value) for value in await handle]
        if batches is not None and batch is not None:
            batches.pass_on(batch.start, vectors)
        return vectors

    # ------------------------------------------------------------ LlamaIndex's interface

    def get_text_embedding_batch(
        self, texts: list[str], show_progress: bool = False, **kwargs: Any
    ) -> list[list[float]]:
        """Embed texts batch after batch, as LlamaIndex does, with all requests sent to the engine at the start.

        Vectors go to the write that stores rows meanwhile, if it can tell to which rows they belong.
        """
        write = current_write.get()
        if write is not None and not write.expect(texts):
            write = None
        with self.prefetching(texts, write):
            return super().get_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc,no-any-return]

    async def aget_text_embedding_batch(
        self, texts: list[str], show_progress: bool = False, **kwargs: Any
    ) -> list[list[float]]:
        """Embed texts as `get_text_embedding_batch` does, in a loop."""
        write = current_write.get()
        if write is not None and not await write.aexpect(texts):
            write = None
        with self.prefetching(texts, write):
            return await super().aget_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc,no-any-return]

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        note_nodes_for_write(nodes)
        return super().__call__(nodes, **kwargs)  # type: ignore[misc,no-any-return]

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        note_nodes_for_write(nodes)
        return await super().acall(nodes, **kwargs)  # type: ignore[misc,no-any-return]

    @contextmanager
    def prefetching(self, texts: Sequence[str], write: PipelinedWrite | None) -> Iterator[None]:
        """Prefetch the batches in the body, unless a cache or a rate limiter decides which calls are made."""
        if is_paced(self) or not texts:
            yield
            return
        batches = _PrefetchedBatches(self, texts, write)
        token = _prefetched.set(batches)
        try:
            yield
        finally:
            _prefetched.reset(token)
            batches.close()


def note_nodes_for_write(nodes: Sequence[BaseNode]) -> None:
    """Note the nodes that are embedded now for the write that runs beside the embedding, if there is one."""
    write = current_write.get()
    if write is not None:
        write.nodes = list(nodes)
