"""What of a query's latency is orchestration: planning, scheduling, communication; here and on a shared pool.

A query is timed by the clock, on engines that sleep as RTX 3090s take, and once more in virtual time, where processors
take none. The difference, less the application's own splitting of its upload, is orchestration, with the lateness of
every timer in it. Of that, planning and scheduling are taken by processor time; what is left is communication: between
tasks, threads and processes, and whatever else.
`processor` is all processor time of this process but the fakes' and the splitting's: what orchestration takes at most,
whatever else the machine does. On engines that hardly sleep, all of it is in the answer's way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from statistics import median
from typing import Any

from langchain_text_splitters import RecursiveCharacterTextSplitter

from benchmarks.apps.studied import Ground, given, virtual_seconds
from benchmarks.common import summary
from examples.apps import workflows
from teola_plugin import EnginePool
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.engines.fake.base import BatchedFake
from teola_plugin.engines.fake.timeline import Timeline
from teola_plugin.scheduling import EngineScheduler, GraphScheduler

SCALES = {"clock": 1.0, "path": 0.001}
"""Latencies of an RTX 3090, and a thousandth of them: then the time of a query is what is done one after the other
around its engines, and not how late long sleeps end. Both are told as shares of the query's latency at scale 1."""
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "planning": ((EnginePool, "plan"),),
    "graphs": ((GraphScheduler, "handle"),),
    "engines": ((EngineScheduler, "handle"),),
    "fakes": ((BatchedFake, "_serve"), (BatchedFake, "_finish"), (FakeLLM, "_work"), (Timeline, "advance")),
    "splitting": ((RecursiveCharacterTextSplitter, "split_text"),),
}
"""What is timed. The last two are no orchestration: what fakes compute is in no real engine's client, and the
application itself splits its upload."""


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Processor seconds of each part in this process, while the block runs."""
    spent, inside = dict.fromkeys(PARTS, 0.0), set[tuple[str, int]]()

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def call(*args: Any, **named: Any) -> Any:
            here = name, threading.get_ident()
            if here in inside:  # within another one that is timed
                return work(*args, **named)
            inside.add(here)
            begun = time.thread_time()
            try:
                return work(*args, **named)
            finally:
                spent[name] += time.thread_time() - begun
                inside.discard(here)

        return call

    plain = [(name, owner, method, getattr(owner, method)) for name, all_ in PARTS.items() for owner, method in all_]
    for name, owner, method, work in plain:
        setattr(owner, method, timed(name, work))
    try:
        yield spent
    finally:
        for _, owner, method, work in plain:
            setattr(owner, method, work)


def engines(scale: float) -> dict[str, Any]:
    """As a pool's file has them."""
    return {
        name: {"factory": "benchmarks.apps.studied:engine", "replicas": len(found), "options": {"scale": scale}}
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


ELSEWHERE = ("engines", "fakes")
"""Parts that run beside the engines, wherever those are."""


def told(
    rows: list[dict[str, float]], elsewhere: Mapping[str, float] | None = None, *, asleep: bool = True
) -> dict[str, Any]:
    """Milliseconds, and shares of the latency at scale 1. `elsewhere`: seconds of the parts that run beside the
    engines, where those are not in this process: as they take here. `asleep`: fakes compute while they are to sleep
    anyway; where they hardly sleep, it is taken off."""
    rows = [{**one, **(elsewhere or {})} for one in rows]
    own = [one["splitting"] + (0.0 if asleep else one["fakes"]) for one in rows]
    over = [one["seconds"] - one["virtual"] - less for one, less in zip(rows, own, strict=True)]
    planning, scheduling = [one["planning"] for one in rows], [one["graphs"] + one["engines"] for one in rows]
    parts = {
        "planning": planning,
        "scheduling": scheduling,
        "communication": [a - b - c for a, b, c in zip(over, planning, scheduling, strict=True)],
        "all": over,
        "processor": [one["processor"] - one["splitting"] - one["fakes"] for one in rows],
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
        elsewhere: dict[str, float] = {}
        for name, pool in pools.items():
            rows = of_app(app, pool, queries, scale)
            found[name][app] = told(rows, elsewhere, asleep=scale == 1)
            elsewhere = elsewhere or {part: median(one[part] for one in rows) for part in ELSEWHERE}
            done()
    return found
