"""`teola simulate`: simulates the user's apps under load, on a cluster that need not exist.

Each app is made on a simulated pool by a function of the user. There is one run for each rate, each variant and each
seed, in several processes if asked for. A variant is the original or the accelerated app.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.app_frameworks import entries_of
from teola_plugin.adapters.comparison import Entries
from teola_plugin.adapters.named_objects import object_named
from teola_plugin.cli.arguments import count
from teola_plugin.cli.compare.options import check_inputs, read_inputs
from teola_plugin.errors import RegistrationError
from teola_plugin.observe import progress
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.simulation import (
    Arrival,
    Ask,
    Cluster,
    arriving,
    bursty,
    figures,
    machine_named,
    mark,
    poisson,
    read_trace,
    run_alone,
    simulate,
)
from teola_plugin.simulation.arrivals import made_up

if TYPE_CHECKING:
    from teola_plugin.observe.progress import Bar
    from teola_plugin.pool import EnginePool


SOUND, FAILING = 0, 1
"""Exit statuses; 1 where a query failed."""


def add_simulate(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "simulate",
        help="your apps under load on a pool that need not exist, in virtual time",
        description="Runs apps on the engines that a pool's YAML names, as fast as a machine's profile says, in "
        "virtual time: the real schedulers, no models, no GPUs. Exit status: 1 if queries failed, 2 for bad input.",
    )
    parser.add_argument("pool", metavar="POOL.yaml", help="the pool's YAML file: engines, instances, policies")
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
        help="what an app is asked with, one JSON value a line, in turn (default: questions are made up)",
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
    from teola_plugin.cli.simulate.command import ARRIVAL_PROCESSES, FAST, PLAIN, run_plan

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
    from teola_plugin.cli.simulate.command import ARRIVAL_PROCESSES, SimulationPlan, parse_apps
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


PLAIN, FAST = "plain", "accelerated"
"""The variants: the app as it is, and by `accelerate`."""
QUESTION_TOKENS = 24
"""The length of a generated question."""
ARRIVAL_PROCESSES = ("poisson", "bursty")
IDLE_QUERIES = 3
"""The queries of each app that run alone, to measure its latency without load."""
_HINT = "write a function that takes the pool and returns the app, made of ChatTeola(pool=pool) and the like"


# ------------------------------------------------------------ apps


@dataclass(frozen=True, slots=True)
class SimulatedApp:
    """An app of the user: its name, and the function that makes it from a pool, as `module:function`."""

    name: str
    factory: str
    inputs: str = ""
    """A file with one JSON value a line; empty for generated questions."""

    @staticmethod
    def parse(text: str, inputs: Mapping[str, str]) -> SimulatedApp:
        """Parse `[NAME=]module:function`. `inputs` are files by app name; that of `""` is for all other apps."""
        name, equals, factory = text.rpartition("=")
        name = name if equals else factory.partition(":")[2] or factory
        return SimulatedApp(name, factory, inputs.get(name, inputs.get("", "")))

    async def make(self, variant: str, pool: EnginePool) -> Ask:
        """Make the app on this pool, and return the function that sends it a query. Raise `RegistrationError`."""
        obj, arguments = await self._call_factory(pool)
        entries = entries_of(obj, self.factory)
        if variant == FAST:
            from teola_plugin import accelerate

            obj = accelerate(obj, **{"pool": pool, "app": self.name, **arguments})
        return partial(entries.acall, obj)

    async def _call_factory(self, pool: EnginePool) -> tuple[Any, dict[str, Any]]:
        """Return the app on this pool, and the arguments of `accelerate` that come with it."""
        factory = object_named(self.factory)
        if not callable(factory) or not _takes_one_argument(factory):
            raise RegistrationError(f"{self.factory} is no function of a pool.", hint=_HINT)
        try:
            result = factory(pool)
            if inspect.iscoroutine(result):
                result = await result
        except Exception as error:
            raise RegistrationError(
                f"{self.factory} raised {type(error).__qualname__}: {error}", hint=f"it is called with a pool: {_HINT}"
            ) from error
        obj, arguments = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if getattr(type(obj), "__teola_accelerated__", False):
            raise RegistrationError(f"{self.factory} gives an accelerated object.", hint="give the plain one: both run")
        return obj, dict(arguments)

    async def values(self, pool: EnginePool, queries: int, seed: int) -> list[Any]:
        """Return the inputs of its queries, from the file or generated. Raise RegistrationError for an invalid file."""
        obj, _ = await self._call_factory(pool)
        entries = entries_of(obj, self.factory)
        if self.inputs:
            inputs = read_inputs(self.inputs)
            check_inputs(inputs, entries, self.inputs)
            return [entry.value for entry in inputs]
        sample = _input_template(obj, entries, self.name)
        return [made_up(sample, mark(number), QUESTION_TOKENS, seed) for number in range(queries)]


def _takes_one_argument(factory: Any) -> bool:
    try:
        inspect.signature(factory).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _input_template(obj: Any, entries: Entries, name: str) -> Any:
    """Return an input of the object with `{text}` in the place of the question.

    Raise `RegistrationError` if the object does not tell what its inputs are.
    """
    for template in _template_candidates(obj):
        if not entries.fault_in(template):
            return template
    raise RegistrationError(
        f"nobody knows what the app {name!r} is asked with.", hint="give --inputs FILE.jsonl, one JSON value a line"
    )


def _template_candidates(obj: Any) -> Iterator[Any]:
    """Yield inputs with `{text}` in the place of the question that fit the object's schema."""
    get_schema = getattr(obj, "get_input_jsonschema", None)
    if get_schema is None:
        yield "{text}"
        return
    schema = get_schema()
    properties = schema.get("properties", {})
    texts = [key for key, value in properties.items() if value.get("type", "string") == "string"]
    if "messages" in properties:
        yield {"messages": [{"role": "user", "content": "{text}"}]}
    elif schema.get("type") == "string":
        yield "{text}"
    elif texts and not set(schema.get("required", ())) - set(texts):
        yield dict.fromkeys(texts, "{text}")


def parse_apps(apps: Sequence[str], inputs: Sequence[str]) -> tuple[SimulatedApp, ...]:
    """Return the apps of the command line. Raise RegistrationError for invalid options."""
    files = {}
    for text in inputs:
        name, equals, path = text.partition("=")
        files[name if equals else ""] = path if equals else text
    parsed = tuple(SimulatedApp.parse(text, files) for text in apps)
    names = [app.name for app in parsed]
    if len(set(names)) < len(names):
        raise RegistrationError("two apps have one name.", hint="name them: --app first=module:function")
    for name in files:
        if name and name not in names:
            raise RegistrationError(
                f"--inputs names the app {name!r}, which is none.", hint=f"there is {', '.join(names)}"
            )
    return parsed


# ------------------------------------------------------------ runs


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """The description of a simulation, as data that can be sent to other processes."""

    pool: str
    apps: tuple[SimulatedApp, ...]
    arrivals: str
    queries: int
    machine: str = ""
    policy: str = ""
    output_tokens: int = 0
    popularity: float | None = None
    slo: float = 5.0

    def cluster(self) -> Cluster:
        machine = machine_named(self.machine) if self.machine else None
        cluster = Cluster.read(self.pool, machine, output_tokens=self.output_tokens)
        return cluster.under(self.policy) if self.policy else cluster

    def arrivals_at(self, rate: float, seed: int) -> list[Arrival]:
        """Return the arrivals, which are the same for every variant. Raise `ConfigError`, `RegistrationError`."""
        inputs = self._inputs(seed)
        if self.arrivals in ARRIVAL_PROCESSES:
            times = poisson(rate, seed) if self.arrivals == "poisson" else bursty(rate, seed)
            return arriving(times, inputs, self.queries, popularity=self.popularity, seed=seed)
        samples = {name: values[0] for name, values in inputs.items()}
        return read_trace(self.arrivals, list(inputs), samples, self.queries)

    def _inputs(self, seed: int) -> dict[str, list[Any]]:
        async def read_values() -> dict[str, list[Any]]:
            from teola_plugin.pool import EnginePool

            async with EnginePool.on_this_loop(self.cluster().make_engines()) as pool:
                return {app.name: await app.values(pool, self.queries, seed) for app in self.apps}

        return run_virtual(read_values(), inline=True)

    def job(
        self, variant: str, rate: float, seed: int, idle: Mapping[str, float], bar: Bar | None = None
    ) -> dict[str, Any]:
        """Run one simulation, and return its figures as JSON-ready data."""
        makes = {app.name: partial(app.make, variant) for app in self.apps}
        on_progress = (lambda: None) if bar is None else bar.advance
        run = simulate(self.cluster(), makes, self.arrivals_at(rate, seed), seed=seed, progressed=on_progress)
        errors = sorted({query.error for query in run.queries if query.error})
        run_figures = figures(run, idle, slo=self.slo)
        return {"rate": rate or None, "way": variant, "seed": seed, **run_figures, "errors": errors[:3]}

    def idle_latencies(self, variant: str) -> dict[str, float]:
        """Return, by app, the median latency of queries that run alone on the cluster, in seconds."""
        arrivals = self.arrivals_at(1.0, 0)
        latencies = {}
        for app in self.apps:
            app_arrivals = [arrival for arrival in arrivals if arrival.app == app.name][:IDLE_QUERIES]
            queries = run_alone(self.cluster(), {app.name: partial(app.make, variant)}, app_arrivals)
            times = sorted(query.seconds for query in queries)
            latencies[app.name] = times[len(times) // 2] if times else float("nan")
        return latencies


def run_plan(
    plan: SimulationPlan, rates: Sequence[float], variants: Sequence[str], seeds: Sequence[int], workers: int
) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """Return the idle latencies by variant and app, and the figures of all runs.

    The latency limits of all runs follow from the idle latencies of the original.
    """
    idle = {variant: plan.idle_latencies(variant) for variant in dict.fromkeys((PLAIN, *variants))}
    jobs = list(itertools.product(variants, rates, seeds))
    with progress(len(jobs) * plan.queries, "simulated queries") as bar:
        if workers == 1:
            return idle, [plan.job(*job, idle[PLAIN], bar) for job in jobs]
        return idle, list(_run_in_processes(plan, jobs, idle[PLAIN], workers, bar))


def _run_in_processes(
    plan: SimulationPlan, jobs: Sequence[tuple[str, float, int]], idle: Mapping[str, float], workers: int, bar: Bar
) -> Iterator[dict[str, Any]]:
    """Yield the figures of the jobs, in their order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context) as processes:
        futures = [processes.submit(plan.job, *job, idle) for job in jobs]
        for _ in as_completed(futures):
            bar.advance(plan.queries)
        for future in futures:
            yield future.result()
