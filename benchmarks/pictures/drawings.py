"""Which chart is made of which result: name of the picture -> what draws it of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.pictures.charts import Bar, Key, Panel, Picture, Series, bars, lines

Result = Mapping[str, Any]
SCHEMES: dict[str, tuple[str, str]] = {
    "accelerated": ("accent", ""),
    "object": ("ink", ""),
    "modern": ("searching", ""),
    "plain script": ("edge", ""),
    "Haystack": ("ingestion", ""),
    "LlamaDistPC-TO": ("decoding", ""),
    "LlamaDistPC-PO": ("decoding", "4 3"),
    "LlamaDist-TO": ("embedding", ""),
    "LlamaDist-PO": ("embedding", "4 3"),
    "AutoGen-TO": ("tool", ""),
    "AutoGen-PO": ("tool", "4 3"),
}
"""Colour and dashes; further schemes get those of `OTHER`."""
OTHER = ("dim", "2 2")
WAYS = {"parallelisation": "prefilling", "pipelining": "embedding", "full": "accent"}
PARTS = {
    "decoding": "decoding",
    "prefilling": "prefilling",
    "reranking": "reranking",
    "searching": "searching",
    "ingestion": "ingestion",
    "embedding": "embedding",
    "queued": "queue",
}


def said(app: str) -> str:
    return app.replace("_", " ").replace("rag", "RAG")


def rate(value: float) -> str:
    return f"{value:g}/s" if value else "alone"


def latency(found: Result) -> Picture:
    """`apps_simulated`: mean latency over rates of each scheme, with a ring at the highest rate that it serves well."""
    body, known = "", dict[str, None]()
    for number, (app, told) in enumerate(found["apps"].items()):
        x, y = number % 2 * 380.0, number // 2 * 250.0
        series = []
        for scheme, rows in told["latency"].items():
            colour, dashes = SCHEMES.get(scheme, OTHER)
            points = tuple((row["rate"], _median(row["mean"])) for row in rows if row["rate"] > 0)
            good = told["goodput"].get(scheme)
            good = None if good is None else _median(good)
            series.append(Series(scheme, points, colour, dashes, good if good and good >= points[0][0] else None))
            known[scheme] = None
        panel = Panel(said(app), "queries a second", "mean latency, s", x, y, 375, 240, (False, True))
        body += lines(panel, sorted(series, key=lambda one: -_place(one.name)))  # ours on top
    keys = [Key(name, *SCHEMES.get(name, OTHER)) for name in sorted(known, key=_place)]
    rows = math.ceil(len(found["apps"]) / 2)
    notes = ("A ring: the highest rate at which nearly all queries are within five times the idle latency.",)
    return Picture(760, 250.0 * rows, body, keys, notes, lined=True)


def _place(scheme: str) -> int:
    return list(SCHEMES).index(scheme) if scheme in SCHEMES else len(SCHEMES)


def _median(told: Any) -> float:
    return float(told["median"] if isinstance(told, Mapping) else told)


def ablation(found: Result) -> Picture:
    """`ablation`: how many times as fast each group of passes makes an application, alone and at load."""
    groups: dict[str, dict[str, list[Bar]]] = {}
    for row in found["graph"]:
        if row["passes"] in WAYS:
            low, high = row["speedup"]["interval"]
            part = ((WAYS[row["passes"]], row["speedup"]["median"]),)
            told = f"{row['speedup']['median']:.2f}" if row["passes"] == "full" else ""
            bar = Bar("", part, told, low, high)
            groups.setdefault(said(row["app"]), {}).setdefault(rate(row["rate"]), []).append(bar)
    body, height = "", 200.0
    for number, (app, by_rate) in enumerate(groups.items()):
        panel = Panel(app, "", "times as fast", number % 2 * 380.0, number // 2 * (height + 10), 375, height)
        body += bars(panel, by_rate, least=0.9, line=1.0)
    named = {"parallelisation": "passes 1 and 3", "pipelining": "passes 2 and 4", "full": "all four"}
    keys = [Key(named[name], colour) for name, colour in WAYS.items()]
    notes = ("Over the same workflow without passes, in virtual time; the scale begins at 0.9.",)
    return Picture(760, math.ceil(len(groups) / 2) * (height + 10), body, keys, notes)


def breakdown(found: Result) -> Picture:
    """`ablation`: what the time of a query goes to, without passes and with all, alone and at the highest rate."""
    groups: dict[str, list[Bar]] = {}
    for app in dict.fromkeys(row["app"] for row in found["graph"]):
        rows = [row for row in found["graph"] if row["app"] == app and row["passes"] in ("none", "full")]
        ends = dict.fromkeys((rows[0]["rate"], rows[-1]["rate"]))
        found_ = [
            Bar(
                "-" if row["passes"] == "none" else "+",
                tuple((PARTS[part], value) for part, value in row["spent"].items()),
            )
            for at in ends
            for row in rows
            if row["rate"] == at
        ]
        groups[_short(said(app))] = found_
    panel = Panel("What the time of a query goes to", "", "s", 0, 0, 760, 300)
    keys = [Key(part, colour) for part, colour in PARTS.items()]
    notes = (
        "Of each: - without passes, + with all four; the left pair one query at a time, the right one at load.",
        "A moment in which several things run counts for the first of those named here. Large: uploads of 600 chunks.",
    )
    return Picture(760, 305, bars(panel, groups), keys, notes)


def _short(app: str) -> str:
    return app.replace("contextual retrieval", "contextual").replace(" RAG, 600 chunks", ", large")


def together(found: Result) -> Picture:
    """`ablation`: two applications on one cluster, baselines over accelerated."""
    groups: dict[str, list[Bar]] = {}
    for row in found["together"]:
        if row["against"] != "accelerated":
            colour, dashes = SCHEMES[row["against"]]
            low, high = row["speedup"]["interval"]
            ratio = row["speedup"]["median"]
            bar = Bar("PO" if dashes else "TO", ((colour, ratio),), f"{ratio:.2f}", low, high)
            groups.setdefault(f"{row['rate']:g} queries a second", []).append(bar)
    panel = Panel("Naive and advanced RAG on one cluster", "", "times as long as accelerated, mean", 0, 0, 560, 240)
    keys = [Key("LlamaDist", "embedding"), Key("LlamaDistPC", "decoding")]
    return Picture(560, 245, bars(panel, groups, line=1.0), keys, ("In virtual time.",))


def costs(found: Result) -> Picture:
    """`overheads`: planning, a decision, a primitive, as graphs, queues and loads grow."""
    plans = tuple((one["primitives"], one["plan_ms"]["median"]) for one in found["planning"])
    kept = tuple((one["primitives"], one["kept_ms"]["median"]) for one in found["planning"])
    decided = found["decisions"]
    waiting = tuple((one["waiting"], one["us"]["median"] / 1000) for one in decided if one["replicas"] == 4)
    copies = tuple((one["replicas"], one["us"]["median"] / 1000) for one in decided if one["waiting"] == 100)
    asked = tuple((one["queries"], one["ms"]["median"]) for one in found["at_once"])
    one = Panel("Planning", "primitives", "ms", 0, 0, 252, 220, (True, True))
    two = replace(one, title="A request, scheduled", across="waiting, or replicas", x=254)
    three = replace(one, title="A primitive, all in all", across="queries at once", x=508)
    body = lines(one, [Series("all passes", plans, "accent"), Series("kept", kept, "decoding")])
    body += lines(two, [Series("waiting", sorted_(waiting), "accent"), Series("replicas", sorted_(copies), "decoding")])
    body += lines(three, [Series("in one process", asked, "accent")])
    keys = [Key("all passes; requests that wait; queries", "accent"), Key("a kept plan; replicas", "decoding")]
    return Picture(762, 225, body, keys, lined=True)


def sorted_(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted(points))


DRAWN: dict[str, tuple[str, Callable[[Result], Picture]]] = {
    "latency": ("apps_simulated", latency),
    "ablation": ("ablation", ablation),
    "breakdown": ("ablation", breakdown),
    "together": ("ablation", together),
    "costs": ("overheads", costs),
}
"""Picture -> the result that it is of, and what draws it."""
