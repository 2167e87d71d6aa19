"""The demo's app: document QA with advanced RAG (the paper's Figure 2d), written in plain LCEL.

Nothing here knows of `accelerate`: these are ordinary LangChain objects and a user's own lambdas.
"""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import VectorStore

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cli.demo.prompts import EXPAND_INSTRUCTION, INSTRUCTION, REFINE_INSTRUCTION

QUERIES, SEARCHED, KEPT = 3, 16, 3

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


def union(found: list[list[Document]]) -> list[Document]:
    """Passages of all searches, each once, in the order in which they were found."""
    return list({document.page_content: document for documents in found for document in documents}.values())


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


def search_and_answer(llm: ChatTeola, store: TeolaVectorStore, reranker: TeolaRerank) -> Runnable[Any, Any]:
    """Expand the question, search for each, rerank, refine an answer. Input: `{"question": str}`."""
    # JsonOutputParser streams unfinished lists, and whatever comes next adds these up: not in a chain that may stream.
    questions = StrOutputParser() | RunnableLambda(json.loads)
    expand = EXPAND | llm.bind(json_schema=LIST_OF_QUESTIONS, max_tokens=96) | questions
    search = store.as_retriever(search_kwargs={"k": SEARCHED})
    return (
        RunnablePassthrough.assign(queries=expand)
        | RunnablePassthrough.assign(found=itemgetter("queries") | search.map())
        | RunnablePassthrough.assign(candidates=itemgetter("found") | RunnableLambda(union))
        | RunnablePassthrough.assign(
            best={"query": itemgetter("question"), "documents": itemgetter("candidates")} | reranker.as_runnable()
        )
        | RunnablePassthrough.assign(passages=itemgetter("best") | RunnableLambda(texts))
        | RunnablePassthrough.assign(first=answer_with(0, llm))
        | RunnablePassthrough.assign(second=answer_with(1, llm, "first"))
        | RunnablePassthrough.assign(answer=answer_with(2, llm, "second"))
        | itemgetter("answer")
    )


def uploaded_document_qa(
    llm: ChatTeola, store: TeolaVectorStore, reranker: TeolaRerank, indexer: TeolaIndexer
) -> Runnable[Any, Any]:
    """The same over a document that comes with the question. Input: `{"question": str, "documents": [...]}`."""
    return RunnablePassthrough.assign(collection=itemgetter("documents") | indexer) | search_and_answer(
        llm, store, reranker
    )


def nothing_to_gain(llm: Runnable[Any, Any], store: VectorStore) -> Runnable[Any, Any]:
    """Retrieve, prompt, answer: every step needs the one before. Input: the question."""
    retrieve = store.as_retriever(search_kwargs={"k": 1}) | RunnableLambda(together)
    prompt = ChatPromptTemplate.from_template("Passage:\n{context}\n\nQuestion: {question}\n\nAnswer:")
    return {"context": retrieve, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()
