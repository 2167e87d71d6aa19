"""Measurement of a chain, original and accelerated in turn, on the same engines and from the same state."""

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
from teola_plugin.adapters.demo_app import CHUNK, three_questions
from teola_plugin.observe import QueryTrace, progress
from teola_plugin.pool import EnginePool

_runner = asyncio.Runner()
"""One event loop for all runs: clients keep connections, which end with their loop."""


@dataclass(frozen=True, slots=True)
class TracedRun:
    """One call of a chain, with its trace."""

    answer: Any
    seconds: float
    trace: QueryTrace


@dataclass(frozen=True, slots=True)
class PreparedChain:
    """A chain, and a function that restores the state from which each of its runs starts.

    For a chain with an LLM engine as vLLM ships, `prepare` also empties that engine's prefix cache.
    """

    chain: Any
    prepare: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One chain, run `len(plain)` times as the original and as often accelerated. Times in seconds."""

    name: str
    plain: tuple[TracedRun, ...]
    accelerated: tuple[TracedRun, ...]
    explanation: str
    passes_fired: tuple[str, ...]
    shipped: tuple[TracedRun, ...] = ()
    """Runs of the original with an LLM engine as vLLM ships, without drafts; empty if there were none."""

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
            **speed_facts(self.plain_s, self.accelerated_s, [run.seconds for run in self.shipped]),
            "answers_equal": self.answers_equal,
            "passes_fired": list(self.passes_fired),
            "runs": len(self.plain),
        }

    @property
    def cached_prefix_tokens(self) -> int:
        """Prompt tokens that full prefillings found cached because a partial prefilling of the same query ran."""
        return min((tokens_cached_by_warmups(run.trace) for run in self.accelerated), default=0)


def speed_facts(plain_s: float, accelerated_s: float, shipped: Sequence[float]) -> dict[str, float]:
    """Return medians and ratio as JSON data.

    With `shipped` times the original's time is their median, and `plain_same_engine_s` is its time on the engine of the
    accelerated chain.
    """
    same = {"plain_same_engine_s": plain_s, "speedup_same_engine": plain_s / accelerated_s} if shipped else {}
    plain_s = statistics.median(shipped) if shipped else plain_s
    return {"plain_s": plain_s, "accelerated_s": accelerated_s, "speedup": plain_s / accelerated_s, **same}


def tokens_cached_by_warmups(trace: QueryTrace) -> int:
    """Return the prompt tokens that a full prefilling found cached because of its partial prefilling."""
    total = 0
    for span in trace.spans:
        if span.kind != "FULL_PREFILLING":
            continue
        warm_ups = [s.tokens for s in trace.spans if s.primitive.startswith(f"{span.primitive}.partial#") and s.done]
        total += min(span.cached, max(warm_ups, default=0))
    return total


def run_case(
    name: str,
    chain: Any,
    value: Any,
    pool: EnginePool,
    prepare: Callable[[], None],
    *,
    repeats: int,
    bind: Sequence[tuple[Any, str]] = (),
    shipped: PreparedChain | None = None,
) -> Case:
    """Run a chain in all variants, in turn, after one round that is not counted.

    `prepare` puts collections into their first state; prefix caches are emptied before every run. With `bind` the
    original uses no engine, so it has no spans. At most three more runs of it, with the named objects on engines and
    nothing prefetched, give its traces.
    """
    fast = accelerate(chain, pool=pool, bind=bind, app="demo")
    plans = fast.plan(value)
    variants = ("accelerated", "plain", *(("shipped",) if shipped is not None else ()))
    runs: dict[str, list[TracedRun]] = {variant: [] for variant in variants}
    with progress((repeats + 1) * len(variants), f"{name}: plain and accelerated") as bar:
        for repeat in range(repeats + 1):
            for variant in reversed(variants) if repeat % 2 else variants:
                subject = PreparedChain(chain, prepare) if variant != "shipped" or shipped is None else shipped
                subject.prepare()
                pool.reset()
                is_fast = variant == "accelerated"
                run = _run_accelerated(fast, value) if is_fast else _run_original(subject.chain, value, pool)
                if repeat:  # the first round warms up
                    runs[variant].append(run)
                bar.advance()
    if bind:
        on_engines = accelerate(chain, pool=pool, bind=bind, app="demo", passes=(), speculate="off")
        traces = []
        for _ in range(min(repeats, 3)):
            prepare()
            pool.reset()
            traces.append(_run_accelerated(on_engines, value).trace)
        runs["plain"] = [replace(run, trace=trace) for run, trace in zip(runs["plain"], cycle(traces), strict=False)]
    plain, accelerated, on_shipped = (tuple(runs.get(variant, ())) for variant in ("plain", "accelerated", "shipped"))
    fired = plans.fired if plans is not None else ()
    return Case(name, plain, accelerated, fast.explain(value, details=True), fired, on_shipped)


def _run_original(chain: Any, value: Any, pool: EnginePool) -> TracedRun:
    """Run the original chain once and measure it. The pool traces the calls that it makes on engines."""
    with pool.watching() as watched:
        start = time.perf_counter()
        answer = _runner.run(chain.ainvoke(value), context=copy_context())
        seconds = time.perf_counter() - start
    return TracedRun(answer, seconds, _require_trace(watched.trace.result(10)))


def _run_accelerated(fast: Any, value: Any) -> TracedRun:
    """Run the accelerated chain once and measure it.

    The run's seconds are wall-clock time, and its trace is the one that the accelerated chain kept of this call.
    """
    start = time.perf_counter()
    answer = _runner.run(fast.ainvoke(value), context=copy_context())
    seconds = time.perf_counter() - start
    return TracedRun(answer, seconds, _require_trace(fast.last_trace()))


def _require_trace(trace: QueryTrace | None) -> QueryTrace:
    assert trace is not None, "the runtime lost the trace of a query that it began"
    return trace


# ------------------------------------------------------------ the smallest app that one line makes faster


@dataclass(frozen=True, slots=True)
class OneLineCase:
    """Three questions on one page, asked one after the other, original and accelerated. Times in seconds.

    There is no pool and no `bind=`: the user's own model is called, as it is, three times at once.
    """

    answer: Any
    plain: tuple[float, ...]
    accelerated: tuple[float, ...]
    answers_equal: bool
    shipped: tuple[float, ...] = ()
    """Times of the original on a server without drafts; empty if there is no such server."""

    @property
    def plain_s(self) -> float:
        return statistics.median(self.plain)

    @property
    def accelerated_s(self) -> float:
        return statistics.median(self.accelerated)

    def facts(self) -> dict[str, Any]:
        """Return its figures as JSON data."""
        return {
            **speed_facts(self.plain_s, self.accelerated_s, self.shipped),
            "answers_equal": self.answers_equal,
            "runs": len(self.plain),
        }


def run_one_line_case(llm: Any, documents: list[Any], repeats: int, shipped_llm: Any | None = None) -> OneLineCase:
    """Run the three questions in all variants, in turn, after one round that is not counted.

    `shipped_llm` is the model on a server without drafts.
    """
    original = three_questions(llm)
    variants = {"plain": original, "accelerated": accelerate(original, app="demo")}
    if shipped_llm is not None:
        variants["shipped"] = three_questions(shipped_llm)
    value = {"text": documents[0].page_content[: CHUNK * 4]}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    answers: list[Any] = []
    for repeat in range(repeats + 1):
        for name in variants if repeat % 2 else reversed(variants):
            start = time.perf_counter()
            answers.append(_runner.run(variants[name].ainvoke(value)))
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    are_equal = all(answer == answers[0] for answer in answers)
    plain, accelerated, shipped = (tuple(seconds.get(name, ())) for name in ("plain", "accelerated", "shipped"))
    return OneLineCase(answers[0], plain, accelerated, are_equal, shipped)
