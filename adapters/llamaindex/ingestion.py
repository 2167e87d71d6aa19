"""Ingestion and index building that store rows while later ones are being embedded.

Everything is done by LlamaIndex's own code; see `pipelined_write` for what runs beside it. Where the pieces are not
known (another vector store, something after the embedding, worker processes) the original's way is the only one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import BaseNode
from llama_index.core.utils import iter_batch

from teola_plugin.adapters.llamaindex.batches import BatchesAhead
from teola_plugin.adapters.llamaindex.pipelined_write import PipelinedWrite, apipelining, pipelining
from teola_plugin.adapters.llamaindex.vector_store import TeolaVectorStore
from teola_plugin.shims.llamaindex.copies import copied_as
from teola_plugin.shims.llamaindex.hooks import IndexHooks, Nodes, VectorStoreIndexParts
from teola_plugin.shims.llamaindex.records import Unreadable

# ------------------------------------------------------------ pipelines


class _Ingests:
    """Stands before the pipeline's own class in the order of methods."""

    def run(self, *args: Any, **kwargs: Any) -> Sequence[BaseNode]:
        write = self._pipelined(args, kwargs)
        if write is None:
            return super().run(*args, **kwargs)  # type: ignore[misc,no-any-return]
        with pipelining(write):
            return super().run(*args, **kwargs)  # type: ignore[misc,no-any-return]

    async def arun(self, *args: Any, **kwargs: Any) -> Sequence[BaseNode]:
        write = self._pipelined(args, kwargs)
        if write is None:
            return await super().arun(*args, **kwargs)  # type: ignore[misc,no-any-return]
        async with apipelining(write):
            return await super().arun(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def _pipelined(self, args: Sequence[Any], kwargs: dict[str, Any]) -> PipelinedWrite | None:
        """Only where what is embedded is what is stored, and both happen here."""
        own: Any = self
        elsewhere = (kwargs.get("num_workers") or 0) > 1 or len(args) > 6
        last = own.transformations[-1] if own.transformations else None
        if elsewhere or not _overlaps(last, own.vector_store):
            return None
        return PipelinedWrite(own.vector_store)


def accelerated_ingestion(pipeline: IngestionPipeline) -> IngestionPipeline:
    """A copy that shares the parts of `pipeline` (cache, documents, stores): the same rows, ids and nodes, sooner."""
    if isinstance(pipeline, _Ingests):
        return pipeline
    copied = pipeline.model_copy()
    copied.__class__ = _class(_Ingests, type(pipeline))
    return copied


# ------------------------------------------------------------ indexes


class _Builds(IndexHooks):
    """Stands before the index's own class in the order of methods."""

    def __teola_add__(self, nodes: Nodes, add: Callable[[Nodes], None]) -> None:
        parts = _overlapping(self)
        if parts is None:
            return add(nodes)
        for batch in iter_batch(nodes, parts.insert_batch_size):
            with pipelining(PipelinedWrite(parts.vector_store, batch)):
                add(batch)

    async def __teola_aadd__(self, nodes: Nodes, add: Callable[[Nodes], Awaitable[None]]) -> None:
        parts = _overlapping(self)
        if parts is None:
            return await add(nodes)
        for batch in iter_batch(nodes, parts.insert_batch_size):
            async with apipelining(PipelinedWrite(parts.vector_store, batch)):
                await add(batch)


def _overlapping(index: object) -> VectorStoreIndexParts | None:
    """What an index is made of, where storing beside embedding is understood and gains."""
    try:
        parts = VectorStoreIndexParts.of(index)
    except Unreadable:  # another version: its own way is the only one
        return None
    return parts if _overlaps(parts.embed_model, parts.vector_store) else None


def _overlaps(model: Any, store: Any) -> bool:
    """Whether storing beside embedding is understood, and gains: on the same cores the two would take turns."""
    if type(store) is not TeolaVectorStore or not isinstance(model, BatchesAhead):
        return False
    embedder: Any = model.pool.engine(model.engine)  # type: ignore[attr-defined]
    database: Any = store.pool.engine(store.engine)
    on_all_cores = getattr(embedder, "device", "") == "cpu" and not getattr(embedder, "cores", ())
    return not (on_all_cores and getattr(database, "embedded", False))


class TeolaVectorStoreIndex(_Builds, VectorStoreIndex):
    """A `VectorStoreIndex` that stores rows in a `TeolaVectorStore` while later nodes are being embedded.

    ::

        storage = StorageContext.from_defaults(vector_store=TeolaVectorStore(pool=pool, collection="docs"))
        index = TeolaVectorStoreIndex(nodes, embed_model=TeolaEmbedding(pool=pool), storage_context=storage)

    Also by `from_documents`, `insert_nodes` and their async forms. With other stores or models it is the plain class.
    """


def accelerated_index(index: VectorStoreIndex) -> VectorStoreIndex:
    """A copy that shares the stores of `index`, for inserting into it."""
    if isinstance(index, _Builds):
        return index
    copied: VectorStoreIndex = copied_as(_class(_Builds, type(index)), index)
    return copied


@lru_cache(maxsize=64)
def _class(kind: Any, own: Any) -> Any:
    """With the name of the object's own class, so that spans and events tell the same."""
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})
