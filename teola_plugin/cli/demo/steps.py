"""Prompts and steps of the demo's app, whatever models it runs on: plain LCEL, and a user's own functions."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from teola_plugin.cli.demo.prompts import EXPAND_INSTRUCTION, INSTRUCTION, REFINE_INSTRUCTION

QUERIES, SEARCHED, KEPT = 3, 16, 3
CHUNK, OVERLAP = 256, 30
"""In tokens, as in the paper; a token is taken as four characters."""
QUESTION_TOKENS, ANSWER_TOKENS = 96, 64

EXPAND = ChatPromptTemplate.from_messages(
    [("system", EXPAND_INSTRUCTION.format(n=QUERIES)), ("human", "Question: {question}")]
)
ANSWER = ChatPromptTemplate.from_messages(
    [("system", INSTRUCTION), ("human", "Question: {question}\n\nPassage:\n{context}\n\nAnswer:")]
)
REFINE = ChatPromptTemplate.from_messages(
    [
        ("system", INSTRUCTION + REFINE_INSTRUCTION),
        ("human", "Question: {question}\n\nPassage:\n{context}\n\nEarlier answer: {previous}\n\nBetter answer:"),
    ]
)
LIST_OF_QUESTIONS = {"type": "array", "items": {"type": "string"}, "minItems": QUERIES, "maxItems": QUERIES}


def texts(documents: list[Document]) -> list[str]:
    return [document.page_content for document in documents]


def together(documents: list[Document]) -> str:
    return "\n\n".join(texts(documents))


def answer_with(context: int, llm: Runnable[Any, Any], previous: str = "") -> Runnable[Any, Any]:
    """One answer from passage number `context`, refining the `previous` one if there is one."""
    inputs: dict[str, Any] = {
        "question": itemgetter("question"),
        "context": itemgetter("passages") | RunnableLambda(itemgetter(context)),
    }
    if previous:
        inputs["previous"] = itemgetter(previous)
    return inputs | (REFINE if previous else ANSWER) | llm | StrOutputParser()


def nothing_to_gain(llm: Runnable[Any, Any], store: VectorStore) -> Runnable[Any, Any]:
    """Retrieve, prompt, answer: every step needs the one before. Input: the question."""
    retrieve = store.as_retriever(search_kwargs={"k": 1}) | RunnableLambda(together)
    prompt = ChatPromptTemplate.from_template("Passage:\n{context}\n\nQuestion: {question}\n\nAnswer:")
    return {"context": retrieve, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


def make_splitter() -> RecursiveCharacterTextSplitter:
    return RecursiveCharacterTextSplitter(
        chunk_size=CHUNK, chunk_overlap=OVERLAP, length_function=lambda text: (len(text) + 3) // 4
    )
