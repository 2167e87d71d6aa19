"""Corrective RAG, a LangGraph graph of plain functions: each passage is graded, the question rewritten. One line more.

    python examples/10_langgraph_corrective_rag.py

prints, with fake engines::

    plain        3.39 s
    accelerated  2.95 s
    same state: True
"""

import time
from typing import Any, Literal, TypedDict

from langchain_core.documents import Document
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import BaseModel

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore


class Grade(BaseModel):
    relevant: Literal["yes", "no"]


class State(TypedDict, total=False):
    question: str
    documents: list[Document]
    answer: str


def corrective_rag(pool: EnginePool) -> CompiledStateGraph[State]:
    """Nothing in here knows of `accelerate`."""
    llm = ChatTeola(pool=pool)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(["Oats are sown in spring.", "Lambs eat oats and ivy.", "Ivy climbs walls.", "Hay is cut in June."])
    retriever, grader = store.as_retriever(), llm.with_structured_output(Grade)

    def retrieve(state: State) -> State:
        return {"documents": retriever.invoke(state["question"])}

    def grade(state: State) -> State:
        kept = []
        for document in state["documents"]:
            grade = grader.invoke(f"Is this of use?\n\n{document.page_content}\n\nQuestion: {state['question']}")
            if grade.relevant == "yes":
                kept.append(document)
        return {"documents": kept}

    def rewrite(state: State) -> State:
        better = llm.invoke(f"Write this question in other words: {state['question']}")
        return {"documents": [*state["documents"], *retriever.invoke(str(better.content))]}

    def generate(state: State) -> dict[str, Any]:
        passages = "\n\n".join(document.page_content for document in state["documents"])
        prompt = f"Answer from the passages.\n\nQuestion: {state['question']}\n\n{passages}"
        return {"answer": llm.invoke(prompt).content}

    graph = StateGraph(State)
    graph.add_sequence([retrieve, grade])
    graph.add_sequence([rewrite, generate])
    graph.add_edge(START, "retrieve")
    graph.add_conditional_edges("grade", lambda state: "generate" if len(state["documents"]) > 3 else "rewrite")
    return graph.compile()


with EnginePool.local(fake_engines(rtx3090())) as pool:
    plain = corrective_rag(pool)
    fast = accelerate(plain)  # the one line
    states = [plain.invoke({"question": "warm up"})]
    for label, graph in (("plain", plain), ("accelerated", fast)):
        pool.reset()
        begun = time.perf_counter()
        states.append(graph.invoke({"question": "What do lambs eat?"}))
        print(f"{label:12} {time.perf_counter() - begun:.2f} s")
    print("same state:", states[1] == states[2])
