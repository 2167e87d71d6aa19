"""vLLM's own API server on the bundled model, as somebody runs it who has one: a process, a port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from teola_plugin.engines.bundled import llm_folder

MODEL = "demo"
_SECONDS = 280.0


@dataclass(frozen=True)
class ApiServer:
    base_url: str
    log: Path

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """A counter of vLLM, summed over its labels."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Started and answering; afterwards no process of it is left. Its log stays in `folder`."""
    port, log = _free_port(), folder / "vllm-api-server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(_command(port), stdout=out, stderr=out, env=_environment(), start_new_session=True)
    server = ApiServer(f"http://127.0.0.1:{port}/v1", log)
    try:
        _wait(server, process)
        yield server
    finally:
        _end(process)


def _command(port: int) -> list[str]:
    options = {
        "--model": str(llm_folder()),
        "--served-model-name": MODEL,
        "--dtype": "float32",
        "--max-model-len": "2048",
        "--block-size": "32",
        "--kv-cache-memory-bytes": str(256 << 20),
        "--scheduling-policy": "priority",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
    parts = [part for option in options.items() for part in option]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *parts, *flags]


def _environment() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[-1]), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, **cpu}


def _wait(server: ApiServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.root}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"vLLM's API server did not start:\n{server.log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own group: whatever it left
    except ProcessLookupError:
        pass
    process.wait(30)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
