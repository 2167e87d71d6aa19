"""What the loop runs for a node: the node itself, and the word that it begins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.utils.aiter import aclosing

from teola_plugin.adapters.langgraph.graph_call import current_call
from teola_plugin.shims.stack_levels import hide_from_stack_levels

_NO_TASK = nullcontext()


class WatchedNode(Runnable[Any, Any]):
    """Hands everything on to the node. It is no run of its own: callbacks and events are the node's alone."""

    def __init__(self, graph: object, name: str, node: Runnable[Any, Any]) -> None:
        self._graph, self._name, self.node = graph, name, node

    def _task(self, input: Any, config: RunnableConfig | None) -> AbstractContextManager[None]:
        call = current_call.get()
        if call is None or call.graph is not self._graph:
            return _NO_TASK
        return call.in_node(self._name, input, config or {})

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._task(input, config):
            return self.node.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._task(input, config):
            return await self.node.ainvoke(input, config, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        with self._task(input, config):
            yield from self.node.stream(input, config, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        with self._task(input, config):
            async with aclosing(self.node.astream(input, config, **kwargs)) as chunks:
                async for chunk in chunks:
                    yield chunk


hide_from_stack_levels(globals())
