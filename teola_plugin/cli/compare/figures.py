"""Figures about the runs as JSON-ready data: equality of answers, latencies, ratios with intervals, advice.

Times are in seconds. A variant is a way to run the object, see `measure.py`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.adapters.comparison import difference
from teola_plugin.cli.compare.measure import (
    ASYNC,
    CONTROL,
    FAST_ASYNC,
    FAST_CALLS,
    FAST_STREAM,
    FAST_SYNC,
    STREAM,
    STREAMS,
    SYNC,
    VARIANTS,
    TimedRun,
)
from teola_plugin.errors import TeolaError
from teola_plugin.observe.spans import Cost

if TYPE_CHECKING:
    from teola_plugin.adapters.plan_report import PlanReport
    from teola_plugin.cli.compare.options import InputLine
    from teola_plugin.observe import QueryTrace

OWN_CODE, OWN_MODELS = "your code, and waiting", "your models and retrievers"
NO_GAIN = "Every part of this object starts at its usual time: expect no gain."


def summarize_runs(fast: Any, inputs: Sequence[InputLine], runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Return equality, latencies, speed-ups, time to first token, shares of the time, wasted work, cost and advice."""
    latency = {variant: latency_figures(group) for variant, group in group_by_variant(runs).items()}
    traces = [run.trace for run in runs if run.trace is not None]
    streams = group_by_variant(runs, streams=True)
    return {
        "equality": equality_of_answers(inputs, runs),
        "latency_s": latency,
        "speedup": best_speedup(runs, latency),
        "over_each_plain": {
            fast: {plain: _ratio_facts(time_ratio(runs, plain, fast)) for plain in (SYNC, ASYNC) if plain in latency}
            for fast in FAST_CALLS
            if fast in latency
        },
        "control": _ratio_facts(time_ratio(runs, ASYNC, CONTROL)),
        "time_to_first_token_s": {
            variant: latency_figures(group, first_token=True) for variant, group in streams.items()
        },
        "first_token_speedup": _ratio_facts(time_ratio(runs, STREAM, FAST_STREAM, first_token=True)),
        "where_the_time_went": engine_shares(traces),
        "wasted": wasted_work(traces),
        "cost_per_query": cost_per_query(runs),
        "advice": advice_on(fast, inputs[0].value),
        "errors": sorted({run.error for run in runs if run.error}),
    }


def group_by_variant(runs: Iterable[TimedRun], *, streams: bool = False) -> dict[str, list[TimedRun]]:
    """Return the runs by variant, in the order of `VARIANTS`: those of streams, or those of whole calls.

    Variants without runs are left out. `streams`: True selects the runs that read a stream.
    """
    selected = [run for run in runs if (run.variant in STREAMS) == streams]
    return {variant: group for variant in VARIANTS if (group := _runs_of(selected, variant))}


def _runs_of(runs: Iterable[TimedRun], *variants: str) -> list[TimedRun]:
    return [run for run in runs if run.variant in variants]


# ------------------------------------------------------------ equality of answers

Equality = Literal["equal", "different", "undecided"]


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """The result of comparing the answers to one input; `undecided` if the original does not agree with itself."""

    state: Equality
    detail: str = ""
    """Where and how two answers first differ."""


def equality_of_answers(inputs: Sequence[InputLine], runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Return the verdict on each input, and the worst of them."""
    verdicts = [compare_answers([run for run in runs if run.input_index == index]) for index in range(len(inputs))]
    states = {verdict.state for verdict in verdicts}
    return {
        "state": next((state for state in ("different", "undecided") if state in states), "equal"),
        "inputs": [
            {"line": entry.line, "state": verdict.state, "detail": verdict.detail}
            for entry, verdict in zip(inputs, verdicts, strict=True)
        ],
    }


def compare_answers(runs: Sequence[TimedRun]) -> AnswerVerdict:
    """Return the verdict on the runs of one input.

    The original is compared with itself first: a difference of the accelerated object means nothing otherwise.
    """
    own_difference = _difference_within_original(_runs_of(runs, SYNC), _runs_of(runs, ASYNC, CONTROL))
    if own_difference:
        return AnswerVerdict("undecided", own_difference)
    for fast, plain in ((FAST_SYNC, SYNC), (FAST_ASYNC, ASYNC)):
        reference = _runs_of(runs, plain)[:1]
        for run in _runs_of(runs, fast) if reference else ():
            if text := difference(run.answer, reference[0].answer):
                return AnswerVerdict("different", f"{fast} (here), {plain} (there): {text}")
    return AnswerVerdict("equal")


def _difference_within_original(sync_runs: list[TimedRun], async_runs: list[TimedRun]) -> str:
    """Return the first difference between two runs of the original; empty if all agree.

    Sync and async runs are compared with each other only if the object works both ways.
    """
    sync_and_async = [runs[0] for runs in (sync_runs, async_runs) if runs and not runs[0].error]
    for group in (sync_runs, async_runs, sync_and_async):
        for first, second in itertools.pairwise(group):
            if text := difference(first.answer, second.answer):
                return f"{first.variant} (here), {second.variant} (there): {text}"
    return ""


# ------------------------------------------------------------ latencies


def latency_figures(runs: Sequence[TimedRun], *, first_token: bool = False) -> dict[str, Any]:
    """Return quantiles of the latency (or of the time to the first token), and how many runs succeeded and failed.

    Failed runs have no latency; without any other run the quantiles are None.
    """
    times = (_time_of(run, first_token=first_token) for run in runs if not run.error)
    ordered = sorted(seconds for seconds in times if seconds is not None)
    points = {"median": 0.5, "p90": 0.9, "p99": 0.99, "min": 0.0, "max": 1.0}
    figures: dict[str, Any] = {name: quantile(ordered, share) for name, share in points.items()}
    return {**figures, "n": len(ordered), "failed": sum(1 for run in runs if run.error)}


def _time_of(run: TimedRun, *, first_token: bool) -> float | None:
    return run.first_token_s if first_token else run.seconds


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the quantile by linear interpolation between the two nearest values; None without any values."""
    if not ordered:
        return None
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


# ------------------------------------------------------------ how many times faster

FEWEST_PAIRS = 6
"""With fewer pairs no interval of their median holds with 95 %."""
_RESAMPLES, _SEED = 2000, 0

SpeedVerdict = Literal["faster", "slower", "cannot tell"]


@dataclass(frozen=True, slots=True)
class TimeRatio:
    """The time of one variant divided by that of another: the median over pairs, with its 95 % bootstrap interval.

    A pair is two runs of one input in one round, which ran one directly after the other.
    """

    ratio: float
    low: float
    high: float
    pairs: int

    def verdict(self, control: TimeRatio | None = None) -> SpeedVerdict:
        """Return `faster` or `slower` only if that is certain, else `cannot tell`.

        The interval must not hold 1, and the original must differ less from itself (`control`) than the two variants.
        """
        noise = 0.0 if control is None else abs(math.log(control.ratio))
        if self.pairs < FEWEST_PAIRS or self.low <= 1.0 <= self.high or abs(math.log(self.ratio)) <= noise:
            return "cannot tell"
        return "faster" if self.ratio > 1.0 else "slower"


def time_ratio(
    runs: Sequence[TimedRun], numerator: str, denominator: str, *, first_token: bool = False
) -> TimeRatio | None:
    """Return how many times longer one variant takes than another; None without a pair of runs that succeeded.

    With `first_token` the times to the first token are compared.
    """
    by_key = {
        (run.variant, run.input_index, run.round): run
        for run in _runs_of(runs, numerator, denominator)
        if not run.error
    }
    ratios = []
    for (variant, index, round_), run in by_key.items():
        partner = by_key.get((denominator, index, round_)) if variant == numerator else None
        if partner is None:
            continue
        time, partner_time = _time_of(run, first_token=first_token), _time_of(partner, first_token=first_token)
        if time and partner_time:
            ratios.append(time / partner_time)
    return _bootstrap(ratios) if ratios else None


def _bootstrap(ratios: Sequence[float]) -> TimeRatio:
    """Return the median and its interval by resampling the pairs; the same ratios always give the same interval.

    The interval holds the middle 95 % of the medians of resampled pairs. `ratios` must not be empty.
    """
    generator = random.Random(_SEED)  # no secret is drawn
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
    return TimeRatio(median(ratios), low, high, len(ratios))


def best_speedup(runs: Sequence[TimedRun], latency: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Compare the original's faster variant (by its median) with the accelerated object's faster variant.

    `saved_s` is the difference of the two medians. Return None if one of the two objects never succeeded.
    """
    plain, fast = (_fastest(latency, group) for group in ((SYNC, ASYNC), FAST_CALLS))
    ratio = time_ratio(runs, plain, fast) if plain and fast else None
    if ratio is None:
        return None
    verdict = ratio.verdict(time_ratio(runs, ASYNC, CONTROL))
    saved = latency[plain]["median"] - latency[fast]["median"]
    return {**asdict(ratio), "verdict": verdict, "plain": plain, "accelerated": fast, "saved_s": saved}


def _fastest(latency: dict[str, dict[str, Any]], variants: Iterable[str]) -> str:
    medians = {name: figure for name in variants if (figure := latency.get(name, {}).get("median")) is not None}
    return min(medians, key=lambda name: medians[name], default="")


def _ratio_facts(ratio: TimeRatio | None) -> dict[str, Any] | None:
    return None if ratio is None else {**asdict(ratio), "verdict": ratio.verdict()}


# ------------------------------------------------------------ figures from traces and from the plan


def engine_shares(traces: Sequence[QueryTrace]) -> dict[str, float]:
    """Return, by engine, the share of the accelerated calls' time during which it worked.

    Engines overlap, so the sum may exceed 1. The last entry is the share during which no engine worked.
    """
    total = sum(trace.seconds for trace in traces)
    if not total:
        return {}
    engines = dict.fromkeys(engine for trace in traces for engine in trace.engines)
    shares = {
        OWN_MODELS if engine == "wrapped" else engine: sum(trace.busy(engine) for trace in traces) / total
        for engine in engines
    }
    return {**shares, OWN_CODE: max(0.0, 1.0 - sum(map(_busy_seconds, traces)) / total)}


def _busy_seconds(trace: QueryTrace) -> float:
    """Return the seconds during which any engine worked for the query."""
    intervals = sorted((s.begin, s.done) for s in trace.spans if s.engine and s.done is not None)
    busy, until = 0.0, trace.started
    for begin, done in intervals:
        end = min(done, trace.ended)
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


def wasted_work(traces: Sequence[QueryTrace]) -> dict[str, Any]:
    """Return the work that was started and that nobody used, over all accelerated calls."""
    wasted = [trace.wasted() for trace in traces]
    return {
        "calls": len(traces),
        "primitives": sum(spans for spans, _ in wasted),
        "tokens": sum(tokens for _, tokens in wasted),
        "median_tokens_per_call": median(tokens for _, tokens in wasted) if wasted else 0,
    }


# ------------------------------------------------------------ cost


def cost_per_query(runs: Sequence[TimedRun]) -> dict[str, dict[str, Any]]:
    """Return the mean calls of models, tokens and dollars of a query, plain and accelerated.

    Every call that was made counts: also those that were prefetched and not used, and those that were made again.
    Tokens are those that providers report with their answers. Streamed runs are left out, as not all providers report
    the tokens of streams. Dollars are None without a price.
    """
    groups = {"plain": _runs_of(runs, SYNC, ASYNC, CONTROL), "accelerated": _runs_of(runs, *FAST_CALLS)}
    return {name: _mean_cost(group) for name, group in groups.items() if group}


def _mean_cost(runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Return the mean calls, tokens and dollars of a query over runs whose calls were counted."""
    costs = [run.usage.cost() for run in runs if run.usage is not None]
    cost = Cost.total((row for one in costs for row in one.models), len(costs) or 1)
    facts = cost.facts()
    amounts = [row.dollars for row in cost.models if row.dollars is not None]
    return {
        "calls": facts["calls"],
        "calls_without_tokens": facts["calls_without_tokens"],
        "wasted_calls": facts["wasted_calls"],
        "tokens_in": facts["input_tokens"],
        "tokens_out": facts["output_tokens"],
        "dollars": sum(amounts) / cost.queries if amounts else None,
    }


def advice_on(fast: Any, value: Any) -> list[str]:
    """Return why there is nothing to gain, and what the author can change. `value` is an input, for the plan."""
    try:
        report: PlanReport = fast.__teola_report__(value)
    except TeolaError as error:
        return [f"Planning failed, so the original ran: {error}"]
    lines = [] if report.prefetched else [NO_GAIN, f"{report.expect[0].upper()}{report.expect[1:]}."]
    rows = (node for node in report.parts if node.level != "lowered")
    not_lowered = list(dict.fromkeys(f"{node.path} ({node.class_name})" for node in rows))
    if not_lowered:
        more = f" and {len(not_lowered) - 5} more" if len(not_lowered) > 5 else ""
        lines.append(f"Run in their place, as they always did: {', '.join(not_lowered[:5])}{more}.")
    return [*lines, *report.advice]
