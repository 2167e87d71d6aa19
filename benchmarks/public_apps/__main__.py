"""`python -m benchmarks.public_apps`: the bare `accelerate(app)` on apps that users write, with a hosted model.

Each app runs on a fake OpenAI-compatible server in a process of its own, in turn as it is and accelerated. A speed-up
is the median of the original, the better of its sync and async way, over the median of the accelerated app.

With `--instant` the server answers at once, and the figures are the CPU time that a query of the app takes, and what
acceleration adds: the median of the differences of pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.common import arguments, environment, report, summary
from benchmarks.public_apps import langchain_apps, langgraph_apps, llamaindex_apps
from benchmarks.public_apps.apps import App, Calls, Way
from benchmarks.public_apps.server import FakeServer, LoggedRequest, fake_server
from teola_plugin import accelerate

APPS: Sequence[App] = [*langchain_apps.APPS, *langgraph_apps.APPS, *llamaindex_apps.APPS]
WAYS: dict[str, tuple[Way, ...]] = {
    "runnable": ("invoke", "ainvoke", "stream"),
    "graph": ("invoke", "ainvoke", "stream"),
    "query_engine": ("invoke", "ainvoke"),
    "workflow": ("ainvoke", "stream"),
}
ASYNC_ONLY = ("research agent with a subgraph", "interviews from several perspectives")
"""Graphs whose nodes are coroutines: `invoke` raises."""
WORTH_MEASURING = 1.15
"""Apps with less to gain do not count for `share_of_possible`."""
SETTLE_S = 0.003
"""Pause after a run, so that the CPU time of what it leaves to other threads counts as its own."""


@dataclass(slots=True)
class Run:
    """One run of an app: its times, the time to its first piece, its result, and what the server received."""

    seconds: float
    cpu_s: float
    first_s: float
    result: str
    requests: list[LoggedRequest]


@dataclass(slots=True)
class Measured:
    """The runs of one app in one way."""

    original: list[Run] = field(default_factory=list)
    fast: list[Run] = field(default_factory=list)


class Runner:
    """Runs apps on one loop, and takes the server's log behind each run."""

    def __init__(self, server: FakeServer, loop: asyncio.Runner) -> None:
        self._server, self._loop = server, loop

    def run(self, app: App, obj: Any, way: Way) -> Run:
        """Call an app once."""
        began, cpu_began = time.perf_counter(), time.process_time()
        first = None
        with contextlib.redirect_stdout(io.StringIO()):
            if way == "stream":
                first, result = self._loop.run(_streamed(app, obj))
            elif way == "ainvoke":
                result = self._loop.run(_awaited(app, obj))
            else:
                result = obj.query(app.input) if app.kind == "query_engine" else obj.invoke(app.input)
        ended = time.perf_counter()
        time.sleep(SETTLE_S)
        cpu_s = time.process_time() - cpu_began
        if way == "stream" and app.is_concurrent:
            result = sorted(result, key=repr)
        return Run(ended - began, cpu_s, (first or ended) - began, comparable(result), self._server.take_log())


async def _awaited(app: App, obj: Any) -> Any:
    if app.kind == "workflow":
        return await obj.run(query=app.input)
    return await (obj.aquery(app.input) if app.kind == "query_engine" else obj.ainvoke(app.input))


async def _streamed(app: App, obj: Any) -> tuple[float | None, Any]:
    """Return when the first piece came, and all pieces."""
    if app.kind == "workflow":
        handler = obj.run(query=app.input)
        pieces = handler.stream_events()
    elif app.kind == "graph":
        pieces = obj.astream(app.input, stream_mode=["messages", "values"])
    else:
        pieces = obj.astream(app.input)
    collected: list[Any] = []
    first: float | None = None
    async for piece in pieces:
        is_input = app.kind == "graph" and not collected
        first = time.perf_counter() if first is None and not is_input else first
        collected.append(piece)
    return first, collected


def comparable(result: Any) -> str:
    """Return a text of a result that is equal for equal results: without the ids of runs and checkpoints."""
    is_response = hasattr(result, "source_nodes")  # of a query engine
    text = f"{result}{result.source_nodes}" if is_response else repr(result)
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<id>", text)
    return re.sub(r"0x[0-9a-f]+", "<address>", text)


# ------------------------------------------------------------ one app


def run_pairs(app: App, runner: Runner, base_url: str, repeats: int) -> dict[Way, Measured]:
    """Run an app in each way, in turn as it is and accelerated."""
    original = app.build(base_url)
    fast = accelerate(original)
    runner.run(app, original, "ainvoke")  # also takes what was requested to build the app
    ways = tuple(way for way in WAYS[app.kind] if way != "invoke" or app.name not in ASYNC_ONLY)
    runs = {way: Measured() for way in ways}
    for way in ways:  # models that are created inside are known from the second query on
        for _ in range(2):
            runner.run(app, fast, way)
        runner.run(app, original, way)
    for number in range(repeats):
        for way in ways:
            pair = [(original, runs[way].original), (fast, runs[way].fast)]
            for obj, kept in pair if number % 2 == 0 else reversed(pair):
                kept.append(runner.run(app, obj, way))
    return runs


def cpu_times(app: App, runner: Runner, base_url: str, repeats: int) -> dict[str, Any]:
    """Return the CPU time of a query of one app, and what acceleration adds, in milliseconds, for each way."""
    ways = {}
    for way, measured in run_pairs(app, runner, base_url, repeats).items():
        pairs = zip(measured.original, measured.fast, strict=True)
        ways[way] = {
            "original_cpu_ms": round(1e3 * median(run.cpu_s for run in measured.original), 3),
            "added_cpu_ms": summary([1e3 * (fast.cpu_s - original.cpu_s) for original, fast in pairs]),
        }
    return {"app": app.name, "ways": ways}


def measure(app: App, runner: Runner, base_url: str, repeats: int) -> dict[str, Any]:
    """Return the figures of one app: for each way the speed-up, the bound and what was equal."""
    runs = run_pairs(app, runner, base_url, repeats)
    ways = tuple(runs)
    whole = [median(run.seconds for run in runs[way].original) for way in ways if way != "stream"]
    bound_s = app.bound(Calls(runs[ways[0]].original[0].requests))
    row: dict[str, Any] = {"app": app.name, "possible": round(min(whole) / bound_s, 3), "ways": {}}
    for way in ways:
        measured = runs[way]
        base = median(run.seconds for run in measured.original) if way == "stream" else min(whole)
        row["ways"][way] = _figures(measured, base, bound_s)
    return row


def _figures(measured: Measured, base_s: float, bound_s: float) -> dict[str, Any]:
    fast_s = median(run.seconds for run in measured.fast)
    first_s = [median(run.first_s for run in runs) for runs in (measured.original, measured.fast)]
    originals = [run.seconds for run in measured.original]
    control = median(originals[::2]) / median(originals[1::2] or originals)
    return {
        "original_s": round(base_s, 4),
        "fast_s": round(fast_s, 4),
        "speed_up": round(base_s / fast_s, 3),
        "possible": round(base_s / bound_s, 3),
        "control": round(control, 3),
        "first_s": [round(value, 4) for value in first_s],
        "requests_equal": len({_bodies(run) for run in (*measured.original, *measured.fast)}) == 1,
        "answers_equal": len({run.result for run in (*measured.original, *measured.fast)}) == 1,
    }


def _bodies(run: Run) -> frozenset[tuple[str, int]]:
    counted = Counter(json.dumps([one.path, one.body], sort_keys=True) for one in run.requests)
    return frozenset(counted.items())


# ------------------------------------------------------------ all apps


def summarized(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all apps, for each way."""
    summary = {}
    for way in ("invoke", "ainvoke", "stream"):
        figures = [row["ways"][way] for row in rows if way in row["ways"]]
        if not figures:
            continue
        shares = [
            (one["speed_up"] - 1) / (one["possible"] - 1) for one in figures if one["possible"] >= WORTH_MEASURING
        ]
        late_s = max(one["first_s"][1] - one["first_s"][0] for one in figures)
        summary[way] = {
            "share_of_possible": round(mean(shares), 3) if shares else None,
            "worst_behind": round(max(one["fast_s"] / one["original_s"] - 1 for one in figures), 4),
            "requests_equal": all(one["requests_equal"] for one in figures),
            "answers_equal": all(one["answers_equal"] for one in figures),
            "first_piece_later_by_s": round(late_s, 4),
            "ttft_never_later": late_s <= 0.02,
        }
    return summary


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=10, help="pairs of runs in each way")
    parser.add_argument("--scale", type=float, default=1.0, help="latencies of the server, times this")
    parser.add_argument("--only", default="", help="only apps whose name contains this")
    parser.add_argument("--instant", action="store_true", help="answers come at once: the CPU time that is added")


def main() -> int:
    """Measure the apps and print the figures."""
    options = arguments(__doc__ or "", _options)
    rows, scale = [], 0.0 if options.instant else options.scale
    with fake_server(scale) as server, asyncio.Runner() as loop:
        for app in APPS:
            if options.only in app.name:
                figures = cpu_times if options.instant else measure
                rows.append(figures(app, Runner(server, loop), server.base_url, options.repeats))
                print(json.dumps(rows[-1]), file=sys.stderr)
    result: dict[str, Any] = {"benchmark": "public_apps", "environment": environment(), "scale": scale}
    result |= {"apps": rows, "repeats": options.repeats}
    if options.instant:
        added = [
            {"app": row["app"], "way": way, "original, ms": one["original_cpu_ms"], "added, ms": cpu_ms["median"]}
            | {"95 %": cpu_ms["interval"]}
            for row in rows
            for way, one in row["ways"].items()
            for cpu_ms in (one["added_cpu_ms"],)
        ]
        report(result, options, "CPU time that the bare accelerate(app) adds, answers at once", added)
        return 0
    result["summary"] = summarized(rows)
    table = [
        {"app": row["app"], "way": way, **{key: one[key] for key in ("possible", "speed_up", "control")}}
        for row in rows
        for way, one in row["ways"].items()
    ]
    report(result, options, "Bare accelerate(app) on apps after public tutorials", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
