"""Questions about an upload, with care: 3 more questions, 16 passages each, reranked to 3, an answer refined over them.

Run it from the root of the checkout::

    python -m examples.apps.advanced_rag                              real engines of this machine
    python -m examples.apps.advanced_rag --document report.pdf --question "..."
    python -m examples.apps.advanced_rag --fakes --compare            latencies of an RTX 3090, no model
"""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from examples.apps.naive_rag import ANSWER_TOKENS, given, indexer, uploads
from examples.apps.prompts import ANSWER, EXPAND, REFINE
from examples.apps.runner import COLLECTION, App, run
from teola_plugin import EnginePool
from teola_plugin.langchain import ChatTeola, TeolaRerank

EXPANSIONS, SEARCHED, TOP = 3, 16, 3
QUESTIONS = {"type": "array", "items": {"type": "string"}, "minItems": EXPANSIONS, "maxItems": EXPANSIONS}


def app(
    pool: EnginePool, *, proxy: str = "llm", tokens: int = ANSWER_TOKENS, collection: str = COLLECTION
) -> Runnable[Any, Any]:
    """Nothing in here knows of `accelerate`. Input: `question` and `document`; output: `answer` and `sources`.
    Uploads go into `collection`: whoever asks about several at once has one for each."""
    llm = ChatTeola(pool=pool, max_tokens=tokens)
    search = uploads(pool, collection).as_retriever(search_kwargs={"k": SEARCHED})
    rerank = TeolaRerank(pool=pool, top_n=TOP).as_runnable()
    return (
        RunnablePassthrough.assign(indexed=itemgetter("document") | indexer(pool, collection))
        | RunnablePassthrough.assign(queries=expansion(llm))
        | RunnablePassthrough.assign(found=itemgetter("queries") | search.map())
        | RunnablePassthrough.assign(candidates=itemgetter("found") | RunnableLambda(union))
        | RunnablePassthrough.assign(
            sources={"query": itemgetter("question"), "documents": itemgetter("candidates")} | rerank
        )
        | RunnablePassthrough.assign(first=answer_from(0, llm))
        | RunnablePassthrough.assign(second=answer_from(1, llm, "first"))
        | RunnablePassthrough.assign(answer=answer_from(2, llm, "second"))
    ).pick(["answer", "sources"])


def expansion(llm: ChatTeola) -> Runnable[Any, list[str]]:
    """The question in other words."""
    return EXPAND | llm.bind(json_schema=QUESTIONS, max_tokens=96) | StrOutputParser() | RunnableLambda(json.loads)


def union(found: list[list[Document]]) -> list[Document]:
    """Passages of all searches, each once, in the order in which they were found."""
    return list({document.page_content: document for documents in found for document in documents}.values())


def answer_from(rank: int, llm: Runnable[Any, Any], previous: str = "") -> Runnable[Any, str]:
    """From one passage, refining the `previous` one if there is one; of fewer passages, the last ones are empty."""

    def passage(documents: list[Document]) -> str:
        return documents[rank].page_content if rank < len(documents) else ""

    inputs: dict[str, Any] = {
        "question": itemgetter("question"),
        "passage": itemgetter("sources") | RunnableLambda(passage),
    }
    if previous:
        inputs["previous"] = itemgetter(previous)
    return inputs | (REFINE if previous else ANSWER) | llm | StrOutputParser()


APP = App("advanced_rag", app, given, "What does an expression-less except clause match?")

if __name__ == "__main__":
    run(APP)
