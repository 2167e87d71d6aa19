"""LangGraph graphs and agents of the tutorials, plain and accelerated, on a pool.

Engines take as long as RTX 3090s (`profiles.rtx3090`), times `--scale`, in wall-clock time; so do tools. The order
alternates, caches are emptied before each run, final states are compared. A speed-up is over the better of plain
`invoke` and plain `ainvoke`; what is possible follows from the data dependencies alone (`langgraph.bounds`), and leaves
out what LangGraph itself takes (`own_s`: the plain graph on engines that take no time). The time to the first token is
that of the answer, by `astream(stream_mode="messages")`.

    python -m benchmarks.graphs --json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import time
import warnings
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

from langgraph.types import Command

from benchmarks.common import arguments, environment, pattern_options, report, summary
from benchmarks.langchain.bounds import Costs
from benchmarks.langgraph.answers import Size
from benchmarks.langgraph.apps import APPS, DOCUMENTS, TOKENS, App, shown
from benchmarks.langgraph.bounds import BOUNDS, Known
from benchmarks.langgraph.kits import Call, Kit, make_kit
from teola_plugin import accelerate
from teola_plugin.engines import profiles

PLAIN = ("plain sync", "plain async")
FAST = ("fast sync", "fast async")
FIRST = ("plain first token", "fast first token")
TOOL_S = 1.0
NO_MORE_MS = 2.0
"""What counts as behind, or later: less is the noise of a shared machine, and the least that a query may cost."""

_threads = itertools.count()


def calls_of(app: App) -> tuple[dict[str, Any], list[Any]]:
    """The configuration of one query, and what the graph is called with, one after the other."""
    config = {"configurable": {"thread_id": str(next(_threads))}}
    return config, [app.given, *([Command(resume=app.resume)] if app.resume else [])]


def answered(graph: Any, app: App) -> Any:
    config, given = calls_of(app)
    return [graph.invoke(one, config) for one in given][-1]


async def aanswered(graph: Any, app: App) -> Any:
    config, given = calls_of(app)
    return [await graph.ainvoke(one, config) for one in given][-1]


async def first_token(graph: Any, app: App) -> float:
    """Seconds until the first token of the answer: of the last message of its node."""
    config, given = calls_of(app)
    firsts: dict[str, float] = {}
    start, last = time.perf_counter(), ""
    for one in given:
        async for message, told in graph.astream(one, config, stream_mode="messages"):
            if told["langgraph_node"] == app.answer_node and message.type in ("ai", "AIMessageChunk") and message.text:
                last = message.id
                firsts.setdefault(last, time.perf_counter() - start)
    return firsts[last]


def timed(runner: asyncio.Runner, kit: Kit, graph: Any, app: App, way: str) -> tuple[float, Any]:
    """One query: its seconds, and what the user sees. The loop of the async ways is there before and after it."""
    kit.fresh()
    gc.collect()
    start = time.perf_counter()
    if way in FIRST:
        return runner.run(first_token(graph, app)), None
    found = answered(graph, app) if way.endswith(" sync") else runner.run(aanswered(graph, app))
    return time.perf_counter() - start, shown(found)


class Row:
    """What one graph of one size was seen to do."""

    def __init__(self, app: App, kit: Kit) -> None:
        self.app, self.kit = app, kit
        plain = app.make(kit)
        self.graphs = {"plain": plain, "fast": accelerate(plain, pool=kit.pool)}
        self.ways = PLAIN + FAST + (FIRST if app.answer_node else ())
        self.seconds: dict[str, list[float]] = {way: [] for way in self.ways}
        self.calls: list[Call] = []
        self.wasted: list[tuple[int, int, int]] = []
        """Of each accelerated run: spans and tokens that nobody used, calls of the model beyond the plain ones."""
        self.differ: set[str] = set()

    def measure(self, runner: asyncio.Runner, repeats: int) -> None:
        gc.collect()
        gc.freeze()  # what is there already need not be looked through before every run
        expected = timed(runner, self.kit, self.graphs["plain"], self.app, PLAIN[0])[1]
        self.calls = list(self.kit.calls)
        for i in range(repeats if self.app.gain else 2 * repeats):
            for way in self.ways[:: 1 if i % 2 == 0 else -1]:
                begun = time.monotonic()
                took, found = timed(runner, self.kit, self.graphs[way.split()[0]], self.app, way)
                self.seconds[way].append(took)
                if way not in FIRST and found != expected:
                    self.differ.add(way)
                if way in FAST:
                    self.wasted.append(self._waste(begun))

    def _waste(self, begun: float) -> tuple[int, int, int]:
        time.sleep(0.01)  # a trace ends behind its query
        lost = [trace.wasted() for trace in self.kit.pool.traces if trace.started >= begun]
        return sum(n for n, _ in lost), sum(n for _, n in lost), len(self.kit.calls) - len(self.calls)

    @property
    def better(self) -> float:
        """Seconds of the better plain way."""
        return min(median(self.seconds[way]) for way in PLAIN)

    def figures(self, name: str, machine: Any, own_s: float) -> dict[str, Any]:
        middle, better = {way: median(times) for way, times in self.seconds.items()}, self.better
        paired = self._paired(("sync", "async"))
        bound = BOUNDS[name](Known(Costs(machine), self.calls, self.kit.tool_s))
        possible = better / bound
        speedup, speedup_sync = better / middle["fast async"], better / middle["fast sync"]
        spans, tokens, calls = (mean(column) for column in zip(*self.wasted, strict=True))
        return {
            "app": name,
            "documents": self.kit.size.documents,
            "tokens": self.kit.size.tokens,
            "speedup": round(speedup, 3),
            "speedup_sync": round(speedup_sync, 3),
            "possible": round(possible, 3),
            **({"share": round((max(speedup, speedup_sync) - 1) / (possible - 1), 3)} if possible >= 1.05 else {}),
            "seen": not self.app.unseen,
            **({"unseen": self.app.unseen} if self.app.unseen else {}),
            "behind_ms": max(one["median"] for one in paired.values()),
            "behind_better_ms": round(1000 * max(middle[way] - better for way in FAST), 2),
            "paired_ms": paired,
            **({"first_token_later_ms": self._paired(("first token",))["first token"]} if self.app.answer_node else {}),
            "wasted": {"spans": round(spans, 1), "tokens": round(tokens, 1), "calls": round(calls, 1)},
            "llm_calls": len(self.calls),
            "answers_equal": not self.differ,
            "bound_s": round(bound, 4),
            "own_s": round(own_s, 4),
            "seconds": {way: summary(times) for way, times in self.seconds.items()},
        }

    def _paired(self, ends: tuple[str, ...]) -> dict[str, Any]:
        """Milliseconds by which the accelerated runs were behind the plain ones by the same entry point."""
        pairs = {end: zip(self.seconds[f"fast {end}"], self.seconds[f"plain {end}"], strict=True) for end in ends}
        return {end: summary([1000 * (f - p) for f, p in pair], digits=2) for end, pair in pairs.items()}


def cases(options: argparse.Namespace) -> Iterator[tuple[Size, list[str]]]:
    """Each size with the graphs that it makes a difference to."""
    documents, tokens = ([int(n) for n in given.split(",")] for given in (options.documents, options.tokens))
    for size in (Size(d, t) for d in documents for t in tokens):
        chosen = [name for name in APPS if options.only in name]
        yield size, [name for name in chosen if APPS[name].wide or size.documents == documents[0]]


def main(options: argparse.Namespace) -> dict[str, Any]:
    quiet()
    machine, at_once = (profiles.scaled(profiles.rtx3090(), scale) for scale in (options.scale, 0.0))
    started, rows = time.perf_counter(), []
    with asyncio.Runner() as runner:
        for size, names in cases(options):
            with make_kit(machine, size, TOOL_S * options.scale) as kit, make_kit(at_once, size, 0.0) as quick:
                first = {name: Row(APPS[name], quick) for name in names}
                for row in first.values():
                    row.measure(runner, 3)  # imports and first-use costs
                for name in names:
                    row = Row(APPS[name], kit)
                    row.measure(runner, options.repeats)
                    rows.append(row.figures(name, machine, first[name].better))
    return {**top(rows), "rows": rows, **facts(options, started)}


def top(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of all rows together; shares are those of rows where 1.05 is possible."""
    shares = [(row["share"], row["seen"]) for row in rows if "share" in row and APPS[row["app"]].gain]
    seen = [share for share, visible in shares if visible]
    later = [row["first_token_later_ms"] for row in rows if "first_token_later_ms" in row]
    latest = max((one["median"] for one in later), default=0.0)
    return {
        "benchmark": "graphs",
        "worst_behind_ms": max(row["behind_ms"] for row in rows),
        "worst_behind_better_ms": max(row["behind_better_ms"] for row in rows),
        "share_of_possible": round(mean(share for share, _ in shares), 3) if shares else None,
        "share_of_possible_seen": round(mean(seen), 3) if seen else None,
        "answers_equal": all(row["answers_equal"] for row in rows),
        "ttft_never_later": latest <= NO_MORE_MS,
        "ttft_latest_ms": latest,
        "wasted": {key: round(mean(row["wasted"][key] for row in rows), 1) for key in ("spans", "tokens", "calls")},
    }


def facts(options: argparse.Namespace, started: float) -> dict[str, Any]:
    return {
        "profile": "rtx3090",
        "scale": options.scale,
        "repeats": options.repeats,
        "took_s": round(time.perf_counter() - started, 1),
        "environment": environment(),
    }


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("langchain_core").setLevel(logging.ERROR)


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "graph": row["app"],
            "docs": row["documents"],
            "tokens": row["tokens"],
            "plain s": min(row["seconds"][way]["median"] for way in PLAIN),
            "fast": row["speedup"],
            "sync": row["speedup_sync"],
            "possible": row["possible"],
            "share": row.get("share", ""),
            "seen": "yes" if row["seen"] else "no",
            "behind": row["behind_ms"],
            "first": row["first_token_later_ms"]["median"] if "first_token_later_ms" in row else "",
            "wasted": row["wasted"]["tokens"],
            "equal": "yes" if row["answers_equal"] else "NO",
        }
        for row in rows
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    pattern_options(parser)
    parser.add_argument("--documents", default=",".join(map(str, DOCUMENTS)), help="passages for each search")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of an answer")


if __name__ == "__main__":
    given = arguments("LangGraph graphs and agents: plain against accelerated.", _options)
    outcome = main(given)
    report(outcome, given, f"graphs and agents, RTX 3090 profile times {given.scale}", table(outcome["rows"]))
