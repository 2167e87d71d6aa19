"""Runs a chain plain and accelerated, in turn, on the same engines and from the same state."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from teola_plugin import accelerate
from teola_plugin.observe import QueryTrace, progress
from teola_plugin.pool import EnginePool

loop = asyncio.Runner()
"""One for all runs: clients keep connections, which end with their loop."""


@dataclass(frozen=True, slots=True)
class Run:
    answer: Any
    seconds: float
    trace: QueryTrace


@dataclass(frozen=True, slots=True)
class Shipped:
    """The plain chain with an LLM engine as vLLM ships; `prepare` also empties that engine's prefix cache."""

    chain: Any
    prepare: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One chain, run both ways `len(plain)` times. Times in seconds."""

    name: str
    plain: tuple[Run, ...]
    accelerated: tuple[Run, ...]
    explanation: str
    passes_fired: tuple[str, ...]
    shipped: tuple[Run, ...] = ()
    """Plain, with an LLM engine as vLLM ships, without drafts; where that was run, too."""

    @property
    def answers_equal(self) -> bool:
        """True if all runs, original and accelerated, gave the same answer."""
        first = self.plain[0].answer
        return all(run.answer == first for run in (*self.plain, *self.accelerated, *self.shipped))

    @property
    def plain_s(self) -> float:
        return statistics.median(run.seconds for run in self.plain)

    @property
    def accelerated_s(self) -> float:
        return statistics.median(run.seconds for run in self.accelerated)

    @property
    def speedup(self) -> float:
        return self.plain_s / self.accelerated_s

    def facts(self) -> dict[str, Any]:
        """Return its figures as JSON data."""
        return {
            **compared_facts(self.plain_s, self.accelerated_s, [run.seconds for run in self.shipped]),
            "answers_equal": self.answers_equal,
            "passes_fired": list(self.passes_fired),
            "runs": len(self.plain),
        }

    @property
    def cached_prefix_tokens(self) -> int:
        """Prompt tokens that full prefillings found cached because a partial prefilling of the same query ran."""
        return min((cached_by_warmups(run.trace) for run in self.accelerated), default=0)


def compared_facts(plain_s: float, accelerated_s: float, shipped: Sequence[float]) -> dict[str, float]:
    """Medians and ratio. Where it was run on the engine as it ships, too, that is the plain way, and the other one the
    plain way on the same engine as the accelerated."""
    same = {"plain_same_engine_s": plain_s, "speedup_same_engine": plain_s / accelerated_s} if shipped else {}
    plain_s = statistics.median(shipped) if shipped else plain_s
    return {"plain_s": plain_s, "accelerated_s": accelerated_s, "speedup": plain_s / accelerated_s, **same}


def cached_by_warmups(trace: QueryTrace) -> int:
    total = 0
    for span in trace.spans:
        if span.kind != "FULL_PREFILLING":
            continue
        warmed = [s.tokens for s in trace.spans if s.primitive.startswith(f"{span.primitive}.partial#") and s.done]
        total += min(span.cached, max(warmed, default=0))
    return total


def run_case(
    name: str,
    chain: Any,
    given: Any,
    pool: EnginePool,
    prepare: Callable[[], None],
    *,
    repeats: int,
    bind: Sequence[tuple[Any, str]] = (),
    shipped: Shipped | None = None,
) -> Case:
    """`prepare` puts collections into their first state; prefix caches are emptied before every run.

    With `bind` the plain chain uses no engine, so it has no spans. Three more runs at most, of the same chain with the
    named objects on engines and nothing ahead, give its traces.
    """
    fast = accelerate(chain, pool=pool, bind=bind, app="demo")
    plans = fast.plan(given)
    ways = ("accelerated", "plain", *(("shipped",) if shipped is not None else ()))
    runs: dict[str, list[Run]] = {which: [] for which in ways}
    with progress((repeats + 1) * len(ways), f"{name}: plain and accelerated") as bar:
        for repeat in range(repeats + 1):
            for which in reversed(ways) if repeat % 2 else ways:
                (prepare if which != "shipped" or shipped is None else shipped.prepare)()
                pool.reset()
                on_it = shipped.chain if which == "shipped" and shipped is not None else chain
                run = _accelerated(fast, given) if which == "accelerated" else _plain(on_it, given, pool)
                if repeat:  # the first round warms up
                    runs[which].append(run)
                bar.advance()
    if bind:
        served = [_served(fast.chain, given, pool, prepare) for _ in range(min(repeats, 3))]
        runs["plain"] = [replace(run, trace=trace) for run, trace in zip(runs["plain"], cycle(served), strict=False)]
    plain, accelerated, as_shipped = (tuple(runs.get(which, ())) for which in ("plain", "accelerated", "shipped"))
    fired = plans.fired if plans is not None else ()
    return Case(name, plain, accelerated, fast.explain(given, details=True), fired, as_shipped)


def _plain(chain: Any, given: Any, pool: EnginePool) -> Run:
    with pool.watching() as watched:
        begun = time.perf_counter()
        answer = loop.run(chain.ainvoke(given), context=copy_context())
        seconds = time.perf_counter() - begun
    return Run(answer, seconds, _finished(watched.trace.result(10)))


def _served(chain: Any, given: Any, pool: EnginePool, prepare: Callable[[], None]) -> QueryTrace:
    prepare()
    pool.reset()
    return _plain(chain, given, pool).trace


def _accelerated(fast: Any, given: Any) -> Run:
    begun = time.perf_counter()
    answer = loop.run(fast.ainvoke(given), context=copy_context())
    seconds = time.perf_counter() - begun
    return Run(answer, seconds, _finished(fast.last_trace()))


def _finished(trace: QueryTrace | None) -> QueryTrace:
    assert trace is not None, "the runtime lost the trace of a query that it began"
    return trace
