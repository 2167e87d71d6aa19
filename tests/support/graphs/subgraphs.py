"""Graphs in graphs: as nodes, called by nodes, with checkpointers of their own, accelerated separately."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from support.graphs.case import case
from support.graphs.kit import Kit, joined


class State(TypedDict, total=False):
    question: str
    context: str
    said: Annotated[list[str], operator.add]


class Said(TypedDict):
    said: Annotated[list[str], operator.add]


class Inner(TypedDict, total=False):
    question: str
    context: str
    query: str


def research(kit: Kit, **options: Any) -> Any:
    """Build a graph that turns a question into context. Its query is in a channel of its own."""
    llm, retriever = kit.llm, kit.retriever

    def rewrite(state: Inner) -> dict[str, Any]:
        return {"query": llm.invoke(f"search words for {state['question']}").content}

    def search(state: Inner) -> dict[str, Any]:
        return {"context": joined(retriever.invoke(state["query"]))}

    graph = StateGraph(Inner)
    graph.add_sequence([rewrite, search])
    graph.add_edge(START, "rewrite")
    return graph.compile(**options)


def outer(kit: Kit, inner: Any) -> Any:
    """Build a graph that runs the inner graph and then answers with what it found."""
    llm = kit.llm

    def answer(state: State) -> dict[str, Any]:
        return {"said": [llm.invoke(f"{state['question']} by {state['context']}").content]}

    graph = StateGraph(State)
    graph.add_node("research", inner)
    graph.add_node(answer)
    graph.add_edge(START, "research")
    graph.add_edge("research", "answer")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is a class?"}, {"question": "what is with?"})
def subgraph_as_node(kit: Kit) -> Any:
    return outer(kit, research(kit))


@case({"question": "what is a class?"}, {"question": "what is with?"})
def accelerated_subgraph_as_node(kit: Kit) -> Any:
    return outer(kit, kit.fast(research(kit)))


@case({"question": "what is raise?"}, {"question": "what is class?"})
def subgraph_with_memory(kit: Kit) -> Any:
    """Build a graph whose subgraph remembers its state from call to call (`checkpointer=True`)."""
    return outer(kit, _counting(kit, True))


@case({"question": "what is raise?"}, {"question": "what is class?"})
def subgraph_without_checkpoints(kit: Kit) -> Any:
    return outer(kit, _counting(kit, False))


class Counted(TypedDict, total=False):
    question: str
    context: Annotated[str, lambda old, new: f"{old}|{new}" if old else new]


def _counting(kit: Kit, checkpointer: Any) -> Any:
    llm = kit.llm
    inner = StateGraph(Counted)
    inner.add_node(
        "count", lambda state: {"context": llm.invoke(f"{state.get('context')} {state['question']}").content}
    )
    inner.add_edge(START, "count")
    return inner.compile(checkpointer=checkpointer, name="counting")


@case({"question": "what is import?"}, races=True)
def subgraph_in_a_function(kit: Kit) -> Any:
    """Build a graph with nodes that call another graph, with and without passing on the config."""
    llm, inner = kit.llm, research(kit)

    def call(state: State, config: RunnableConfig) -> dict[str, Any]:
        found = inner.invoke({"question": state["question"]}, config)
        return {"context": found["context"]}

    def without_config(state: State) -> dict[str, Any]:
        return {"said": [inner.invoke({"question": state["context"]})["context"]]}

    graph = StateGraph(State)
    graph.add_sequence([call, without_config])
    graph.add_node("answer", lambda state: {"said": [llm.invoke(f"{state['said']}").content]})
    graph.add_edge(START, "call")
    graph.add_edge("without_config", "answer")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is import?"}, only="async")
def accelerated_subgraph_in_a_function(kit: Kit) -> Any:
    inner = kit.fast(research(kit))

    async def call(state: State) -> dict[str, Any]:
        parts = [part async for part in inner.astream({"question": state["question"]}, stream_mode="values")]
        return {"context": parts[-1]["context"], "said": [str(len(parts))]}

    graph = StateGraph(State)
    graph.add_node(call)
    graph.add_edge(START, "call")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "twice"}, races=True)
def one_subgraph_for_two_nodes(kit: Kit) -> Any:
    """Build a graph with two parallel nodes that are the same subgraph. It contains another one."""
    llm = kit.llm
    leaf = StateGraph(State, output_schema=Said)
    leaf.add_node("leaf", lambda state: {"said": [llm.invoke(f"leaf {state['question']}").content]})
    leaf.add_edge(START, "leaf")
    middle = StateGraph(State, output_schema=Said)
    middle.add_node("below", leaf.compile(name="the-leaf"))
    middle.add_edge(START, "below")
    made = middle.compile()

    graph = StateGraph(State)
    graph.add_node("left", made)
    graph.add_node("right", made)
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "deep"})
def failing_subgraph(kit: Kit) -> Any:
    llm = kit.llm

    def fail(state: State) -> dict[str, Any]:
        raise KeyError(llm.invoke(f"why {state['question']}?").content, 7)

    inner = StateGraph(State)
    inner.add_node(fail)
    inner.add_edge(START, "fail")
    return outer(kit, inner.compile())
