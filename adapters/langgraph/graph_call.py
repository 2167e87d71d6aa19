"""One call of an accelerated graph: the live query that its nodes join."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, aclosing, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from teola_plugin.adapters.langgraph.agents.agent_call import AgentCall
from teola_plugin.adapters.langgraph.agents.tool_places import nobody
from teola_plugin.adapters.langgraph.ahead import Parts
from teola_plugin.adapters.langgraph.steps import Steps
from teola_plugin.runtime.context import current_place
from teola_plugin.runtime.query_run import QueryRun

T = TypeVar("T")
_END: Any = object()


@dataclass(slots=True, eq=False)
class GraphCall:
    """What the nodes of one graph share in one call of it. To be used from any thread."""

    graph: object
    """Stands for the accelerated graph whose nodes these are."""
    run: QueryRun
    parts: Parts | None = None
    """What runs ahead of its nodes."""
    agent: AgentCall | None = None
    """What begins early of its tools."""
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = Steps(self.run)

    @contextmanager
    def in_node(self, name: str, given: Any, config: Mapping[str, Any]) -> Iterator[None]:
        """A task of a node runs in the body."""
        place = current_place.get() if self.parts is None else self.parts.place(name, config)
        with ExitStack() as around:
            around.enter_context(self.steps.node(name, place, config))
            if self.parts is not None:
                self.parts.node_began(name, given, config)
            around.enter_context(nobody() if self.agent is None else self.agent.in_node(name))
            yield

    def close(self) -> None:
        """It is over: what nobody has claimed is given up."""
        for one in (self.agent, self.parts, self.steps):
            if one is not None:
                one.close()


current_call: ContextVar[GraphCall | None] = ContextVar("teola_graph_call", default=None)
"""The call that the running code belongs to: of the innermost accelerated graph."""


@contextmanager
def _inside(call: GraphCall) -> Iterator[None]:
    token = current_call.set(call)
    try:
        yield
    finally:
        current_call.reset(token)


@contextmanager
def _ending(call: GraphCall) -> Iterator[None]:
    try:
        yield
    finally:
        call.close()


def stepped(call: GraphCall, items: Iterator[T]) -> Iterator[T]:
    """The items, each made inside the call, which never leaks to the reader between two of them."""
    with _ending(call), closing(items):  # type: ignore[type-var]
        while True:
            with _inside(call):
                item = next(items, _END)
            if item is _END:
                return
            yield item


async def astepped(call: GraphCall, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """`stepped` in a loop."""
    with _ending(call):
        async with aclosing(items):  # type: ignore[type-var]
            while True:
                with _inside(call):
                    item = await anext(items, _END)
                if item is _END:
                    return
                yield item
