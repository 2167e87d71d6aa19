"""The bundled model behind `teola serve` and behind vLLM's own API server: answers per second, and their ratio.

python -m benchmarks.server_throughput --json

Both servers run at once, with the same settings and without drafts, their EngineCores on the same core, the processes
in front of them wherever there is room; only one is asked at a time. In each round both answer as many chats, by so
many clients that ask one after the other, in turns first. Prompts differ, so that no prefix of theirs is found in a
cache; answers have a fixed length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.common import arguments, environment, report
from teola_plugin.adapters.demo_app import SERVED
from teola_plugin.cli.demo.stock import api_server
from teola_plugin.engines.model_cache import llm_folder

CLIENTS = (1, 4, 16)
TOKENS = 32
"""Of an answer."""
LIKE_THEIRS = {"engine_args": {"max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20, "dtype": "float32"}}
"""What `api_server` gives vLLM's own."""


@contextmanager
def ours(core: str, folder: Path) -> Iterator[str]:
    """The address of `teola serve` on the bundled model."""
    config = {
        "engines": {SERVED: {"kind": "vllm", "model": "bundled", "cores": [core], "drafts": "off", **LIKE_THEIRS}},
        "server": {"port": 0, "store": "memory", "log": "off"},
    }
    (folder / "pool.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", str(folder / "pool.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.communicate(timeout=60)


@contextmanager
def theirs(core: str, folder: Path) -> Iterator[str]:
    """The address of vLLM's server; its front may run where ours may."""
    free = os.sched_getaffinity(0)
    with api_server(llm_folder(), folder, cores=core) as started:
        for thread in os.listdir(f"/proc/{started.process.pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), free)
        yield started.root


async def answers(url: str, clients: int, count: int, mark: str) -> float:
    """Answers per second of `count` chats."""
    numbers = iter(range(count))

    async def one_after_the_other(client: httpx.AsyncClient) -> None:
        for number in numbers:
            message = {"role": "user", "content": f"{mark} {number}: what do lambs eat in spring?"}
            body = {"model": SERVED, "messages": [message], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
            answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            assert answer.json()["usage"]["completion_tokens"] == TOKENS

    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(one_after_the_other(client) for _ in range(clients)))
        return count / (time.perf_counter() - begun)


def throughput(rounds: int) -> dict[str, Any]:
    """`throughput_ratio` by clients at a time (medians of the rounds' ratios), and answers per second of both."""
    core = str(max(os.sched_getaffinity(0)))
    found: dict[int, list[tuple[float, float]]] = {clients: [] for clients in CLIENTS}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="teola-")))
        urls = [held.enter_context(theirs(core, folder)), held.enter_context(ours(core, folder))]
        for url in urls:
            asyncio.run(answers(url, 4, 8, "warm-up"))
        for turn in range(rounds):
            for clients in CLIENTS:
                pair = [0.0, 0.0]
                for which in (0, 1) if turn % 2 else (1, 0):
                    mark = f"round {turn} with {clients}"
                    pair[which] = asyncio.run(answers(urls[which], clients, 8 + 2 * clients, mark))
                found[clients].append((pair[0], pair[1]))
    return {
        "throughput_ratio": {str(c): round(median(b / a for a, b in pairs), 3) for c, pairs in found.items()},
        "throughput_rounds": {str(c): [round(b / a, 3) for a, b in pairs] for c, pairs in found.items()},
        "vllm_answers_per_s": {str(c): round(median(a for a, _ in pairs), 2) for c, pairs in found.items()},
        "teola_answers_per_s": {str(c): round(median(b for _, b in pairs), 2) for c, pairs in found.items()},
    }


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=5)

    options = arguments(__doc__ or "", add)
    result = {**throughput(options.rounds), "environment": environment()}
    rows = [{"figure": key, "value": str(value)} for key, value in result.items() if key != "environment"]
    report(result, options, "vLLM's own server and ours on one model", rows)


if __name__ == "__main__":
    main()
