"""The figures of a run: latencies, time to first token, goodput, use of the engines, waste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from teola_plugin.simulation.meter import Served
from teola_plugin.simulation.run import Run

SLO = 5.0
"""A query is served well within this many times the latency that it has alone."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the `share` quantile, linear between the two nearest values (like NumPy). Raises `ValueError` for none."""
    if not values:
        raise ValueError("there is no quantile of nothing")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def figures(run: Run, idle: Mapping[str, float], *, slo: float = SLO) -> dict[str, Any]:
    """Return figures that are JSON-ready, all times in seconds. `idle` has the latency of an app's query alone on the
    cluster.

    `goodput` is the number of queries a second that were served within `slo` times that; failed ones do not count.
    """
    apps = sorted({query.app for query in run.served})
    results = _query_figures(run.served, idle, slo, run.seconds)
    if len(apps) > 1:
        by_app = {name: [query for query in run.served if query.app == name] for name in apps}
        results["apps"] = {name: _query_figures(queries, idle, slo, run.seconds) for name, queries in by_app.items()}
    results["utilisation"] = {
        name: [round(busy / run.seconds, 4) if run.seconds else 0.0 for busy in seconds]
        for name, seconds in run.busy.items()
    }
    return results


def _query_figures(queries: Sequence[Served], idle: Mapping[str, float], slo: float, seconds: float) -> dict[str, Any]:
    succeeded = [query for query in queries if not query.error]
    within_slo = sum(query.seconds <= slo * idle[query.app] for query in succeeded)
    firsts = [query.first_token - query.at for query in succeeded if query.first_token is not None]
    span = max((query.ended for query in queries), default=0.0) - min((query.at for query in queries), default=0.0)
    return {
        "queries": len(queries),
        "failed": len(queries) - len(succeeded),
        "latency": _spread([query.seconds for query in succeeded]),
        "first_token": _spread(firsts),
        "within_slo": round(within_slo / len(queries), 4) if queries else 0.0,
        "goodput": round(within_slo / span, 4) if span else 0.0,
        "queued": round(_mean([query.queued for query in succeeded]), 4),
        "work": round(_mean([query.work for query in succeeded]), 4),
        "wasted": round(_mean([query.wasted for query in succeeded]), 4),
        "wasted_tokens": round(_mean([query.wasted_tokens for query in succeeded]), 2),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    quantiles = {f"p{round(100 * share)}": round(quantile(values, share), 4) for share in (0.5, 0.95, 0.99)}
    return {"mean": round(fmean(values), 4), **quantiles}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
