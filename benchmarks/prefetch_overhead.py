"""What intercepted and prefetched calls of the user's own models cost, on a model that answers at once.

python -m benchmarks.prefetch_overhead --json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
import timeit
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from benchmarks.common import arguments, environment, report, summary
from teola_plugin import accelerate, uninstall

INPUT = {"question": "what is it"}
SETTLE_S = 0.003
"""Pause after a query, so that what it leaves to other threads counts as its own."""


class Instant(BaseChatModel):
    """A model of the user's own that takes no time."""

    @property
    def _llm_type(self) -> str:
        return "instant"

    def _result(self, messages: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"about {messages[-1].content}"))])

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return self._result(messages)

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return self._result(messages)


def _part(number: int) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_messages([("system", f"role {number}"), ("human", "{question}?")])
    return prompt | Instant() | StrOutputParser()


def one_call() -> Runnable[Any, Any]:
    """Return a chain of which nothing can be prefetched."""
    return _part(1)


def three_calls() -> Runnable[Any, Any]:
    """Return a chain of three independent calls in a row: two are prefetched."""
    return (
        RunnablePassthrough.assign(a=_part(1))
        | RunnablePassthrough.assign(b=_part(2))
        | RunnablePassthrough.assign(c=_part(3))
    )


def outside_a_query(repeats: int) -> list[float]:
    """Return how much longer an intercepted method takes outside every query, in microseconds, for each repeat."""
    model = Instant()

    def best() -> float:
        return min(timeit.repeat(lambda: model._generate([AIMessage("a")]), number=2000, repeat=7)) / 2000

    def added() -> float:
        uninstall()
        original = best()
        accelerate(one_call())
        return (best() - original) * 1e6

    return [added() for _ in range(repeats)]


def _cpu_ms(query: Callable[[], object]) -> float:
    began = time.process_time()
    query()
    time.sleep(SETTLE_S)
    return (time.process_time() - began) * 1e3


def of_queries(make: Callable[[], Runnable[Any, Any]], queries: int, *, on_loop: bool) -> dict[str, Any]:
    """Return the processor time of a query of the original, and what the accelerated one takes more, in milliseconds.

    The two take turns, and who is first changes.
    """
    app = make()
    fast = accelerate(app)
    loop = asyncio.new_event_loop()

    def timed(one: Any) -> float:
        call: Callable[..., Awaitable[object]] = one.ainvoke
        return _cpu_ms((lambda: loop.run_until_complete(call(INPUT))) if on_loop else (lambda: one.invoke(INPUT)))

    for _ in range(20):
        timed(app)
        timed(fast)
    gc.collect()
    original, added = list[float](), list[float]()
    for number in range(queries):
        first, second = (app, fast) if number % 2 else (fast, app)
        by_object = {id(first): timed(first), id(second): timed(second)}
        original.append(by_object[id(app)])
        added.append(by_object[id(fast)] - by_object[id(app)])
    loop.close()
    return {"original_ms": median(original), "added_ms": summary(added)}


def main(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return all figures."""
    return {
        "benchmark": "prefetch_overhead",
        "outside_a_query_us": summary(outside_a_query(max(3, options.queries // 40))),
        "inside, nothing prefetched": of_queries(one_call, options.queries, on_loop=False),
        "inside, nothing prefetched, async": of_queries(one_call, options.queries, on_loop=True),
        "three calls": of_queries(three_calls, options.queries, on_loop=False),
        "three calls, async": of_queries(three_calls, options.queries, on_loop=True),
        "queries": options.queries,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures as rows of a table."""
    outside = result["outside_a_query_us"]
    table = [
        {"figure": "added to a call outside a query, µs", "median": outside["median"], "95 %": outside["interval"]}
    ]
    for name, figures in result.items():
        if isinstance(figures, dict) and "added_ms" in figures:
            added = figures["added_ms"]
            table.append(
                {"figure": f"added to a query: {name}, ms CPU", "median": added["median"], "95 %": added["interval"]}
            )
    return table


if __name__ == "__main__":
    given = arguments(
        "What intercepted and prefetched calls cost.",
        lambda parser: parser.add_argument("--queries", type=int, default=200, help="timed queries of each figure"),
    )
    result = main(given)
    report(result, given, "intercepted and prefetched calls", rows(result))
