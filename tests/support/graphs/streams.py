"""Graphs that stream: tokens of models, and values that nodes write themselves."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langchain_core.callbacks import dispatch_custom_event
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import StreamWriter
from typing_extensions import TypedDict

from support.graphs.case import case
from support.graphs.kit import Kit


@case({"messages": "hello"}, {"messages": "again"})
def streamed_tokens(kit: Kit) -> Any:
    """Build a graph of three nodes: the model streams when invoked, the node streams it, and its tokens stay hidden."""
    streaming, llm = kit.streaming, kit.llm
    hidden = kit.streaming.with_config(tags=["nostream"])

    def first(state: MessagesState) -> dict[str, Any]:
        return {"messages": streaming.invoke(state["messages"])}

    def second(state: MessagesState) -> dict[str, Any]:
        text = "".join(chunk.content for chunk in llm.stream(f"second {len(state['messages'])}"))
        return {"messages": [("ai", text)]}

    def third(state: MessagesState) -> dict[str, Any]:
        hidden.invoke("what nobody sees")
        return {"messages": llm.invoke("third")}

    graph = StateGraph(MessagesState)
    graph.add_sequence([first, second, third])
    graph.add_edge(START, "first")
    return graph.compile(checkpointer=kit.saver)


class State(TypedDict, total=False):
    question: str
    said: Annotated[list[str], operator.add]


@case({"question": "loud"})
def custom_writers(kit: Kit) -> Any:
    llm = kit.llm

    def written(state: State, writer: StreamWriter) -> dict[str, Any]:
        writer({"begun": state["question"]})
        said = llm.invoke(f"write {state['question']}").content
        writer(said)
        return {"said": [said]}

    def fetched(state: State, config: RunnableConfig) -> dict[str, Any]:
        write = get_stream_writer()
        for chunk in llm.stream(f"fetch {state['said']}"):
            write(("piece", chunk.content))
        dispatch_custom_event("mine", {"said": state["said"]}, config=config)
        return {"said": ["fetched"]}

    inner = StateGraph(State)
    inner.add_node(fetched)
    inner.add_edge(START, "fetched")
    graph = StateGraph(State)
    graph.add_node(written)
    graph.add_node("inner", inner.compile())
    graph.add_edge(START, "written")
    graph.add_edge("written", "inner")
    return graph.compile(checkpointer=kit.saver)


@case({"messages": "hello"}, only="async")
def streamed_in_async_code(kit: Kit) -> Any:
    llm = kit.llm

    async def chat(state: MessagesState) -> dict[str, Any]:
        pieces = [chunk async for chunk in llm.astream(state["messages"])]
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        return {"messages": whole}

    graph = StateGraph(MessagesState)
    graph.add_node(chat)
    graph.add_edge(START, "chat")
    return graph.compile(checkpointer=kit.saver)
