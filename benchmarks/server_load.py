"""A server at ten times its capacity: what is taken meets its goal, the rest is told at once, nothing is lost.

python -m benchmarks.server_load --json

Real HTTP over loopback, the server in a process of its own on an engine of a profile (it sleeps as long as a model
would work). First the capacity: as many queries at a time as keep the engine busy. Then Poisson arrivals at `--times`
the capacity, each with a goal; a query that is refused (429) is not asked again. `lost` are queries that got neither an
answer nor a refusal; `within_goal` is the share of answers whose whole way, as its client measures it, took no longer
than the goal. Then, at half the capacity and without a goal, `added`: what an answer takes longer over HTTP than the
same call in process, the same arrivals, in turns; `client_p50_ms` is what the client itself and the loopback take of
that, asking a server that does nothing. `memory_mib` of the server: at the start, in the middle and at the end of the
overload; `loop_lag_p99_ms`: how late its loop came to what was due, at most, 99 times of 100.

`throughput_ratio` is that of benchmarks/server_throughput.py: the bundled model behind this server and behind vLLM's
own, by clients at a time (`--no-throughput` leaves it out).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import arguments, environment, report
from benchmarks.server_throughput import throughput
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


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False)


async def overload(options: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    async with client_of(url) as client:
        per_second = await capacity(lambda n: over_http(client, n, None), options.warm_up)
        resident, before = [memory(pid)], await figures(client)

        async def ask(number: int) -> int:
            if number == options.queries // 2:
                resident.append(memory(pid))
            return await over_http(client, number, options.goal)

        found = await arrivals(ask, options.queries, options.times * per_second, options.seed)
        resident.append(memory(pid))
        told = await figures(client)
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
        "memory_mib": [round(one, 1) for one in resident],
        "loop_lag_p99_ms": lag(before, told, 0.99),
        "told_accepted": round(told[ACCEPTED] - before[ACCEPTED]),
        "told_within_goal": round(told[WITHIN] - before[WITHIN]),
    }


LAG = "teola_loop_lag_seconds_bucket"


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    """Sums over labels of what the server itself tells; the buckets of the loop's lag one by one."""
    found: dict[str, float] = {}
    for line in (await client.get("/metrics")).text.split("\n"):
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name if name.startswith(LAG) else name.partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found


def lag(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """Milliseconds: the bound of the bucket that this share of the looks between the two has not exceeded."""
    seen = {float(k.split('"')[1]): after[k] - before[k] for k in after if k.startswith(LAG)}
    return round(1000 * min(bound for bound, count in seen.items() if count >= share * seen[math.inf]), 1)


async def nothing(options: argparse.Namespace, rate: float) -> list[float]:
    """Seconds that the client and the loopback take alone: of such arrivals at a server that does nothing."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(one.split(b":")[1]) for one in head.split(b"\r\n") if b"ength:" in one)
                await reader.readexactly(length)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    served = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}"
    async with served:
        found = await over_the_wire(options, url, rate, options.seed)
        await asyncio.sleep(0.1)  # until it has heard that the connections are closed
        return found


async def over_the_wire(options: argparse.Namespace, url: str, rate: float, seed: int) -> list[float]:
    """Seconds of answers to arrivals at this rate."""
    async with client_of(url) as client:
        found = await arrivals(lambda n: over_http(client, n, None), options.half, rate, seed)
    return [one.seconds for one in found if one.status == 200]


async def in_process(options: argparse.Namespace, rate: float, seed: int) -> list[float]:
    """The same arrivals, the same engine, no server."""
    with EnginePool.local([engine()]) as pool:

        async def ask(number: int) -> int:
            prompt = Prompt((Message("user", f"query {number}"),))
            request = Generate(prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))
            await pool.call(PrimitiveKind.PREFILLING, "llm", [request])
            return 200

        return [one.seconds for one in await arrivals(ask, options.half, rate, seed)]


def added(options: argparse.Namespace, url: str, rate: float) -> dict[str, Any]:
    """The server and the same engine in process take turns; quantiles are of all turns together."""
    wire: list[float] = []
    plain: list[float] = []
    for turn in range(options.repeats):
        ways: list[Callable[[int], None]] = [
            lambda seed: wire.extend(asyncio.run(over_the_wire(options, url, rate, seed))),
            lambda seed: plain.extend(asyncio.run(in_process(options, rate, seed))),
        ]
        for way in ways[:: 1 if turn % 2 else -1]:
            way(options.seed + 1 + turn)
    more = {
        f"added_p{round(100 * share)}_ms": round(1000 * (quantile(wire, share) - quantile(plain, share)), 2)
        for share in (0.5, 0.99)
    }
    alone = asyncio.run(nothing(options, rate))
    return more | {"client_p50_ms": round(1000 * quantile(alone, 0.5), 2), "half": len(wire)}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    with server(options.goal) as (url, pid):
        found = asyncio.run(overload(options, url, pid))
        more = added(options, url, found["capacity_per_s"] / 2)
    through = {"throughput_ratio": None} if options.no_throughput else throughput(options.rounds)
    top = {name: found[name] for name in ("lost", "within_goal")}
    asked = {"goal_s": options.goal, "times": options.times}
    told = {"benchmark": "server_load", "environment": environment()}
    return {**top, **more, **through, **found, **asked, **told}


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--queries", type=int, default=2000)
        parser.add_argument("--times", type=float, default=10.0, help="of the capacity (default: 10)")
        parser.add_argument("--goal", type=float, default=GOAL, help=f"seconds (default: {GOAL:g})")
        parser.add_argument("--warm-up", type=int, default=120, help="queries by which the capacity is measured")
        parser.add_argument("--half", type=int, default=100, help="queries at half the capacity, of each turn")
        parser.add_argument("--repeats", type=int, default=3, help="turns of server and in-process calls")
        parser.add_argument("--rounds", type=int, default=5, help="rounds against vLLM's own server")
        parser.add_argument("--no-throughput", action="store_true", help="leave that out")
        parser.add_argument("--seed", type=int, default=1)

    options = arguments(__doc__ or "", add)
    result = measured(options)
    rows = [{"figure": key, "value": str(value)} for key, value in result.items() if key != "environment"]
    report(result, options, "A server at many times its capacity", rows)


if __name__ == "__main__":
    main()
