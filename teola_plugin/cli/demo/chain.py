"""The demo's app on pool-backed objects: the same steps, and indexing that is understood, too.

Nothing here knows of `accelerate`.
"""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cli.demo.steps import EXPAND, LIST_OF_QUESTIONS, QUESTION_TOKENS, SEARCHED, answer_with, texts


def union(found: list[list[Document]]) -> list[Document]:
    """Passages of all searches, each once, in the order in which they were found."""
    return list({document.page_content: document for documents in found for document in documents}.values())


def search_and_answer(llm: ChatTeola, store: TeolaVectorStore, reranker: TeolaRerank) -> Runnable[Any, Any]:
    """Expand the question, search for each, rerank, refine an answer. Input: `{"question": str}`."""
    # JsonOutputParser streams unfinished lists, and whatever comes next adds these up: not in a chain that may stream.
    questions = StrOutputParser() | RunnableLambda(json.loads)
    expand = EXPAND | llm.bind(json_schema=LIST_OF_QUESTIONS, max_tokens=QUESTION_TOKENS) | questions
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
