"""Ingestion and index building that store rows while later ones are being embedded.

Everything is done by LlamaIndex's own code; see `pipelined_write` for what runs beside it. Where the pieces are not
known (another vector store, something after the embedding, worker processes) the original's way is the only one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import BaseNode
from llama_index.core.utils import iter_batch

from teola_plugin.adapters.calls import joined
from teola_plugin.adapters.llamaindex.batches import BatchesAhead
from teola_plugin.adapters.llamaindex.own_batches import side_by_side
from teola_plugin.adapters.llamaindex.own_titles import titles_side_by_side
from teola_plugin.adapters.llamaindex.pipelined_write import PipelinedWrite, apipelining, pipelining
from teola_plugin.adapters.llamaindex.vector_store import TeolaVectorStore
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.terms import NO_APP, named
from teola_plugin.graph import Terms
from teola_plugin.runtime.context import current_run, current_terms
from teola_plugin.shims.llamaindex.copies import copied_as
from teola_plugin.shims.llamaindex.hooks import IndexHooks, Nodes, VectorStoreIndexParts
from teola_plugin.shims.llamaindex.records import Unreadable

# ------------------------------------------------------------ pipelines


class _Ingests:
    """Stands before the pipeline's own class in the order of methods."""

    __teola_app__: ClassVar[str] = NO_APP
    __teola_kind__: ClassVar[type]

    def run(self, *args: Any, **kwargs: Any) -> Sequence[BaseNode]:
        write = self._pipelined(args, kwargs)
        with _named(self.__teola_app__), nullcontext() if write is None else pipelining(write):
            return super().run(*args, **kwargs)  # type: ignore[misc,no-any-return]

    async def arun(self, *args: Any, **kwargs: Any) -> Sequence[BaseNode]:
        write = self._pipelined(args, kwargs)
        with _named(self.__teola_app__):
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


_PLAIN = Options()


def accelerated_ingestion(pipeline: IngestionPipeline, options: Options = _PLAIN) -> IngestionPipeline:
    """A copy that shares the parts of `pipeline` (cache, documents, stores): the same rows, ids and nodes, sooner."""
    kind: Any = getattr(pipeline, "__teola_kind__", type(pipeline))
    parts = [_beside(part, options) for part in pipeline.transformations]
    changed = any(a is not b for a, b in zip(parts, pipeline.transformations, strict=True))
    if isinstance(pipeline, _Ingests) and not changed and options.app in (None, pipeline.__teola_app__):
        return pipeline
    copied = pipeline.model_copy(update={"transformations": parts} if changed else None)
    copied.__class__ = _class(_Ingests, kind, options.app or NO_APP)
    return copied


def _beside(part: Any, options: Options) -> Any:
    """A part that is sure to make calls one after the other, and may make them side by side."""
    return part if options.speculate == "off" else titles_side_by_side(side_by_side(part, options.threads))


@contextmanager
def _named(app: str) -> Iterator[None]:
    """Calls in the body that belong to no query are made under the app's name."""
    if app == NO_APP or current_run.get() is not None:
        yield
        return
    with joined(None, named(current_terms.get() or Terms(), app)):
        yield


# ------------------------------------------------------------ indexes


class _Builds(IndexHooks):
    """Stands before the index's own class in the order of methods."""

    __teola_app__: ClassVar[str] = NO_APP
    __teola_kind__: ClassVar[type]

    def __teola_add__(self, nodes: Nodes, add: Callable[[Nodes], None]) -> None:
        parts = _overlapping(self)
        with _named(self.__teola_app__):
            if parts is None:
                return add(nodes)
            for batch in iter_batch(nodes, parts.insert_batch_size):
                with pipelining(PipelinedWrite(parts.vector_store, batch)):
                    add(batch)

    async def __teola_aadd__(self, nodes: Nodes, add: Callable[[Nodes], Awaitable[None]]) -> None:
        parts = _overlapping(self)
        with _named(self.__teola_app__):
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


def accelerated_index(index: VectorStoreIndex, options: Options = _PLAIN) -> VectorStoreIndex:
    """A copy that shares the stores of `index`, for inserting into it."""
    kind: Any = getattr(index, "__teola_kind__", type(index))
    changed = _models_beside(index, options)
    if isinstance(index, _Builds) and not changed and options.app in (None, index.__teola_app__):
        return index
    copied: VectorStoreIndex = copied_as(_class(_Builds, kind, options.app or NO_APP), index)
    vars(copied).update(changed)
    return copied


def _models_beside(index: VectorStoreIndex, options: Options) -> dict[str, Any]:
    """Attributes of the index that are to be others."""
    try:
        model = VectorStoreIndexParts.of(index).embed_model
    except Unreadable:  # another version: its model is asked as it always was
        return {}
    made = _beside(model, options)
    return {} if made is model else VectorStoreIndexParts.named(embed_model=made)


@lru_cache(maxsize=64)
def _class(kind: Any, own: Any, app: str) -> Any:
    """With the name of the object's own class, so that spans and events tell the same."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (kind, own), {**names, "__teola_app__": app, "__teola_kind__": own})
