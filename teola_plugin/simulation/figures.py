"""What a run says: latencies, time to first token, goodput, use of the engines, waste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from teola_plugin.simulation.meter import Served
from teola_plugin.simulation.run import Run

SLO = 5.0
"""A query is served well within so many times the latency that it has alone."""


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile, linear between the two nearest values (as NumPy takes it). Raises `ValueError` for none."""
    if not values:
        raise ValueError("there is no quantile of nothing")
    found = sorted(values)
    place = share * (len(found) - 1)
    below = int(place)
    above = min(below + 1, len(found) - 1)
    return found[below] + (found[above] - found[below]) * (place - below)


def figures(run: Run, idle: Mapping[str, float], *, slo: float = SLO) -> dict[str, Any]:
    """JSON-ready; all times in seconds. `idle`: by app, the latency of a query that has the cluster for itself.

    `goodput`: queries a second that were served within `slo` times that; failed ones are not.
    """
    apps = sorted({one.app for one in run.served})
    found = _of(run.served, idle, slo, run.seconds)
    if len(apps) > 1:
        chosen = {name: [one for one in run.served if one.app == name] for name in apps}
        found["apps"] = {name: _of(served, idle, slo, run.seconds) for name, served in chosen.items()}
    found["utilisation"] = {
        name: [round(busy / run.seconds, 4) if run.seconds else 0.0 for busy in each] for name, each in run.busy.items()
    }
    return found


def _of(served: Sequence[Served], idle: Mapping[str, float], slo: float, seconds: float) -> dict[str, Any]:
    well = [one for one in served if not one.error]
    good = sum(one.seconds <= slo * idle[one.app] for one in well)
    firsts = [one.first_token - one.at for one in well if one.first_token is not None]
    span = max((one.ended for one in served), default=0.0) - min((one.at for one in served), default=0.0)
    return {
        "queries": len(served),
        "failed": len(served) - len(well),
        "latency": _spread([one.seconds for one in well]),
        "first_token": _spread(firsts),
        "within_slo": round(good / len(served), 4) if served else 0.0,
        "goodput": round(good / span, 4) if span else 0.0,
        "queued": round(_mean([one.queued for one in well]), 4),
        "work": round(_mean([one.work for one in well]), 4),
        "wasted": round(_mean([one.wasted for one in well]), 4),
        "wasted_tokens": round(_mean([one.wasted_tokens for one in well]), 2),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    quantiles = {f"p{round(100 * share)}": round(quantile(values, share), 4) for share in (0.5, 0.95, 0.99)}
    return {"mean": round(fmean(values), 4), **quantiles}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
