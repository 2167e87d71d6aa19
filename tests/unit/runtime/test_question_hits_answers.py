"""Answers begun on what the question itself finds, while an LLM writes what else is searched for."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from support.arriving import arriving
from test_provisional_answers import TICK, Seen, _watch, events, joined

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeLLM, FakeReranker, Faults, fake_engines
from teola_plugin.engines.profiles import drafting, rtx3090
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.requests.payloads import Generate, Prompt, Sampling, ScorePair, SearchVector
from teola_plugin.requests.request import Request
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind
QUESTIONS = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}
PASSAGES = [f"passage {i} " + "about lambda and class " * 4 for i in range(40)]
OTHERS = tuple(one for one in DEFAULT_PASSES if one.name != "provisional-answers")


def union(found: list[list[Document]]) -> list[Document]:
    return list({document.page_content: document for documents in found for document in documents}.values())


def write(prompt: Prompt, sampling: Sampling) -> str:
    text = prompt.flat()
    if sampling.json_schema:
        asked = text.rpartition("Question: ")[2].splitlines()[0]
        return json.dumps([f"{asked}, said by a {who}" for who in ("teacher", "lawyer", "poet")])
    return " ".join(word for word in text.split() if word.isdigit()) + " is what was said about it, at length" * 6


class World:
    """A pool in virtual time, and an app that writes three questions, searches, reranks and answers."""

    def __init__(
        self,
        *,
        right: bool,
        proxy: bool = False,
        pair: float = 0.004,
        faults: dict[str, Faults] | None = None,
        **asks: Any,
    ):
        machine = drafting(rtx3090())
        machine["reranker"] = replace(machine["reranker"], curves={K.RERANKING: Curve.linear(0.02, 0.004)})
        faults, self.seen, self.own = faults or {}, list[Seen](), set[str]()
        self.pairs, self.searches = list[Request](), list[Request]()
        engines: list[Any] = [
            one for one in fake_engines(machine, **faults) if one.name not in ("reranker", "llm", "store")
        ]
        engines += [one for one in fake_engines(machine, **faults) if one.name == "store"]
        given = {"recent": 0, "lookup": False}
        self.llm = FakeLLM("llm", machine["llm"], write, drafts=given, faults=faults.get("llm", Faults()))
        self.proxy = FakeLLM("proxy", replace(machine["llm"], device="proxy"), write, drafts=given)

        def score(query: str, text: str) -> float:
            mine = text in self.own
            return (1.0 if mine == right else 0.0) + PASSAGES.index(text) * 7 % 40 / 1000

        rank = FakeReranker("reranker", machine["reranker"], score, faults=faults.get("reranker", Faults()))
        _noting(rank, self.pairs)
        _noting(engines[-1], self.searches)
        _watch(self.llm, self.seen)
        self.engines = [*engines, self.llm, self.proxy, rank]
        self.writer, self.asks = "proxy" if proxy else "llm", {"max_tokens": 40, **asks}

    async def __aenter__(self) -> World:
        self.pool = EnginePool.on_this_loop(self.engines)
        pool = await self.pool.__aenter__()
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="docs")
        await store.aadd_documents([Document(page_content=text, id=str(i)) for i, text in enumerate(PASSAGES)])
        self.search = store.as_retriever(search_kwargs={"k": 12})
        written = ChatTeola(pool=pool, engine=self.writer, max_tokens=96).bind(json_schema=QUESTIONS)
        expand = (
            ChatPromptTemplate.from_template("Write three others.\nQuestion: {query}")
            | written
            | StrOutputParser()
            | RunnableLambda(json.loads)
        )
        self.chain: Runnable[Any, str] = (
            RunnablePassthrough.assign(queries=expand)
            | RunnablePassthrough.assign(documents=itemgetter("queries") | self.search.map() | RunnableLambda(union))
            | RunnablePassthrough.assign(context=TeolaRerank(pool=pool, top_n=3).as_runnable() | joined)
            | ChatPromptTemplate.from_template("Context: {context}\nQuestion: {query}")
            | ChatTeola(pool=pool, **self.asks)
            | StrOutputParser()
        )
        self.fast, self.off = accelerate(self.chain), accelerate(self.chain, passes=OTHERS)
        return self

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        await asyncio.sleep(5.0)
        assert not self.llm._jobs and not self.proxy._jobs, "something goes on that nobody wants"
        await self.pool.__aexit__(None, None, None)

    async def timed(self, chain: Any, query: str = "lambda") -> tuple[str, float, float]:
        """(answer, seconds to its first piece, seconds), with empty caches; what was asked is in `seen` and `pairs`."""
        self.own = {one.page_content for one in await self.search.ainvoke(query)}
        await self.llm.reset()
        await self.proxy.reset()
        self.seen.clear()
        self.pairs.clear()
        self.searches.clear()
        loop, text = asyncio.get_running_loop(), ""
        began, first = loop.time(), 0.0
        async for piece in chain.astream({"query": query}):
            first, text = first or loop.time() - began, text + piece
        return text, first, loop.time() - began

    @property
    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = self.pool.traces[-1].summary()
        return found

    @property
    def guesses(self) -> list[Seen]:
        return [one for one in self.seen if one.provisional and isinstance(one.request.payload, Generate)]


def _noting(engine: Any, asked: list[Request]) -> None:
    execute = engine.execute

    async def noted(batch: Any) -> Any:
        asked.extend(batch)
        async for result in execute(batch):
            yield result

    engine.execute = noted


def in_world(run: Callable[[World], Awaitable[None]], **world: Any) -> None:
    async def main() -> None:
        async with World(**world) as made:
            await run(made)

    run_virtual(main())


@pytest.mark.parametrize("proxy", [False, True], ids=["one llm", "two llms"])
def test_a_right_guess_is_claimed(proxy: bool) -> None:
    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        off, first_off, seconds_off = await w.timed(w.off)
        text, first, seconds = await w.timed(w.fast)
        assert text == off == plain
        assert first < first_off - 0.05 and seconds < seconds_off - 0.05
        assert len(w.guesses) == 1 and not w.guesses[0].cancelled
        assert sum(not one.provisional and "Context:" in str(one.request.payload) for one in w.seen) == 0
        assert (w.told["provisional_answers"], w.told["provisional_claimed"]) == (1, 1)
        assert w.told["provisional_wasted_tokens"] == 0

    in_world(run, right=True, proxy=proxy)


def test_the_prompt_is_read_before_the_questions_are_written_where_they_are_anothers() -> None:
    async def run(w: World) -> None:
        await w.timed(w.fast)
        [guess] = w.guesses
        read = [one for one in w.seen if one.provisional and one is not guess]
        assert len(read) == 1 and (read[0].ended or 0) < guess.began
        assert w.told["provisional_tokens"] > 0, "it is written while the real hits are reranked"

    in_world(run, right=True, proxy=True)


@pytest.mark.parametrize("proxy", [False, True], ids=["one llm", "two llms"])
def test_a_wrong_guess_is_stopped_and_becomes_the_draft(proxy: bool) -> None:
    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        off, first_off, seconds_off = await w.timed(w.off)
        text, first, seconds = await w.timed(w.fast)
        assert text == off == plain
        assert first < first_off + TICK and seconds < seconds_off + TICK
        [guess] = w.guesses
        [real] = [one for one in w.seen if not one.provisional and "Context:" in str(one.request.payload)]
        assert guess.cancelled and guess.request.payload != real.request.payload
        written = w.told["provisional_wasted_tokens"]
        assert bool(real.request.drafts) is bool(written) and w.told["provisional_claimed"] == 0
        assert written <= 10, "a quarter of what the answer may have"

    in_world(run, right=False, proxy=proxy)


def test_pairs_that_were_scored_for_the_guess_are_not_scored_again() -> None:
    async def run(w: World) -> None:
        await w.timed(w.off)
        before = {(p.payload.query, p.payload.text) for p in w.pairs if isinstance(p.payload, ScorePair)}
        without = len(w.pairs)
        await w.timed(w.fast)
        after = [(p.payload.query, p.payload.text) for p in w.pairs if isinstance(p.payload, ScorePair)]
        assert len(after) == len(set(after)) and before <= set(after)
        assert sum(p.objective == "provisional" for p in w.pairs) == 12
        assert sum(p.objective != "provisional" for p in w.pairs) < without

    in_world(run, right=True)


@pytest.mark.parametrize("right", [True, False])
def test_nobody_hears_of_it(right: bool) -> None:
    async def run(w: World) -> None:
        w.own = {one.page_content for one in await w.search.ainvoke("class")}
        plain = [one async for one in w.chain.astream_events({"query": "class"}, version="v2")]
        fast = [one async for one in w.fast.astream_events({"query": "class"}, version="v2")]
        assert sum(one.provisional for one in w.seen) == 1
        assert sorted(events(fast)) == sorted(events(plain))

    in_world(run, right=right)


@pytest.mark.parametrize("right", [True, False])
def test_beside_other_queries_nothing_is_written_on_a_guess_and_nobody_waits(right: bool) -> None:
    async def run(w: World) -> None:
        off, seconds_off = await arriving(w.off, 8)
        w.seen.clear()
        fast, seconds = await arriving(w.fast, 8)
        assert fast == off and seconds < 1.01 * seconds_off
        for guess in w.guesses:
            others = [one for one in w.seen if one.request.query != guess.request.query]
            assert not any(one.began < guess.began < (one.ended or 0.0) for one in others), "one began under load"

    in_world(run, right=right)


def test_of_a_sampled_answer_only_the_prompt_is_read() -> None:
    async def run(w: World) -> None:
        off, _, _ = await w.timed(w.off)
        text, _, _ = await w.timed(w.fast)
        assert text == off and not w.guesses and w.told["provisional_tokens"] == 0
        assert any(one.provisional for one in w.seen)

    in_world(run, right=True, temperature=0.7)


@pytest.mark.parametrize("engine", ["reranker", "llm"])
def test_what_fails_on_a_guess_is_seen_by_nobody(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(fail_on=lambda request: request.objective == "provisional")

    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        text, _, _ = await w.timed(w.fast)
        assert text == plain and w.told["provisional_claimed"] == (engine == "llm")

    with caplog.at_level(logging.WARNING):
        in_world(run, right=True, faults={engine: faults})
    assert not [one for one in caplog.records if engine == "reranker"]


def test_a_query_that_is_given_up_takes_all_of_it_along() -> None:
    async def run(w: World) -> None:
        task = asyncio.ensure_future(w.timed(w.fast))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert not w.llm._jobs and not w.proxy._jobs

    in_world(run, right=True, proxy=True)


def test_without_speculation_there_is_none() -> None:
    async def run(w: World) -> None:
        fast = accelerate(w.chain, speculate="off")
        await w.timed(fast)
        assert not any(one.provisional for one in w.seen)
        found = [one.payload for one in w.searches]
        assert len(found) == 3 and all(isinstance(one, SearchVector) for one in found), "the question is not searched"

    in_world(run, right=True)


def test_it_is_told() -> None:
    async def run(w: World) -> None:
        assert "provisionally, on what the question itself finds, before queries.loads is there" in w.fast.explain()
        assert "which is searched for and reranked before" in w.fast.explain(details=True)
        await w.timed(w.fast)
        kinds = [span.kind for span in w.pool.traces[-1].spans if span.primitive.endswith(".provisional")]
        assert "PROVISIONAL" in kinds and "RERANKING" in kinds

    in_world(run, right=True)
