"""`teola simulate`: simulates the user's apps under load, on a cluster that need not exist."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from teola_plugin.cli.pool import count
from teola_plugin.errors import RegistrationError

SOUND, FAILING = 0, 1
"""Exit statuses; 1 where a query failed."""


def add_simulate(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "simulate",
        help="your apps under load on a pool that need not exist, in virtual time",
        description="Runs apps on the engines that a pool's YAML names, as fast as a machine's profile says, in "
        "virtual time: with the real schedulers, without models or GPUs. Exit status: 1 if queries failed, "
        "2 for bad input.",
    )
    parser.add_argument("pool", metavar="POOL.yaml", help="the pool's YAML file: engines, replicas, policies")
    parser.add_argument(
        "--app",
        action="append",
        required=True,
        metavar="[NAME=]module:function",
        help="a function that makes the app from a pool: def make(pool): return chain (repeat for apps side by side)",
    )
    parser.add_argument(
        "--rate", type=_rates, default=(1.0,), metavar="R,R,...", help="queries a second, all apps together (default 1)"
    )
    parser.add_argument("--queries", type=count, default=200, metavar="N", help="of each run (default 200)")
    parser.add_argument(
        "--arrivals", default="poisson", metavar="poisson|bursty|FILE.jsonl", help="how they come (default poisson)"
    )
    parser.add_argument(
        "--inputs",
        action="append",
        default=[],
        metavar="[NAME=]FILE.jsonl",
        help="inputs of an app, one JSON value a line, in turn (default: questions are made up)",
    )
    parser.add_argument(
        "--popularity", type=_exponent, metavar="S", help="draw inputs by Zipf's law with this exponent instead"
    )
    parser.add_argument(
        "--machine", default="", metavar="NAME|FILE.json", help="how fast engines are; the YAML's fakes may say so"
    )
    parser.add_argument("--policy", default="", help="batch policy of all engines (default: as the YAML says)")
    parser.add_argument("--output-tokens", type=count, default=0, metavar="N", help="length of each answer of LLMs")
    parser.add_argument("--way", choices=("plain", "accelerated", "both"), default="both", help="default both")
    parser.add_argument("--slo", type=_positive, default=5.0, metavar="X", help="in time: X times alone (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same figures (default 0)")
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="runs of each, from --seed on (default 1)")
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="processes side by side (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(run=run_simulate)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> float:
    """Parse an option that is a number above 0. Raise `ArgumentTypeError` for another text."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _exponent(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _positive(text)


def run_simulate(options: argparse.Namespace) -> int:
    """Run the command. Return the exit status: 0, 1 if a query failed, 2 for bad input."""
    from teola_plugin.cli.compare.command import stdout_to_stderr
    from teola_plugin.cli.simulate.runs import ARRIVAL_PROCESSES, FAST, PLAIN, run_plan

    plan, variants = _plan(options), (PLAIN, FAST) if options.way == "both" else (options.way,)
    rates = options.rate if options.arrivals in ARRIVAL_PROCESSES else (0.0,)  # a trace has its own times
    seeds = range(options.seed, options.seed + options.seeds)
    with stdout_to_stderr(options.json):
        idle, runs = run_plan(plan, rates, variants, seeds, options.workers)
    hidden = ("run", "command", "json", "workers")
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    results = {"settings": settings, "idle_s": idle, "runs": runs}
    if options.json:
        json.dump(results, sys.stdout)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("\n".join(_report_lines(results)) + "\n")
    return FAILING if any(run["failed"] for run in runs) else SOUND


def _plan(options: argparse.Namespace) -> Any:
    """Return the simulation that the options describe. Raise `RegistrationError` for invalid ones."""
    from teola_plugin.cli.simulate.runs import ARRIVAL_PROCESSES, SimulationPlan, parse_apps
    from teola_plugin.errors import unknown_name
    from teola_plugin.scheduling import POLICIES

    if options.policy and options.policy not in POLICIES:
        raise unknown_name("batch policy", options.policy, list(POLICIES))
    if options.arrivals not in ARRIVAL_PROCESSES and not options.arrivals.endswith(".jsonl"):
        raise RegistrationError(
            f"--arrivals is {options.arrivals!r}.", hint="give poisson, bursty, or a trace whose name ends in .jsonl"
        )
    return SimulationPlan(
        options.pool,
        parse_apps(options.app, options.inputs),
        options.arrivals,
        options.queries,
        options.machine,
        options.policy,
        options.output_tokens,
        options.popularity,
        options.slo,
    )


# ------------------------------------------------------------ the report

_COLUMNS = ("rate", "way", "mean", "p95", "p99", "first", "in time", "goodput", "wasted", "busiest")
_TEXT_COLUMNS = (1, 9)
"""The columns of text; the others hold numbers, which are aligned to the right."""


def _report_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each run, the latencies of single queries, and the errors."""
    rows = [_COLUMNS, *map(_table_row, results["runs"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield "seconds from arrival to answer, in virtual time"
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(
            cell.ljust(width) if index in _TEXT_COLUMNS else cell.rjust(width) for index, (cell, width) in cells
        ).rstrip()
    yield ""
    for variant, latencies in results["idle_s"].items():
        yield f"alone, {variant}: " + ", ".join(f"{app} {seconds:.3f} s" for app, seconds in latencies.items())
    for error in dict.fromkeys(error for run in results["runs"] for error in run["errors"]):
        yield f"failed: {error}"


def _table_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a run in the table. `run`: its figures as JSON-ready data."""
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
    share, name = max((max(shares), name) for name, shares in utilisation.items())
    return f"{name} {share:.0%}"
