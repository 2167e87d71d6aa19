"""Graphs with calls that can be prefetched, with wrong speculation, and with work that must not start early."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import CachePolicy, Send, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from support.graphs.agents import passages
from support.graphs.case import Turn, case
from support.graphs.kit import Kit, called, joined
from support.graphs.middleware import APPROVED, REJECTED
from support.request_counts import POISON
from teola_plugin.langchain import TeolaVectorStore, read_only


class State(TypedDict, total=False):
    question: str
    words: list[str]
    first: str
    second: str
    context: str
    answer: str
    said: Annotated[list[str], operator.add]


def in_a_row(*nodes: Any, state: Any = State, **options: Any) -> Any:
    """Compile a graph of these nodes, one after the other."""
    graph = StateGraph(state)
    graph.add_sequence(nodes)
    graph.add_edge(START, nodes[0].__name__ if callable(nodes[0]) else nodes[0][0])
    return graph.compile(**options)


QUESTION = {"question": "what is a lambda?"}


@case(QUESTION, {"question": "what is with?"})
def independent_steps(kit: Kit) -> Any:
    """Build a graph whose nodes read the question alone, except the last one."""
    llm, retriever = kit.llm, kit.retriever

    def one(state: State) -> dict[str, Any]:
        return {"first": llm.invoke(f"Rewrite {state['question']}").content}

    def two(state: State) -> dict[str, Any]:
        return {"second": llm.invoke("Shorten " + state["question"]).content}

    def three(state: State) -> dict[str, Any]:
        return {"context": "\n".join(d.page_content for d in retriever.invoke(state["question"]))}

    def four(state: State) -> dict[str, Any]:
        text = "Answer {} with {} and {}: {}".format(
            state["first"], state["second"], state["context"], state["question"]
        )
        return {"answer": llm.invoke(text).content}

    return in_a_row(one, two, three, four, checkpointer=kit.saver)


@case(QUESTION, only="async")
def independent_async_steps(kit: Kit) -> Any:
    llm, retriever = kit.llm, kit.retriever

    async def one(state: State) -> dict[str, Any]:
        return {"first": (await llm.ainvoke(f"Rewrite {state['question']}")).content}

    async def two(state: State) -> dict[str, Any]:
        found = await retriever.ainvoke(state["question"])
        return {"context": joined(found), "second": (await llm.ainvoke(f"Shorten {state['question']}")).content}

    return in_a_row(one, two, checkpointer=kit.saver)


@case(Turn({"question": "old", "words": ["a", "b"]}, options={"durability": "sync"}))
def changed_in_between(kit: Kit) -> Any:
    """Build a graph whose first node changes the question for the second. Words of the state are changed in place."""
    llm = kit.llm

    def change(state: State) -> dict[str, Any]:
        state["words"].append("c")
        said = llm.invoke(f"first {state['question']}").content
        return {"question": f"new {len(said)}", "words": state["words"]}

    def use(state: State) -> dict[str, Any]:
        state["words"].remove("a")
        return {"answer": llm.invoke(f"second {state['question']} {state['words']}").content}

    def again(state: State) -> dict[str, Any]:
        return {"said": [llm.invoke(f"third {state['question']} {state['words']}").content]}

    return in_a_row(change, use, again, checkpointer=kit.saver)


@case({"question": f"a {POISON} question"}, {"question": "wholesome"})
def early_work_fails(kit: Kit) -> Any:
    """Build a graph with a prefetch that fails, of a call that the original never makes."""
    llm = kit.llm

    def first(state: State) -> dict[str, Any]:
        return {"first": llm.invoke("hello").content}

    def second(state: State) -> dict[str, Any]:
        if POISON in state["question"]:
            return {"second": "not asked"}
        return {"second": llm.invoke(f"Say {state['question']}").content}

    def third(state: State) -> dict[str, Any]:
        try:
            return {"answer": llm.invoke(f"Tell {state['question']}").content}
        except Exception as error:
            return {"answer": type(error).__name__}

    return in_a_row(first, second, third, checkpointer=kit.saver)


@case({"question": "short"}, {"question": "a longer question"}, {"question": "none"})
def decided_early(kit: Kit) -> Any:
    """Build a graph with a router whose choice is known from the start."""
    llm = kit.llm

    def start(state: State) -> dict[str, Any]:
        return {"first": llm.invoke(f"start {state['question']}").content}

    def route(state: State) -> Literal["short", "long", "__end__"]:
        if state["question"] == "none":
            return END
        return "short" if len(state["question"]) < 8 else "long"

    def short(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"short {state['question']}").content}

    def long(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"long {state['question']}").content}

    graph = StateGraph(State)
    graph.add_node(start)
    graph.add_node(short)
    graph.add_node(long)
    graph.add_edge(START, "start")
    graph.add_conditional_edges("start", route)
    return graph.compile(checkpointer=kit.saver)


@case(QUESTION, QUESTION, not_by="batch")
def written_before_it_is_searched(kit: Kit) -> Any:
    """Build a graph whose searches must find what an earlier node stored, and not what was deleted."""
    kit.pool.admin("store", "delete_collection", "notes").result(5)
    notes = TeolaVectorStore(pool=kit.pool, embedding=kit.embeddings, collection="notes")
    retriever = notes.as_retriever(search_kwargs={"k": 1})
    llm = kit.llm

    def store(state: State) -> dict[str, Any]:
        notes.add_texts([f"a note on {state['question']}", "another note"], ids=["1", "2"])
        return {"first": llm.invoke(f"stored {state['question']}").content}

    def search(state: State) -> dict[str, Any]:
        return {"context": joined(retriever.invoke(state["question"]))}

    def forget(state: State) -> dict[str, Any]:
        notes.delete(["1"])
        return {"second": joined(retriever.invoke(state["question"]))}

    def answer(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"{state['context']} {state['second']}").content}

    return in_a_row(store, search, forget, answer)


@case(QUESTION, QUESTION, {"question": "another"}, not_by="batch")
def cached_and_ahead(kit: Kit) -> Any:
    """Build a graph with a node cache. Calls of cached nodes must not be made."""
    llm = kit.llm

    def first(state: State) -> dict[str, Any]:
        return {"first": llm.invoke(f"first {state['question']}").content}

    def second(state: State) -> dict[str, Any]:
        return {"second": llm.invoke(f"second {state['question']}").content}

    graph = StateGraph(State)
    graph.add_node(first, cache_policy=CachePolicy())
    graph.add_node(second, cache_policy=CachePolicy())
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    return graph.compile(cache=kit.cache, checkpointer=kit.saver)


class Score(BaseModel):
    """A score."""

    score: int


ASK = ChatPromptTemplate.from_messages([("system", "Be {how}."), ("human", "{question}")])


@case(QUESTION, races=True)
def ways_to_ask(kit: Kit) -> Any:
    """Build a graph with partial prompts, bound models, structured output, batches, streams and sampled answers."""
    llm = kit.llm
    brief = ASK.partial(how="brief") | llm.bind(max_tokens=5)
    scored = ASK | llm.with_structured_output(Score)
    sampled = llm.bind(temperature=0.9, seed=3)

    def one(state: State) -> dict[str, Any]:
        return {"first": brief.invoke({"question": state["question"]}).content}

    def two(state: State) -> dict[str, Any]:
        score = scored.invoke({"question": state["question"], "how": "just"})
        return {"second": f"{score.score} " + sampled.invoke(state["question"]).content}

    def three(state: State) -> dict[str, Any]:
        several = llm.batch([f"a {state['question']}", f"b {state['question']}"])
        return {"said": [one.content for one in several]}

    def four(state: State) -> dict[str, Any]:
        return {"answer": "".join(chunk.content for chunk in llm.stream([("human", f"c {state['question']}")]))}

    return in_a_row(one, two, three, four, checkpointer=kit.saver)


@case({"question": "x", "words": ["lambda", "class", "lambda"]}, {"words": []}, races=True)
def sent_in_known_parts(kit: Kit) -> Any:
    """Build a graph that sends known parts to a node. Calls with equal parts are made twice."""
    llm, retriever = kit.llm, kit.retriever

    def look(state: dict[str, Any]) -> dict[str, Any]:
        found = retriever.invoke(state["word"])
        return {"said": [llm.invoke(f"{state['word']}: {found[0].page_content}").text]}

    graph = StateGraph(State)
    graph.add_node(look)
    graph.add_node("close", lambda state: {"answer": llm.invoke(f"close {state['said']}").text})
    graph.add_conditional_edges(START, lambda s: [Send("look", {"word": word}) for word in s["words"]], ["look"])
    graph.add_edge("look", "close")
    return graph.compile(checkpointer=kit.saver)


@case(Turn({"question": "round"}, config={"recursion_limit": 9}))
def counted_rounds(kit: Kit) -> Any:
    """Build a graph with a loop. Its prompts are known except for what was said in earlier rounds."""
    llm = kit.llm

    def think(state: State) -> dict[str, Any]:
        return {"said": [llm.invoke(f"round {len(state.get('said', []))} of {state['question']}").content]}

    def note(state: State) -> dict[str, Any]:
        return {"first": llm.invoke(f"note {state['question']}").content}

    graph = StateGraph(State)
    graph.add_node(think)
    graph.add_node(note)
    graph.add_edge(START, "think")
    graph.add_edge("think", "note")
    graph.add_conditional_edges("note", lambda state: "think" if len(state["said"]) < 3 else END)
    return graph.compile(checkpointer=kit.saver)


@case(QUESTION, None)
def ahead_of_an_approval(kit: Kit) -> Any:
    """Build a graph that stops before a node. Prefetched calls of that node must stay invisible."""
    llm = kit.llm

    def first(state: State) -> dict[str, Any]:
        return {"first": llm.invoke(f"first {state['question']}").content}

    def second(state: State) -> dict[str, Any]:
        return {"second": llm.invoke(f"second {state['question']}").content}

    return in_a_row(first, second, checkpointer=kit.saver, interrupt_before=["second"])


def _read_only_tools(kit: Kit) -> list[Any]:
    llm, retriever = kit.llm, kit.retriever

    @read_only
    @tool
    def look(at: str) -> str:
        """Looks."""
        found = f"{joined(retriever.invoke(at))} {llm.invoke(f'sum up {at}').text}"
        kit.note(f"look {at}")  # at its end: one that was stopped has not looked
        return found

    @read_only
    @tool
    def fails(at: str) -> str:
        """Fails."""
        kit.note(f"fails {at}")
        raise ValueError(at)

    @read_only
    @tool
    def asks(at: str) -> str:
        """Asks somebody."""
        return str(interrupt(f"may I look at {at}?"))

    return [look, fails, asks, passages(kit)]


MANY = called("look", at="class") + called("look", at="class") + called("passages", query="with")


@case({"messages": "Look: " + MANY}, {"messages": "Fail: " + called("fails", at="it")}, races=True)
def agent_with_read_only_tools(kit: Kit) -> Any:
    """Build an agent whose read-only tools run once, early or not. Two equal calls run twice."""
    return create_agent(kit.agent, _read_only_tools(kit), checkpointer=kit.saver)


@case({"messages": "Ask: " + called("asks", at="it") + called("look", at="with")}, None, races=True)
def read_only_tool_that_asks(kit: Kit) -> Any:
    return create_agent(kit.agent, _read_only_tools(kit), checkpointer=kit.saver)


ONE = {"messages": "Look: " + called("look", at="class")}


@case(ONE, APPROVED, ONE, REJECTED)
def read_only_tools_past_an_approval(kit: Kit) -> Any:
    approval: Any = HumanInTheLoopMiddleware(interrupt_on={"look": True})
    return create_agent(kit.agent, _read_only_tools(kit), middleware=[approval], checkpointer=kit.saver)


@case({"messages": "Look: " + MANY}, only="async", races=True)
def async_read_only_tools(kit: Kit) -> Any:
    llm = kit.llm

    @read_only
    @tool
    async def look(at: str) -> str:
        """Looks."""
        found = (await llm.ainvoke(f"look at {at}")).text
        kit.note(f"look {at}")
        return found

    return create_agent(kit.agent, [look, passages(kit)], checkpointer=kit.saver)
