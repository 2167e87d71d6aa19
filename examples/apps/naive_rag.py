"""Questions about an upload: chunked, embedded, ingested; answers from the 3 nearest passages, combined.

Run it from the root of the checkout::

    python -m examples.apps.naive_rag                              real engines of this machine
    python -m examples.apps.naive_rag --document report.pdf --question "..."
    python -m examples.apps.naive_rag --fakes --compare            latencies of an RTX 3090, no model
"""

from __future__ import annotations

import argparse
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_text_splitters import RecursiveCharacterTextSplitter

from examples.apps.prompts import ANSWER, COMBINE
from examples.apps.runner import COLLECTION, App, run
from examples.apps.uploads import CHARACTERS, CHUNK, OVERLAP, read
from teola_plugin import EnginePool
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaIndexer, TeolaVectorStore

TOP, ANSWER_TOKENS = 3, 64


def uploads(pool: EnginePool, collection: str = COLLECTION) -> TeolaVectorStore:
    return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=collection)


def indexer(pool: EnginePool, collection: str = COLLECTION) -> TeolaIndexer:
    """Chunks of 256 tokens that overlap by 30."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=CHUNK * CHARACTERS, chunk_overlap=OVERLAP * CHARACTERS)
    return TeolaIndexer(store=uploads(pool, collection), splitter=splitter)


def app(
    pool: EnginePool, *, proxy: str = "llm", tokens: int = ANSWER_TOKENS, collection: str = COLLECTION
) -> Runnable[Any, Any]:
    """Nothing in here knows of `accelerate`. Input: `question` and `document`; output: `answer` and `sources`.
    Uploads go into `collection`: whoever asks about several at once has one for each."""
    llm = ChatTeola(pool=pool, max_tokens=tokens)
    return (
        RunnablePassthrough.assign(indexed=itemgetter("document") | indexer(pool, collection))
        | RunnablePassthrough.assign(
            sources=itemgetter("question") | uploads(pool, collection).as_retriever(search_kwargs={"k": TOP})
        )
        | RunnablePassthrough.assign(a=leaf(0, llm), b=leaf(1, llm), c=leaf(2, llm))
        | RunnablePassthrough.assign(answer=COMBINE | llm | StrOutputParser())
    ).pick(["answer", "sources"])


def leaf(rank: int, llm: Runnable[Any, Any]) -> Runnable[Any, str]:
    """The answer from one passage; of fewer passages, the last ones are empty."""
    passage = itemgetter("sources") | RunnableLambda(_passage(rank))
    return {"question": itemgetter("question"), "passage": passage} | ANSWER | llm | StrOutputParser()


def _passage(rank: int) -> Any:
    def passage(documents: list[Any]) -> str:
        return documents[rank].page_content if rank < len(documents) else ""

    return passage


def given(args: argparse.Namespace) -> dict[str, Any]:
    return {"question": args.question, "document": read(args.document)}


APP = App("naive_rag", app, given, "What does an expression-less except clause match?")

if __name__ == "__main__":
    run(APP)
