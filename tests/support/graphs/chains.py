"""Graphs in chains, and chains in graphs."""

from __future__ import annotations

import operator
from operator import itemgetter
from typing import Annotated, Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langgraph.graph import START, MessagesState, StateGraph
from typing_extensions import TypedDict

from support.graphs.case import case
from support.graphs.kit import Kit, joined


class State(TypedDict, total=False):
    question: str
    context: str
    answer: str
    said: Annotated[list[str], operator.add]


ANSWER = ChatPromptTemplate.from_template("Answer {question} with {context}")
SHORTEN = ChatPromptTemplate.from_template("Shorten {question}")


@case({"question": "what is a lambda?"}, {"question": "what is with?"}, races=True)
def chains_as_nodes(kit: Kit) -> Any:
    """Build a graph with chains as nodes: sequences, a parallel, an assign, a lambda."""
    find = {"context": itemgetter("question") | kit.retriever | joined, "said": lambda _: ["found"]}
    graph = StateGraph(State)
    graph.add_node("find", RunnableParallel(find))
    graph.add_node("answer", ANSWER | kit.llm | StrOutputParser() | (lambda text: {"answer": text}))
    graph.add_node("check", RunnablePassthrough.assign(said=RunnableLambda(lambda state: [state["answer"][:3]])))
    graph.add_edge(START, "find")
    graph.add_edge("find", "answer")
    graph.add_edge("answer", "check")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is a lambda?"}, {"question": "what is with?"})
def nodes_of_two_functions(kit: Kit) -> Any:
    """Build a graph whose nodes have a sync and an async function each, as LangGraph's documentation shows them."""
    llm, retriever = kit.llm, kit.retriever

    def find(state: State) -> dict[str, Any]:
        return {"context": joined(retriever.invoke(state["question"]))}

    async def afind(state: State) -> dict[str, Any]:
        return {"context": joined(await retriever.ainvoke(state["question"]))}

    def answer(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"Answer {state['question']} with {state['context']}").content}

    async def aanswer(state: State) -> dict[str, Any]:
        return {"answer": (await llm.ainvoke(f"Answer {state['question']} with {state['context']}")).content}

    graph = StateGraph(State)
    graph.add_node("find", RunnableLambda(find, afind))
    graph.add_node("answer", RunnableLambda(answer, aanswer))
    graph.add_edge(START, "find")
    graph.add_edge("find", "answer")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is a class?"})
def chain_called_in_a_node(kit: Kit) -> Any:
    """Build a graph whose nodes call a chain and an accelerated chain."""
    chain = (
        RunnablePassthrough.assign(context=itemgetter("question") | kit.retriever | joined)
        | RunnablePassthrough.assign(short=SHORTEN | kit.llm | StrOutputParser())
        | ANSWER
        | kit.llm
    )
    fast = kit.fast(chain)

    def plainly(state: State) -> dict[str, Any]:
        return {"answer": chain.invoke({"question": state["question"]}).content}

    def sooner(state: State) -> dict[str, Any]:
        return {"said": [fast.invoke({"question": state["question"]}).content]}

    graph = StateGraph(State)
    graph.add_sequence([plainly, sooner])
    graph.add_edge(START, "plainly")
    return graph.compile(checkpointer=kit.saver)


def answering(kit: Kit, name: str = "answering") -> Any:
    llm, retriever = kit.llm, kit.retriever

    def find(state: State) -> dict[str, Any]:
        return {"context": joined(retriever.invoke(state["question"]))}

    def answer(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"{name}: {state['question']} {state['context']}").content}

    graph = StateGraph(State)
    graph.add_sequence([find, answer])
    graph.add_edge(START, "find")
    return graph.compile(name=name)


@case("what is a lambda?", is_graph=False)
def graph_in_a_chain(kit: Kit) -> Any:
    rewrite = ChatPromptTemplate.from_template("Rewrite {question}") | kit.llm | StrOutputParser()
    return (
        {"question": RunnablePassthrough() | (lambda text: {"question": text}) | rewrite}
        | answering(kit)
        | itemgetter("answer")
        | RunnableLambda(str.upper)
    )


@case("what is raise?", is_graph=False)
def accelerated_graph_in_a_chain(kit: Kit) -> Any:
    return {"question": RunnablePassthrough()} | kit.fast(answering(kit)) | itemgetter("answer") | kit.llm


@case({"question": "what is with?"}, is_graph=False, races=True, not_by="stream")
def graphs_side_by_side(kit: Kit) -> Any:
    return RunnableParallel(
        one=answering(kit, "one").with_config(tags=["left"]),
        two=kit.fast(answering(kit, "two")).with_config(run_name="right"),
    )


@case({"question": "what is with?"}, is_graph=False)
def graph_with_fallback_and_retry(kit: Kit) -> Any:
    broken = StateGraph(State)
    broken.add_node("fail", lambda state: {"answer": state["nothing"]})
    broken.add_edge(START, "fail")
    return (
        broken.compile()
        .with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
        .with_fallbacks([answering(kit)])
    )


@case({"messages": "count the passages"})
def model_as_node(kit: Kit) -> Any:
    """Build a graph whose node is a prompt and a model."""
    prompt = ChatPromptTemplate.from_messages([("system", "You count."), ("placeholder", "{messages}")])
    graph = StateGraph(MessagesState)
    graph.add_node("count", prompt | kit.streaming | (lambda message: {"messages": [message]}))
    graph.add_edge(START, "count")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "named"})
def configured_graph(kit: Kit) -> Any:
    """Return a graph with a config set by `with_config`, which gives a graph again."""
    return answering(kit, "inside").with_config(tags=["of-the-graph"], metadata={"team": 7}, recursion_limit=7)
