"""Fixtures for the whole suite.

Some start once for the session: a vLLM engine (about 15 s), vLLM's API server, one Ray node and one embedded
PostgreSQL. Each test has a pool of its own on that node.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

os.environ.setdefault("TEOLA_VALIDATE_STATE", "1")  # schedulers check themselves, also in processes of tests

if TYPE_CHECKING:
    from support.api_server import ApiServer

    from teola_plugin.engines.vllm import VllmEngine

T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what is made now")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from support.workers import EnginesTogether

    return EnginesTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked as long, except in `make test-all`."""
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get("TEOLA_TEST_LONG"):
            item.add_marker(pytest.mark.skip(reason="the long version (make test-all)"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what the suite imports from garbage collection, during the imports and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Collect leftovers of tests, and make all objects visible to the last collection, which is pytest's.

    The leftovers must go first, because plugins import modules at the end. In Python 3.11 parsing a module may fail
    while loops and similar objects are collected (*AST constructor recursion depth mismatch*).
    """
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def schedulers_in_order() -> Iterator[None]:
    """Check after every event that each scheduler in this process keeps its own rules."""
    from teola_plugin.scheduling import validate

    validate.VIOLATIONS.clear()
    yield
    assert not validate.VIOLATIONS


@pytest.fixture(autouse=True)
def quick_calls_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetch calls of models that answer at once: most models of tests do."""
    monkeypatch.setattr("teola_plugin.runtime.prefetch_gate.SHORT_QUERY_S", 0.0)


class LoopThread:
    """An event loop on its own thread, for engines that outlive a test's loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="session-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass(frozen=True)
class SessionLlm:
    """The session's engine and the loop on which it runs.

    Use it through `run` only, and call `reset` if its cache matters.
    """

    engine: VllmEngine
    thread: LoopThread

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        return self.thread.run(work, timeout)


@contextmanager
def llm() -> Iterator[SessionLlm]:
    """Start vLLM with the tiny random Llama in float32. The CPU build gets one core."""
    from teola_plugin.engines.bundled import llama as tiny_llama
    from teola_plugin.engines.vllm import VllmEngine

    thread = LoopThread()
    args = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "max_model_len": 4096}
    engine = VllmEngine("session-llm", tiny_llama.make(), engine_args=args, cores="0", tell_cache=True)
    try:
        thread.run(engine.start(), timeout=280)
        yield SessionLlm(engine, thread)
    finally:
        thread.run(engine.stop())
        thread.close()


@pytest.fixture(scope="session")
def postgres_dsn() -> Iterator[str]:
    """Return the address of the session's embedded PostgreSQL. Each test has collections of its own."""
    from teola_plugin.engines.postgres.embedded import EmbeddedPostgres

    server = EmbeddedPostgres()
    server.start()
    try:
        yield server.dsn
    finally:
        server.stop()


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Connect this process to the session's Ray node, and return its address.

    Ray is told that the node has two GPUs.
    """
    from support.ray_nodes import ray_nodes

    with ray_nodes(8, gpus=2) as cluster:
        yield cluster.address


class SlowServices:
    """Services that start slowly, each on a thread of its own."""

    def __init__(
        self,
        makers: dict[str, Callable[[], AbstractContextManager[Any]]],
        exit_stack: ExitStack,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._makers, self._exit_stack, self._threads = makers, exit_stack, threads
        self._started: dict[str, Future[Any]] = {}

    def start(self) -> None:
        for name, make in self._makers.items():
            if name not in self._started:
                self._started[name] = self._threads.submit(lambda make=make: self._exit_stack.enter_context(make()))

    def settle(self) -> None:
        """Wait until no service is starting."""
        wait(self._started.values())

    def __getitem__(self, name: str) -> Any:
        self.start()
        return self._started[name].result()


@pytest.fixture(scope="session", autouse=True)
def slow_services(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowServices]:
    """Start the services that some test needs while the first tests run.

    They inherit the environment as it is before the first test. If there are several workers, each starts a service
    when its first test needs it.
    """
    from support.api_server import api_server

    run: list[Any] = [item for item in request.session.items if not item.get_closest_marker("skip")]
    fixture_names = {name for item in run for name in item.fixturenames}
    folder = tmp_path_factory.mktemp("vllm-api")
    makers = {"session_llm": llm, "vllm_api": lambda: api_server(folder)}
    with ExitStack() as exit_stack, ThreadPoolExecutor(2, "slow-services") as threads:
        services = SlowServices(
            {name: make for name, make in makers.items() if name in fixture_names}, exit_stack, threads
        )
        if not hasattr(request.config, "workerinput"):
            services.start()
        yield services


@pytest.fixture(scope="session")
def session_llm(slow_services: SlowServices) -> SessionLlm:
    """Return the session's engine, which takes about 12 s to start."""
    session: SessionLlm = slow_services["session_llm"]
    return session


@pytest.fixture(scope="session")
def vllm_api(slow_services: SlowServices) -> ApiServer:
    """Return vLLM's API server on the bundled model, which takes about 25 s to start."""
    server: ApiServer = slow_services["vllm_api"]
    return server
