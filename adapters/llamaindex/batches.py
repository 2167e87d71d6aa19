"""Texts that are embedded in batches, all of which are under way at once.

LlamaIndex embeds many texts batch after batch, each with its events and a step of the progress bar. That stays as it
is; but the engine is told of all batches at the start, fuses them as it likes, and never waits for the caller.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.adapters.calls import to_list
from teola_plugin.adapters.llamaindex.pipelined_write import PipelinedWrite, current_write
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText, Vector
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.shims.llamaindex.models import is_paced

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode

Role = Literal["query", "document"]


class _Batches:
    """The batches of one call: what the engine was told, until the framework's own code asks for it."""

    def __init__(self, model: BatchesAhead, texts: Sequence[str], write: PipelinedWrite | None) -> None:
        size = model.embed_batch_size
        self._write = write
        self._calls: dict[tuple[str, ...], deque[tuple[int, CallHandle]]] = defaultdict(deque)
        for start in range(0, len(texts), size):
            batch = tuple(texts[start : start + size])
            self._calls[batch].append((start, model.call(batch, "document")))

    def take(self, texts: Sequence[str]) -> tuple[int, CallHandle] | None:
        calls = self._calls.get(tuple(texts))
        return calls.popleft() if calls else None

    def came(self, start: int, vectors: Sequence[Sequence[float]]) -> None:
        if self._write is not None:
            self._write.put(start, vectors)

    def close(self) -> None:
        """Give up what nobody asked for."""
        for calls in self._calls.values():
            for _, handle in calls:
                handle.cancel()


_current: ContextVar[_Batches | None] = ContextVar("teola_batches", default=None)


class BatchesAhead:
    """Stands before a `BaseEmbedding` class in the order of methods. No spans of its own: it is no such class."""

    if TYPE_CHECKING:
        embed_batch_size: int

        def request(self, kind: PrimitiveKind, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle: ...

    def payload(self, text: str, role: Role) -> EmbedText:
        """What the engine is asked for: `query` for `get_query_embedding`, `document` for `get_text_embedding`."""
        return EmbedText(text, role)

    def vector_of(self, value: Vector) -> list[float]:
        """What the methods return for the engine's value."""
        return to_list(value)

    def call(self, texts: Sequence[str], role: Role) -> CallHandle:
        return self.request(PrimitiveKind.EMBEDDING, [self.payload(text, role) for text in texts])

    def vectors(self, texts: Sequence[str], role: Role) -> list[list[float]]:
        """One per text, in order."""
        batches, (start, handle) = self._begun(texts, role)
        found = [self.vector_of(value) for value in handle.result()]
        if batches is not None:
            batches.came(start, found)
        return found

    async def avectors(self, texts: Sequence[str], role: Role) -> list[list[float]]:
        """`vectors` in a loop."""
        batches, (start, handle) = self._begun(texts, role)
        found = [self.vector_of(value) for value in await handle]
        if batches is not None:
            batches.came(start, found)
        return found

    def _begun(self, texts: Sequence[str], role: Role) -> tuple[_Batches | None, tuple[int, CallHandle]]:
        batches = _current.get() if role == "document" else None
        taken = batches.take(texts) if batches is not None else None
        return (batches, taken) if taken is not None else (None, (0, self.call(texts, role)))

    # ------------------------------------------------------------ LlamaIndex's interface

    def get_text_embedding_batch(
        self, texts: list[str], show_progress: bool = False, **kwargs: Any
    ) -> list[list[float]]:
        write = current_write.get()
        if write is not None and not write.expect(texts):
            write = None
        with self._ahead(texts, write):
            return super().get_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc,no-any-return]

    async def aget_text_embedding_batch(
        self, texts: list[str], show_progress: bool = False, **kwargs: Any
    ) -> list[list[float]]:
        write = current_write.get()
        if write is not None and not await write.aexpect(texts):
            write = None
        with self._ahead(texts, write):
            return await super().aget_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc,no-any-return]

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        _tell(nodes)
        return super().__call__(nodes, **kwargs)  # type: ignore[misc,no-any-return]

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        _tell(nodes)
        return await super().acall(nodes, **kwargs)  # type: ignore[misc,no-any-return]

    @contextmanager
    def _ahead(self, texts: Sequence[str], write: PipelinedWrite | None) -> Iterator[None]:
        """With a cache or a rate limiter the framework decides what is asked for, and when."""
        if is_paced(self) or not texts:
            yield
            return
        batches = _Batches(self, texts, write)
        token = _current.set(batches)
        try:
            yield
        finally:
            _current.reset(token)
            batches.close()


def _tell(nodes: Sequence[BaseNode]) -> None:
    write = current_write.get()
    if write is not None:
        write.nodes = list(nodes)
