"""Tools of agents that call models: certain calls are prefetched when the tool is called, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.tools import InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, interrupt
from pydantic import SecretStr
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.slow_answers import SlowAnswers

from teola_plugin import accelerate

LATENCY_S = 0.1
KINDS = ("history", "price", "taste")


class Answers(SlowAnswers):
    """Calls each tool once in the first answer of an agent."""

    refused = ""
    """Requests with this text are refused."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        text = str(body["messages"][-1]["content"])
        if self.refused and self.refused in text:
            return {"status": 400}
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            return {"content": "", "tool_calls": [_call_of(one["function"]) for one in body["tools"]]}
        return {"content": f"answer to {text}"}


def _call_of(function: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool with "oats" for its first argument."""
    argument = next(iter(function["parameters"]["properties"]))
    return {
        "id": f"call-{function['name']}",
        "type": "function",
        "function": {"name": function["name"], "arguments": f'{{"{argument}": "oats"}}'},
    }


answers = Answers(LATENCY_S)
Build = Callable[[ChatOpenAI], Any]


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub(answers) as server:
        yield server


def loop_tool(model: ChatOpenAI) -> Any:
    @tool
    def summarize(topic: str, style: str = "short") -> str:
        """Summarize what is known of a topic."""
        notes = []
        for kind in KINDS:
            notes.append(str(model.invoke(f"{kind} of {topic}, {style}").content))
        return " ".join(notes)

    return summarize


def async_tool(model: ChatOpenAI) -> Any:
    @tool
    async def summarize(topic: str) -> str:
        """Summarize what is known of a topic."""
        return " ".join([str((await model.ainvoke(f"{kind} of {topic}")).content) for kind in KINDS])

    return summarize


def react_agent(model: ChatOpenAI) -> Any:
    return create_react_agent(model, [loop_tool(model)])


def agent(model: ChatOpenAI) -> Any:
    return create_agent(model, [loop_tool(model)])


def agent_with_an_async_tool(model: ChatOpenAI) -> Any:
    return create_agent(model, [async_tool(model)])


def old_react_agent(model: ChatOpenAI) -> Any:
    """The tool node gets all messages, and reads the calls from the last one."""
    return create_react_agent(model, [loop_tool(model)], version="v1")


def graph_with_a_tool_node(model: ChatOpenAI) -> Any:
    tools = [loop_tool(model)]

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.bind_tools(tools).invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.add_node("tools", ToolNode(tools))
    builder.add_edge(START, "ask")
    builder.add_conditional_edges("ask", tools_condition)
    builder.add_edge("tools", "ask")
    return builder.compile()


def tool_with_feedback(model: ChatOpenAI) -> Any:
    """Each call needs the answer to the one before."""

    @tool
    def refine(topic: str) -> str:
        """Refine a text on a topic."""
        text = topic
        for kind in KINDS:
            text = str(model.invoke(f"{kind} of {text}").content)
        return text

    return create_agent(model, [refine])


def tool_with_an_early_end(model: ChatOpenAI) -> Any:
    @tool
    def find(topic: str) -> str:
        """Find the first answer that will do."""
        for kind in KINDS:
            text = str(model.invoke(f"{kind} of {topic}").content)
            if "answer" in text:
                return text
        return "nothing"

    return create_agent(model, [find])


def tool_with_an_injected_argument(model: ChatOpenAI) -> Any:
    @tool
    def summarize(topic: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Summarize what is known of a topic."""
        return " ".join([str(model.invoke(f"{kind} of {topic}").content) for kind in KINDS]) + tool_call_id

    return create_agent(model, [summarize])


def tool_behind_middleware(model: ChatOpenAI) -> Any:
    """Middleware answers in place of the tool."""

    @wrap_tool_call
    def refuse(request: Any, handler: Any) -> Any:
        from langchain_core.messages import ToolMessage

        return ToolMessage("refused", tool_call_id=request.tool_call["id"])

    return create_agent(model, [loop_tool(model)], middleware=[refuse])


def tool_with_arguments_that_are_refused(model: ChatOpenAI) -> Any:
    @tool
    def summarize(number: int) -> str:
        """Summarize what is known of a number."""
        return " ".join([str(model.invoke(f"{kind} of {number}").content) for kind in KINDS])

    return create_agent(model, [summarize])


GAINING = (react_agent, agent, agent_with_an_async_tool, old_react_agent, graph_with_a_tool_node)
IN_PLACE = (
    tool_with_feedback,
    tool_with_an_early_end,
    tool_with_an_injected_argument,
    tool_behind_middleware,
    tool_with_arguments_that_are_refused,
)
WAYS = ("invoke", "ainvoke", "updates", "messages")


class Requests(NamedTuple):
    """What one call of an agent gave and asked for."""

    result: Any
    bodies: list[str]
    most_at_once: int


def called(stub: OpenAIStub, build: Build, way: str, change: Callable[[Any], Any], **options: Any) -> Requests:
    """Call an agent, changed or not. An error is its result."""
    model = ChatOpenAI(base_url=stub.base_url, api_key=SecretStr("k"), model=MODEL, temperature=0.0, max_retries=0)
    graph = change(build(model), **options)
    stub.requests.clear()
    answers.most_at_once = 0
    graph_input: Any = {"messages": [("user", "hi")]}
    try:
        if way == "invoke":
            result = _shown(graph.invoke(graph_input)["messages"])
        elif way == "ainvoke":
            result = _shown(asyncio.run(graph.ainvoke(graph_input))["messages"])
        elif way == "updates":
            steps = list(graph.stream(graph_input, stream_mode="updates"))
            result = [(name, _shown(update["messages"])) for one in steps for name, update in one.items()]
        else:
            pieces = list(graph.stream(graph_input, stream_mode="messages"))
            result = [(piece.content, metadata["langgraph_node"]) for piece, metadata in pieces]
    except Exception as error:
        result = type(error), str(error)
    return Requests(result, sorted(map(str, stub.generations)), answers.most_at_once)


def _shown(messages: list[Any]) -> list[Any]:
    return [(type(one).__name__, one.content, getattr(one, "tool_calls", None)) for one in messages]


def original(graph: Any) -> Any:
    return graph


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", GAINING)
def test_calls_of_a_tool_overlap(stub: OpenAIStub, build: Build, way: str) -> None:
    if build is agent_with_an_async_tool and way != "ainvoke":
        pytest.skip("its tool runs on a loop only")
    expected = called(stub, build, way, original)

    result = called(stub, build, way, accelerate)

    assert result[:2] == expected[:2]
    assert (expected.most_at_once, result.most_at_once) == (1, 3)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "updates"])
@pytest.mark.parametrize("build", IN_PLACE)
def test_uncertain_calls_of_a_tool_are_not_prefetched(stub: OpenAIStub, build: Build, way: str) -> None:
    expected = called(stub, build, way, original)

    result = called(stub, build, way, accelerate)

    assert result == expected


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_error_of_a_call_in_a_tool_is_the_originals(stub: OpenAIStub, way: str) -> None:
    results = []
    for change in (original, accelerate):
        answers.refused = "price of"
        try:
            results.append(called(stub, react_agent, way, change))
        finally:
            answers.refused = ""

    assert results[0].result == results[1].result
    assert "it refuses" in str(results[0].result)


def test_prefetched_read_only_tool_makes_its_calls_once(stub: OpenAIStub) -> None:
    expected = called(stub, agent, "invoke", original)

    result = called(stub, agent, "invoke", accelerate, read_only=["summarize"])

    assert result[:2] == expected[:2]


def test_tool_that_asks_a_person_resumes_with_the_originals_calls(stub: OpenAIStub) -> None:
    def build(model: ChatOpenAI) -> Any:
        @tool
        def summarize(topic: str) -> str:
            """Summarize what a person agrees to."""
            drafts = [str(model.invoke(f"{kind} of {topic}").content) for kind in KINDS]
            agreed = interrupt("good?")
            return " ".join([str(model.invoke(f"finish {draft} {agreed}").content) for draft in drafts])

        return create_agent(model, [summarize], checkpointer=InMemorySaver())

    results = []
    for change in (original, accelerate):
        model = ChatOpenAI(base_url=stub.base_url, api_key=SecretStr("k"), model=MODEL, temperature=0.0)
        graph = change(build(model))
        config: Any = {"configurable": {"thread_id": "1"}}
        stub.requests.clear()
        graph.invoke({"messages": [("user", "hi")]}, config)
        final = graph.invoke(Command(resume="yes"), config)
        results.append((_shown(final["messages"]), sorted(map(str, stub.generations))))

    assert results[0] == results[1]


def test_explanation_names_the_tool_whose_calls_start_together(stub: OpenAIStub) -> None:
    model = ChatOpenAI(base_url=stub.base_url, api_key=SecretStr("k"), model=MODEL)

    explained = accelerate(agent(model)).explain()

    assert "summarize: its calls of models that do not need each other's answers start together" in explained
