"""Ingestion and index building that store rows while later ones are being embedded.

LlamaIndex's own code does everything; see `pipelined_write` for the writes that run beside it. An object with unknown
pieces (another vector store, a step after the embedding, worker processes) runs as the original does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import BaseNode
from llama_index.core.utils import iter_batch

from teola_plugin.adapters.calls import NO_APP, joined, with_app
from teola_plugin.adapters.llamaindex.accelerated import (
    Accelerated,
    EqualsOriginal,
    OriginalAttribute,
    accelerated,
    original_of,
)
from teola_plugin.adapters.llamaindex.batches import BatchPrefetching
from teola_plugin.adapters.llamaindex.composite_calls import prefetching
from teola_plugin.adapters.llamaindex.pipelined_write import PipelinedWrite, apipelining, pipelining
from teola_plugin.adapters.llamaindex.session import ServedObject
from teola_plugin.adapters.llamaindex.vector_store import TeolaVectorStore
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.routing import RoutingRules, route_of
from teola_plugin.graph import RequestContext
from teola_plugin.runtime.query_run import current_request_context, current_run
from teola_plugin.shims.llamaindex.engines import IndexHooks, Nodes, VectorStoreIndexParts
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.llamaindex.classes import pool_backed

# ------------------------------------------------------------ pipelines


class WritingSession(ServedObject):
    """The session of a pipeline or an index, whose models are called in parallel if they allow it."""

    def __init__(self, original: Any, options: Options, rules: RoutingRules | None = None) -> None:
        super().__init__(original, options.pool, rules)
        self.app = options.app or NO_APP
        self._options = options

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let the original write in the body: its models are routed, its calls to the user's own models prefetched.

        For a run of a pipeline, and for nodes that are added to an index. Requests to engines are made under the app's
        name.
        """
        is_off = self._options.speculate == "off"
        with (
            self.calling(),
            nullcontext() if is_off else prefetching(self._options.threads),
            _under_app_name(self.app),
        ):
            yield

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the method `name` of the original."""
        if name == "run":
            return self._run(args, kwargs)
        if name == "arun":
            return self._arun(args, kwargs)
        return getattr(self.original, name)(*args, **self._with_embedding_model(kwargs))

    def _with_embedding_model(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by which an index makes a retriever or an engine that embeds as the index does here."""
        model = getattr(self.original, VectorStoreIndexParts.attribute("embed_model"))
        with self.routing():
            route = route_of(model)
        if route is None or "embed_model" in kwargs:
            return kwargs
        return {**kwargs, "embed_model": route.pool.bound(model, route.engine)}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[BaseNode]:
        """Run the original pipeline, and store rows while later ones are being embedded, if it may be done."""
        pipeline = self.original
        with self.writing():
            write = _plan_write(pipeline, args, kwargs)
            with nullcontext() if write is None else pipelining(write):
                return pipeline.run(*args, **kwargs)  # type: ignore[no-any-return]

    async def _arun(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[BaseNode]:
        """Run the original pipeline as `_run` does, in a loop."""
        pipeline = self.original
        with self.writing():
            write = _plan_write(pipeline, args, kwargs)
            if write is None:
                return await pipeline.arun(*args, **kwargs)  # type: ignore[no-any-return]
            async with apipelining(write):
                return await pipeline.arun(*args, **kwargs)  # type: ignore[no-any-return]


class AcceleratedPipeline(Accelerated):
    """An `IngestionPipeline`."""

    __teola_entries__ = ("run", "arun")
    __teola_attributes__ = OriginalAttribute


def _plan_write(pipeline: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> PipelinedWrite | None:
    """Return the write that runs beside the embedding; None unless the embedded nodes are stored, in this process."""
    uses_processes = (kwargs.get("num_workers") or 0) > 1 or len(args) > 6
    last = pipeline.transformations[-1] if pipeline.transformations else None
    return (
        None
        if uses_processes or not _can_overlap(last, pipeline.vector_store)
        else PipelinedWrite(pipeline.vector_store)
    )


_PLAIN = Options()


def accelerated_ingestion(pipeline: IngestionPipeline, options: Options = _PLAIN) -> Any:
    """Accelerate a pipeline: the same rows, ids and nodes, sooner."""
    return accelerated(writing_session(pipeline, options), AcceleratedPipeline)


def writing_session(obj: Any, options: Options) -> WritingSession:
    """Create the session of a pipeline or an index."""
    session = WritingSession(original_of(obj), options)
    session.accelerate_copy = partial(accelerated_writing, options=options)
    return session


def accelerated_writing(obj: Any, options: Options = _PLAIN) -> Any:
    """Accelerate a pipeline or an index."""
    make = accelerated_ingestion if isinstance(obj, IngestionPipeline) else accelerated_index
    return make(obj, options)


@contextmanager
def _under_app_name(app: str) -> Iterator[None]:
    """Make the calls in the body under the app's name if they belong to no query."""
    if app == NO_APP or current_run.get() is not None:
        yield
        return
    with joined(None, with_app(current_request_context.get() or RequestContext(), app)):
        yield


# ------------------------------------------------------------ indexes


class BuildsIndex(IndexHooks):
    """A mixin before the index's own class, whose nodes are stored while later ones are being embedded."""

    def __teola_add__(self, nodes: Nodes, add: Callable[[Any, Nodes], None]) -> None:
        """Add nodes to the index by `add`, the original's own code, and store rows while later ones are being embedded.

        For an index that cannot do that, `add` gets all nodes at once.
        """
        index, writing = self._teola_index()
        with writing:
            parts = None if index is not self and isinstance(index, BuildsIndex) else _overlapping_parts(index)
            if parts is None:
                return add(index, nodes)
            for batch in iter_batch(nodes, parts.insert_batch_size):
                with pipelining(PipelinedWrite(parts.vector_store, batch)):
                    add(index, batch)

    async def __teola_aadd__(self, nodes: Nodes, add: Callable[[Any, Nodes], Awaitable[None]]) -> None:
        """Add nodes as `__teola_add__` does, in a loop."""
        index, writing = self._teola_index()
        with writing:
            parts = None if index is not self and isinstance(index, BuildsIndex) else _overlapping_parts(index)
            if parts is None:
                return await add(index, nodes)
            for batch in iter_batch(nodes, parts.insert_batch_size):
                async with apipelining(PipelinedWrite(parts.vector_store, batch)):
                    await add(index, batch)

    def _teola_index(self) -> tuple[Any, AbstractContextManager[None]]:
        """Return the index that nodes are added to, and the context in which that is done."""
        session = getattr(self, "__teola_session__", None)
        return (self, nullcontext()) if session is None else (session.original, session.writing())


class AcceleratedIndex(BuildsIndex, Accelerated, metaclass=EqualsOriginal):
    """A `VectorStoreIndex`. Its retrievers and engines use the model that an engine serves, if there is one.

    It equals the original's class, as LlamaIndex has dictionaries by class of index, such as `Playground`'s.
    """

    __teola_entries__ = ("as_retriever", "as_query_engine", "as_chat_engine")
    __teola_attributes__ = OriginalAttribute


def _overlapping_parts(index: object) -> VectorStoreIndexParts | None:
    """Return the parts of an index that can store rows while it embeds others; None for another index."""
    try:
        parts = VectorStoreIndexParts.of(index)
    except Unreadable:  # an unknown version: it runs as the original does
        return None
    return parts if _can_overlap(parts.embed_model, parts.vector_store) else None


def _can_overlap(model: Any, store: Any) -> bool:
    """Return True if rows can be stored while others are embedded, and not on the same cores: that gains nothing."""
    worker = pool_backed(model)
    if type(store) is not TeolaVectorStore or not isinstance(worker, BatchPrefetching):
        return False
    embedder: Any = worker.pool.engine(worker.engine)  # type: ignore[attr-defined]
    database: Any = store.pool.engine(store.engine)
    on_all_cores = getattr(embedder, "device", "") == "cpu" and not getattr(embedder, "cores", ())
    return not (on_all_cores and getattr(database, "embedded", False))


class TeolaVectorStoreIndex(BuildsIndex, VectorStoreIndex):
    """A `VectorStoreIndex` that stores rows in a `TeolaVectorStore` while later nodes are being embedded.

    ::

        storage = StorageContext.from_defaults(vector_store=TeolaVectorStore(pool=pool, collection="docs"))
        index = TeolaVectorStoreIndex(nodes, embed_model=TeolaEmbedding(pool=pool), storage_context=storage)

    So do `from_documents`, `insert_nodes` and their async forms. With other stores or models it is the original class.
    """


def accelerated_index(index: VectorStoreIndex, options: Options = _PLAIN) -> Any:
    """Accelerate an index: the same rows and nodes, sooner, for inserting into it."""
    return accelerated(writing_session(index, options), AcceleratedIndex)


hide_from_stack_levels(globals())
