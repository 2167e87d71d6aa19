"""Tests of agents that ask for approval between an answer and its tools: no tool starts before the approval."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Annotated, Any

import langgraph.config
import pytest
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware, ToolCallLimitMiddleware
from langchain_core.callbacks import dispatch_custom_event
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import InjectedToolArg, InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, InjectedStore, ToolNode, ToolRuntime, tools_condition
from langgraph.types import Command, interrupt
from langgraph.types import interrupt as ask
from support.agents import INPUT, World, agent, react, world
from support.writing_llm import call

from teola_plugin.adapters.langgraph.agents.agent_tools import agent_tools, reach, watch_tool_node
from teola_plugin.adapters.langgraph.agents.tool_inputs import ToolPlanner
from teola_plugin.langchain import read_only


@pytest.fixture
def at() -> Iterator[World]:
    with world() as made:
        yield made


def reads(at: World) -> Any:
    @read_only
    @tool
    def weather(city: str) -> str:
        """The weather."""
        at.ran.append(city)
        return f"sunny in {city}"

    return weather


def eager(at: World, graph: Any) -> Any:
    return agent_tools(graph, ToolPlanner(at.pool))


class Wraps(AgentMiddleware[Any, Any]):
    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        return handler(request)


class WrapsOnLoop(AgentMiddleware[Any, Any]):
    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


class After(AgentMiddleware[Any, Any]):
    def after_model(self, state: Any, runtime: Any) -> Any:
        return None


class Asks(AgentMiddleware[Any, Any]):
    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        made = handler(request)
        ask("is that well?")
        return made


class Passes(AgentMiddleware[Any, Any]):
    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request)

    def before_model(self, state: Any, runtime: Any) -> Any:
        return None

    def after_agent(self, state: Any, runtime: Any) -> Any:
        return None


@pytest.mark.parametrize(
    "middleware",
    [
        HumanInTheLoopMiddleware(interrupt_on={"weather": True}),
        ToolCallLimitMiddleware(thread_limit=1),
        Wraps(),
        WrapsOnLoop(),
        After(),
        Asks(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_middleware_that_may_hold_back_calls_disables_tool_prefetch(at: World, middleware: Any) -> None:
    assert eager(at, agent(at.model, [reads(at)], middleware=[middleware], checkpointer=InMemorySaver())) is None


def test_harmless_middleware_allows_tool_prefetch(at: World) -> None:
    made = eager(at, agent(at.model, [reads(at)], middleware=[Passes()]))
    assert set(made.tools) == {"weather"} and made.models == {"model"} and made.nodes == {"tools"}


@pytest.mark.parametrize("make", [agent, react])
@pytest.mark.parametrize(
    "stops",
    [
        {"interrupt_before": ["tools"]},
        {"interrupt_after": "*"},
        {"interrupt_before": "*"},
        {"interrupt_after": ["{model}"]},
    ],
)
def test_interrupts_around_tools_disable_tool_prefetch(at: World, make: Any, stops: dict[str, Any]) -> None:
    model = "model" if make is agent else "agent"
    stops = {key: [model] if value == ["{model}"] else value for key, value in stops.items()}
    plain, paused = make(at.model, [reads(at)]), make(at.model, [reads(at)], checkpointer=InMemorySaver(), **stops)
    assert eager(at, paused) is None
    found = eager(at, plain)
    assert found.is_interrupted(None, *stops.values()) and not found.is_interrupted(None, [], ["elsewhere"])


def test_interrupt_before_passed_to_invoke_disables_tool_prefetch(at: World) -> None:
    at.writes(call("weather", city="Rome"))
    fast = at.fast(agent(at.model, [reads(at)], checkpointer=InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "1"}}
    fast.invoke(INPUT, config, interrupt_before=["tools"])
    assert at.ran == [] and not any(step.is_prefetched for step in fast.last_trace().steps)
    made = fast.invoke(None, config)["messages"]
    assert at.ran == ["Rome"] and made[2].content == "sunny in Rome" and made[-1].content == "done"


def test_tool_runs_only_after_human_approval(at: World) -> None:
    """The whole way: an answer, the question, the tool."""
    at.writes(call("weather", city="Rome"))
    middleware = [HumanInTheLoopMiddleware(interrupt_on={"weather": True})]
    fast = at.fast(agent(at.model, [reads(at)], middleware=middleware, checkpointer=InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "1"}}
    assert "__interrupt__" in fast.invoke(INPUT, config) and at.ran == []
    fast.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert at.ran == ["Rome"]


def test_tool_node_with_wrapper_or_own_class_disables_tool_prefetch(at: World) -> None:
    node = ToolNode([reads(at)], wrap_tool_call=lambda request, execute: execute(request))
    assert eager(at, react(at.model, node)) is None
    assert eager(at, react(at.model, ToolNode([reads(at)], handle_tool_errors=lambda e: "no"))) is not None
    mine = type("Mine", (ToolNode,), {})([reads(at)])
    assert eager(at, react(at.model, mine)) is None, "a class of one's own may do anything"


def test_post_model_hook_disables_tool_prefetch(at: World) -> None:
    assert eager(at, react(at.model, [reads(at)], post_model_hook=lambda state: {})) is None
    found = eager(at, react(at.model, [reads(at)], pre_model_hook=lambda state: {}))
    assert found.models == {"agent"}


# ---------------------------------------------------------------- graphs by hand


def built(at: World, think: Any, **more: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("act", ToolNode([reads(at)]))
    graph.add_edge(START, "think")
    for name, node in more.items():
        graph.add_node(name, node)
    return graph


def answers(state: MessagesState) -> Any:
    return {"messages": []}


def asks_itself(state: MessagesState) -> Any:
    return {"messages": [ask("may I?")]}


def test_interrupting_node_before_tools_disables_tool_prefetch(at: World) -> None:
    graph = built(at, answers, human=asks_itself)
    graph.add_edge("think", "human")
    graph.add_conditional_edges("human", tools_condition, {"tools": "act", "__end__": "__end__"})
    assert eager(at, graph.compile()) is None


def test_interrupting_node_on_a_possible_path_disables_tool_prefetch(at: World) -> None:
    for ends in ({"tools": "act", "human": "human"}, None):
        graph = built(at, answers, human=asks_itself)
        graph.add_conditional_edges("think", lambda state: "tools", ends)
        assert eager(at, graph.compile()) is None, ends
    graph = built(at, answers, human=asks_itself)
    graph.add_conditional_edges("think", lambda state: "tools", {"tools": "act"})
    assert eager(at, graph.compile()) is not None


def test_interrupting_model_node_disables_tool_prefetch(at: World) -> None:
    graph = built(at, asks_itself)
    graph.add_conditional_edges("think", tools_condition, {"tools": "act", "__end__": "__end__"})
    assert eager(at, graph.compile()) is None
    graph = StateGraph(MessagesState)
    graph.add_node("think", lambda state: Command(goto="act"), destinations=("act",))
    graph.add_node("act", ToolNode([reads(at)]))
    graph.add_edge(START, "think")
    assert eager(at, graph.compile()).models == {"think"}


def test_graph_without_tools_has_no_tool_prefetch(at: World) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("think", answers)
    graph.add_edge(START, "think")
    assert eager(at, graph.compile()) is None and eager(at, object()) is None
    assert watch_tool_node("no node", id, id) == "no node"


# ---------------------------------------------------------------- tools


@tool
def with_state(x: int, state: Annotated[dict[str, Any], InjectedState]) -> int:
    """State."""
    return x


@tool
def with_store(x: int, store: Annotated[Any, InjectedStore()]) -> int:
    """A store."""
    return x


@tool
def with_id(x: int, tool_call_id: Annotated[str, InjectedToolCallId]) -> int:
    """The call's id."""
    return x


@tool
def with_own(x: int, user: Annotated[str, InjectedToolArg]) -> int:
    """Something of the caller's."""
    return x


@tool
def with_runtime(x: int, runtime: ToolRuntime) -> int:
    """The runtime."""
    return x


@tool
def with_config(x: int, config: RunnableConfig) -> int:
    """The config."""
    return x


@tool
def with_interrupt(x: int) -> int:
    """Asks."""
    return int(interrupt("may I?"))


@tool
def with_alias(x: int) -> int:
    """Asks under another name."""
    return int(ask("may I?"))


@tool
def harmless(x: int) -> int:
    """Nothing."""
    return x


UNFIT = [with_state, with_store, with_id, with_own, with_runtime, with_config, with_interrupt, with_alias]


def test_tools_with_injected_or_runtime_arguments_are_not_prefetched(at: World) -> None:
    tools = [read_only(one) for one in (*UNFIT, harmless)]
    found = eager(at, agent(at.model, tools))
    assert [name for name, one in found.tools.items() if one.can_be_prefetched] == ["harmless"]
    assert not {one.name for one in UNFIT} - {"with_config"} & set(found.tools)


def test_tools_of_the_same_name_are_not_prefetched(at: World) -> None:
    graph = built(at, answers, also=ToolNode([reads(at)]))
    graph.add_conditional_edges("think", tools_condition, {"tools": "act", "__end__": "also"})
    assert set(eager(at, graph.compile()).tools) == set()


# ---------------------------------------------------------------- looking for interrupts


def helper() -> Any:
    return ask("?")


class Callable_:
    def __call__(self, state: Any) -> Any:
        return interrupt(state)

    def method(self, state: Any) -> Any:
        return [interrupt(one) for one in state]


def holds(function: Any) -> Any:
    def outer(state: Any) -> Any:
        return function(state)

    return outer


@pytest.mark.parametrize(
    "obj",
    [
        helper,
        Callable_(),
        Callable_().method,
        functools.partial(holds, helper),
        holds(helper),
        RunnableLambda(helper),
        RunnableLambda(lambda x: x) | RunnableLambda(helper),
        {"a": [helper]},
        functools.wraps(helper)(lambda: 1),
        lambda: helper(),
    ],
)
def test_object_that_contains_interrupting_code_asks_human(obj: Any) -> None:
    assert reach(obj).asks_human


def test_code_without_interrupt_does_not_ask_human() -> None:
    def stops() -> Any:
        try:
            return 1
        except KeyboardInterrupt:
            return 2

    assert not any(
        reach(one).asks_human for one in [stops, RunnableLambda(lambda x: x), [], None, 3, with_interrupt, dict]
    )
    many: Any = [[i] for i in range(5000)]
    assert reach(many).asks_human, "nobody knows"


# ---------------------------------------------------------------- looking for what only a place has


def writes_down(text: str) -> None:
    get_stream_writer()(text)


class Service:
    def __init__(self) -> None:
        self.chain = RunnableLambda(lambda x: x)

    def answer(self, text: str) -> Any:
        return self.chain.invoke(text)


SERVICE, CHAIN = Service(), RunnableLambda(lambda x: x)


@pytest.mark.parametrize(
    ("function", "places", "tells"),
    [
        (lambda x: writes_down(x), True, False),
        (lambda x: langgraph.config.get_store(), True, False),
        (lambda x: ensure_config(), True, False),
        (lambda x: CHAIN.invoke(x), False, True),
        (lambda x: SERVICE.answer(x), False, True),
        (SERVICE.answer, False, True),
        (lambda x: dispatch_custom_event("x", x), False, True),
        (lambda x: FakeListChatModel(responses=[x]).invoke(x), False, True),
        (lambda x, chain=CHAIN: chain.invoke(x), False, True),
        (lambda x: Command(update={"x": x}), False, False),
        (lambda x: json.dumps(x), False, False),
        (str, False, False),
    ],
)
def test_reach_reports_runtime_context_and_events_of_code(function: Any, places: bool, tells: bool) -> None:
    found = reach(function)
    assert (found.asks_human, found.needs_runtime_context, found.has_events) == (False, places, tells)
