"""Tables and texts of the documents, made from result files, examples and commands. A test compares them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
from pathlib import Path

from teola_plugin.adapters import demo_app
from teola_plugin.cli.demo.engines import make_pool_for_app
from teola_plugin.cli.demo.measure import run_case
from teola_plugin.cli.main import main

ROOT = Path(__file__).parents[2]


def routing() -> str:
    """Return the table of the committed run of benchmarks.routing: mean and 99th percentile of each routing policy."""
    results = json.loads((ROOT / "benchmarks" / "results" / "routing.json").read_text())
    ways = list(results["cases"][0]["ways"])
    rows = [f"| workload, requests/s on replicas | {' | '.join(ways)} |", "|---|" + "--:|" * len(ways)]
    for case in results["cases"]:
        times = [f"{case['ways'][way]['mean_s']:.2f} ({case['ways'][way]['p99_s']:.1f})" for way in ways]
        rows.append(f"| {case['workload']}, {case['rate']:g} on {case['replicas']} | {' | '.join(times)} |")
    return "\n".join(rows)


def simulator() -> str:
    """Return the table of the committed run of benchmarks.simulator."""
    results = json.loads((ROOT / "benchmarks" / "results" / "simulator.json").read_text())
    rows = [
        "| app, accelerated | queries/s | mean, s: wall clock | simulated | p95, s: wall clock | simulated |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in results["cases"]:
        times = [f"{case[way][key]:.2f}" for key in ("mean", "p95") for way in ("wall", "simulated")]
        rows.append(f"| {case['app']} | {case['rate']:g} | {' | '.join(times)} |")
    return "\n".join(rows)


def policies() -> str:
    """Return the table of the committed run of benchmarks.policies."""
    results = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())
    rows = [
        "| queries/s | policy | mean, s | p99, s | in time | mean, times topology-aware |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for case in results["cases"]:
        low, high = case["mean_ratio"]["interval"]
        ratio = f"{case['mean_ratio']['median']:.2f} ({low:.2f} to {high:.2f})"
        figures = f"{case['mean']:.1f} | {case['p99']:.1f} | {case['within_slo']:.0%} | {ratio}"
        rows.append(f"| {case['rate']:g} | {case['policy']} | {figures} |")
    return "\n".join(rows)


def ray_overhead() -> str:
    """Return the table of the committed run of benchmarks.ray_overhead."""
    results = json.loads((ROOT / "benchmarks" / "results" / "ray_overhead.json").read_text())
    names = {
        "chain": "same engine",
        "alternating": "alternating between two engines",
        "fan_out": "20 side by side",
        "queries": "16 chains at once, same engine",
        "alternating_queries": "16 chains at once, alternating",
        "load": "64 chains at once, same engine",
    }
    rows = ["| | ms a primitive | times a bare call |", "|---|--:|--:|"]
    rows.append(f"| bare call of a Ray actor, there and back | {results['bare_round_trip_ms']:.2f} | 1.0 |")
    for name, label in names.items():
        rows.append(f"| {label} | {results['per_primitive_ms'][name]['median']:.2f} | {results['ratios'][name]:.1f} |")
    return "\n".join(rows)


def example(script: str, name: str) -> str:
    """Return the source of a class of an example. With `Class.method`, the source ends with that method."""
    text = (ROOT / "examples" / f"{script}.py").read_text()
    class_name, _, method = name.partition(".")
    definition = next(
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    first = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
    ends = {getattr(node, "name", ""): node.end_lineno for node in definition.body}
    return "\n".join(text.splitlines()[first - 1 : ends.get(method, definition.end_lineno)])


def fenced(text: str, language: str = "text") -> str:
    """Return the text as a fenced code block."""
    return f"```{language}\n{text}\n```"


def demo_diff() -> str:
    """Return the demo's app and the lines that acceleration adds to it, as a diff made from their sources."""
    app_source, pool, case = (inspect.getsource(f) for f in (demo_app.make_app, make_pool_for_app, run_case))
    plain = app_source[app_source.index("    llm = ") : app_source.index("    bind = ")]
    call = next(line for line in case.splitlines(keepends=True) if "= accelerate(" in line)
    bind = app_source[app_source.index("    bind = ") : app_source.index("    return")]
    pool_lines = pool[pool.index("    pool = ") : pool.index("    return")].replace(", drafts=drafts", "")
    added = pool_lines + bind + call
    lines = [(" ", line) for line in plain.splitlines()] + [("+", line) for line in added.splitlines()]
    return fenced("\n".join(sign + line.removeprefix("    ") for sign, line in lines), "diff")


def simulated() -> str:
    """Return what the command of docs/simulation.md prints."""
    output = io.StringIO()
    app, pool = "examples.capacity.app:support_desk", str(Path(__file__).parents[2] / "examples/capacity/pool.yaml")
    with contextlib.redirect_stdout(output):
        main(["simulate", pool, "--app", app, "--rate", "0.5,1,2", "--queries", "30"])
    return output.getvalue().rstrip()
