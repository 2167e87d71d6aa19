"""Contextual retrieval: a model says where each chunk of an upload belongs, before chunks are indexed and searched.

Run it from the root of the checkout::

    python -m examples.apps.contextual_retrieval                              real engines of this machine
    python -m examples.apps.contextual_retrieval --document report.pdf --question "..."
    python -m examples.apps.contextual_retrieval --fakes --compare            latencies of an RTX 3090, no model
"""

from __future__ import annotations

import argparse
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_text_splitters import CharacterTextSplitter, RecursiveCharacterTextSplitter

from examples.apps.naive_rag import ANSWER_TOKENS, TOP, uploads
from examples.apps.prompts import ANSWER, SITUATE
from examples.apps.runner import COLLECTION, App, run
from examples.apps.uploads import CHARACTERS, CHUNK, OVERLAP, read
from teola_plugin import EnginePool
from teola_plugin.langchain import ChatTeola, TeolaIndexer

WHOLE, LINE_TOKENS = 3000, 32
"""Characters of the document that a model sees with each chunk, and tokens of what it says."""


def app(
    pool: EnginePool, *, proxy: str = "llm", tokens: int = ANSWER_TOKENS, collection: str = COLLECTION
) -> Runnable[Any, Any]:
    """Nothing in here knows of `accelerate`. Input: `question` and `document`; output: `answer` and `sources`.
    Uploads go into `collection`: whoever asks about several at once has one for each."""
    llm = ChatTeola(pool=pool, max_tokens=tokens)
    return (
        RunnablePassthrough.assign(chunks=itemgetter("document") | RunnableLambda(chunks))
        | RunnablePassthrough.assign(lines=itemgetter("chunks") | line(pool, proxy).map())
        | RunnablePassthrough.assign(indexed=RunnableLambda(situated) | indexer(pool, collection))
        | RunnablePassthrough.assign(
            sources=itemgetter("question") | uploads(pool, collection).as_retriever(search_kwargs={"k": TOP})
        )
        | RunnablePassthrough.assign(passage=itemgetter("sources") | RunnableLambda(together))
        | RunnablePassthrough.assign(answer=ANSWER | llm | StrOutputParser())
    ).pick(["answer", "sources"])


def line(pool: EnginePool, engine: str) -> Runnable[Any, str]:
    """Where a chunk belongs in its document."""
    return SITUATE | ChatTeola(pool=pool, engine=engine, max_tokens=LINE_TOKENS) | StrOutputParser()


def indexer(pool: EnginePool, collection: str = COLLECTION) -> TeolaIndexer:
    """Of chunks that are made already."""
    as_they_are = CharacterTextSplitter(separator="\0", chunk_size=10**9, chunk_overlap=0)
    return TeolaIndexer(store=uploads(pool, collection), splitter=as_they_are)


def chunks(document: str) -> list[dict[str, str]]:
    """Each chunk, with what the model sees of its document."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=CHUNK * CHARACTERS, chunk_overlap=OVERLAP * CHARACTERS)
    return [{"document": document[:WHOLE], "chunk": text} for text in splitter.split_text(document)]


def situated(state: dict[str, Any]) -> list[Document]:
    """The chunks as they are indexed: behind the line about them."""
    pairs = zip(state["lines"], state["chunks"], strict=True)
    return [Document(f"{line.strip()}\n\n{chunk['chunk']}") for line, chunk in pairs]


def together(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def given(args: argparse.Namespace) -> dict[str, Any]:
    return {"question": args.question, "document": read(args.document)}


APP = App("contextual_retrieval", app, given, "What does an expression-less except clause match?")

if __name__ == "__main__":
    run(APP)
