"""Tests that schedulers know the remaining time and the due time of every query, also of subplans and calls."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import RequestContext
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.estimate import ANSWER_TOKENS, remaining_times
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.query_run import current_request_context
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling.engine_queue import Enqueue

ANSWER = 0.0285 * ANSWER_TOKENS
THREE = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}


def answers(pool: EnginePool) -> Runnable[Any, Any]:
    llm = ChatTeola(pool=pool, max_tokens=8)
    first = ChatPromptTemplate.from_template("Say: {question}") | llm | StrOutputParser()
    second = ChatPromptTemplate.from_template("And: {question}") | llm | StrOutputParser()
    assigned = RunnablePassthrough.assign(first=first) | RunnablePassthrough.assign(second=second)
    return assigned | ChatPromptTemplate.from_template("{first} {second} {question}") | llm


def mapped(pool: EnginePool) -> Runnable[Any, Any]:
    """Return a graph with a MAP whose number of items is known when the list is."""
    llm = ChatTeola(pool=pool, max_tokens=8)
    items = ChatPromptTemplate.from_template("List: {question}") | llm.bind(json_schema=THREE) | JsonOutputParser()
    each = ChatPromptTemplate.from_template("On {item}") | llm | StrOutputParser()
    named = RunnableLambda(lambda text: {"item": text})
    return items | (named | each).map() | ChatPromptTemplate.from_template("All: {found}") | llm


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Enqueue]:
    found: list[Enqueue] = []
    enqueue = EnginePort.enqueue

    def noting(port: EnginePort, entries: Any, event: Enqueue) -> None:
        found.append(event)
        enqueue(port, entries, event)

    monkeypatch.setattr(EnginePort, "enqueue", noting)
    return found


def run(make: Any, given: Any, request_context: RequestContext | None = None) -> Any:
    async def main() -> Any:
        async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
            current_request_context.set(request_context)
            return accelerate(make(pool)).plan(given), await accelerate(make(pool)).ainvoke(given)

    return run_virtual(main(), inline=True)


def test_planned_primitives_have_the_planned_remaining_time(events: list[Enqueue]) -> None:
    plan, _ = run(answers, {"question": "why?"})
    known = remaining_times(plan.graph, PassContext(rtx3090()))
    planned = [event for event in events if event.primitive in known]
    assert planned and {event.primitive: event.remaining for event in planned} == {
        event.primitive: known[event.primitive] for event in planned
    }
    assert max(event.remaining for event in planned) == pytest.approx(2 * ANSWER, rel=0.1)
    assert all(event.left is None for event in events)


def test_spliced_primitives_count_time_to_the_planned_end(events: list[Enqueue]) -> None:
    run(mapped, {"question": "why?"})
    assert all(event.remaining > 0 for event in events)
    last = events[-1]
    assert all(event.remaining >= last.remaining for event in events)


def test_latency_goal_sets_the_time_left_of_requests(events: list[Enqueue]) -> None:
    run(answers, {"question": "why?"}, RequestContext(goal=5.0))
    assert events[0].left == pytest.approx(5.0)
    assert events[-1].left is not None and 0 < events[-1].left < 5.0
