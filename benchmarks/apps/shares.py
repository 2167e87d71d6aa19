"""What of a query's latency is orchestration: planning, scheduling, communication; here and on a shared pool.

A query is timed by the clock, on engines that sleep as RTX 3090s take, and once more in virtual time, where processors
take none. The difference is orchestration, with the lateness of every timer in it. Of that, planning and scheduling
are taken by processor time; what is left is communication: between tasks, threads and processes, and whatever else.
`processor` is all processor time of this process, also what stands in no answer's way, and what the fakes compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from statistics import median
from typing import Any

from benchmarks.apps.studied import Ground, given, virtual_seconds
from benchmarks.common import summary
from examples.apps import workflows
from teola_plugin import EnginePool
from teola_plugin.scheduling import EngineScheduler, GraphScheduler

SCALES = {"clock": 1.0, "path": 0.001}
"""Latencies of an RTX 3090, and a thousandth of them: then the time of a query is what is done one after the other
around its engines, and not how late long sleeps end. Both are told as shares of the query's latency at scale 1."""
PARTS = {"planning": (EnginePool, "plan"), "graphs": (GraphScheduler, "handle"), "engines": (EngineScheduler, "handle")}


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Processor seconds of each part in this process, while the block runs."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def call(*args: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return work(*args, **named)
            finally:
                spent[name] += time.thread_time() - begun

        return call

    plain = {name: getattr(owner, method) for name, (owner, method) in PARTS.items()}
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, timed(name, plain[name]))
    try:
        yield spent
    finally:
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, plain[name])


def engines(scale: float) -> dict[str, Any]:
    """As a pool's file has them."""
    return {
        name: {"factory": "benchmarks.apps.studied:engine", "instances": len(found), "options": {"scale": scale}}
        for name, found in Ground().made().items()
    }


def of_app(app: str, pool: EnginePool, queries: int, scale: float = 1.0) -> list[dict[str, float]]:
    """Seconds of each query, one after the other: the clock's, virtual ones, and of each part."""
    made = workflows.WORKFLOWS[app]("proxy").deploy(pool, name=f"{app}, timed")
    pool.reset()
    found = []
    alike = zip(virtual_seconds(app, queries, scale), virtual_seconds(app, queries), strict=True)
    for number, (virtual, whole) in enumerate(alike):
        with counted() as spent:
            begun, processor = time.perf_counter(), time.process_time()
            made.run(given(app, number))
            seconds, processor = time.perf_counter() - begun, time.process_time() - processor
        found.append({"seconds": seconds, "virtual": virtual, "whole": whole, "processor": processor, **spent})
    return found[1:]  # the first one plans


def told(rows: list[dict[str, float]], schedulers: float | None = None) -> dict[str, Any]:
    """Milliseconds, and shares of the latency at scale 1. `schedulers`: seconds of the engines' schedulers, where they
    run elsewhere: as they take here."""
    scheduling = [one["graphs"] + (one["engines"] if schedulers is None else schedulers) for one in rows]
    over = [one["seconds"] - one["virtual"] for one in rows]
    parts = {
        "planning": [one["planning"] for one in rows],
        "scheduling": scheduling,
        "communication": [a - one["planning"] - b for a, one, b in zip(over, rows, scheduling, strict=True)],
        "all": over,
        "processor": [one["processor"] for one in rows],
    }
    latencies = [one["whole"] + more for one, more in zip(rows, over, strict=True)]
    return {
        "latency_s": summary(latencies),
        "virtual_s": round(median(one["whole"] for one in rows), 4),
        "ms": {name: summary([1000 * one for one in found], digits=3) for name, found in parts.items()},
        "share": {
            name: summary([one / whole for one, whole in zip(found, latencies, strict=True)])
            for name, found in parts.items()
        },
    }


def of_all(
    pools: Mapping[str, EnginePool], scale: float, queries: int, apps: list[str], done: Callable[[], object]
) -> dict[str, Any]:
    """By pool and app; pools take turns. The first pool is in this process."""
    found: dict[str, Any] = {name: {} for name in pools}
    for app in apps:
        schedulers = None
        for name, pool in pools.items():
            rows = of_app(app, pool, queries, scale)
            found[name][app] = told(rows, schedulers)
            schedulers = median(one["engines"] for one in rows) if schedulers is None else schedulers
            done()
    return found
