"""Orchestration as a share of latency, per application; and what it costs as queries, replicas and graphs grow.

Shares: the five applications as workflows, one query at a time, in this process and on a shared pool on Ray: by the
clock, on engines that sleep as RTX 3090s take, and on engines a thousand times as fast, where what is left is what is
done one after the other around them (`benchmarks.apps.shares`). Costs: planning by the primitives of a graph, a
decision of an engine's scheduler by queries that wait and by replicas, all of it by queries at once.

    python -m benchmarks.overheads --json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.apps import shares
from benchmarks.apps.studied import Ground
from benchmarks.common import arguments, environment, print_table, report, summary
from benchmarks.overhead import SIZE, milliseconds
from benchmarks.rag.apps import fake_pool
from benchmarks.ray_cluster import shared_pool
from benchmarks.ray_overhead import executed
from examples.apps import workflows
from teola_plugin import EnginePool
from teola_plugin.engines.profiles import noop
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind, build_pgraph
from teola_plugin.observe.progress import progress
from teola_plugin.passes import DEFAULT_PASSES, PassContext, PassPipeline
from teola_plugin.runtime.conformance import chain
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_queue import Enqueue, PrefillEnded, QueuedRequest, RequestsEnded

EXPANSIONS = (1, 4, 16, 64)
"""Further questions of advanced RAG: graphs of tens to hundreds of primitives."""
AT_ONCE, WAITING, REPLICAS = (1, 4, 16, 64, 256), (1, 10, 100, 1000), (1, 4, 16, 64)
SLOTS = 8
"""Of each replica, while decisions are timed."""


def planning(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds that all passes take on an advanced RAG with so many expansions, and to find a kept plan."""
    found = []
    with EnginePool.local(Ground().made()) as pool:
        pipeline, context = PassPipeline(DEFAULT_PASSES), PassContext(pool.profiles)
        workflow = workflows.WORKFLOWS["advanced_rag"]("proxy")
        for count in EXPANSIONS:
            template = workflow.lower(workflow.config({"queries": {"n": count}})).traced.template
            plan = pool.plan(template)
            found.append(
                {
                    "expansions": count,
                    "primitives": len(tuple(plan.graph)),
                    "plan_ms": summary(milliseconds(lambda: pipeline.run(build_pgraph(template), context), repeats)),  # noqa: B023 - at once
                    "kept_ms": summary(milliseconds(lambda: pool.plan(template), repeats)),  # noqa: B023 - at once
                }
            )
    return found


def decision(waiting: int, replicas: int, requests: int) -> float:
    """Microseconds of processor time for a request's way through an engine's scheduler (queued, batched, first token,
    end) while all slots are taken and so many queries wait."""
    profile = EngineProfile(
        {PrimitiveKind.PREFILLING: Curve.linear(0.0, 0.00035)},
        batching=Batching.CONTINUOUS,
        max_batch=10**9,
        max_requests=SLOTS,
    )
    scheduler = EngineScheduler(profile, tuple(f"i{n}" for n in range(replicas)))
    running: list[str] = []
    numbers = iter(range(10**9))

    def ask(at: float) -> None:
        name = f"r{next(numbers)}"
        one = Enqueue(at, name, name, PrimitiveKind.PREFILLING, (QueuedRequest(name, 500),), depth=len(name) % 4)
        take(scheduler.handle(one))

    def take(orders: list[Any]) -> None:
        running.extend(name for order in orders for name in getattr(order, "requests", ()))

    for _ in range(waiting + SLOTS * replicas):
        ask(0.0)
    begun = time.process_time()
    for number in range(requests):
        at, name = 1 + number / 1000, running.pop(0)
        take(scheduler.handle(PrefillEnded(at, name)))
        take(scheduler.handle(RequestsEnded(at, (name,))))
        ask(at)
    return 1e6 * (time.process_time() - begun) / requests


def decisions(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [(waiting, 4) for waiting in WAITING] + [(100, replicas) for replicas in REPLICAS]
    return [
        {
            "waiting": waiting,
            "replicas": replicas,
            "us": summary([decision(waiting, replicas, options.requests) for _ in range(5)], digits=2),
        }
        for waiting, replicas in dict.fromkeys(cases)
    ]


def at_once(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds a primitive of chains of 20, so many queries at once, on engines without latency."""
    graph, found = chain(SIZE, "embedder"), []
    with fake_pool(noop()).pool as pool:
        executed(pool, graph)
        for queries in AT_ONCE:
            times = [1000 * executed(pool, graph, queries) / (SIZE * queries) for _ in range(repeats)]
            found.append({"queries": queries, "ms": summary(times)})
    return found


def orchestration(options: argparse.Namespace) -> dict[str, Any]:
    """By scale, ground and application."""
    chosen = [app for app in workflows.WORKFLOWS if options.only in app]
    found = {}
    with progress(len(shares.SCALES) * (1 if options.here else 2) * len(chosen), "applications") as bar:
        for name, scale in shares.SCALES.items():
            with ExitStack() as pools:
                grounds = {"process": pools.enter_context(EnginePool.local(Ground(scale=scale).made()))}
                if not options.here:
                    grounds["ray"] = pools.enter_context(shared_pool(shares.engines(scale)))
                queries = options.queries * (1 if scale == 1 else 3)
                found[name] = shares.of_all(grounds, scale, queries + 1, chosen, bar.advance)
    return found


def timers(times: int = 100) -> dict[str, Any]:
    """Milliseconds by which a sleep of 50 ms of a bare event loop ends late on this machine, now."""

    async def measured() -> list[float]:
        found = []
        for _ in range(times):
            begun = time.perf_counter()
            await asyncio.sleep(0.05)
            found.append(1000 * (time.perf_counter() - begun) - 50)
        return found

    return summary(asyncio.run(measured()), digits=3)


def main(options: argparse.Namespace) -> dict[str, Any]:
    found = orchestration(options)
    worst = {
        f"{scale}, {ground}": max(app["share"]["all"]["median"] for app in apps.values())
        for scale, grounds in found.items()
        for ground, apps in grounds.items()
    }
    return {
        "benchmark": "overheads",
        "worst_share": worst,
        "worst_processor_share": max(app["share"]["processor"]["median"] for app in found["path"]["process"].values()),
        "shares": found,
        "sleep_late_ms": timers(),
        "planning": planning(options.repeats),
        "decisions": decisions(options),
        "at_once": at_once(options.repeats),
        "queries": options.queries,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "app": app,
            "on": f"{ground}, {scale}",
            "seconds": one["latency_s"]["median"],
            **{f"{name}, ms": found["median"] for name, found in one["ms"].items()},
            "share": f"{one['share']['all']['median']:.2%}",
        }
        for scale, grounds in result["shares"].items()
        for ground, apps in grounds.items()
        for app, one in apps.items()
    ]


def cost_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    plans = [
        {"what": f"planning {one['primitives']} primitives", "ms": one["plan_ms"]["median"]}
        for one in result["planning"]
    ]
    decided = [
        {"what": f"a request, {one['waiting']} wait, {one['replicas']} replicas", "ms": one["us"]["median"] / 1000}
        for one in result["decisions"]
    ]
    return [
        *plans,
        *decided,
        *({"what": f"a primitive, {q['queries']} queries", "ms": q["ms"]["median"]} for q in result["at_once"]),
    ]


if __name__ == "__main__":
    given = arguments(
        "Orchestration as a share of latency, and what it costs.",
        lambda parser: (
            parser.add_argument("--queries", type=int, default=8, help="of each application on each ground"),
            parser.add_argument("--repeats", type=int, default=15, help="timed runs of each cost"),
            parser.add_argument("--requests", type=int, default=3000, help="in a timed run of decisions"),
            parser.add_argument("--only", default="", help="only applications whose name contains this"),
            parser.add_argument("--here", action="store_true", help="in this process alone, without Ray"),
        ),
    )
    outcome = main(given)
    report(outcome, given, "orchestration, one query at a time", rows(outcome))
    print_table("what it costs", cost_rows(outcome))
