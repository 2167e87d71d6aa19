"""Agents that a node calls: the first call of the agent's model is prefetched if its messages are known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import create_react_agent
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.slow_answers import SlowAnswers

from teola_plugin import accelerate

Build = Callable[[Any], Any]
LATENCY_S = 0.2


class State(TypedDict, total=False):
    """The state of the outer graph."""

    topic: str
    facts: str
    style: str
    report: str


@tool
def look_up(word: str) -> str:
    """Look up a word."""
    return f"{word} is a word"


class Answers(SlowAnswers):
    """Calls a tool in the first answer of an agent."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a call of the tool for a request with tools that has no result yet, else a text."""
        last = body["messages"][-1]
        if last["role"] != "tool" and body.get("tools"):
            call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "oats"}'}}
            return {"content": "", "tool_calls": [call]}
        return {"content": f"answer to {last['content']}"}


answers = Answers(LATENCY_S)


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub(answers) as server:
        yield server


def outer_graph(model: Any, *agents: Any, messages: Callable[[State], list[Any]]) -> Any:
    """Return a graph whose nodes call these agents, one after the other, and then the model."""
    first, second = agents

    def research(state: State) -> State:
        return {"facts": first.invoke({"messages": messages(state)})["messages"][-1].content}

    def judge(state: State) -> State:
        result = second.invoke({"messages": [("user", f"style for {state['topic']}")]})
        return {"style": result["messages"][-1].content}

    def write(state: State) -> State:
        return {"report": str(model.invoke(f"write {state['facts']} {state['style']}").content)}

    builder = StateGraph(State)
    previous = START
    for node in (research, judge, write):
        builder.add_node(node.__name__, node)
        builder.add_edge(previous, node.__name__)
        previous = node.__name__
    return builder.compile()


def pairs(model: Any) -> Any:
    ann = create_agent(model, [], system_prompt="You are Ann.")
    bob = create_agent(model, [look_up], system_prompt="You are Bob.")
    return outer_graph(model, ann, bob, messages=lambda state: [("user", f"facts on {state['topic']}")])


def messages_and_dictionaries(model: Any) -> Any:
    agents = [create_agent(model, []), create_agent(model, [look_up], name="judge")]

    def messages(state: State) -> list[Any]:
        return [HumanMessage(content="be brief"), {"role": "user", "content": f"facts on {state['topic']}"}]

    return outer_graph(model, *agents, messages=messages)


def react_agents(model: Any) -> Any:
    ann = create_react_agent(model, [], prompt="You are {Ann}.")
    bob = create_react_agent(model, [look_up], prompt=SystemMessage("You are Bob."))
    return outer_graph(model, ann, bob, messages=lambda state: [("user", f"facts on {state['topic']}")])


def react_agents_without_a_prompt(model: Any) -> Any:
    agents = [create_react_agent(model, []), create_react_agent(model, [look_up], name="judge")]

    def messages(state: State) -> list[Any]:
        return [HumanMessage(content="be brief"), {"role": "user", "content": f"facts on {state['topic']}"}]

    return outer_graph(model, *agents, messages=messages)


def react_agents_with_a_template(model: Any) -> Any:
    template = ChatPromptTemplate.from_messages([("system", "You are Ann."), ("placeholder", "{messages}")])
    agents = [create_react_agent(model, tools, prompt=template) for tools in ([], [look_up])]
    return outer_graph(model, *agents, messages=lambda state: [("user", f"facts on {state['topic']}")])


def chains_as_nodes(model: Any) -> Any:
    """Build a graph whose nodes are chains. They run in the way in which the graph is called."""
    facts = ChatPromptTemplate.from_template("facts on {topic}") | model | StrOutputParser()
    style = ChatPromptTemplate.from_template("style for {topic}") | model | StrOutputParser()
    builder = StateGraph(State)
    builder.add_node("research", RunnableParallel(facts=facts))
    builder.add_node("judge", RunnableParallel(style=style))
    builder.add_edge(START, "research")
    builder.add_edge("research", "judge")
    return builder.compile()


def behind_an_agent_with_tools(model: Any) -> Any:
    """Build a graph with a node after an agent whose tools may write something."""
    agents = [create_agent(model, [look_up]) for _ in range(2)]
    return outer_graph(model, *agents, messages=lambda state: [("user", f"facts on {state['topic']}")])


def with_middleware(model: Any) -> Any:
    @wrap_model_call
    def shout(request: Any, handler: Any) -> Any:
        return handler(request.override(messages=[HumanMessage("LOUD"), *request.messages]))

    agents = [create_agent(model, [look_up], middleware=[shout]) for _ in range(2)]
    return outer_graph(model, *agents, messages=lambda state: [("user", f"facts on {state['topic']}")])


def behind_a_react_agent_with_tools(model: Any) -> Any:
    agents = [create_react_agent(model, [look_up]) for _ in range(2)]
    return outer_graph(model, *agents, messages=lambda state: [("user", f"facts on {state['topic']}")])


def with_a_hook(model: Any) -> Any:
    def shorten(state: Any) -> Any:
        return {"llm_input_messages": state["messages"][-1:]}

    agents = [create_react_agent(model, [], pre_model_hook=shorten) for _ in range(2)]
    messages = [HumanMessage("hello"), HumanMessage("oats")]
    return outer_graph(model, *agents, messages=lambda state: messages)


def with_a_function_as_prompt(model: Any) -> Any:
    def prompt(state: Any) -> list[Any]:
        return [SystemMessage(f"{len(state['messages'])} messages"), *state["messages"]]

    agents = [create_react_agent(model, [], prompt=prompt) for _ in range(2)]
    return outer_graph(model, *agents, messages=lambda state: [("user", state["topic"])])


def with_a_chosen_model(model: Any) -> Any:
    agents = [create_react_agent(lambda state, runtime: model, []) for _ in range(2)]
    return outer_graph(model, *agents, messages=lambda state: [("user", state["topic"])])


def with_answers_before(model: Any) -> Any:
    agents = [create_agent(model, [look_up]) for _ in range(2)]
    broken: Any = {"name": "look_up", "args": "{", "id": "9", "error": "no JSON", "type": "invalid_tool_call"}

    def messages(state: State) -> list[Any]:
        return [("user", "hello"), AIMessage("", invalid_tool_calls=[broken]), ("user", state["topic"])]

    return outer_graph(model, *agents, messages=messages)


REACT = (react_agents, react_agents_without_a_prompt, react_agents_with_a_template)
UNREAD_REACT = (behind_a_react_agent_with_tools, with_a_hook, with_a_function_as_prompt, with_a_chosen_model)


def called(stub: OpenAIStub, build: Build, change: Callable[[Any], Any], way: str) -> tuple[Any, list[str], int]:
    """Return the result of a call, the bodies that the server got, and how many it answered at the same time."""
    model = ChatOpenAI(base_url=stub.base_url, api_key="k", model=MODEL, temperature=0.0)  # type: ignore[arg-type]
    graph = change(build(model))
    stub.requests.clear()
    answers.most_at_once = 0
    if way == "invoke":
        result = graph.invoke({"topic": "oats"})
    elif way == "ainvoke":
        result = asyncio.run(graph.ainvoke({"topic": "oats"}))
    else:
        result = list(graph.stream({"topic": "oats"}, stream_mode=way))
    return result, sorted(map(str, stub.generations)), answers.most_at_once


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "updates"])
@pytest.mark.parametrize("build", [pairs, messages_and_dictionaries, chains_as_nodes, *REACT])
def test_first_call_of_an_agent_in_a_node_overlaps(stub: OpenAIStub, build: Build, way: str) -> None:
    expected = called(stub, build, lambda graph: graph, way)

    result = called(stub, build, accelerate, way)

    assert result[:2] == expected[:2]
    assert (expected[2], result[2]) == (1, 2)


@pytest.mark.parametrize("way", ["ainvoke", "updates"])
@pytest.mark.parametrize("build", [behind_an_agent_with_tools, with_middleware, with_answers_before, *UNREAD_REACT])
def test_agent_call_with_uncertain_messages_is_not_prefetched(stub: OpenAIStub, build: Build, way: str) -> None:
    expected = called(stub, build, lambda graph: graph, way)

    result = called(stub, build, accelerate, way)

    assert result == expected


@pytest.mark.parametrize("create", [create_agent, create_react_agent])
def test_error_of_the_first_agent_is_the_originals(stub: OpenAIStub, create: Any) -> None:
    def build(model: Any) -> Any:
        failing = ChatOpenAI(base_url=f"{stub.base_url}/nowhere", api_key="k", model=MODEL, max_retries=0)  # type: ignore[arg-type]
        agents = [create(failing.bind(status=1), []), create(model, [])]
        return outer_graph(model, *agents, messages=lambda state: [("user", state["topic"])])

    errors = []
    for change in (lambda graph: graph, accelerate):
        with pytest.raises(Exception) as raised:
            called(stub, build, change, "invoke")
        errors.append((type(raised.value), str(raised.value)))

    assert errors[0] == errors[1]
