"""Where requests go when an LLM has several replicas: what a decision costs, and what it gains in virtual time.

Decisions are timed on 64 replicas that hold 5,000 prefixes, with prompts of 8,192 tokens. The gain is simulated
(`placement.machine` says on which machine), on Preble's two workloads without data sets, with others' routers beside.

    python -m benchmarks.routing --json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import arguments, environment, print_table, report, summary
from benchmarks.placement.baselines import LeastLoaded, RayServe, RoundRobin, VllmRouter
from benchmarks.placement.machine import CACHE_TOKENS, profile
from benchmarks.placement.workloads import WORKLOADS, Workload
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.observe.progress import progress
from teola_plugin.scheduling import E2, E2Options, EngineScheduler, PrefixBlocks, RequestPlacement, block_hashes
from teola_plugin.scheduling.engine_queue import Enqueue, PrefillEnded, QueuedRequest, RequestsEnded
from teola_plugin.scheduling.placement import PlacementRequest
from teola_plugin.simulation import Cluster, Run, SimulatedEngine, replay

REPLICAS, PREFIXES, TOKENS, SHARED = 64, 5000, 8192, 7168
RUNNING = 1000
"""Requests that run at any time while decisions are timed."""
NO_LIMIT = profile(10**9, 10**9)
LIMITED = profile(2048, 256)
"""vLLM's defaults: prompt tokens in a step, requests at once."""
MIXES = {"shared": 1.0, "mixed": 0.5, "fresh": 0.0}
"""Share of requests that have one of the known prefixes; the others have nothing in common with any."""

# ---------------------------------------------------------------- what a decision costs


def prompts(
    known: Sequence[tuple[int, ...]], shared: float, count: int, rng: random.Random
) -> Iterator[tuple[int, ...]]:
    """Block hashes of so many prompts."""
    for _ in range(count):
        prefix: PrefixBlocks = rng.choice(known) if rng.random() < shared else ()
        yield prefix + tuple(rng.getrandbits(64) for _ in range(TOKENS // 16 - len(prefix)))


def decisions(shared: float, count: int, seed: int) -> dict[str, float]:
    """Decisions a second, by the wall's clock and by the processor's: choose, send, first token, end."""
    rng = random.Random(seed)
    placement = E2(NO_LIMIT, E2Options(capacity=65_536))
    known = warm(placement, rng)
    asked = [PlacementRequest(f"r{i}", TOKENS, blocks) for i, blocks in enumerate(prompts(known, shared, count, rng))]
    running: deque[str] = deque()
    wall, cpu = time.perf_counter(), time.process_time()
    for number, one in enumerate(asked):
        at = 1 + number / 1000
        placement.begin_round(at)
        placed = placement.choose_replica(one, anywhere)
        assert placed is not None
        placement.record_sent(one, placed)
        running.append(one.id)
        if len(running) > RUNNING:
            placement.record_prefilled(at, running[0])
            placement.record_ended(at, (running.popleft(),))
    return {"wall": count / (time.perf_counter() - wall), "cpu": count / (time.process_time() - cpu)}


def warm(placement: E2, rng: random.Random) -> list[PrefixBlocks]:
    """5,000 prefixes on 64 replicas."""
    for replica in range(REPLICAS):
        placement.add_replica(f"i{replica}")
    placement.begin_round(0.0)
    known = [tuple(rng.getrandbits(64) for _ in range(SHARED // 16)) for _ in range(PREFIXES)]
    for number, blocks in enumerate(known):
        one = PlacementRequest(f"p{number}", SHARED, blocks)
        placed = placement.choose_replica(one, anywhere)
        assert placed is not None
        placement.record_sent(one, placed)
        placement.record_ended(0.0, (one.id,))
    live = sum(placement.index.match(blocks).depth == len(blocks) for blocks in known)
    assert live == PREFIXES
    return known


def anywhere(replica: str, units: int) -> bool:
    return True


def scheduled(shared: float, count: int, seed: int) -> dict[str, float]:
    """Requests a second through the whole scheduler: queued, batched, first token, end."""
    rng = random.Random(seed)
    placement = E2(NO_LIMIT, E2Options(capacity=65_536))
    known = warm(placement, rng)
    scheduler = EngineScheduler(NO_LIMIT, tuple(f"i{i}" for i in range(REPLICAS)), placement=placement)
    requests = [QueuedRequest(f"r{i}", TOKENS, blocks) for i, blocks in enumerate(prompts(known, shared, count, rng))]
    running: deque[str] = deque()
    wall, cpu = time.perf_counter(), time.process_time()
    for number, request in enumerate(requests):
        at = 1 + number / 1000
        scheduler.handle(Enqueue(at, request.id, request.id, PrimitiveKind.PREFILLING, (request,)))
        running.append(request.id)
        if len(running) > RUNNING:
            scheduler.handle(PrefillEnded(at, running[0]))
            scheduler.handle(RequestsEnded(at, (running.popleft(),)))
    return {"wall": count / (time.perf_counter() - wall), "cpu": count / (time.process_time() - cpu)}


def hashing(repeats: int) -> dict[str, Any]:
    """Milliseconds to name the blocks of one prompt: what a sender pays."""
    ids, text = list(range(TOKENS)), "lorem ipsum " * (4 * TOKENS // 12)
    given: dict[str, str | list[int]] = {"token_ids_ms": ids, "text_ms": text}
    return {name: timed(lambda: block_hashes(prompt), repeats) for name, prompt in given.items()}  # noqa: B023 - at once


def timed(work: Callable[[], object], repeats: int) -> dict[str, Any]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - start))
    return summary(found)


def costs(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"placement": {}, "scheduler": {}, "hashing": hashing(20 * options.repeats)}
    found["environment"] = environment()
    ways = {"placement": decisions, "scheduler": scheduled}
    with progress(len(ways) * len(MIXES) * options.repeats, "decisions") as bar:
        for way, measure in ways.items():
            for mix, shared in MIXES.items():
                runs = []
                for seed in range(options.repeats):
                    runs.append(measure(shared, options.requests, seed))
                    bar.advance()
                found[way][mix] = {clock: summary([run[clock] for run in runs], digits=0) for clock in ("wall", "cpu")}
    return found


# ---------------------------------------------------------------- what it gains


@dataclass(frozen=True)
class Way:
    """A way to route. Others bind a request when it comes; ours, too, where there is no limit on what may run."""

    name: str
    make: Callable[[EngineProfile], RequestPlacement]
    profile: EngineProfile = NO_LIMIT

    def cluster(self, replicas: int) -> Cluster:
        return Cluster({"llm": SimulatedEngine("llm", self.profile, replicas, placement=self.make)})


def e2(known: EngineProfile) -> E2:
    return E2(known, E2Options(capacity=CACHE_TOKENS // 16))


WAYS = (
    Way("round robin", lambda known: RoundRobin()),
    Way("least loaded", lambda known: LeastLoaded()),
    Way("vLLM router", lambda known: VllmRouter()),
    Way("Ray Serve", lambda known: RayServe()),
    Way("E2 on arrival", e2),
    Way("E2", e2, LIMITED),
)


def case(workload: Workload, progressed: Callable[[], object], seed: int = 0) -> dict[str, Any]:
    """Latencies in seconds, from arrival to the last token, by each way; and by how many times E2's is shorter."""
    ways = {}
    for way in WAYS:
        ways[way.name] = latencies(replay(way.cluster(workload.replicas), workload.arrivals(seed), progressed))
    ours = ways["E2"]
    return {
        "workload": workload.name,
        "replicas": workload.replicas,
        "rate": workload.rate,
        "requests": workload.requests,
        "ways": ways,
        "mean_ratio": {name: round(found["mean_s"] / ours["mean_s"], 2) for name, found in ways.items()},
        "p99_ratio": {name: round(found["p99_s"] / ours["p99_s"], 2) for name, found in ways.items()},
    }


def latencies(run: Run) -> dict[str, Any]:
    took = sorted(one.seconds for one in run.queries)
    return {
        "mean_s": round(fmean(took), 3),
        "p50_s": round(took[len(took) // 2], 3),
        "p99_s": round(took[int(0.99 * len(took))], 3),
        "first_token_mean_s": round(fmean((one.first_token or one.ended_at) - one.at for one in run.queries), 3),
        "cached": round(run.cached["llm"], 3),
    }


def best(cases: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How often each way has the least mean latency (ties within 1 % count for all)."""
    found: Counter[str] = Counter({way.name: 0 for way in WAYS})
    for one in cases:
        least = min(way["mean_s"] for way in one["ways"].values())
        found.update(name for name, way in one["ways"].items() if way["mean_s"] <= 1.01 * least)
    return dict(found)


def main(options: argparse.Namespace) -> dict[str, Any]:
    cost = json.loads(options.costs.read_text())["costs"] if options.costs else costs(options)
    chosen = [workload for workload in WORKLOADS if options.only in workload.name]
    with progress(sum(workload.requests for workload in chosen) * len(WAYS), "simulated requests") as bar:
        cases = [case(workload, bar.advance, options.seed) for workload in chosen]
    return {
        "benchmark": "routing",
        "decisions_per_s": min(mix["wall"]["median"] for mix in cost["placement"].values()),
        "decisions_per_cpu_s": min(mix["cpu"]["median"] for mix in cost["placement"].values()),
        "scheduled_per_s": min(mix["wall"]["median"] for mix in cost["scheduler"].values()),
        "hash_ms": cost["hashing"]["token_ids_ms"]["median"],
        "hashes_per_s": round(1000 * (TOKENS // 16) / cost["hashing"]["token_ids_ms"]["median"]),
        "best": best(cases),
        "costs": cost,
        "cases": cases,
        "repeats": options.repeats,
        "seed": options.seed,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean and 99th percentile by each way."""
    return [
        {"workload": f"{one['workload']}, {one['rate']:g}/s on {one['replicas']}"}
        | {name: f"{way['mean_s']:.2f} {way['p99_s']:.1f}" for name, way in one["ways"].items()}
        for one in result["cases"]
    ]


def cost_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "a second": f"{way}, {mix}",
            "by the clock": str(found["wall"]["median"]),
            "95 %": str(found["wall"]["interval"]),
            "of processor time": str(found["cpu"]["median"]),
        }
        for way in ("placement", "scheduler")
        for mix, found in result["costs"][way].items()
    ]


if __name__ == "__main__":
    given = arguments(
        "Routing to several replicas: what a decision costs and gains.",
        lambda parser: (
            parser.add_argument("--repeats", type=int, default=5, help="timed runs of each mix of requests"),
            parser.add_argument("--requests", type=int, default=6000, help="requests in a timed run"),
            parser.add_argument("--seed", type=int, default=0, help="of the simulated workloads"),
            parser.add_argument("--costs", type=Path, help="an earlier result, to take what decisions cost from"),
            parser.add_argument("--only", default="", help="only workloads whose name contains this"),
        ),
    )
    outcome = main(given)
    report(outcome, given, "mean and 99th percentile of latency, s, in virtual time", rows(outcome))
    print_table("decisions, 64 replicas, 5,000 prefixes, 8,192 tokens", cost_rows(outcome))
