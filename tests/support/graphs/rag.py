"""Retrieval with graders, rewriting, plans and critics, as tutorials show it."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel
from typing_extensions import TypedDict

from support.graphs.case import case
from support.graphs.kit import Kit, joined


class Rag(TypedDict, total=False):
    question: str
    documents: list[Document]
    generation: str
    rewritten: Annotated[int, operator.add]


class Grade(BaseModel):
    """Whether a document helps."""

    relevant: Literal["yes", "no"]


ANSWER = ChatPromptTemplate.from_template("Answer {question} with {context}")
GRADE = ChatPromptTemplate.from_template("Does this help with {question}?\n{document}")


@case({"question": "what is a lambda?"}, {"question": "what is moonlight?"})
def corrective_rag(kit: Kit) -> Any:
    """Build a graph that retrieves, grades every document, and rewrites the question at most twice if none is left."""
    retriever = kit.retriever
    grader = GRADE | kit.llm.with_structured_output(Grade)
    answer = ANSWER | kit.llm | StrOutputParser()
    rewrite = ChatPromptTemplate.from_template("Rewrite {question}") | kit.llm | StrOutputParser()

    def retrieve(state: Rag) -> dict[str, Any]:
        return {"documents": retriever.invoke(state["question"])}

    def grade(state: Rag) -> dict[str, Any]:
        kept = []
        for document in state["documents"]:
            score = grader.invoke({"question": state["question"], "document": document.page_content})
            if score.relevant == "yes":
                kept.append(document)
        return {"documents": kept}

    def transform(state: Rag) -> dict[str, Any]:
        return {"question": rewrite.invoke({"question": state["question"]}), "rewritten": 1}

    def generate(state: Rag) -> dict[str, Any]:
        given = {"question": state["question"], "context": joined(state["documents"])}
        return {"generation": answer.invoke(given)}

    def decide(state: Rag) -> str:
        return "rewrite" if not state["documents"] and state.get("rewritten", 0) < 2 else "generate"

    graph = StateGraph(Rag)
    for node in (retrieve, grade, transform, generate):
        graph.add_node(node)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "grade")
    graph.add_conditional_edges("grade", decide, {"rewrite": "transform", "generate": "generate"})
    graph.add_edge("transform", "retrieve")
    graph.add_edge("generate", END)
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is class?"}, races=True)
def graded_in_one_batch(kit: Kit) -> Any:
    """Build a graph whose grader gets all documents in one batch."""
    retriever = kit.retriever
    grader = GRADE | kit.llm.with_structured_output(Grade)

    def retrieve(state: Rag) -> dict[str, Any]:
        return {"documents": retriever.invoke(state["question"])}

    def grade(state: Rag) -> dict[str, Any]:
        asked = [{"question": state["question"], "document": d.page_content} for d in state["documents"]]
        return {"generation": str([grade.relevant for grade in grader.batch(asked)])}

    graph = StateGraph(Rag)
    graph.add_sequence([retrieve, grade])
    graph.add_edge(START, "retrieve")
    return graph.compile(checkpointer=kit.saver)


class Route(BaseModel):
    """Where to look."""

    source: Literal["documents", "model"]


@case({"question": "what is with?"}, {"question": "who are you?"}, {"question": "what is bread?"})
def adaptive_router(kit: Kit) -> Any:
    """Build a graph with a router that calls the model itself."""
    retriever, llm = kit.retriever, kit.llm
    router = ChatPromptTemplate.from_template("Where to look for {question}?") | llm.with_structured_output(Route)

    def route(state: Rag) -> Literal["look", "tell"]:
        return "look" if router.invoke({"question": state["question"]}).source == "documents" else "tell"

    def look(state: Rag) -> dict[str, Any]:
        return {"documents": retriever.invoke(state["question"])}

    def tell(state: Rag) -> dict[str, Any]:
        return {"generation": llm.invoke(f"{state['question']}\n{joined(state.get('documents', []))}").content}

    graph = StateGraph(Rag)
    graph.add_node(look)
    graph.add_node(tell)
    graph.add_conditional_edges(START, route)
    graph.add_edge("look", "tell")
    return graph.compile(checkpointer=kit.saver)


class Plan(TypedDict, total=False):
    goal: str
    todo: list[str]
    past: Annotated[list[str], operator.add]
    answer: str


STEPS = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}


@case({"goal": "a house"})
def plan_and_execute(kit: Kit) -> Any:
    llm, planner = kit.llm, kit.agent.with_structured_output(STEPS)

    def plan(state: Plan) -> dict[str, Any]:
        return {"todo": planner.invoke(f"Three steps to {state['goal']}")}

    def execute(state: Plan) -> dict[str, Any]:
        step, *rest = state["todo"]
        done = llm.invoke(f"Do {step}, after {state.get('past', [])}").content
        return {"todo": rest, "past": [f"{step}: {done}"]}

    def answer(state: Plan) -> dict[str, Any]:
        return {"answer": llm.invoke(f"{state['goal']}: {state['past']}").content}

    graph = StateGraph(Plan)
    graph.add_node(plan)
    graph.add_node(execute)
    graph.add_node(answer)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "execute")
    graph.add_conditional_edges("execute", lambda s: "execute" if s["todo"] else "answer", ["execute", "answer"])
    return graph.compile(checkpointer=kit.saver)


class Draft(TypedDict, total=False):
    task: str
    draft: str
    critique: str
    rounds: Annotated[int, operator.add]


@case({"task": "a poem"})
def reflection(kit: Kit) -> Any:
    """Build a graph of a writer and a critic that run for two rounds."""
    llm = kit.llm

    def write(state: Draft) -> dict[str, Any]:
        text = f"Write {state['task']}. Critique: {state.get('critique', 'none')}"
        return {"draft": llm.invoke(text).content, "rounds": 1}

    def criticise(state: Draft) -> dict[str, Any]:
        return {"critique": llm.invoke(f"Criticise {state['draft']}").content}

    graph = StateGraph(Draft)
    graph.add_node(write)
    graph.add_node(criticise)
    graph.add_edge(START, "write")
    graph.add_conditional_edges(
        "write", lambda s: END if s["rounds"] > 2 else "criticise", {END: END, "criticise": "criticise"}
    )
    graph.add_edge("criticise", "write")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is import?"}, only="async", races=True)
def async_rag(kit: Kit) -> Any:
    """Build a graph with async nodes and an async router."""
    import asyncio

    retriever, llm = kit.retriever, kit.llm

    async def retrieve(state: Rag) -> dict[str, Any]:
        first, second = await asyncio.gather(retriever.ainvoke(state["question"]), retriever.ainvoke("class"))
        return {"documents": [*first, *second]}

    async def generate(state: Rag) -> dict[str, Any]:
        reply = await llm.ainvoke(f"{state['question']} {joined(state['documents'])}")
        return {"generation": reply.content, "rewritten": 1}

    async def decide(state: Rag) -> str:
        return END if state["rewritten"] > 1 else "generate"

    graph = StateGraph(Rag)
    graph.add_sequence([retrieve, generate])
    graph.add_edge(START, "retrieve")
    graph.add_conditional_edges("generate", decide, ["generate", END])
    return graph.compile(checkpointer=kit.saver)
