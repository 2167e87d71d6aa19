"""Chains as people write them, on pool-backed objects, and their inputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    NumberedListOutputParser,
    StrOutputParser,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough, chain

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.pool import EnginePool

WORDS = ("lambda", "class", "import", "with", "raise")
TEXTS = [f"passage {i} about {word} and naïve café — {word} again" for i, word in enumerate(WORDS)]
LIST = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True)
class Parts:
    """The usual objects of an app, on one pool."""

    llm: ChatTeola
    store: TeolaVectorStore
    reranker: TeolaRerank
    indexer: TeolaIndexer


def parts(pool: EnginePool, collection: str = "docs") -> Parts:
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=collection)
    return Parts(
        ChatTeola(pool=pool, max_tokens=12),
        store,
        TeolaRerank(pool=pool, top_n=2),
        TeolaIndexer(store=TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="uploads")),
    )


def joined(documents: list[Document]) -> str:
    return "\n".join(d.page_content for d in documents)


def ask(text: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_template(text)


def retrieve_prompt_answer(p: Parts) -> Runnable[Any, Any]:
    return (
        {"context": p.store.as_retriever(search_kwargs={"k": 2}) | joined, "question": RunnablePassthrough()}
        | ask("Context: {context}\nQuestion: {question}")
        | p.llm
        | StrOutputParser()
    )


def independent_assigns(p: Parts) -> Runnable[Any, Any]:
    def answer(task: str) -> Runnable[Any, Any]:
        return ask(task + ": {question}") | p.llm | StrOutputParser()

    return (
        RunnablePassthrough.assign(a=answer("Rewrite"))
        | RunnablePassthrough.assign(b=answer("Shorten"))
        | RunnablePassthrough.assign(c=ask("Join {a} and {b}") | p.llm | StrOutputParser())
    )


def mapped_retrieval(p: Parts) -> Runnable[Any, Any]:
    queries = ask("Two questions like {question}") | p.llm.bind(json_schema=LIST, max_tokens=60) | JsonOutputParser()
    return RunnablePassthrough.assign(queries=queries) | RunnablePassthrough.assign(
        found=itemgetter("queries") | p.store.as_retriever(search_kwargs={"k": 2}).map()
    )


def lines_in_a_lambda(p: Parts) -> Runnable[Any, Any]:
    """Return a chain whose lambda splits the answer into lines. The answer itself is no list of lines."""
    split = RunnableLambda(lambda text: text.split(" ")[:3])
    return ask("Words for {question}") | p.llm | StrOutputParser() | split | p.store.as_retriever().map()


def numbered_list(p: Parts) -> Runnable[Any, Any]:
    return ask("List for {question}") | p.llm | NumberedListOutputParser() | p.store.as_retriever().map()


def comma_list(p: Parts) -> Runnable[Any, Any]:
    return ask("List for {question}") | p.llm | CommaSeparatedListOutputParser() | p.store.as_retriever().map()


def text_that_does_not_parse(p: Parts) -> Runnable[Any, Any]:
    return ask("JSON for {question}") | p.llm | JsonOutputParser() | p.store.as_retriever().map()


def upload_and_refine(p: Parts) -> Runnable[Any, Any]:
    retriever = TeolaVectorStore(pool=p.store.pool, embedding=p.store.embeddings, collection="uploads").as_retriever()
    refine = ask("Improve {first} with {question}") | p.llm | StrOutputParser()
    return (
        RunnablePassthrough.assign(collection=itemgetter("documents") | p.indexer)
        | RunnablePassthrough.assign(found=itemgetter("question") | retriever)
        | RunnablePassthrough.assign(context=itemgetter("found") | RunnableLambda(joined))
        | RunnablePassthrough.assign(first=ask("{question} by {context}") | p.llm | StrOutputParser())
        | refine
    )


def reranked(p: Parts) -> Runnable[Any, Any]:
    return (
        RunnablePassthrough.assign(documents=itemgetter("question") | p.store.as_retriever())
        | {"query": itemgetter("question"), "documents": itemgetter("documents")}
        | p.reranker.as_runnable()
    )


def expanded(p: Parts) -> Runnable[Any, Any]:
    """Return advanced RAG over an upload. The answer can be prefetched on what the question itself finds."""
    retriever = p.indexer.store.as_retriever(search_kwargs={"k": 3})
    first = ask("{question} by {context}") | p.llm | StrOutputParser()
    return (
        RunnablePassthrough.assign(indexed=itemgetter("documents") | p.indexer)
        | RunnablePassthrough.assign(
            queries=ask("questions like {question}")
            | p.llm.bind(json_schema=LIST, max_tokens=96)
            | StrOutputParser()
            | json.loads
        )
        | RunnablePassthrough.assign(found=itemgetter("queries") | retriever.map() | RunnableLambda(union))
        | RunnablePassthrough.assign(
            best={"query": itemgetter("question"), "documents": itemgetter("found")} | p.reranker.as_runnable()
        )
        | RunnablePassthrough.assign(context=itemgetter("best") | RunnableLambda(joined))
        | RunnablePassthrough.assign(answer=first)
    )


def union(found: list[list[Document]]) -> list[Document]:
    return list({document.page_content: document for documents in found for document in documents}.values())


def rerank_in_a_lambda(p: Parts) -> Runnable[Any, Any]:
    return p.store.as_retriever() | RunnableLambda(lambda found: list(p.reranker.compress_documents(found, "lambda")))


def history(p: Parts) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You are {role}."), MessagesPlaceholder("history", optional=True), ("human", "{question}")]
    ).partial(role="brief")
    return prompt | p.llm


def string_prompt(p: Parts) -> Runnable[Any, Any]:
    return PromptTemplate.from_template("Say {question}") | p.llm | StrOutputParser()


def parallel_with_failure(p: Parts) -> Runnable[Any, Any]:
    def fail(_: Any) -> Any:
        raise ValueError("my own error")

    return RunnableParallel(good=ask("{question}") | p.llm, bad=RunnableLambda(fail))


def failure_before_an_independent_answer(p: Parts) -> Runnable[Any, Any]:
    def fail(_: Any) -> Any:
        raise LookupError("first")

    answer = ask("{question}") | p.llm | StrOutputParser()
    return RunnablePassthrough.assign(a=RunnableLambda(fail)) | RunnablePassthrough.assign(b=answer)


def missing_variable(p: Parts) -> Runnable[Any, Any]:
    return ask("{question} and {nothing}") | p.llm


def returns_a_runnable(p: Parts) -> Runnable[Any, Any]:
    @chain
    def route(given: dict[str, Any]) -> Any:
        return (ask("PrefetchPlan {question}") | p.llm | StrOutputParser()) if "question" in given else None

    return route | RunnableLambda(str.upper)


def pick_and_bind(p: Parts) -> Runnable[Any, Any]:
    model = p.llm.bind(max_tokens=5, stop=["zz"]).with_config(tags=["bound"], run_name="named")
    return RunnablePassthrough.assign(a=ask("{question}") | model).pick(["a", "question"])


def model_alone(p: Parts) -> Runnable[Any, Any]:
    return p.llm


def fallback(p: Parts) -> Runnable[Any, Any]:
    broken = ask("{nothing}") | p.llm
    return broken.with_fallbacks([ask("{question}") | p.llm | StrOutputParser()])


QUESTION = {"question": "what is a lambda?"}
UPLOAD = {"question": "what is raise?", "documents": "\n\n".join(TEXTS * 6)}
CHAINS: dict[str, tuple[Any, Any]] = {
    "retrieve_prompt_answer": (retrieve_prompt_answer, "what is import?"),
    "independent_assigns": (independent_assigns, QUESTION),
    "mapped_retrieval": (mapped_retrieval, QUESTION),
    "lines_in_a_lambda": (lines_in_a_lambda, QUESTION),
    "numbered_list": (numbered_list, QUESTION),
    "comma_list": (comma_list, QUESTION),
    "text_that_does_not_parse": (text_that_does_not_parse, QUESTION),
    "upload_and_refine": (upload_and_refine, UPLOAD),
    "upload_nothing": (upload_and_refine, {"question": "x", "documents": []}),
    "upload_unicode": (upload_and_refine, {"question": "naïve?", "documents": ["naïve café " * 400, "日本語 " * 300]}),
    "reranked": (reranked, QUESTION),
    "expanded": (expanded, UPLOAD),
    "rerank_in_a_lambda": (rerank_in_a_lambda, "what is class?"),
    "history": (history, {"question": "and?", "history": [HumanMessage("hello")]}),
    "no_history": (history, QUESTION),
    "string_prompt": (string_prompt, QUESTION),
    "parallel_with_failure": (parallel_with_failure, QUESTION),
    "failure_before_an_independent_answer": (failure_before_an_independent_answer, QUESTION),
    "missing_variable": (missing_variable, QUESTION),
    "wrong_input_type": (independent_assigns, "not a dict"),
    "returns_a_runnable": (returns_a_runnable, QUESTION),
    "pick_and_bind": (pick_and_bind, QUESTION),
    "model_alone": (model_alone, "hello"),
    "fallback": (fallback, QUESTION),
}
