"""Tests of `shims.langchain_agents` on the installed packages, and with a private name missing."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, create_retriever_tool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from pydantic import BaseModel
from support.own_leaves import Chat

from teola_plugin.shims import langchain_agents as shims


@tool
def add(a: int, b: int = 1) -> int:
    """The sum."""
    return a + b


@tool
def marked(a: int, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
    """Its call."""
    return tool_call_id


class Model(Chat):
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind()


class Docs(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(query)]


class Passes(AgentMiddleware[Any, Any]):
    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request)


class Answer(BaseModel):
    text: str


def bare() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: state)
    graph.add_edge(START, "model")
    return graph.compile()


def test_agent_model_reads_model_tools_and_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    found = shims.agent_model(create_agent(model, [add], system_prompt="Be kind."))
    assert found is not None and found.model is model and found.tools == (add,) and found.node == "model"
    assert found.system_message.text == "Be kind." and not found.wrapped and not found.structured
    more = shims.agent_model(create_agent(model, middleware=[Passes()], response_format=Answer))
    assert more is not None and more.wrapped and more.structured and more.system_message is None
    assert shims.agent_model(bare()) is None and shims.agent_model(object()) is None
    assert shims.agent_model(create_react_agent(model, [add])) is None
    monkeypatch.setattr(shims, "_closure", lambda function: {"model": model})
    assert shims.agent_model(create_agent(model, [add])) is None


def test_react_model_returns_the_chain_of_the_agent_node(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = create_react_agent(Model(), [add], prompt="Be kind.")
    found = shims.react_model(graph)
    assert found is not None and found.node == "agent"
    message = found.chain.invoke({"messages": [HumanMessage("hi")]})
    assert isinstance(message, AIMessage)
    assert found.prompt == "Be kind." and found.takes_messages
    hooked = shims.react_model(create_react_agent(Model(), [add], pre_model_hook=lambda state: state))
    assert hooked is not None and hooked.prompt is None and not hooked.takes_messages
    chosen = shims.react_model(create_react_agent(lambda state, runtime: Model(), [add]))
    assert chosen is not None and chosen.chain is None
    assert shims.react_model(bare()) is None
    monkeypatch.setattr(shims, "_closure", lambda function: {})
    assert shims.react_model(graph) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_chain_with_history_returns_what_its_functions_return(monkeypatch: pytest.MonkeyPatch) -> None:
    history = RunnableWithMessageHistory(Model(), lambda session_id: InMemoryChatMessageHistory())
    inner: Any = history.bound
    functions = [vars(inner.bound.last.bound)[name] for name in ("func", "afunc")]

    chains = [shims.chain_with_history(function) for function in functions]

    assert chains[0] is functions[0]("text")
    assert chains[1] is asyncio.run(functions[1]("text"))
    assert shims.chain_with_history(print) is None
    monkeypatch.setattr(shims, "_closure", lambda function: {})
    assert shims.chain_with_history(functions[0]) is None


def test_retriever_of_returns_the_retriever_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Docs()
    made = create_retriever_tool(docs, "docs", "Documents.")
    assert shims.retriever_of(made) is docs and shims.retriever_of(add) is None and shims.retriever_of(None) is None
    assert shims.retriever_of(made.model_copy(update={"coroutine": None})) is None
    assert shims.retriever_of(made.model_copy(update={"func": add.func})) is None  # type: ignore[attr-defined]
    monkeypatch.setattr(shims, "_closure", lambda function: {})
    assert shims.retriever_of(made) is None


def test_call_arguments_validates_and_fills_in_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"a": "2"}
    assert shims.call_arguments(add, args) == ((), {"a": 2, "b": 1}) and args == {"a": "2"}
    monkeypatch.delattr(BaseTool, "_to_args_and_kwargs")
    assert shims.call_arguments(add, args) is None


def test_tool_node_parts_reads_tools_and_injected_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shims.tool_node_parts(ToolNode([add, marked]))
    assert found is not None and list(found.tools) == ["add", "marked"]
    assert found.injected == {"marked"} and not found.wrapped
    wrapped = shims.tool_node_parts(ToolNode([add], wrap_tool_call=lambda request, execute: execute(request)))
    assert wrapped is not None and wrapped.wrapped
    assert shims.tool_node_parts(RunnableLambda(lambda x: x)) is None
    assert shims.tool_node_parts(type("Mine", (ToolNode,), {})([add])) is None
    node = ToolNode([add])
    monkeypatch.delattr(StructuredTool, "_injected_args_keys")
    monkeypatch.delattr(BaseTool, "_injected_args_keys", raising=False)
    fresh = StructuredTool.from_function(lambda a: a, name="fresh", description="Nobody knows of it.")
    gone = shims.tool_node_parts(ToolNode([fresh]))
    assert gone is not None and gone.injected == {"fresh"}
    monkeypatch.delattr(ToolNode, "_run_one")
    assert shims.tool_node_parts(node) is None


def test_tool_calls_in_reads_all_forms_of_input(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ToolNode([add])
    call: Any = {"name": "add", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    messages = [HumanMessage("hi"), AIMessage("", tool_calls=[call])]
    sent = {"__type": "tool_call_with_context", "tool_call": call, "state": {}}

    inputs: list[Any] = [messages, {"messages": messages}, [call], sent]
    results = [shims.tool_calls_in(node, one) for one in inputs]

    assert [[one["args"] for one in calls] for calls in results] == [[{"a": 1}]] * 4
    assert shims.tool_calls_in(node, {"messages": []}) == []
    monkeypatch.delattr(ToolNode, "_parse_input")
    assert shims.tool_calls_in(node, messages) == []


def test_tool_node_with_wraps_each_tool_call() -> None:
    seen: list[Any] = []

    def around(run_one: Any) -> Any:
        return lambda call, *args: seen.append(call["id"]) or run_one(call, *args)

    def in_loop(run_one: Any) -> Any:
        async def run(call: Any, *args: Any) -> Any:
            seen.append(call["id"])
            return await run_one(call, *args)

        return run

    node = ToolNode([add, marked], name="mine", tags=["t"])
    made = shims.tool_node_with(node, around, in_loop)
    assert made.tools_by_name == {"add": add, "marked": marked}
    assert (made.get_name(), made.tags, type(made)) == (node.get_name(), node.tags, ToolNode)
    calls = [{"name": "add", "args": {"a": 3, "b": 4}, "id": name, "type": "tool_call"} for name in ("x", "y")]
    graph = StateGraph(MessagesState)
    graph.add_node("tools", made)
    graph.add_edge(START, "tools")
    given = {"messages": [AIMessage("", tool_calls=calls)]}
    answers = graph.compile().invoke(given)["messages"][1:]
    assert [one.content for one in answers] == ["7", "7"] and sorted(seen) == ["x", "y"]
    assert [one.content for one in asyncio.run(graph.compile().ainvoke(given))["messages"][1:]] == ["7", "7"]
    assert sorted(seen) == ["x", "x", "y", "y"]


def test_graph_keys_returns_only_keys_of_langgraph() -> None:
    kept: list[Any] = []
    graph = StateGraph(MessagesState)
    graph.add_node("look", RunnableLambda(lambda state, config: kept.append(config) or state))
    graph.add_edge(START, "look")
    graph.compile().invoke({"messages": []}, {"configurable": {"mine": 1}})
    found = shims.graph_keys(kept[0]["configurable"])
    assert "__pregel_runtime" in found and "__pregel_scratchpad" in found and "mine" not in found
    assert shims.graph_keys({"mine": 1}) == []
