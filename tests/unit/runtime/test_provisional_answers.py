"""Answers begun while a reranker thinks: claimed where the guess was right, drafts where it was not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from support.arriving import arriving

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeLLM, FakeReranker, Faults, fake_engines
from teola_plugin.engines.profiles import drafting, rtx3090
from teola_plugin.errors import EngineError
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Result
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind
TICK = 1e-6
"""Seconds that are none."""
PASSAGES = [f"passage {i} " + "about lambda and class " * 4 for i in range(20)]


def joined(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


@dataclass
class Seen:
    """One request at the LLM."""

    request: Request
    began: float
    ended: float | None = None
    cancelled: bool = False

    @property
    def provisional(self) -> bool:
        return self.request.objective == "provisional"


class World:
    """A pool in virtual time, a chain on it, plain and accelerated."""

    def __init__(self, *, right: bool, reranking: float = 0.1, faults: dict[str, Faults] | None = None, **llm: Any):
        machine = drafting(rtx3090())
        machine["reranker"] = replace(machine["reranker"], curves={K.RERANKING: Curve.linear(reranking, 0.0)})
        faults, self.seen = faults or {}, list[Seen]()
        self.engines = [one for one in fake_engines(machine, **faults) if one.name not in ("reranker", "llm")]
        given = {"recent": 0, "lookup": False}  # nothing is drafted but what comes with a request
        self.llm = FakeLLM("llm", machine["llm"], drafts=given, faults=faults.get("llm", Faults()))
        texts = PASSAGES

        def answer(query: str, text: str) -> float:
            return 0.5 if right else float(texts.index(text) * 7 % 20)

        faults_of = faults.get("reranker", Faults())
        self.engines += [self.llm, FakeReranker("reranker", machine["reranker"], answer, faults=faults_of)]
        self.texts, self.asks = texts, {"max_tokens": 40, **llm}
        _watch(self.llm, self.seen)

    async def __aenter__(self) -> World:
        self.pool = EnginePool.on_this_loop(self.engines)
        await self.pool.__aenter__()
        pool = self.pool
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="docs")
        await store.aadd_documents([Document(page_content=text, id=str(i)) for i, text in enumerate(self.texts)])
        found = RunnablePassthrough.assign(documents=(lambda given: given["query"]) | store.as_retriever(
            search_kwargs={"k": 16}
        )) | TeolaRerank(pool=pool, top_n=3).as_runnable() | joined  # fmt: skip
        self.chain: Runnable[Any, str] = (
            RunnablePassthrough.assign(context=found)
            | ChatPromptTemplate.from_template("Context: {context}\nQuestion: {query}")
            | ChatTeola(pool=pool, **self.asks)
            | StrOutputParser()
        )
        self.fast, self.off = accelerate(self.chain), accelerate(self.chain, speculate="off")
        return self

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        await asyncio.sleep(5.0)
        assert not self.llm._jobs, "something goes on that nobody wants"
        await self.pool.__aexit__(None, None, None)

    async def timed(self, chain: Any, query: str = "lambda") -> tuple[str, float, float]:
        """(answer, seconds to its first piece, seconds)"""
        loop, text = asyncio.get_running_loop(), ""
        began, first = loop.time(), 0.0
        async for piece in chain.astream({"query": query}):
            first, text = first or loop.time() - began, text + piece
        return text, first, loop.time() - began

    @property
    def told(self) -> dict[str, Any]:
        """The figures of the last query."""
        found: dict[str, Any] = self.pool.traces[-1].summary()
        return found

    @property
    def guesses(self) -> list[Seen]:
        return [one for one in self.seen if one.provisional]


def _watch(llm: FakeLLM, seen: list[Seen]) -> None:
    execute, cancel = llm.execute, llm.cancel

    async def watched(batch: Sequence[Request]) -> AsyncIterator[Result]:
        now = asyncio.get_running_loop().time
        begun = {request.id: Seen(request, now()) for request in batch}
        seen.extend(begun.values())
        async for result in execute(batch):
            begun[result.request_id].ended = now()
            yield result

    async def cancelled(request: str) -> None:
        for one in seen:
            one.cancelled |= one.request.id == request
        await cancel(request)

    llm.execute, llm.cancel = watched, cancelled  # type: ignore[method-assign]


def in_world(run: Callable[[World], Awaitable[None]], **world: Any) -> None:
    async def main() -> None:
        async with World(**world) as made:
            await run(made)

    run_virtual(main())


def test_a_right_guess_is_claimed() -> None:
    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        off, first_off, seconds_off = await w.timed(w.off)
        w.seen.clear()
        text, first, seconds = await w.timed(w.fast)
        assert text == off == plain
        assert first < first_off - 0.02 and seconds < seconds_off - 0.09
        [only] = w.seen
        assert only.provisional and not only.cancelled
        told = w.told
        assert (told["provisional_answers"], told["provisional_claimed"]) == (1, 1)
        assert told["provisional_tokens"] > 0 and told["provisional_wasted_tokens"] == told["wasted_tokens"] == 0

    in_world(run, right=True)


def test_a_wrong_guess_is_stopped_and_becomes_the_draft() -> None:
    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        off, first_off, seconds_off = await w.timed(w.off)
        w.seen.clear()
        text, first, seconds = await w.timed(w.fast)
        assert text == off == plain
        assert first < first_off + TICK and seconds < seconds_off + TICK
        guess, real = w.seen
        assert guess.provisional and guess.cancelled and not real.provisional
        assert guess.request.payload != real.request.payload
        [draft] = real.request.drafts
        written = w.told["provisional_wasted_tokens"]
        assert draft and w.told["provisional_claimed"] == 0
        assert w.told["provisional_tokens"] == written == w.told["wasted_tokens"] > 0

    in_world(run, right=False)


def events(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["event"], one["name"]) for one in found if not one["event"].endswith("stream")]


@pytest.mark.parametrize("right", [True, False])
def test_nobody_hears_of_it(right: bool) -> None:
    async def run(w: World) -> None:
        plain = [one async for one in w.chain.astream_events({"query": "class"}, version="v2")]
        fast = [one async for one in w.fast.astream_events({"query": "class"}, version="v2")]
        assert len(w.guesses) == 1
        assert sorted(events(fast)) == sorted(events(plain))

    in_world(run, right=right)


@pytest.mark.parametrize("most", [20, 40, 400])
@pytest.mark.parametrize("right", [True, False])
def test_it_writes_a_quarter_of_what_the_answer_is_expected_to_have(right: bool, most: int) -> None:
    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        w.seen.clear()
        text, _, _ = await w.timed(w.fast)
        assert text == plain
        guess, real = w.seen
        assert guess.cancelled and not real.provisional and real.request.drafts[0]
        assert w.told["provisional_wasted_tokens"] == min(most, 64) // 4
        assert (guess.request.payload == real.request.payload) is right
        assert text.startswith(real.request.drafts[0]) or not right

    in_world(run, right=right, reranking=3.0, max_tokens=most)


def test_of_a_sampled_answer_only_the_prompt_is_read() -> None:
    async def run(w: World) -> None:
        off, first_off, _ = await w.timed(w.off)
        w.seen.clear()
        text, first, _ = await w.timed(w.fast)
        assert text == off and first < first_off - 0.02
        guess, real = w.seen
        assert guess.provisional and isinstance(guess.request.payload, Warmup)
        assert isinstance(real.request.payload, Generate) and not real.request.drafts
        assert w.told["provisional_tokens"] == 0 and w.told["provisional_claimed"] == 1

    in_world(run, right=True, temperature=0.7)


def test_one_with_a_seed_is_written() -> None:
    async def run(w: World) -> None:
        off, _, seconds_off = await w.timed(w.off)
        text, _, seconds = await w.timed(w.fast)
        assert text == off and seconds < seconds_off - 0.09

    in_world(run, right=True, temperature=0.7, seed=3)


@pytest.mark.parametrize("right", [True, False])
def test_beside_other_queries_none_begins_and_none_goes_on(right: bool) -> None:
    async def run(w: World) -> None:
        off, seconds_off = await arriving(w.off, 12)
        w.seen.clear()
        fast, seconds = await arriving(w.fast, 12)
        assert fast == off and seconds < seconds_off + TICK
        assert w.guesses
        for guess in w.guesses:
            others = [one for one in w.seen if one.request.query != guess.request.query]
            assert not any(one.began < guess.began < (one.ended or 0.0) for one in others), "one began under load"
            if guess.cancelled:
                assert not any(guess.began < one.began < (guess.ended or 0.0) for one in others), "one went on"

    in_world(run, right=right)


def test_a_query_that_is_given_up_takes_it_along() -> None:
    async def run(w: World) -> None:
        task = asyncio.ensure_future(w.timed(w.fast))
        await asyncio.sleep(0.12)
        [guess] = w.guesses
        assert not guess.cancelled
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert guess.cancelled and len(w.seen) == 1
        assert w.told["provisional_wasted_tokens"] > 0

    in_world(run, right=True, reranking=0.4)


def test_one_that_fails_is_seen_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(fail_on=lambda request: request.objective == "provisional")

    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        w.seen.clear()
        text, _, _ = await w.timed(w.fast)
        assert text == plain
        guess, real = w.seen
        assert guess.provisional and not real.provisional

    with caplog.at_level(logging.WARNING):
        in_world(run, right=True, reranking=3.0, faults={"llm": faults}, max_tokens=12)
    assert not caplog.records


def test_one_that_fails_when_it_is_claimed_is_asked_for_again() -> None:
    """As of an engine elsewhere that has stopped it before the claim came: its reader sees the text go on."""
    faults = Faults(fail_on=lambda request: request.objective == "provisional", retryable=False)

    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        w.seen.clear()
        text, _, _ = await w.timed(w.fast)
        assert text == plain and w.told["provisional_claimed"] == 1
        guess, again = w.seen
        assert guess.request.id == again.request.id and not again.provisional

    in_world(run, right=True, faults={"llm": faults})


def test_a_reranker_that_fails_takes_it_along() -> None:
    faults = Faults(fail_on=lambda request: True, retryable=False)

    async def run(w: World) -> None:
        errors = []
        for chain in (w.chain, w.fast):
            with pytest.raises(EngineError) as raised:
                await chain.ainvoke({"query": "lambda"})
            errors.append((type(raised.value), str(raised.value).partition("request")[0]))
        assert errors[0] == errors[1]
        await asyncio.sleep(0.01)
        assert all(guess.cancelled for guess in w.guesses) and len(w.seen) == len(w.guesses)

    in_world(run, right=True, faults={"reranker": faults})


def test_a_dying_engine_is_survived() -> None:
    """The guess runs when its engine dies; the call of the plain object is made at the one that is started again."""

    async def run(w: World) -> None:
        plain, _, _ = await w.timed(w.chain)
        text, _, _ = await w.timed(w.fast, "lambda")
        assert text == plain

    in_world(run, right=True, reranking=0.4, faults={"llm": Faults(die_after=1)})


def test_none_without_speculation() -> None:
    async def run(w: World) -> None:
        await w.timed(w.off)
        await w.timed(w.chain)
        assert w.seen and not w.guesses

    in_world(run, right=True)
