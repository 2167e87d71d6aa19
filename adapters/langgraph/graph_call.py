"""One call of an accelerated graph: the live query that its nodes join."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from teola_plugin.adapters.langgraph.agents.agent_call import AgentCall
from teola_plugin.adapters.langgraph.ahead import Parts
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

    def in_node(self, name: str) -> AbstractContextManager[None]:
        """A node's task runs in the body."""
        return nullcontext() if self.agent is None else self.agent.in_node(name)


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
        if call.parts is not None:
            call.parts.close()
        if call.agent is not None:
            call.agent.close()


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
