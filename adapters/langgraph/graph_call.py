"""One call of an accelerated graph: the live query that its nodes join, and what runs around each node."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.utils.aiter import aclosing
from langgraph.errors import GraphBubbleUp

from teola_plugin.adapters.calls import aitems_inside, items_inside
from teola_plugin.adapters.langchain.listening import form_of_answers
from teola_plugin.adapters.langgraph.agents.agent_call import AgentCall, is_in_agent, outside_agents
from teola_plugin.adapters.langgraph.plans import Parts
from teola_plugin.observe.steps import OpenStep
from teola_plugin.runtime.query_run import QueryRun, current_place, during
from teola_plugin.shims.stack_levels import hide_from_stack_levels

T = TypeVar("T")
_END: Any = object()


class GraphCall:
    """One call of a graph, as its nodes share it. Used from any thread."""

    def __init__(
        self, graph: object, run: QueryRun, parts: Parts | None = None, agent: AgentCall | None = None
    ) -> None:
        """`graph`: stands for the accelerated graph. `parts`: the parts of the query that run before their nodes."""
        self.graph, self.run, self.parts, self.agent = graph, run, parts, agent
        self.steps = Steps(run)
        self.succeeded = False
        """Set once all items of the call were read."""

    def close(self) -> None:
        """End the call: give up what nobody has claimed."""
        if self.agent is not None:
            self.agent.close()
        if self.parts is not None:
            self.parts.close(succeeded=self.succeeded)
        self.steps.close()


class Steps:
    """Supersteps and nodes of one call, in the trace of its query. Used from any thread.

    A superstep lasts until the next one begins.
    """

    def __init__(self, run: QueryRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._number: int | None = None
        self._superstep: OpenStep | None = None

    def start_node(self, name: str, parent: OpenStep | None, number: int, metadata: Mapping[str, Any]) -> OpenStep:
        """Start the step of a node's task in the superstep of that number. `metadata`: that of the task's config."""
        triggers = metadata.get("langgraph_triggers", ())
        with self._lock:
            if self._superstep is None or number != self._number:
                self._end_superstep()
                self._number = number
                self._superstep = self._run.step_began("superstep", str(number), parent)
            superstep = self._superstep
        return self._run.step_began("node", name, superstep, triggers=triggers)

    def _end_superstep(self) -> None:
        if self._superstep is not None:
            self._run.step_ended(self._superstep)

    def close(self) -> None:
        """End with the call."""
        with self._lock:
            self._end_superstep()
            self._superstep = None


class NodeTask:
    """A context manager around one task of a node. A class: generators would take more of the time that tasks take."""

    __slots__ = ("_agent", "_call", "_config", "_input", "_is_async", "_name", "_step", "_token")

    def __init__(self, call: GraphCall, name: str, input: Any, config: Mapping[str, Any], is_async: bool) -> None:
        self._call, self._name, self._input, self._config = call, name, input, config
        self._is_async = is_async
        self._agent: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        call, name, config = self._call, self._name, self._config
        metadata = config.get("metadata") or {}
        number = int(metadata.get("langgraph_step", 0))
        outer = current_place.get() if call.parts is None else call.parts.place_of(name, config)
        self._step = call.steps.start_node(name, outer.step, number, metadata)
        node_place = replace(outer, step=self._step, form=form_of_answers(config))
        if call.parts is not None:
            held_part = call.parts.start_node(name, self._input, config, node_place, number, is_async=self._is_async)
            node_place = node_place if held_part is None else replace(node_place, deferred=held_part)
        self._token = current_place.set(node_place)
        if call.agent is not None:
            self._agent = call.agent.in_node(name)
        elif is_in_agent():
            self._agent = outside_agents()
        if self._agent is not None:
            self._agent.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if self._agent is not None:
                self._agent.__exit__(kind, error, trace)
        finally:
            with suppress(ValueError):  # a generator may be closed in another context than it began in
                current_place.reset(self._token)
            outcome = "done" if error is None else "failed"
            if isinstance(error, GraphBubbleUp):  # an interrupt, a command for the graph around
                outcome = "interrupted"
            self._call.run.step_ended(self._step, outcome)


current_call: ContextVar[GraphCall | None] = ContextVar("teola_graph_call", default=None)
"""The call that the running code belongs to: of the innermost accelerated graph."""


def in_call(call: GraphCall, items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each made inside the call. The call ends with them, and is not current for their reader."""
    with closing(call):
        yield from items_inside(partial(during, current_call, call), items)
        call.succeeded = True


async def ain_call(call: GraphCall, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield the items as `in_call` does, in a loop."""
    with closing(call):
        async with aclosing(aitems_inside(partial(during, current_call, call), items)) as items_in_call:
            async for item in items_in_call:
                yield item
        call.succeeded = True


# ------------------------------------------------------------ nodes

_NO_TASK = nullcontext()


class WatchedNode(Runnable[Any, Any]):
    """Stands for a node in the graph that runs: tells the call when a task begins, and hands everything on to the node.

    It is no run of its own: callbacks and events are the node's alone.
    """

    def __init__(self, graph: object, name: str, node: Runnable[Any, Any]) -> None:
        self._graph, self._name, self.node = graph, name, node

    def _task(self, input: Any, config: RunnableConfig | None, *, is_async: bool) -> AbstractContextManager[None]:
        call = current_call.get()
        if call is None or call.graph is not self._graph:
            return _NO_TASK
        return NodeTask(call, self._name, input, config or {}, is_async)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._task(input, config, is_async=False):
            return self.node.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._task(input, config, is_async=True):
            return await self.node.ainvoke(input, config, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        with self._task(input, config, is_async=False):
            yield from self.node.stream(input, config, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        with self._task(input, config, is_async=True):
            async with aclosing(self.node.astream(input, config, **kwargs)) as chunks:
                async for chunk in chunks:
                    yield chunk


hide_from_stack_levels(globals())
