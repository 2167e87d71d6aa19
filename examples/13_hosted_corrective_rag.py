"""Corrective RAG on a hosted model: each passage is graded, then the question is rewritten or answered. One line more.

    export OPENAI_API_KEY=...  # and OPENAI_BASE_URL, OPENAI_MODEL, OPENAI_EMBEDDING_MODEL for another server
    python examples/13_hosted_corrective_rag.py

prints, for example::

    plain        1.69 s
    accelerated  1.09 s
    same state: True
"""

import os
import time
from typing import Any, Literal, TypedDict

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.graph import START, StateGraph
from pydantic import BaseModel

from teola_plugin import accelerate

PASSAGES = ["Oats are sown in spring.", "Lambs eat oats and ivy.", "Ivy climbs walls.", "Hay is cut in June."]


class Grade(BaseModel):
    relevant: Literal["yes", "no"]


class State(TypedDict, total=False):
    question: str
    documents: list[Document]
    answer: str


llm = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"), temperature=0)
embedding_model = os.environ.get("OPENAI_EMBEDDING_MODEL", "text-embedding-3-small")
embedding = OpenAIEmbeddings(model=embedding_model, check_embedding_ctx_length=False)
retriever = InMemoryVectorStore.from_texts(PASSAGES, embedding).as_retriever()
grading = ChatPromptTemplate.from_template("Is this of use?\n\n{passage}\n\nQuestion: {question}")
grader = grading | llm.with_structured_output(Grade)
answerer = ChatPromptTemplate.from_template("{passages}\n\nAnswer from these passages: {question}") | llm


def retrieve(state: State) -> State:
    return {"documents": retriever.invoke(state["question"])}


def grade(state: State) -> State:
    kept = []
    for document in state["documents"]:
        grade: Any = grader.invoke({"passage": document.page_content, "question": state["question"]})
        kept += [document] if grade.relevant == "yes" else []
    return {"documents": kept}


def rewrite(state: State) -> State:
    better = llm.invoke(f"Write this question in other words: {state['question']}")
    return {"documents": [*state["documents"], *retriever.invoke(str(better.content))]}


def answer(state: State) -> State:
    passages = "\n\n".join(document.page_content for document in state["documents"])
    return {"answer": str(answerer.invoke({"passages": passages, "question": state["question"]}).content)}


builder = StateGraph(State).add_sequence([retrieve, grade]).add_sequence([rewrite, answer]).add_edge(START, "retrieve")
builder.add_conditional_edges("grade", lambda state: "answer" if len(state["documents"]) > 3 else "rewrite")
plain = builder.compile()
fast = accelerate(plain)  # the one line

states = [plain.invoke({"question": "Is anybody there?"})]  # opens connections
for label, graph in (("plain", plain), ("accelerated", fast)):
    begun = time.perf_counter()
    states.append(graph.invoke({"question": "What do lambs eat?"}))
    print(f"{label:12} {time.perf_counter() - begun:.2f} s")
print("same state:", states[1] == states[2])
