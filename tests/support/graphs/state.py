"""Kinds of graph state: TypedDict, pydantic, dataclass, reducers, private channels, other inputs and outputs."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.channels import EphemeralValue, UntrackedValue
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.managed import IsLastStep, RemainingSteps
from langgraph.types import Overwrite
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from support.graphs.case import Turn, case
from support.graphs.kit import Kit, joined

QUESTION = {"question": "what is a lambda?"}


def longest(old: str | None, new: str) -> str:
    return new if len(new) >= len(old or "") else str(old)


class Reduced(TypedDict, total=False):
    question: str
    notes: Annotated[list[str], operator.add]
    best: Annotated[str, longest]
    count: Annotated[int, operator.add]
    messages: Annotated[list[AnyMessage], add_messages]


@case(QUESTION, {"question": "and a class?", "notes": ["again"]})
def reducers(kit: Kit) -> Any:
    llm, retriever = kit.llm, kit.retriever

    def find(state: Reduced) -> dict[str, Any]:
        found = retriever.invoke(state["question"])
        return {"notes": [d.page_content for d in found], "count": 1, "messages": HumanMessage(state["question"])}

    def answer(state: Reduced) -> dict[str, Any]:
        reply = llm.invoke(f"Answer {state['question']} with {state['notes']}")
        return {"best": reply.content, "count": 1, "messages": [reply]}

    graph = StateGraph(Reduced)
    graph.add_sequence([find, answer])
    graph.add_edge(START, "find")
    return graph.compile(checkpointer=kit.saver)


@case({"notes": ["first"], "question": "x"})
def overwritten(kit: Kit) -> Any:
    llm = kit.llm

    def more(state: Reduced) -> dict[str, Any]:
        return {"notes": [llm.invoke(f"more about {state['question']}").content]}

    def fewer(state: Reduced) -> dict[str, Any]:
        return {"notes": Overwrite([llm.invoke("sum up " + " ".join(state["notes"])).content])}

    graph = StateGraph(Reduced)
    graph.add_sequence([more, fewer])
    graph.add_edge(START, "more")
    return graph.compile(checkpointer=kit.saver)


class Checked(BaseModel):
    question: str
    answer: str = ""
    tries: Annotated[int, operator.add] = 0
    found: list[str] = Field(default_factory=list)

    @field_validator("question")
    @classmethod
    def short(cls, value: str) -> str:
        if len(value) > 40:
            raise ValueError("a question is short")
        return value


def _checked(kit: Kit) -> Any:
    llm, retriever = kit.llm, kit.retriever

    def find(state: Checked) -> dict[str, Any]:
        return {"found": [d.page_content for d in retriever.invoke(state.question)], "tries": 1}

    def answer(state: Checked) -> dict[str, Any]:
        return {"answer": llm.invoke(f"{state.question} by {state.found}").content, "tries": 1}

    graph = StateGraph(Checked)
    graph.add_sequence([find, answer])
    graph.add_edge(START, "find")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is import?"}, Checked(question="and with?"))
def pydantic_state(kit: Kit) -> Any:
    return _checked(kit)


@case({"question": "q" * 50}, {"answer": "no question"})
def pydantic_refuses(kit: Kit) -> Any:
    return _checked(kit)


@dataclass
class Data:
    question: str = "none"
    steps: Annotated[list[str], operator.add] = field(default_factory=list)


@case({"question": "what is raise?"}, Data("and class?"))
def dataclass_state(kit: Kit) -> Any:
    llm = kit.llm

    def plan(state: Data) -> dict[str, Any]:
        return {"steps": [llm.invoke(f"plan for {state.question}").content]}

    async def aplan(state: Data) -> dict[str, Any]:
        return {"steps": [(await llm.ainvoke(f"plan for {state.question}")).content]}

    def check(state: Data) -> Data:
        return Data(state.question.upper(), [llm.invoke(f"check {state.steps[-1]}").content])

    from langchain_core.runnables import RunnableLambda

    graph = StateGraph(Data)
    graph.add_node("plan", RunnableLambda(plan, aplan))
    graph.add_node(check)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "check")
    return graph.compile(checkpointer=kit.saver)


class Given(TypedDict):
    question: str


class Told(TypedDict):
    answer: str


class Whole(Given, Told):
    context: str


class Private(TypedDict):
    draft: str


@case(QUESTION, Turn({"question": "with?"}, options={"output_keys": ["context", "answer"]}))
def private_channels(kit: Kit) -> Any:
    llm, retriever = kit.llm, kit.retriever

    def find(state: Given) -> dict[str, Any]:
        return {"context": joined(retriever.invoke(state["question"]))}

    def draft(state: Whole) -> Private:
        return {"draft": llm.invoke(f"draft: {state['question']} {state['context']}").content}

    def refine(state: Private) -> Told:
        return {"answer": llm.invoke(f"refine {state['draft']}").content}

    graph = StateGraph(Whole, input_schema=Given, output_schema=Told)
    graph.add_node(find)
    graph.add_node(draft)
    graph.add_node(refine)
    graph.add_edge(START, "find")
    graph.add_edge("find", "draft")
    graph.add_edge("draft", "refine")
    graph.add_edge("refine", END)
    return graph.compile(checkpointer=kit.saver)


@case({"messages": ["hello"]}, {"messages": [HumanMessage("and again", id="mine")]}, {"messages": "third"})
def chat_with_memory(kit: Kit) -> Any:
    """Build a graph that keeps the last four messages."""
    prompt = ChatPromptTemplate.from_messages([("system", "You are brief."), ("placeholder", "{messages}")])
    model = prompt | kit.llm

    def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": model.invoke({"messages": state["messages"]})}

    def forget(state: MessagesState) -> dict[str, Any]:
        old = state["messages"][:-4]
        return {"messages": [RemoveMessage(id=str(m.id)) for m in old]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([chat, forget])
    graph.set_entry_point("chat")
    graph.set_finish_point("forget")
    return graph.compile(checkpointer=kit.saver)


class Steps(TypedDict):
    said: Annotated[list[str], operator.add]
    left: RemainingSteps
    last: IsLastStep


@case(Turn({"said": []}, config={"recursion_limit": 5}))
def managed_values(kit: Kit) -> Any:
    llm = kit.llm

    def step(state: Steps) -> dict[str, Any]:
        return {"said": [llm.invoke(f"{state['left']} steps are left, last: {state['last']}").content]}

    graph = StateGraph(Steps)
    graph.add_node(step)
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: END if state["left"] <= 2 else "step", ["step", END])
    return graph.compile()


class Passing(TypedDict):
    question: str
    once: Annotated[str, EphemeralValue]
    unsaved: Annotated[str, UntrackedValue]
    answer: str


@case({"question": "q", "once": "now"}, {"question": "r"})
def passing_channels(kit: Kit) -> Any:
    """Build a graph with channels whose values live for one step, or are never saved."""
    llm = kit.llm

    def first(state: Passing) -> dict[str, Any]:
        return {"unsaved": f"kept with {state.get('once')}", "question": state["question"] + "?"}

    def second(state: Passing) -> dict[str, Any]:
        seen = f"{state['question']} {state.get('once')} {state.get('unsaved')}"
        return {"answer": llm.invoke(seen).content}

    graph = StateGraph(Passing)
    graph.add_sequence([first, second])
    graph.add_edge(START, "first")
    return graph.compile(checkpointer=kit.saver)


@case(3, 4)
def a_number_for_state(kit: Kit) -> Any:
    """Build a graph whose state is a number instead of a dictionary."""
    llm = kit.llm

    def one(number: int) -> int:
        return number + len(llm.invoke(f"how much is {number}?").content)

    graph: Any = StateGraph(Annotated[int, operator.add])  # type: ignore[arg-type]
    graph.add_node("one", one)
    graph.add_edge(START, "one")
    return graph.compile(checkpointer=kit.saver)


@case({"messages": [AIMessage("odd")], "nothing": 1}, None, {"messages": 5}, {})
def wrong_inputs(kit: Kit) -> Any:
    """Build a graph that gets unknown keys, no input, values that are no messages, and an empty dictionary."""
    llm = kit.llm
    graph = StateGraph(MessagesState)
    graph.add_node("chat", lambda state: {"messages": llm.invoke(state["messages"])})
    graph.add_edge(START, "chat")
    return graph.compile(checkpointer=kit.saver)
