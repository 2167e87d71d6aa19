"""A server at ten times its capacity: what is taken meets its goal, the rest is told at once, nothing is lost.

python -m benchmarks.server_load --json

Real HTTP over loopback, the server in a process of its own on an engine of a profile (it sleeps as long as a model
would work). First the capacity: as many queries at a time as keep the engine busy. Then Poisson arrivals at `--times`
the capacity, each with a goal; a query that is refused (429) is not asked again. `lost` are queries that got neither an
answer nor a refusal; `within_goal` is the share of answers whose whole way, as its client measures it, took no longer
than the goal. Then, at half the capacity and without a goal, `added`: what an answer takes longer over HTTP than the
same call in process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import arguments, environment, report
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Message, Prompt, Sampling

TOKENS, PER_TOKEN, SLOTS = 20, 0.04, 8
"""Of an answer; seconds of one; answers that the engine writes at a time."""
GOAL = 4.0
ACCEPTED, WITHIN = "teola_queries_accepted_total", "teola_queries_within_goal_total"


def engine(name: str = "llm") -> FakeLLM:
    """An LLM of this profile; the server makes it by this name."""
    curves = {PrimitiveKind.PREFILLING: Curve.linear(0.002, 0.0), PrimitiveKind.DECODING: Curve.linear(0.0, PER_TOKEN)}
    profile = EngineProfile(curves, batching=Batching.CONTINUOUS, max_batch=1 << 16, max_requests=SLOTS)
    return FakeLLM(name, profile)


@dataclass(frozen=True)
class Outcome:
    status: int
    """0 for a connection that broke."""
    seconds: float
    late: float = 0.0
    """Seconds by which the client itself was late to ask."""


@contextmanager
def server(goal: float) -> Iterator[tuple[str, int]]:
    """Address and process id."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "engines": {"llm": {"factory": "benchmarks.server_load:engine"}},
            "server": {"port": 0, "store": "memory", "log": "off", "max_requests": 4096},
        }
        (Path(folder) / "pool.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", f"{folder}/pool.yaml"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split()[-1], process.pid
            finally:
                process.terminate()
                process.communicate(timeout=30)


def body(number: int) -> dict[str, Any]:
    message = {"role": "user", "content": f"query {number}"}
    return {"model": "llm", "messages": [message], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


async def over_http(client: httpx.AsyncClient, number: int, goal: float | None) -> int:
    headers = {} if goal is None else {"X-Teola-Goal": f"{goal:g}"}
    return (await client.post("/v1/chat/completions", json=body(number), headers=headers)).status_code


async def timed(work: Awaitable[int], late: float = 0.0) -> Outcome:
    begun = time.perf_counter()
    try:
        status = await work
    except httpx.TransportError:
        status = 0
    return Outcome(status, time.perf_counter() - begun, late)


async def capacity(ask: Callable[[int], Awaitable[int]], queries: int) -> float:
    """Answers per second with twice as many at a time as there are slots."""
    numbers = iter(range(queries))
    begun = time.perf_counter()

    async def one_after_the_other() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(one_after_the_other() for _ in range(2 * SLOTS)))
    return queries / (time.perf_counter() - begun)


async def arrivals(ask: Callable[[int], Awaitable[int]], queries: int, rate: float, seed: int) -> list[Outcome]:
    """Poisson arrivals; all outcomes."""
    rng, at, tasks = random.Random(seed), time.perf_counter(), []
    for number in range(queries):
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(timed(ask(number), time.perf_counter() - at)))
    return await asyncio.gather(*tasks)


def memory(pid: int) -> float:
    """Resident MiB of a process; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def overload(options: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        per_second = await capacity(lambda n: over_http(client, n, None), options.warm_up)
        before, metrics_before = memory(pid), await figures(client)
        found = await arrivals(
            lambda n: over_http(client, n, options.goal), options.queries, options.times * per_second, options.seed
        )
        after, told = memory(pid), await figures(client)
        half = await arrivals(lambda n: over_http(client, n, None), options.half, per_second / 2, options.seed + 1)
    answered = [one for one in found if one.status == 200]
    within = sum(one.seconds <= options.goal for one in answered)
    return {
        "lost": sum(one.status not in (200, 429) for one in found),
        "within_goal": round(within / max(1, len(answered)), 4),
        "accepted": len(answered),
        "refused": sum(one.status == 429 for one in found),
        "capacity_per_s": round(per_second, 2),
        "offered_per_s": round(options.times * per_second, 2),
        "refusal_p50_ms": round(1000 * quantile([o.seconds for o in found if o.status == 429], 0.5), 2),
        "refusal_p99_ms": round(1000 * quantile([o.seconds for o in found if o.status == 429], 0.99), 2),
        "client_late_p99_ms": round(1000 * quantile([o.late for o in found], 0.99), 2),
        "memory_mib": [round(before, 1), round(after, 1)],
        "told_accepted": round(told[ACCEPTED] - metrics_before[ACCEPTED]),
        "told_within_goal": round(told[WITHIN] - metrics_before[WITHIN]),
        "half": [one.seconds for one in half if one.status == 200],
    }


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    """Sums over labels of what the server itself tells."""
    found: dict[str, float] = {}
    for line in (await client.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name.partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found


async def in_process(options: argparse.Namespace, rate: float) -> list[float]:
    """The same arrivals, the same engine, no server."""
    with EnginePool.local([engine()]) as pool:

        async def ask(number: int) -> int:
            prompt = Prompt((Message("user", f"query {number}"),))
            request = Generate(prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))
            await pool.call(PrimitiveKind.PREFILLING, "llm", [request])
            return 200

        return [one.seconds for one in await arrivals(ask, options.half, rate, options.seed + 1)]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    with server(options.goal) as (url, pid):
        found = asyncio.run(overload(options, url, pid))
    half = found.pop("half")
    plain = asyncio.run(in_process(options, found["capacity_per_s"] / 2))
    added = {
        f"added_p{round(100 * share)}_ms": round(1000 * (quantile(half, share) - quantile(plain, share)), 2)
        for share in (0.5, 0.99)
    }
    top = {name: found[name] for name in ("lost", "within_goal")}
    return {**top, **added, **found, "goal_s": options.goal, "times": options.times, "environment": environment()}


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--queries", type=int, default=2000)
        parser.add_argument("--times", type=float, default=10.0, help="of the capacity (default: 10)")
        parser.add_argument("--goal", type=float, default=GOAL, help=f"seconds (default: {GOAL:g})")
        parser.add_argument("--warm-up", type=int, default=120, help="queries by which the capacity is measured")
        parser.add_argument("--half", type=int, default=200, help="queries at half the capacity")
        parser.add_argument("--seed", type=int, default=1)

    options = arguments(__doc__ or "", add)
    result = measured(options)
    rows = [{"figure": key, "value": str(value)} for key, value in result.items() if key != "environment"]
    report(result, options, "A server at many times its capacity", rows)


if __name__ == "__main__":
    main()
