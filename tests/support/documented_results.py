"""Tables and texts of the documents, made from results files, examples and commands: a test compares them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

from teola_plugin.adapters import demo_app
from teola_plugin.cli.demo.engines import make_pool_for_app
from teola_plugin.cli.demo.measure import run_case
from teola_plugin.cli.main import main

ROOT = Path(__file__).parents[2]
_APPS = {
    "advanced/sequential": "upload, expand, search, rerank, refine: steps one after the other",
    "advanced/parallel": "the same, upload and expansion written in parallel",
    "naive": "upload, three passages, an answer for each, combined",
}


def results() -> str:
    """The table of the committed run of benchmarks.single_query."""
    found = json.loads((ROOT / "benchmarks" / "results" / "single_query.json").read_text())
    rows = ["| app | answer tokens | runs | plain | accelerated | speed-up | possible |", "|---|" + "--:|" * 6]
    for case in found["cases"]:
        times = [f"{case[key]['median']:.2f}" for key in ("plain_s", "accelerated_s")]
        ratios = [f"{case[key]:.2f}" for key in ("speedup", "possible")]
        rows.append(
            "| "
            + " | ".join([_APPS[case["app"]], str(case["answer_tokens"]), str(case["plain_s"]["n"]), *times, *ratios])
            + " |"
        )
    idle = found["nothing_to_gain"]
    plain = idle["plain_ms"]["median"] / 1000
    sooner = plain + idle["behind_ms"]["median"] / 1000
    last = [
        "retrieve, prompt, answer: nothing to gain",
        "10",
        str(idle["plain_ms"]["n"]),
        f"{plain:.2f}",
        f"{sooner:.2f}",
        f"{plain / sooner:.2f}",
    ]
    return "\n".join([*rows, "| " + " | ".join([*last, "none"]) + " |"])


def copied() -> str:
    """Answers that copy, of the committed run of benchmarks.single_query."""
    found = json.loads((ROOT / "benchmarks" / "results" / "single_query.json").read_text())["drafts"]
    rows = [
        "| app | answer tokens | copied | plain | plain with drafts | accelerated | speed-up | virtual | possible "
        "| over drafts | possible | tokens a step, plain | accelerated | ideal |",
        "|---|" + "--:|" * 13,
    ]
    for row, exact in zip(found["rows"], found["virtual"], strict=True):
        seconds = [f"{row[f'{way}_s']['median']:.2f}" for way in ("plain", "plain_same_engine", "accelerated")]
        bases = ("", "_same_engine")
        ratios = [f"{row[f'{name}{base}']:.2f}" for base in bases for name in ("speedup", "possible_runs")]
        steps = [f"{row['tokens_per_step'][way]:.2f}" for way in ("plain_same_engine", "accelerated", "ideal_runs")]
        ratios.insert(1, f"{exact['plain_s'] / exact['accelerated_s']:.2f}")
        named = [row["app"].replace("/", ", "), str(row["answer_tokens"]), f"{row['copied']:.0%}"]
        rows.append("| " + " | ".join([*named, *seconds, *ratios, *steps]) + " |")
    return "\n".join(rows)


def real_engines() -> str:
    """The sentences below the README's first chain, of committed runs of public_apps and real_engines."""
    one = json.loads((ROOT / "benchmarks" / "results" / "real_engines.json").read_text())["cases"]["one_line"]
    seconds = f"{one['plain_s']:.2f} s plain, {one['accelerated_s']:.2f} s accelerated"
    return (
        f"{public_apps()} On a small model of a real vLLM server with one CPU core, where three answers at once take "
        f"longer than one: {seconds}, **{one['speedup']:.2f} times faster**."
    )


def _public_apps() -> list[dict[str, Any]]:
    apps: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "public_apps.json").read_text())["apps"]
    return apps


def public_apps() -> str:
    """The sentence on apps on hosted models, of the committed run of benchmarks.public_apps."""
    names = {
        "langgraph corrective RAG": "a corrective RAG graph",
        "research agent with a subgraph": "a research agent",
        "four analysts and a trader": "four analysts in sequence",
    }
    figures = {row["app"]: row["ways"]["ainvoke"] for row in _public_apps()}
    parts = [
        f"{text} in {figures[name]['fast_s']:.1f} s instead of {figures[name]['original_s']:.1f} s "
        f"(**{figures[name]['speed_up']:.1f} times faster**)"
        for name, text in names.items()
    ]
    return (
        f"Whole apps, with that one line and nothing else: {parts[0]}, {parts[1]}, {parts[2]}; "
        "[seventeen](docs/benchmarks.md#apps-on-hosted-models) after public tutorials, with those that gain nothing, "
        "on a fake server with the latencies of hosted models."
    )


def public_apps_table() -> str:
    """All apps of the same run, by each way in which they are called."""
    rows = [
        "| app | called by | original, s | accelerated, s | times faster | possible | control |",
        "|---|---|" + "--:|" * 5,
    ]
    for row in _public_apps():
        for way, one in row["ways"].items():
            seconds = [f"{one[key]:.2f}" for key in ("original_s", "fast_s")]
            ratios = [f"{one[key]:.2f}" for key in ("speed_up", "possible", "control")]
            rows.append("| " + " | ".join([row["app"], way, *seconds, *ratios]) + " |")
    return "\n".join(rows)


_REAL = {
    "one_line": "one line: three independent questions",
    "stock": "own classes: RAG over an uploaded document",
    "pool": "on engines: the same",
    "nothing_to_gain": "own classes: retrieve, prompt, answer",
}


def real_engines_table() -> str:
    """The same run as a table."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "real_engines.json").read_text())["cases"]
    rows = ["| app | runs | plain, s | accelerated, s | times faster |", "|---|" + "--:|" * 4]
    for name, case in cases.items():
        figures = [f"{case[key]:.2f}" for key in ("plain_s", "accelerated_s", "speedup")]
        rows.append("| " + " | ".join([_REAL[name], str(case["runs"]), *figures]) + " |")
    return "\n".join(rows)


def overhead() -> str:
    """The table of the committed run of benchmarks.overhead."""
    found = json.loads((ROOT / "benchmarks" / "results" / "overhead.json").read_text())
    per, planned = found["per_primitive_ms"], found["planning"]
    figures = {
        "per primitive, a chain": (per["chain"], "ms"),
        "per primitive, a fan-out": (per["fan_out"], "ms"),
        "per primitive, 16 queries at once": (per["queries"], "ms"),
        "tracing a chain, once": (planned["trace_ms"], "ms"),
        "planning, all passes": (planned["optimise_ms"], "ms"),
        "planning, cached": (planned["optimise_cached_ms"], "ms"),
        "`import teola_plugin`": (found["import"], "s"),
    }
    rows = ["| figure | median | 95 % interval of the median |", "|---|--:|--:|"]
    rows += [
        f"| {name} | {one['median']:.3f} {unit} | {one['interval'][0]:.3f} to {one['interval'][1]:.3f} {unit} |"
        for name, (one, unit) in figures.items()
    ]
    return "\n".join(rows)


def patterns() -> str:
    """The table of the committed run of benchmarks.langchain_patterns."""
    found = json.loads((ROOT / "benchmarks" / "results" / "langchain_patterns.json").read_text())
    by_name: dict[str, dict[str, Any]] = {}
    for case in found["cases"]:
        by_name.setdefault(case["pattern"], {})[case["objects"]] = case
    shown = {
        "pool": ("speedup", "speedup_sync", "speedup_all"),
        "mixed": ("speedup", "speedup_all"),
        "own": ("speedup", "speedup_sync"),
    }
    kinds = [(objects, key) for objects, keys in shown.items() for key in keys]
    rows = ["| pattern | pool | pool, sync | pool, all | possible | mixed | mixed, all | own | own, sync | ms behind |"]
    rows.append("|---|" + "--:|" * 9)
    for name, cases in by_name.items():
        behind = max((case["behind_ms"] for case in cases.values() if "behind_ms" in case), default=None)
        figures = [f"{cases[objects][key]:.2f}" for objects, key in kinds]
        figures.insert(3, f"{cases['pool']['possible']:.2f}" if "possible" in cases["pool"] else "")
        rows.append("| " + " | ".join([name, *figures, "" if behind is None else f"{behind:.1f}"]) + " |")
    return "\n".join(rows)


def llamaindex_patterns(run: str = "llamaindex_patterns") -> str:
    """The table of a committed run of benchmarks.llamaindex_patterns."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{run}.json").read_text())
    rows = [
        "| engine | `query` s | `aquery` s | accelerated `query` over `query` | over better | possible | ms behind |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for case in found["cases"]:
        seconds = {way: case["seconds"][way]["median"] for way in ("plain sync", "plain async", "auto sync")}
        over = seconds["plain sync"] / seconds["auto sync"]
        behind = f"{case['behind_ms']:.1f}" if "behind_ms" in case else ""
        figures = [
            f"{seconds['plain sync']:.3f}",
            f"{seconds['plain async']:.3f}",
            f"{over:.2f}",
            f"{case['speedup_sync']:.2f}",
            f"{case['possible']:.2f}" if case.get("possible") else "",
        ]
        rows.append("| " + " | ".join([case["pattern"], *figures, behind]) + " |")
    return "\n".join(rows)


def stock_real() -> str:
    """The table of the committed run of benchmarks.stock_real: median seconds of each way."""
    found = json.loads((ROOT / "benchmarks" / "results" / "stock_real.json").read_text())
    ways = [f"{mode} {way}" for mode in ("plain", "bare", "served") for way in ("sync", "async")]
    rows = ["| app | " + " | ".join(ways) + " |", "|---|" + "--:|" * len(ways)]
    for case in found["cases"]:
        seconds = [f"{case['seconds'][way]['median']:.3f}" for way in ways]
        rows.append("| " + " | ".join([case["app"], *seconds]) + " |")
    return "\n".join(rows)


def routing() -> str:
    """The table of the committed run of benchmarks.routing: mean and 99th percentile by each way."""
    found = json.loads((ROOT / "benchmarks" / "results" / "routing.json").read_text())
    ways = list(found["cases"][0]["ways"])
    rows = [f"| workload, requests/s on replicas | {' | '.join(ways)} |", "|---|" + "--:|" * len(ways)]
    for case in found["cases"]:
        times = [f"{case['ways'][way]['mean_s']:.2f} ({case['ways'][way]['p99_s']:.1f})" for way in ways]
        rows.append(f"| {case['workload']}, {case['rate']:g} on {case['replicas']} | {' | '.join(times)} |")
    return "\n".join(rows)


def simulator() -> str:
    """The table of the committed run of benchmarks.simulator."""
    found = json.loads((ROOT / "benchmarks" / "results" / "simulator.json").read_text())
    rows = [
        "| app, accelerated | queries/s | mean, s: wall clock | simulated | p95, s: wall clock | simulated |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in found["cases"]:
        times = [f"{case[way][key]:.2f}" for key in ("mean", "p95") for way in ("wall", "simulated")]
        rows.append(f"| {case['app']} | {case['rate']:g} | {' | '.join(times)} |")
    return "\n".join(rows)


def policies() -> str:
    """The table of the committed run of benchmarks.policies."""
    found = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())
    rows = [
        "| queries/s | policy | mean, s | p99, s | in time | mean, times topology-aware |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for case in found["cases"]:
        low, high = case["mean_ratio"]["interval"]
        ratio = f"{case['mean_ratio']['median']:.2f} ({low:.2f} to {high:.2f})"
        figures = f"{case['mean']:.1f} | {case['p99']:.1f} | {case['within_slo']:.0%} | {ratio}"
        rows.append(f"| {case['rate']:g} | {case['policy']} | {figures} |")
    return "\n".join(rows)


def ray_overhead() -> str:
    """The table of the committed run of benchmarks.ray_overhead."""
    found = json.loads((ROOT / "benchmarks" / "results" / "ray_overhead.json").read_text())
    names = {
        "chain": "same engine",
        "alternating": "alternating between two engines",
        "fan_out": "20 side by side",
        "queries": "16 chains at once, same engine",
        "alternating_queries": "16 chains at once, alternating",
        "load": "64 chains at once, same engine",
    }
    rows = ["| | ms a primitive | times a bare call |", "|---|--:|--:|"]
    rows.append(f"| bare call of a Ray actor, there and back | {found['bare_round_trip_ms']:.2f} | 1.0 |")
    for name, said in names.items():
        rows.append(f"| {said} | {found['per_primitive_ms'][name]['median']:.2f} | {found['ratios'][name]:.1f} |")
    return "\n".join(rows)


def memory() -> str:
    """The table of the committed run of benchmarks.memory."""
    found = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())["cases"]
    names = {
        "queries": "{count:,} short queries, one after the other",
        "open query": "one query that stays open through {count:,} requests, with 1,000 parts of its own plan",
    }
    rows = ["| case | resident after warm-up | at the end |", "|---|--:|--:|"]
    for name, said in names.items():
        resident = found[name]["resident_mib"]
        times = [f"{resident[key]:.1f} MiB" for key in ("after_warm_up", "end")]
        rows.append(f"| {said.format(count=found[name]['count'])} | {' | '.join(times)} |")
    return "\n".join(rows)


def five_apps(run: str = "apps") -> str:
    """The table of a committed run of benchmarks.apps: how many times as long each baseline takes."""
    apps = json.loads((ROOT / "benchmarks" / "results" / f"{run}.json").read_text())["apps"]
    schemes = list(dict.fromkeys(name for app in apps.values() for name in app["speedup_low"]))
    rows = [f"| application | accelerated, s | {' | '.join(schemes)} |", "|---|--:|" + "--:|" * len(schemes)]
    for name, app in apps.items():
        found = [app["speedup_low"].get(scheme) for scheme in schemes]
        ratios = ["" if one is None else f"{one['median']:.2f}" for one in found]
        seconds = f"{app['seconds']['accelerated']['median']:.2f}"
        rows.append(f"| {name.replace('_', ' ')} | {seconds} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def apps_under_load() -> str:
    """The table of the committed run of benchmarks.apps --ground simulated."""
    apps = json.loads((ROOT / "benchmarks" / "results" / "apps_simulated.json").read_text())["apps"]
    names = list(dict.fromkeys(name for app in apps.values() for name in app["speedup_low"]))
    rows = [f"| application | load | {' | '.join(names)} |", "|---|---|" + "--:|" * len(names)]
    for app, found in apps.items():
        for label, key, at in (("low", "speedup_low", 0), ("high", "speedup_high", -1)):
            ratios = [found[key].get(name) for name in names]
            cells = ["" if one is None else f"{one['median']:.2f}" for one in ratios]
            rows.append(f"| {app.replace('_', ' ')} | {label}, {found['rates'][at]:g}/s | {' | '.join(cells)} |")
        goodput = [found["goodput"].get(name) for name in names]
        cells = ["" if one is None else f"{one:.2f}" for one in goodput]
        rows.append(f"| | goodput; accelerated {found['goodput']['accelerated']:.2f}/s | {' | '.join(cells)} |")
    return "\n".join(rows)


def neighbours() -> str:
    """The table of the committed run of benchmarks.neighbours."""
    found = json.loads((ROOT / "benchmarks" / "results" / "neighbours.json").read_text())
    names = {"pure function": "a pure function on a long text", "JSON parser": "a JSON parser", "upload": "an upload"}
    rows = ["| heavy chain | beside the plain one | beside the accelerated one |", "|---|--:|--:|"]
    for case in found["longest_wait_ms"]:
        times = [f"{case[key]['median']:.1f} ms" for key in ("plain", "accelerated")]
        rows.append(f"| {names[case['chain']]} | {' | '.join(times)} |")
    return "\n".join(rows)


def example(script: str, name: str) -> str:
    """The source of a class of an example; with `Class.method`, up to the end of that method."""
    text = (ROOT / "examples" / f"{script}.py").read_text()
    wanted, _, last = name.partition(".")
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == wanted)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    ends = {getattr(node, "name", ""): node.end_lineno for node in found.body}
    return "\n".join(text.splitlines()[first - 1 : ends.get(last, found.end_lineno)])


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```"


def demo_diff() -> str:
    """The demo's app, and what is added to it, from the source of both."""
    own, pool, case = (inspect.getsource(f) for f in (demo_app.make_app, make_pool_for_app, run_case))
    plain = own[own.index("    llm = ") : own.index("    bind = ")]
    call = next(line for line in case.splitlines(keepends=True) if "= accelerate(" in line)
    bind = own[own.index("    bind = ") : own.index("    return")]
    made = pool[pool.index("    pool = ") : pool.index("    return")].replace(", drafts=drafts", "")
    added = made + bind + call
    lines = [(" ", line) for line in plain.splitlines()] + [("+", line) for line in added.splitlines()]
    return fenced("\n".join(sign + line.removeprefix("    ") for sign, line in lines), "diff")


def simulated() -> str:
    """What the command of docs/simulation.md prints."""
    said = io.StringIO()
    app, pool = "examples.capacity.app:support_desk", str(Path(__file__).parents[2] / "examples/capacity/pool.yaml")
    with contextlib.redirect_stdout(said):
        main(["simulate", pool, "--app", app, "--rate", "0.5,1,2", "--queries", "30"])
    return said.getvalue().rstrip()
