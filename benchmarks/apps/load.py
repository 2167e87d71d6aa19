"""The five applications under load, in virtual time: every scheme meets the same queries at the same times.

What is run is the flow of each query (`teola_plugin.simulation.record`), recorded from the objects themselves, on the
real schedulers; `tests/benchmarks/test_replayed_apps.py` compares that with the objects. One run of one application
under one scheme at one rate with one seed is a cell; each is written to a file of its own as soon as it is done, and
is not run again as long as that file is there.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.apps.flows import INPUTS, cluster_of, flow, flow_arrivals
from benchmarks.apps.schemes import APPS, SCHEMES, Scheme
from teola_plugin.observe.progress import progress
from teola_plugin.simulation import Flow, Run, poisson, replay

SIMULATED = tuple(scheme for scheme in SCHEMES if scheme.how != "haystack")
"""Haystack's own executor is not known to keep to virtual time."""
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
RATES: Mapping[str, tuple[float, ...]] = {
    "search_engine": (2, 6, 12, 18, 24, 30),
    "agent": (1, 4, 8, 10, 12, 16),
    "naive_rag": (0.5, 1, 2, 3, 4, 5),
    "advanced_rag": (0.5, 1, 2, 3, 4, 5),
    "contextual_retrieval": (0.1, 0.25, 0.5, 0.75, 1, 1.25),
}
"""Queries a second: from mostly one at a time to where the strongest baseline takes about half as long again."""
ALONE = 0.0
"""Instead of a rate: each query comes when the one before is long over."""
APART = 100.0
"""Seconds between two such queries."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    app: str
    scheme: str
    rate: float
    seed: int
    queries: int

    @property
    def file(self) -> str:
        return f"{self.app}.{self.scheme}.{self.rate:g}.{self.seed}.{self.queries}.json"

    def times(self) -> list[float]:
        """When the queries come: the same for every scheme."""
        if self.rate == ALONE:
            return [APART * number for number in range(self.queries)]
        return list(itertools.islice(poisson(self.rate, self.seed), self.queries))


def cells(seeds: int, queries: int, only: str = "") -> list[Cell]:
    """All runs: each application under each scheme, with each input alone and at each rate with each seed. A seed is
    done with before the next, so that what is interrupted has all schemes and rates."""
    pairs = [(app, scheme.name) for app in APPS for scheme in SIMULATED if only in app and scheme.takes(app)]
    return [Cell(app, name, ALONE, 0, 2 * INPUTS) for app, name in pairs] + [
        Cell(app, name, rate, seed, queries)
        for seed in range(1, seeds + 1)
        for app, name in pairs
        for rate in RATES[app]
    ]


def run(wanted: Sequence[Cell], folder: Path, workers: int) -> dict[Cell, dict[str, Any]]:
    """What each cell gave; those that are not in the folder yet are run, so many at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [cell for cell in wanted if not (folder / cell.file).exists()]
    kinds = sorted({(cell.app, _recorded(BY_NAME[cell.scheme]).name) for cell in left})
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool, progress(len(kinds) + len(left), "runs, in processes") as bar:
        for job in as_completed([pool.submit(_record, *kind, folder) for kind in kinds]):
            job.result()
            bar.advance()
        for job in as_completed([pool.submit(_run, cell, folder) for cell in left]):
            job.result()
            bar.advance()
    return {cell: json.loads((folder / cell.file).read_text()) for cell in wanted}


def _recorded(scheme: Scheme) -> Scheme:
    """Whose flows it has: of schemes that differ only in the order in which engines serve, the first."""
    return next(one for one in SCHEMES if (one.how, one.caching) == (scheme.how, scheme.caching))


def _flow_file(app: str, name: str, folder: Path) -> Path:
    return folder / f"{app}.{name}.{INPUTS}.flows"


def _record(app: str, name: str, folder: Path) -> None:
    """In one process: names of blocks of prompts mean nothing in another."""
    file = _flow_file(app, name, folder)
    if not file.exists():
        _write(file, pickle.dumps([flow(app, BY_NAME[name], number) for number in range(INPUTS)]))


def _run(cell: Cell, folder: Path) -> None:
    scheme = BY_NAME[cell.scheme]
    flows: list[Flow] = pickle.loads(_flow_file(cell.app, _recorded(scheme).name, folder).read_bytes())
    found = replay(cluster_of(scheme), flow_arrivals(cell.app, flows, cell.times()))
    _write(folder / cell.file, json.dumps(asdict(cell) | measured(found, cell.queries)).encode())


def measured(run: Run, queries: int) -> dict[str, Any]:
    """Latencies in seconds, by query; what it took per query; how full batches were and what caches held."""
    busy = sum(sum(each) for each in run.busy.values())
    return {
        "latencies": [round(one.seconds, 5) for one in run.queries],
        "wasted_tokens": sum(one.wasted_tokens for one in run.queries) / queries,
        "engine_seconds": busy / queries,
        "batch_sizes": {name: round(size, 3) for name, size in run.batch_sizes.items()},
        "cached": {name: round(share, 4) for name, share in run.cached.items()},
    }


def _write(file: Path, content: bytes) -> None:
    """Whole, or not at all."""
    part = file.with_suffix(file.suffix + ".part")
    part.write_bytes(content)
    part.replace(file)
