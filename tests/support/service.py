"""`teola serve` over real HTTP on a thread of this process, and clients for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from starlette.testclient import TestClient

from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM, fake_engines
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.server.app import create_app, listening, serve, server_of
from teola_plugin.server.callers import new_key
from teola_plugin.server.queries.store import MemoryStore, Store
from teola_plugin.server.service import Service
from teola_plugin.server.settings import AppSettings, ServerSettings


@dataclass
class RunningServer:
    """A running server, with its service and pool."""

    url: str
    service: Service
    pool: EnginePool
    server: Any
    loop: asyncio.AbstractEventLoop | None = None
    errors: list[BaseException] = field(default_factory=list)

    @property
    def base(self) -> str:
        """Return the address of the OpenAI protocol."""
        return f"{self.url}/v1"

    def client(self, key: str = "", **more: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False, **more)

    def openai(self, key: str = "none", **more: Any) -> Any:
        import openai

        return openai.OpenAI(
            base_url=self.base, api_key=key, max_retries=0, http_client=httpx.Client(trust_env=False), **more
        )


@contextmanager
def running_server(
    pool: EnginePool | None = None,
    *,
    apps: Mapping[str, Mapping[str, Any]] | None = None,
    store: Store | None = None,
    tracing_provider: Any = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Run a server until the body ends.

    Args:
        pool: the pool; by default one of fake engines that take no time.
        apps: settings of each app, by name.
        store: where queries are kept; by default in memory.
        tracing_provider: an OpenTelemetry provider for the server's spans.
        settings: settings of the server. It takes a free port.
    """
    server_settings = ServerSettings.model_validate({"port": 0, "log": "off", "drain": 5, **settings})
    app_settings = {name: AppSettings.model_validate(one) for name, one in (apps or {}).items()}
    query_store = store or MemoryStore()
    with pool or EnginePool.local(fake_engines()) as running, listening(server_settings) as bound:
        service = Service(running, server_settings, app_settings, tracing_provider)
        handle = RunningServer(
            f"http://127.0.0.1:{bound.getsockname()[1]}", service, running, server_of(service, query_store)
        )
        ready = threading.Event()

        async def main() -> None:
            handle.loop = asyncio.get_running_loop()
            task = asyncio.create_task(serve(handle.server, query_store, bound))
            while not handle.server.started and not task.done():
                await asyncio.sleep(0.005)
            ready.set()
            await task

        def run() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:
                handle.errors.append(error)
            finally:
                ready.set()

        thread = threading.Thread(target=run, name="test-server")
        thread.start()
        try:
            assert ready.wait(20) and not handle.errors, handle.errors
            yield handle
        finally:
            handle.server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
            assert not handle.errors, handle.errors


@contextmanager
def in_process(
    pool: EnginePool | None = None, *, apps: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """Yield a client of a server without sockets. Each request goes to the ASGI app itself."""
    server_settings = ServerSettings.model_validate({"log": "off", "hosts": ["testserver"], **settings})
    app_settings = {name: AppSettings.model_validate(one) for name, one in (apps or {}).items()}
    with pool or EnginePool.local(fake_engines()) as running:
        app = create_app(Service(running, server_settings, app_settings), MemoryStore())
        with TestClient(app, raise_server_exceptions=False) as client:
            yield client


@dataclass(frozen=True)
class Key:
    """An API key, and the settings that declare it."""

    secret: str
    settings: dict[str, Any]


def key(name: str, **caps: Any) -> Key:
    """Create a key of a tenant with the same name. `caps` are further settings of the key."""
    created = new_key()
    return Key(created.secret, {"name": name, "hash": created.hash, "tenant": name, **caps})


def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait until the condition is true. Fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def slow_llm(seconds_per_token: float = 0.05) -> FakeLLM:
    """Return a fake LLM whose decoding takes `seconds_per_token`."""
    curve = {PrimitiveKind.DECODING: Curve.linear(0.0, seconds_per_token), PrimitiveKind.PREFILLING: Curve.linear(0, 0)}
    return FakeLLM("llm", replace(profiles.noop()["llm"], curves=curve), answer=lambda *_: "word " * 200)


@contextmanager
def chat_during_shutdown(server: RunningServer, body: Mapping[str, Any]) -> Iterator[None]:
    """Start a chat, then tell the server to stop.

    The server drains in the body; afterwards the chat must be answered.
    """
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as http:
            answers.append(http.post("/v1/chat/completions", json=dict(body)))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: server.service.live.running)
    server.server.should_exit = True
    until(lambda: server.service.draining)
    yield
    asking.join(10)
    assert answers[0].status_code == 200
