"""The apps and the runs of `teola simulate`: each app is made on a simulated pool by a function of the user.

There is one run for each rate, each variant and each seed, in several processes if asked for. A variant is the original
or the accelerated app.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.app_frameworks import entries_of
from teola_plugin.adapters.comparison import Entries
from teola_plugin.adapters.named_objects import object_named
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
        """Parse `[NAME=]module:function`. `inputs` are files by app name; that of `""` is for all other apps.

        Without a NAME, the app has the name of the function. Its file of inputs is an empty text if none was given.
        """
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
    """Return True if the user's function can be called with a pool and nothing else."""
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
        """Return the inputs of each app, by its name. The apps are made for that on a pool in virtual time."""

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
