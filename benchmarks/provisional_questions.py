"""A question and three others that a model writes: searched, reranked, answered from the best four.

What `benchmarks.provisional` measures of answers that begin on what the question itself finds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeLLM, FakeReranker, fake_engines
from teola_plugin.engines.profiles import drafting, rtx3090
from teola_plugin.requests.payloads import Prompt, Sampling

EXPANSIONS, SEARCHED, BEST = 3, 16, 4
QUESTIONS = {"type": "array", "items": {"type": "string"}, "minItems": EXPANSIONS, "maxItems": EXPANSIONS}
Score = Callable[[int | None, int], float]
"""(place among the question's own hits if it is one, place among all that is found) -> the score of a passage."""
GUESSES: dict[str, Score] = {
    "right: the best are among the question's hits": lambda own, place: 0.0 if own is None else 1.0 - own / SEARCHED,
    "half right: the first two stay": lambda own, place: 2.0 - own if own in (0, 1) else (own is None) * 0.5,
    "wrong: an expansion finds a better one": lambda own, place: 1.0 if own is None else 0.5 - own / 100,
}


def joined(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def union(found: list[list[Document]]) -> list[Document]:
    """Each passage once."""
    return list({document.page_content: document for documents in found for document in documents}.values())


def writes(prompt: Prompt, sampling: Sampling, answer: Callable[[Prompt, Sampling], str]) -> str:
    """Questions where these are asked for, else the answer."""
    if not sampling.json_schema:
        return answer(prompt, sampling)
    asked = prompt.flat().rpartition("Question: ")[2].splitlines()[0]
    return json.dumps([f"{asked} in the words of a {who}" for who in ("teacher", "beginner", "lawyer")])


class Expanded:
    """A pool of fakes, and the chain. The questions are written by `writer`: `llm`, which answers, or `proxy`."""

    def __init__(
        self,
        score: Score,
        answer: Callable[[Prompt, Sampling], str],
        passages: list[str],
        *,
        writer: str,
        tokens: int,
        drafts: bool,
    ) -> None:
        self.own: dict[str, int] = {}
        self.found: dict[str, int] = {}
        machine = drafting(rtx3090()) if drafts else rtx3090()
        engines: list[Any] = [one for one in fake_engines(machine) if one.name not in ("llm", "reranker")]
        given: Any = {"recent": 0} if drafts else "off"

        def say(prompt: Prompt, sampling: Sampling) -> str:
            return writes(prompt, sampling, answer)

        own_card = replace(machine["llm"], device="proxy")
        profiles = {"llm": machine["llm"], "proxy": own_card}
        self.llms = [FakeLLM(name, profile, say, drafts=given) for name, profile in profiles.items()]
        rank = FakeReranker("reranker", machine["reranker"], lambda _, text: self._score(score, text))
        self.pool = EnginePool.on_this_loop([*engines, *self.llms, rank])
        self.passages, self.tokens, self.writer = passages, tokens, writer

    def _score(self, score: Score, text: str) -> float:
        return score(self.own.get(text), self.found.get(text, 0))

    async def chain(self) -> Runnable[Any, str]:
        pool = self.pool
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="expanded")
        await store.aadd_documents([Document(page_content=text, id=str(i)) for i, text in enumerate(self.passages)])
        self.search = store.as_retriever(search_kwargs={"k": SEARCHED})
        self.expand: Runnable[Any, list[str]] = (
            ChatPromptTemplate.from_template("Write three questions like this one, as JSON.\nQuestion: {query}")
            | ChatTeola(pool=pool, engine=self.writer, max_tokens=96).bind(json_schema=QUESTIONS)
            | StrOutputParser()
            | RunnableLambda(json.loads)
        )
        rerank = TeolaRerank(pool=pool, top_n=BEST).as_runnable()
        return (
            RunnablePassthrough.assign(queries=self.expand)
            | RunnablePassthrough.assign(documents=itemgetter("queries") | self.search.map() | RunnableLambda(union))
            | RunnablePassthrough.assign(context=rerank | joined)
            | ChatPromptTemplate.from_template("Answer from these passages:\n{context}\nQuestion: {query}")
            | ChatTeola(pool=pool, max_tokens=self.tokens)
            | StrOutputParser()
        )

    async def knows(self, query: str) -> None:
        """The reranker learns what the searches find for it."""
        others = await self.expand.ainvoke({"query": query})
        self.own = {one.page_content: place for place, one in enumerate(await self.search.ainvoke(query))}
        found = union([await self.search.ainvoke(other) for other in others])
        self.found = {one.page_content: place for place, one in enumerate(found)}

    async def reset(self) -> None:
        for llm in self.llms:
            await llm.reset()
