"""What the runs of `load` say: per application how many times as long every baseline takes, and how much is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.apps.flows import INPUTS
from benchmarks.apps.load import ALONE, RATES, Cell
from benchmarks.common import summary
from teola_plugin.simulation import quantile

OWN = "accelerated"
PLAIN = "object"
SLO = 5.0
"""A query is well served within so many times what the plain object takes alone."""
LEVEL = 0.98
"""A ratio whose interval reaches below this is told: by the measurement alone the baseline may be sooner there."""
SHARE = 0.95
"""Of all queries have to be well served at a rate that counts as goodput."""
Cells = Mapping[Cell, Mapping[str, Any]]
ByScheme = dict[str, dict[float, list[Mapping[str, Any]]]]
"""Cells by scheme and rate, by seed."""


def application(cells: Cells, app: str) -> dict[str, Any]:
    """One application, ready for JSON."""
    found: ByScheme = {}
    for cell, measured in sorted(cells.items(), key=lambda item: item[0].seed):
        if cell.app == app:
            found.setdefault(cell.scheme, {}).setdefault(cell.rate, []).append(measured)
    goal = SLO * _alone(found, PLAIN)
    baselines = sorted(name for name in found if name != OWN)
    low, *_, high = RATES[app]
    ratios = [(app, *one) for one in _ratios(found, baselines)]
    return {
        "speedup_low": {name: _ratio(found, name, low, fmean) for name in baselines},
        "speedup_high": {name: _ratio(found, name, high, fmean) for name in baselines},
        "goodput": {name: _goodput(found[name], goal) for name in sorted(found)},
        "alone": {name: round(_alone(found, name), 4) for name in sorted(found)},
        "goal_seconds": round(goal, 4),
        "worst_ratio": worst(ratios),
        "ratios": len(ratios),
        "behind": [_named(one) for one in ratios if one[-1]["interval"][0] < LEVEL],
        "rates": list(RATES[app]),
        "latency": {name: [_at(found[name][rate], rate, goal) for rate in RATES[app]] for name in sorted(found)},
    }


def worst(ratios: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The least of (app, baseline, rate, what, summary), by its median."""
    return _named(min(ratios, key=lambda one: one[-1]["median"]))


def _named(one: tuple[Any, ...]) -> dict[str, Any]:
    app, name, rate, what, ratio = one
    return {**ratio, "app": app, "baseline": name, "rate": rate, "of": what}


def _ratios(found: ByScheme, baselines: Sequence[str]) -> list[tuple[str, float, str, dict[str, Any]]]:
    rates = [rate for rate in found[OWN] if rate != ALONE]
    kinds = (("mean", fmean), ("p99", _p99))
    return [(n, rate, what, _ratio(found, n, rate, of)) for n in baselines for rate in rates for what, of in kinds]


def _ratio(found: ByScheme, baseline: str, rate: float, of: Any) -> dict[str, Any]:
    """How many times as long as accelerated, seed by seed: both meet the same arrivals."""
    pairs = zip(found[baseline][rate], found[OWN][rate], strict=True)
    return summary([of(one["latencies"]) / of(own["latencies"]) for one, own in pairs])


def _p99(latencies: Sequence[float]) -> float:
    return quantile(latencies, 0.99)


def _alone(found: ByScheme, name: str) -> float:
    """Mean latency of each input on an idle cluster that has served all of them before."""
    [measured] = found[name][ALONE]
    return fmean(measured["latencies"][INPUTS:])


def _goodput(rates: Mapping[float, Sequence[Mapping[str, Any]]], goal: float) -> float:
    """The highest rate, up to which enough queries are well served, straight between the measured ones."""
    served = {rate: _within(each, goal) for rate, each in sorted(rates.items()) if rate != ALONE}
    before, share_before = 0.0, 1.0
    for rate, share in served.items():
        if share < SHARE:
            return round(before + (rate - before) * (share_before - SHARE) / (share_before - share), 3)
        before, share_before = rate, share
    return before


def _within(each: Sequence[Mapping[str, Any]], goal: float) -> float:
    return fmean(latency <= goal for one in each for latency in one["latencies"])


def _at(each: Sequence[Mapping[str, Any]], rate: float, goal: float) -> dict[str, Any]:
    latencies = [latency for one in each for latency in one["latencies"]]
    return {
        "rate": rate,
        "mean": summary([fmean(one["latencies"]) for one in each]),
        **{f"p{100 * share:g}": round(quantile(latencies, share), 4) for share in (0.5, 0.95, 0.99)},
        "wasted_tokens": round(fmean(one["wasted_tokens"] for one in each), 2),
        "engine_seconds": round(fmean(one["engine_seconds"] for one in each), 4),
        "within_goal": round(_within(each, goal), 4),
        "batch_sizes": _mean(each, "batch_sizes"),
        "cached": _mean(each, "cached"),
    }


def _mean(each: Sequence[Mapping[str, Any]], what: str) -> dict[str, float]:
    return {name: round(fmean(one[what].get(name, 0.0) for one in each), 4) for name in each[0][what]}
