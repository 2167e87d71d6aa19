"""What the runs say, as JSON-ready data. Times in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from teola_plugin.cli.compare.intervals import Ratio, ratio_of
from teola_plugin.cli.compare.measure import ASYNC, CONTROL, FAST, FAST_STREAM, STREAM, SYNC, WAYS, Run
from teola_plugin.cli.compare.verdict import overall, verdict
from teola_plugin.errors import TeolaError

if TYPE_CHECKING:
    from teola_plugin.adapters.plan_report import PlanReport
    from teola_plugin.cli.compare.given import Given
    from teola_plugin.observe import QueryTrace

OWN_CODE, OWN_MODELS = "your code, and waiting", "your models and retrievers"
NO_GAIN = "No part of this object is known to start before its place: expect no gain."


def facts(fast: Any, inputs: Sequence[Given], runs: Sequence[Run]) -> dict[str, Any]:
    """Equality, latencies, how many times faster, time to first token, where the time went, wasted work, advice."""
    latency = {way: distribution(found) for way, found in by_way(runs).items()}
    traces = [run.trace for run in runs if run.trace is not None]
    streams = by_way(runs, streams=True)
    return {
        "equality": equality(inputs, runs),
        "latency_s": latency,
        "speedup": speedup(runs, latency),
        "over_each_plain": {
            fast: {plain: _told(ratio_of(runs, plain, fast)) for plain in (SYNC, ASYNC) if plain in latency}
            for fast in FAST
            if fast in latency
        },
        "control": _told(ratio_of(runs, ASYNC, CONTROL)),
        "time_to_first_token_s": {way: distribution(found, first=True) for way, found in streams.items()},
        "first_token_speedup": _told(ratio_of(runs, STREAM, FAST_STREAM, first=True)),
        "where_the_time_went": shares(traces),
        "wasted": wasted(traces),
        "advice": advice(fast, inputs[0].value),
        "errors": sorted({run.raised for run in runs if run.raised}),
    }


def by_way(runs: Iterable[Run], *, streams: bool = False) -> dict[str, list[Run]]:
    """Runs by way, in the order of `WAYS`: of streams, or of whole calls."""
    kept = [run for run in runs if (run.way in (STREAM, FAST_STREAM)) == streams]
    return {way: found for way in WAYS if (found := [run for run in kept if run.way == way])}


# ------------------------------------------------------------ how many times faster


def speedup(runs: Sequence[Run], latency: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The better plain way (by its median) against the better accelerated one; None where one of the two never ended
    well. `saved_s`: the difference of the two medians, in seconds."""
    plain, fast = (_best(latency, group) for group in ((SYNC, ASYNC), FAST))
    found = ratio_of(runs, plain, fast) if plain and fast else None
    if found is None:
        return None
    said = found.said(ratio_of(runs, ASYNC, CONTROL))
    saved = latency[plain]["median"] - latency[fast]["median"]
    return {**asdict(found), "verdict": said, "plain": plain, "accelerated": fast, "saved_s": saved}


def _best(latency: dict[str, dict[str, Any]], group: Iterable[str]) -> str:
    medians = {way: figure for way in group if (figure := latency.get(way, {}).get("median")) is not None}
    return min(medians, key=lambda way: medians[way], default="")


def _told(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else {**asdict(ratio), "verdict": ratio.said()}


# ------------------------------------------------------------ answers and latencies


def equality(inputs: Sequence[Given], runs: Sequence[Run]) -> dict[str, Any]:
    verdicts = [verdict([run for run in runs if run.input == index]) for index in range(len(inputs))]
    return {
        "state": overall(verdicts),
        "inputs": [
            {"line": given.line, "state": one.state, "detail": one.detail}
            for given, one in zip(inputs, verdicts, strict=True)
        ],
    }


def distribution(runs: Sequence[Run], *, first: bool = False) -> dict[str, Any]:
    """Of the seconds (or those to the `first` token) of runs that ended well; figures are None without any."""
    times = (run.first if first else run.seconds for run in runs if not run.raised)
    good = sorted(seconds for seconds in times if seconds is not None)
    points = {"median": 0.5, "p90": 0.9, "p99": 0.99, "min": 0.0, "max": 1.0}
    figures: dict[str, Any] = {name: quantile(good, share) for name, share in points.items()}
    return {**figures, "n": len(good), "failed": sum(1 for run in runs if run.raised)}


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """By linear interpolation between the two nearest values."""
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


# ------------------------------------------------------------ from the traces


def shares(traces: Sequence[QueryTrace]) -> dict[str, float]:
    """Engine -> the share of the accelerated calls' time during which it worked; they overlap, so the sum may exceed 1.

    The last entry is the share during which none did.
    """
    total = sum(trace.seconds for trace in traces)
    if not total:
        return {}
    engines = dict.fromkeys(engine for trace in traces for engine in trace.engines)
    found = {_name(engine): sum(trace.busy(engine) for trace in traces) / total for engine in engines}
    return {**found, OWN_CODE: max(0.0, 1.0 - sum(map(_covered, traces)) / total)}


def _name(engine: str) -> str:
    return OWN_MODELS if engine == "wrapped" else engine


def _covered(trace: QueryTrace) -> float:
    """Seconds during which any engine worked for the query."""
    runs = sorted((s.begin, s.done) for s in trace.spans if s.engine and s.done is not None)
    covered, until = 0.0, trace.started
    for begin, done in runs:
        end = min(done, trace.ended)
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def wasted(traces: Sequence[QueryTrace]) -> dict[str, Any]:
    """Work that was begun and that nobody used, over all accelerated calls."""
    lost = [trace.wasted() for trace in traces]
    return {
        "calls": len(traces),
        "primitives": sum(spans for spans, _ in lost),
        "tokens": sum(tokens for _, tokens in lost),
        "median_tokens_per_call": median(tokens for _, tokens in lost) if lost else 0,
    }


# ------------------------------------------------------------ from the plan


def advice(fast: Any, value: Any) -> list[str]:
    """What would help: why there is nothing to gain, what the author could change. `value`: an input, for the plan."""
    try:
        report: PlanReport = fast.__teola_report__(value)
    except TeolaError as error:
        return [f"Planning failed, so the original ran: {error}"]
    found = [] if report.prefetched else [NO_GAIN, f"{report.expect[0].upper()}{report.expect[1:]}."]
    rows = (node for node in report.parts if node.level != "lowered")
    elsewhere = list(dict.fromkeys(f"{node.path} ({node.class_name})" for node in rows))
    if elsewhere:
        named = ", ".join(elsewhere[:5])
        more = f" and {len(elsewhere) - 5} more" if len(elsewhere) > 5 else ""
        found.append(f"Run in their place, as they always did: {named}{more}.")
    return [*found, *report.advice]
