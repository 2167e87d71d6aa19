"""What `teola simulate` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_COLUMNS = ("rate", "way", "mean", "p95", "p99", "first", "in time", "goodput", "wasted", "busiest")
_TEXT = (1, 9)
"""Columns of text; the others are figures, which stand to the right."""


def report(found: Mapping[str, Any]) -> str:
    """A line a run, what a query takes alone, and what failed."""
    rows = [_COLUMNS, *map(_row, found["runs"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    lines = ["seconds from arrival to answer, in virtual time", *(_line(row, widths) for row in rows), ""]
    return "\n".join([*lines, *_alone(found["idle_s"]), *_errors(found["runs"])])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (row[at].ljust(width) if at in _TEXT else row[at].rjust(width) for at, width in enumerate(widths))
    return "  ".join(cells).rstrip()


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    latency, first = run["latency"] or {}, run["first_token"] or {}
    waste = run["wasted"] / run["work"] if run["work"] else 0.0
    return (
        "trace" if run["rate"] is None else f"{run['rate']:g}",
        run["way"],
        *(_seconds(latency.get(key)) for key in ("mean", "p95", "p99")),
        _seconds(first.get("mean")),
        f"{run['within_slo']:.0%}",
        f"{run['goodput']:.2f}/s",
        f"{waste:.1%}",
        _busiest(run["utilisation"]),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _busiest(utilisation: Mapping[str, list[float]]) -> str:
    share, name = max((max(each), name) for name, each in utilisation.items())
    return f"{name} {share:.0%}"


def _alone(idle: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for way, found in idle.items():
        yield f"alone, {way}: " + ", ".join(f"{app} {seconds:.3f} s" for app, seconds in found.items())


def _errors(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for error in dict.fromkeys(error for run in runs for error in run["errors"]):
        yield f"failed: {error}"
