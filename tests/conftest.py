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
    """What is marked as long is left to `make test-all`."""
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get("TEOLA_TEST_LONG"):
            item.add_marker(pytest.mark.skip(reason="the long version (make test-all)"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the suite imports stays: it is neither looked through while it comes nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """The last collection, which is pytest's, looks through everything.

    What tests have left goes before: plugins import modules at the end, and in Python 3.11 to parse one may fail where
    loops and the like are collected meanwhile (*AST constructor recursion depth mismatch*).
    """
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def schedulers_in_order() -> Iterator[None]:
    """Every scheduler that a test drives in this process keeps its own rules after every event."""
    from teola_plugin.scheduling import validate

    validate.VIOLATIONS.clear()
    yield
    assert not validate.VIOLATIONS


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
    """The session's engine and the loop that it lives on: use it only through `run`, and `reset` it if that matters."""

    engine: VllmEngine
    thread: LoopThread

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        return self.thread.run(work, timeout)


@contextmanager
def llm() -> Iterator[SessionLlm]:
    """vLLM with the tiny random Llama in float32, on one core where this is the CPU build."""
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
    """The session's embedded PostgreSQL; each test has collections of its own."""
    from teola_plugin.engines.postgres.embedded import EmbeddedPostgres

    server = EmbeddedPostgres()
    server.start()
    try:
        yield server.dsn
    finally:
        server.stop()


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The session's Ray node: its address. This process is connected to it. It has two GPUs, as far as Ray knows."""
    from support.ray_nodes import ray_nodes

    with ray_nodes(8, gpus=2) as cluster:
        yield cluster.address


class Coming:
    """What starts slowly, each on a thread of its own."""

    def __init__(
        self,
        makers: dict[str, Callable[[], AbstractContextManager[Any]]],
        held: ExitStack,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._makers, self._held, self._threads = makers, held, threads
        self._begun: dict[str, Future[Any]] = {}

    def begin(self) -> None:
        for name, make in self._makers.items():
            if name not in self._begun:
                self._begun[name] = self._threads.submit(lambda make=make: self._held.enter_context(make()))

    def settle(self) -> None:
        """Returns when nothing is starting."""
        wait(self._begun.values())

    def __getitem__(self, name: str) -> Any:
        self.begin()
        return self._begun[name].result()


@pytest.fixture(scope="session", autouse=True)
def coming(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coming]:
    """What some test needs starts beside the first tests, so that it finds the environment as it is.

    One of several workers knows what it needs when the first test asks for it.
    """
    from support.api_server import api_server

    run: list[Any] = [item for item in request.session.items if not item.get_closest_marker("skip")]
    needed = {name for item in run for name in item.fixturenames}
    folder = tmp_path_factory.mktemp("vllm-api")
    makers = {"session_llm": llm, "vllm_api": lambda: api_server(folder)}
    with ExitStack() as held, ThreadPoolExecutor(2, "coming") as threads:
        made = Coming({name: make for name, make in makers.items() if name in needed}, held, threads)
        if not hasattr(request.config, "workerinput"):
            made.begin()
        yield made


@pytest.fixture(scope="session")
def session_llm(coming: Coming) -> SessionLlm:
    """The session's engine; about 12 s to start."""
    found: SessionLlm = coming["session_llm"]
    return found


@pytest.fixture(scope="session")
def vllm_api(coming: Coming) -> ApiServer:
    """vLLM's API server on the bundled model; about 25 s to start."""
    found: ApiServer = coming["vllm_api"]
    return found
