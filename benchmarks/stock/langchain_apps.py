"""Chains of `ChatOpenAI`, `HuggingFaceEmbeddings`, Chroma and FAISS, as the cookbooks write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import VectorStore

Chain = Runnable[Any, Any]
ASK = ChatPromptTemplate.from_messages(
    [("system", "Answer the question with the given context only."), ("human", "Context:\n{context}\n\n{question}")]
)
QUESTION = "What does an expression-less except clause match?"


@dataclass(frozen=True, slots=True)
class Models:
    """Where an app asks; stock objects."""

    chat: BaseChatModel
    """A `ChatOpenAI`."""
    chroma: VectorStore
    faiss: VectorStore


def models(base_url: str, model: str, folder: str, texts: list[str], *, tokens: int = 16) -> Models:
    """`folder`: of the embedding model. The stores hold the texts."""
    import chromadb
    from langchain_chroma import Chroma
    from langchain_community.vectorstores import FAISS
    from langchain_huggingface import HuggingFaceEmbeddings
    from langchain_openai import ChatOpenAI

    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "max_retries": 1}
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=model, **given)  # type: ignore[arg-type]
    embeddings = HuggingFaceEmbeddings(model_name=folder)
    ids = [str(number) for number in range(len(texts))]
    client = chromadb.EphemeralClient()
    chroma = Chroma.from_texts(texts, embeddings, ids=ids, client=client, collection_name=f"texts-{uuid4()}")
    return Models(chat, chroma, FAISS.from_texts(texts, embeddings, ids=ids))


def _joined(found: list[Document]) -> str:
    return "\n\n".join([one.page_content for one in found])


def answered(retriever: Any, made: Models) -> Chain:
    """Retrieve, prompt, answer: nothing to gain."""
    found = RunnablePassthrough.assign(context=itemgetter("question") | retriever | _joined)
    return found | ASK | made.chat | StrOutputParser()


def independent(made: Models) -> Chain:
    """Three steps, written one after the other, that do not need each other; then an answer."""

    def told(said: str) -> Chain:
        return ChatPromptTemplate.from_template(said + "\n{question}") | made.chat | StrOutputParser()

    context = itemgetter("question") | made.faiss.as_retriever(search_kwargs={"k": 1}) | _joined
    steps: Chain = RunnablePassthrough.assign(rewritten=told("Formulate an improved question:"))
    steps = steps | RunnablePassthrough.assign(keywords=told("Write keywords to search with."))
    steps = steps | RunnablePassthrough.assign(general=told("Ask a more general question."), context=context)
    last = "Context:\n{context}\n\nQuestions: {rewritten} {general}\nKeywords: {keywords}\n\n{question}"
    return steps | ChatPromptTemplate.from_template(last) | made.chat | StrOutputParser()


def multi_query(made: Models) -> Chain:
    """Queries that the model writes, each searched with; then an answer."""
    from langchain_classic.retrievers import MultiQueryRetriever

    plain = made.chroma.as_retriever(search_kwargs={"k": 1})
    return answered(MultiQueryRetriever.from_llm(plain, made.chat, include_original=True), made)


def extracted(made: Models) -> Chain:
    """Of each passage the model says what matters; then an answer."""
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_classic.retrievers.document_compressors import LLMChainExtractor

    plain = made.faiss.as_retriever(search_kwargs={"k": 3})
    compressor = LLMChainExtractor.from_llm(made.chat)
    return answered(ContextualCompressionRetriever(base_compressor=compressor, base_retriever=plain), made)


APPS: dict[str, Callable[[Models], Chain]] = {
    "three independent steps, FAISS": independent,
    "multi-query, Chroma": multi_query,
    "extractor, FAISS": extracted,
    "retrieve, prompt, answer, Chroma": lambda made: answered(made.chroma.as_retriever(search_kwargs={"k": 2}), made),
    "retrieve, prompt, answer, FAISS": lambda made: answered(made.faiss.as_retriever(search_kwargs={"k": 2}), made),
}
