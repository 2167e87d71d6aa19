"""Agents of `create_agent` and `create_react_agent`, and their tools."""

from __future__ import annotations

from typing import Annotated, Any

from langchain.agents import AgentState, create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.tools import ToolRuntime
from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, StructuredTool, create_retriever_tool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, InjectedStore, ToolNode, create_react_agent, tools_condition
from langgraph.store.base import BaseStore
from langgraph.types import Command
from pydantic import BaseModel

from support.graphs.case import Turn, case
from support.graphs.chains import answering
from support.graphs.kit import Kit, called, joined


def passages(kit: Kit) -> Any:
    """Return the pool's retriever as a tool, made by LangChain's own function."""
    return create_retriever_tool(kit.retriever, "passages", "Searches passages.")


def adder(kit: Kit) -> Any:
    """Return a tool that adds two numbers and counts its calls."""

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        kit.note(f"add {a} {b}")
        return a + b

    return add


ADD = "Add them. " + called("add", a=2, b=3)
SEARCH = "Look it up. " + called("passages", query="what is a lambda?")


@case({"messages": ADD}, {"messages": "and now?"}, {"messages": [("user", SEARCH)]})
def agent(kit: Kit) -> Any:
    return create_agent(kit.agent, [adder(kit), passages(kit)], system_prompt="Be brief.", checkpointer=kit.saver)


THREE = called("passages", query="class") + called("passages", query="with") + called("add", a=1, b=1)


@case({"messages": "All of it: " + THREE}, races=True)
def parallel_tool_calls(kit: Kit) -> Any:
    return create_agent(kit.agent, [adder(kit), passages(kit)], checkpointer=kit.saver)


@case({"messages": "Follow: " + called("follow", to="one")})
def tool_after_tool(kit: Kit) -> Any:
    """Build an agent whose model calls another tool after each result of a tool."""
    retriever = kit.retriever

    @tool
    def follow(to: str) -> str:
        """Goes on."""
        kit.note(f"follow {to}")
        return called("look", at="import") if to == "one" else "the end"

    @tool
    def look(at: str) -> str:
        """Looks, then goes on."""
        return joined(retriever.invoke(at)) + called("follow", to="two")

    return create_agent(kit.agent, [follow, look], checkpointer=kit.saver, name="follower")


@case({"messages": "Both: " + called("wait", text="a") + called("either", text="b")}, only="async", races=True)
def async_tools(kit: Kit) -> Any:
    llm = kit.llm

    @tool
    async def wait(text: str) -> str:
        """Asks the model."""
        return str((await llm.ainvoke(f"wait for {text}")).content)

    def either(text: str) -> str:
        """Sync or async."""
        return f"sync {text}"

    async def aeither(text: str) -> str:
        return f"async {(await llm.ainvoke(text)).content}"

    both = StructuredTool.from_function(either, aeither)
    return create_agent(kit.agent, [wait, both], checkpointer=kit.saver)


@case({"messages": "Try: " + called("break_", what="it")}, {"messages": "Wrong: " + called("add", a="x", b=2)})
def tool_errors(kit: Kit) -> Any:
    """Build an agent with a tool that raises, and with calls whose arguments do not fit."""

    @tool
    def break_(what: str) -> str:
        """Breaks."""
        raise ValueError(f"{what} is broken")

    return create_agent(kit.agent, [break_, adder(kit)], checkpointer=kit.saver)


@case({"messages": "Try: " + called("break_", what="it")}, {"messages": "None: " + called("add", a=1)})
def handled_tool_errors(kit: Kit) -> Any:
    """Build a graph around a `ToolNode` that reports errors to the model."""

    @tool
    def break_(what: str) -> str:
        """Breaks."""
        raise ValueError(f"{what} is broken")

    model = kit.agent.bind_tools([break_, adder(kit)])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": model.invoke(state["messages"])})
    graph.add_node("tools", ToolNode([break_, adder(kit)], handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=kit.saver)


@case({"messages": "Now: " + called("final", text="done")})
def return_direct(kit: Kit) -> Any:
    llm = kit.llm

    @tool(return_direct=True)
    def final(text: str) -> str:
        """The last word."""
        return str(llm.invoke(f"final {text}").content)

    return create_agent(kit.agent, [final], checkpointer=kit.saver)


class Weather(BaseModel):
    """The weather."""

    place: str
    degrees: int


@case({"messages": "How is the weather?"})
def structured_by_a_tool(kit: Kit) -> Any:
    return create_agent(kit.agent, [adder(kit)], response_format=ToolStrategy(Weather), checkpointer=kit.saver)


@case({"messages": "How is the weather?"})
def structured_by_the_model(kit: Kit) -> Any:
    return create_agent(kit.agent, [], response_format=ProviderStrategy(Weather), checkpointer=kit.saver)


class Counting(AgentState[Any]):
    count: int


@case(
    {"messages": "Inject: " + called("inject", text="x"), "count": 2},
    {"messages": "Again: " + called("inject", text="y")},
)
def injected_arguments(kit: Kit) -> Any:
    """Build an agent whose tool gets state, store, call id and runtime, and answers with a command."""
    llm = kit.llm

    @tool
    def inject(
        text: str,
        state: Annotated[dict[str, Any], InjectedState],
        store: Annotated[BaseStore, InjectedStore],
        tool_call_id: Annotated[str, InjectedToolCallId],
        runtime: ToolRuntime,
    ) -> Command[Any]:
        """Knows more than its argument."""
        assert runtime.tool_call_id == tool_call_id
        store.put(("tools",), text, {"text": text, "count": state["count"]})
        said = llm.invoke(f"{text} {state['count']}").content
        return Command(update={"count": state["count"] + 1, "messages": [ToolMessage(said, tool_call_id=tool_call_id)]})

    return create_agent(kit.agent, [inject], state_schema=Counting, store=kit.memory, checkpointer=kit.saver)


@case({"messages": ADD}, {"messages": SEARCH})
def react_agent(kit: Kit) -> Any:
    return create_react_agent(kit.agent, [adder(kit), passages(kit)], prompt="Think.", checkpointer=kit.saver)


@case({"messages": "All of it: " + THREE}, races=True)
def react_agent_of_version_1(kit: Kit) -> Any:
    tools = [adder(kit), passages(kit)]
    return create_react_agent(kit.agent, tools, version="v1", response_format=Weather, checkpointer=kit.saver)


@case({"messages": ADD}, {"messages": "thanks"})
def agent_with_own_model(kit: Kit) -> Any:
    """Build an agent on the user's own model, with a tool that uses the pool."""
    return create_agent(kit.own, [adder(kit), passages(kit)], checkpointer=kit.saver)


@case({"messages": ADD})
def agent_with_an_accelerated_model(kit: Kit) -> Any:
    return create_agent(kit.fast(kit.agent), [adder(kit)], checkpointer=kit.saver)


@case({"messages": "Ask it: " + called("ask_graph", question="what is a class?")}, races=True)
def graph_as_tool(kit: Kit) -> Any:
    inner = kit.fast(answering(kit))

    @tool
    def ask_graph(question: str) -> str:
        """Asks a graph."""
        return str(inner.invoke({"question": question})["answer"])

    return create_agent(kit.agent, [ask_graph], checkpointer=kit.saver)


@case({"messages": "Look: " + called("answering", question="what is raise?")})
def graph_turned_into_a_tool(kit: Kit) -> Any:
    """Build an agent with an accelerated graph that is turned into a tool by `as_tool`."""
    made = kit.fast(answering(kit)).as_tool(name="answering", description="Answers.", arg_types={"question": str})
    return create_agent(kit.agent, [made], checkpointer=kit.saver)


@case({"messages": "Both of you. " + called("transfer", to="second")})
def two_agents(kit: Kit) -> Any:
    """Build a graph with two agents as nodes. The first hands over to the second."""

    @tool
    def transfer(to: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Hands over."""
        done = ToolMessage("handed over " + called("add", a=4, b=4), tool_call_id=tool_call_id)
        return Command(goto=to, graph=Command.PARENT, update={"messages": [done]})

    graph = StateGraph(MessagesState)
    graph.add_node("first", create_agent(kit.agent, [transfer], name="first"), destinations=("second",))
    graph.add_node("second", create_agent(kit.agent, [adder(kit)], name="second"))
    graph.add_edge(START, "first")
    return graph.compile(checkpointer=kit.saver)


@case(Turn({"messages": ADD}, config={"recursion_limit": 2}), {"messages": ADD + called("nobody", x=1)})
def agent_out_of_steps(kit: Kit) -> Any:
    """Build an agent that reaches its recursion limit, and that calls a tool which does not exist."""
    return create_agent(kit.agent, [adder(kit)], checkpointer=kit.saver)


@case({"messages": ADD}, None, None)
def agent_stopped_before_tools(kit: Kit) -> Any:
    return create_agent(kit.agent, [adder(kit), passages(kit)], checkpointer=kit.saver, interrupt_before=["tools"])
