"""The tables of docs/benchmarks.md about what each part gains and costs, made from the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """A table whose first `texts` columns are texts, the others numbers."""
    lines = [heads, ["---" if at < texts else "--:" for at in range(len(heads))], *rows]
    told = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([told[0], told[1].replace(" ", ""), *told[2:]])


def said(app: str) -> str:
    return app.replace("_", " ").replace("rag", "RAG")


def rate(value: float) -> str:
    return f"{value:g}" if value else "one at a time"


def ratio(row: dict[str, Any], key: str = "speedup") -> str:
    """Median; with its interval, where there were several runs."""
    found = row[key]
    low, high = found["interval"]
    return f"{found['median']:.2f}" + (f" ({low:.2f} to {high:.2f})" if found["n"] > 1 else "")


def grouped(
    rows: list[dict[str, Any]], column: str, *named: str
) -> Iterable[tuple[list[Any], dict[Any, dict[str, Any]]]]:
    """What names rows, without one column, and the rows by that column."""
    found: dict[tuple[Any, ...], dict[Any, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in named), {})[row[column]] = row
    return [(list(key), by) for key, by in found.items()]


def graph() -> str:
    ways = ("parallelisation", "pipelining", "full")
    rows = [
        [
            said(app),
            rate(at),
            f"{by['none']['mean']:.2f}",
            *(ratio(by[way]) for way in ways),
            ratio(by["full"], "speedup_p99"),
        ]
        for (app, at), by in grouped(result("ablation")["graph"], "passes", "app", "rate")
    ]
    heads = (
        "application",
        "queries/s",
        "none, s",
        "passes 1 and 3",
        "passes 2 and 4",
        "all four",
        "of the 99th percentile",
    )
    return markdown(heads, rows, 2)


def batching() -> str:
    rows = [
        [said(app), slots, f"{at:g}", f"{by['topology-aware']['mean']:.2f}", f"{by['topology-aware']['queued']:.2f}"]
        + [ratio(by[way], key) for way in ("TO", "PO") for key in ("speedup", "speedup_p99")]
        for (app, slots, at), by in grouped(result("ablation")["batching"], "against", "app", "slots", "rate")
    ]
    heads = ["application", "slots", "queries/s", "mean, s", "queued, s", "TO", "TO, 99th", "PO", "PO, 99th"]
    return markdown(heads, rows)


def drafts() -> str:
    rows = [
        [
            said(app),
            f"{copied:.0%}",
            rate(at),
            f"{by['off']['mean']:.2f}",
            ratio(by["lookup"]),
            ratio(by["lookup and graph"]),
        ]
        for (app, copied, at), by in grouped(result("ablation")["drafts"], "drafts", "app", "copied", "rate")
    ]
    heads = ("application", "copied", "queries/s", "without, s", "by lookup", "by lookup and graph")
    return markdown(heads, rows)


def together() -> str:
    rows = [
        [row["against"], f"{row['rate']:g}", ratio(row), ratio(row, "speedup_p99")]
        + [f"{row['speedup_by_app'][app]:.2f}" for app in ("naive_rag", "advanced_rag")]
        for row in result("ablation")["together"]
        if row["against"] != "accelerated"
    ]
    heads = ("times as long as accelerated", "queries/s", "mean", "99th percentile", "naive RAG", "advanced RAG")
    return markdown(heads, rows)


def sensitivity() -> str:
    found, rows = result("ablation"), []
    tables = (("lengths", "tokens", "tokens of an answer"), ("interference", "interference", "interference"))
    for table, column, name in tables:
        for (app, at), by in grouped(found[table], column, "app", "rate"):
            rows.append(
                [said(app), rate(at), name, ", ".join(f"{ratio(row)} at {value:g}" for value, row in by.items())]
            )
    return markdown(("application", "queries/s", "what changes", "times faster than without passes"), rows, 4)


def shares() -> str:
    found, rows = result("overheads")["shares"], []
    for app, one in found["clock"]["process"].items():
        cells: list[object] = [said(app), f"{one['virtual_s']:.2f}"]
        path = found["path"]["process"][app]["share"]
        cells += [f"{path[part]['median']:.2%}" for part in ("planning", "scheduling", "processor")]
        for ground in ("process", "ray"):
            clock = found["clock"][ground][app]["share"]
            cells += [f"{clock['all']['median']:.1%}", f"{clock['all']['min']:.1%}"]
        rows.append(cells)
    heads = ("application", "latency, s", "planning", "scheduling", "all, processor time")
    clock = ("by the clock", "least", "Ray, by the clock", "least")
    return markdown([*heads, *clock], rows)


def costs() -> str:
    found = result("overheads")
    rows: list[Sequence[object]] = [
        [f"planning, {one['primitives']} primitives", f"{one['plan_ms']['median']:.2f}"] for one in found["planning"]
    ]
    rows += [["a kept plan", f"{max(one['kept_ms']['median'] for one in found['planning']):.3f}"]]
    for one in found["decisions"]:
        what = f"an engine's scheduler, a request, {one['waiting']} waiting, {one['replicas']} replicas"
        rows.append([what, f"{one['us']['median'] / 1000:.3f}"])
    rows += [
        [f"a primitive, {one['queries']} queries at once", f"{one['ms']['median']:.3f}"] for one in found["at_once"]
    ]
    return markdown(("what", "ms"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "ablation, graph": graph,
    "ablation, batching": batching,
    "ablation, drafts": drafts,
    "ablation, together": together,
    "ablation, sensitivity": sensitivity,
    "overhead shares": shares,
    "orchestration costs": costs,
}
"""Block name -> its text."""
