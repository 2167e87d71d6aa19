"""Tests of gangs: requests that the original makes at once.

A single request does not wait for gangs of other queries.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue

LLM = rtx3090() | {"llm": replace(rtx3090()["llm"], max_requests=4)}
DOCS = {"docs": [{"doc": f"{n} {'text ' * 40}"} for n in range(24)]}


def asks(pool: EnginePool, text: str) -> Runnable[Any, str]:
    return ChatPromptTemplate.from_template(text) | ChatTeola(pool=pool, max_tokens=32) | StrOutputParser()


def map_reduce(pool: EnginePool) -> Runnable[Any, str]:
    each = asks(pool, "Summarise: {doc}").map()
    return accelerate(RunnablePassthrough.assign(parts=itemgetter("docs") | each) | asks(pool, "Unite: {parts}"))


def one_by_one(pool: EnginePool) -> Runnable[Any, str]:
    return accelerate(asks(pool, "Rewrite: {doc}") | (lambda doc: {"doc": doc}) | asks(pool, "Answer: {doc}"))


def tools(pool: EnginePool) -> Runnable[Any, Any]:
    """Return a chain with user code that cannot be planned."""
    one = asks(pool, "Summarise: {doc}")

    async def some(given: dict[str, Any]) -> dict[str, Any]:
        return {"doc": await asyncio.gather(*(one.ainvoke(doc) for doc in given["docs"][:3]))}

    return accelerate(RunnableLambda(some) | asks(pool, "Unite: {doc}"))


@pytest.mark.parametrize(
    ("made", "given", "wanted"),
    [
        (map_reduce, DOCS, ["throughput"] * 24 + ["latency"]),
        (one_by_one, DOCS["docs"][0], ["latency"] * 2),
        (tools, DOCS, ["throughput"] * 3 + ["latency"]),
    ],
)
def test_concurrent_calls_of_the_original_form_a_gang(
    made: Any, given: Any, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    handle = EngineScheduler.handle

    def watched(self: EngineScheduler, event: Any) -> Any:
        if isinstance(event, Enqueue):
            seen[event.primitive] = event.objective.value
        elif isinstance(event, DepthChanged):
            seen.update({name: objective.value for name, (objective, _) in event.objectives.items()})
        return handle(self, event)

    async def run() -> None:
        async with EnginePool.on_this_loop(fake_engines(LLM)) as pool:
            await made(pool).ainvoke(given)

    monkeypatch.setattr(EngineScheduler, "handle", watched)
    run_virtual(run())
    assert list(seen.values()) == wanted


def test_an_answer_does_not_wait_for_the_rest_of_a_gang() -> None:
    """24 summaries on 4 slots, and then a question: it gets the next slot, not the 25th."""

    async def run() -> tuple[float, float, float]:
        async with EnginePool.on_this_loop(fake_engines(LLM)) as pool:
            loop, question = asyncio.get_running_loop(), accelerate(asks(pool, "Answer: {doc}"))

            async def seconds(work: Any) -> float:
                begun = loop.time()
                await work
                return loop.time() - begun

            alone = await seconds(question.ainvoke({"doc": "first"}))
            summary = asyncio.ensure_future(seconds(map_reduce(pool).ainvoke(DOCS)))
            await asyncio.sleep(0.05)
            return alone, await seconds(question.ainvoke({"doc": "second"})), await summary

    alone, beside, summary = run_virtual(run())
    assert beside < 2.2 * alone < summary / 2
