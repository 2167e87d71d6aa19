"""One call of an accelerated graph: the live query that its nodes join."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, closing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from teola_plugin.adapters.langchain.current_query import form_of_answers
from teola_plugin.adapters.langgraph.agents.agent_call import AgentCall
from teola_plugin.adapters.langgraph.agents.tool_places import anybody, nobody
from teola_plugin.adapters.langgraph.ahead import Parts
from teola_plugin.adapters.langgraph.steps import Steps
from teola_plugin.runtime.context import current_place
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.stack_levels import hide_from_stack_levels

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

    def in_node(self, name: str, given: Any, config: Mapping[str, Any]) -> NodeTask:
        """A task of a node runs in the body."""
        return NodeTask(self, name, given, config)

    def close(self) -> None:
        """It is over: what nobody has claimed is given up."""
        for one in (self.agent, self.parts, self.steps):
            if one is not None:
                one.close()


class NodeTask:
    """Around the code of one task of a node. A class of its own: generators would take more of what it takes."""

    __slots__ = ("_agent", "_call", "_config", "_given", "_name", "_step", "_token")

    def __init__(self, call: GraphCall, name: str, given: Any, config: Mapping[str, Any]) -> None:
        self._call, self._name, self._given, self._config = call, name, given, config
        self._agent: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        call, name, config = self._call, self._name, self._config
        known = config.get("metadata") or {}
        number = int(known.get("langgraph_step", 0))
        place = current_place.get() if call.parts is None else call.parts.place(name, config)
        self._step = call.steps.node_began(name, place.step, number, known)
        place = replace(place, step=self._step, form=form_of_answers(config))
        held = None if call.parts is None else call.parts.node_began(name, self._given, config, place, number)
        self._token = current_place.set(place if held is None else replace(place, held=held))
        self._agent = call.agent.in_node(name) if call.agent is not None else nobody() if anybody() else None
        if self._agent is not None:
            self._agent.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if self._agent is not None:
                self._agent.__exit__(kind, error, trace)
        finally:
            with suppress(ValueError):  # a generator may be closed in another context than it began in
                current_place.reset(self._token)
            self._call.steps.node_ended(self._step, error)


current_call: ContextVar[GraphCall | None] = ContextVar("teola_graph_call", default=None)
"""The call that the running code belongs to: of the innermost accelerated graph."""


def stepped(call: GraphCall, items: Iterator[T]) -> Iterator[T]:
    """The items, each made inside the call, which never leaks to the reader between two of them."""
    with closing(call), closing(items):  # type: ignore[type-var]
        while True:
            token = current_call.set(call)
            try:
                item = next(items, _END)
            finally:
                current_call.reset(token)
            if item is _END:
                return
            yield item


async def astepped(call: GraphCall, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """`stepped` in a loop."""
    with closing(call):
        async with aclosing(items):  # type: ignore[type-var]
            while True:
                token = current_call.set(call)
                try:
                    item = await anext(items, _END)
                finally:
                    current_call.reset(token)
                if item is _END:
                    return
                yield item


hide_from_stack_levels(globals())
