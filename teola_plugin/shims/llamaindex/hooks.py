"""Methods of LlamaIndex's that are overridden, or called around their public entries."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.data_structs import IndexDict
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.query_engine import MultiStepQueryEngine
from llama_index.core.schema import BaseNode, QueryBundle
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import DISPATCHER_SPAN_DECORATED_ATTR

from teola_plugin.shims.llamaindex.records import Parts, attribute

Nodes = Sequence[BaseNode]

# ------------------------------------------------------------ query engines


class QueryHooks:
    """Stands before a query engine's class: engines that retry call it below its entries."""

    if TYPE_CHECKING:

        def __teola_query__(self, query: QueryBundle, plain: Callable[[Any], Any]) -> Any: ...
        async def __teola_aquery__(self, query: QueryBundle, plain: Callable[[Any], Awaitable[Any]]) -> Any: ...

    def _query(self, query_bundle: QueryBundle) -> Any:
        plain = super()._query  # type: ignore[misc]
        return self.__teola_query__(query_bundle, lambda node: (plain if node is self else node._query)(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> Any:
        plain = super()._aquery  # type: ignore[misc]
        return await self.__teola_aquery__(
            query_bundle, lambda node: (plain if node is self else node._aquery)(query_bundle)
        )


def query_below(engine: BaseQueryEngine, query: QueryBundle) -> Any:
    """`query` without the events of the entry."""
    return engine._query(query)


def multi_step_aquery(engine: MultiStepQueryEngine, query: QueryBundle) -> Coroutine[Any, Any, Any]:
    """LlamaIndex's own async way of it, without the span."""
    made: Coroutine[Any, Any, Any] = inspect.unwrap(MultiStepQueryEngine._aquery)(engine, query)
    return made


def with_aquery(engine: BaseQueryEngine, function: Callable[[Any, QueryBundle], Awaitable[Any]]) -> Any:
    """A copy whose async entry calls `function`, under the span that it always had."""

    async def _aquery(self: Any, query_bundle: QueryBundle) -> Any:
        return await function(self, query_bundle)

    made, kind = copy.copy(engine), type(engine)
    spanned: Any = get_dispatcher(kind.__module__).span(_aquery)
    vars(made)["_aquery"] = spanned.__get__(made, kind)
    return made


def without_span(method: Any) -> Any:
    """Return the method, marked so that no class wraps it in a span: what it calls has one."""
    setattr(method, DISPATCHER_SPAN_DECORATED_ATTR, True)
    return method


# ------------------------------------------------------------ indexes


@dataclass(frozen=True, slots=True)
class VectorStoreIndexParts(Parts):
    OF: ClassVar = (VectorStoreIndex,)
    METHODS: ClassVar = ("_add_nodes_to_index", "_async_add_nodes_to_index")

    embed_model: Any = attribute("_embed_model")
    vector_store: Any = attribute("_vector_store")
    insert_batch_size: int = attribute("_insert_batch_size", int)


class IndexHooks:
    """Stands before an index's class: nodes are embedded and stored by `__teola_add__` and `__teola_aadd__`.

    These get the nodes, and a function that adds some of them to an index: to this one, or to another of its state.
    """

    if TYPE_CHECKING:

        def __teola_add__(self, nodes: Nodes, add: Callable[[Any, Nodes], None]) -> None: ...
        async def __teola_aadd__(self, nodes: Nodes, add: Callable[[Any, Nodes], Awaitable[None]]) -> None: ...

    def _add_nodes_to_index(
        self, index_struct: IndexDict, nodes: Nodes, show_progress: bool = False, **insert_kwargs: Any
    ) -> None:
        plain = super()._add_nodes_to_index  # type: ignore[misc]

        def add(index: Any, some: Nodes) -> None:
            method = plain if index is self else index._add_nodes_to_index
            method(index_struct, some, show_progress, **insert_kwargs)

        self.__teola_add__(nodes, add)

    async def _async_add_nodes_to_index(
        self, index_struct: IndexDict, nodes: Nodes, show_progress: bool = False, **insert_kwargs: Any
    ) -> None:
        plain = super()._async_add_nodes_to_index  # type: ignore[misc]

        async def add(index: Any, some: Nodes) -> None:
            method = plain if index is self else index._async_add_nodes_to_index
            await method(index_struct, some, show_progress, **insert_kwargs)

        await self.__teola_aadd__(nodes, add)
