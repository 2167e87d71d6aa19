"""Engine hosts and a client's port in this process, without Ray: calls of actors run on this loop.

All other parts are the real ones. A test can see what a host receives, and lose a host at an exact moment.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from teola_plugin.cluster.client import link
from teola_plugin.cluster.client.shared_engine import SharedEngine
from teola_plugin.cluster.client.shared_port import SharedPort
from teola_plugin.cluster.config import EngineConfig
from teola_plugin.cluster.host import engine_host
from teola_plugin.cluster.host.engine_host import EngineHost
from teola_plugin.cluster.names import actor_name
from teola_plugin.cluster.wire import PROTOCOL, EngineFacts, Hello
from teola_plugin.engines.base import Engine
from teola_plugin.requests.payloads import Request
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.scheduling.engine_queue import Enqueue


class _Replica:
    """An engine of this process with the interface of a `RemoteReplica`."""

    node, pid = "", 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.facts: EngineFacts | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        engine = self._engine
        await engine.start()
        self.facts = EngineFacts(engine.name, engine.kinds, engine.profile, engine.versions(), ("0",))

    async def is_alive(self, seconds: float) -> bool:
        return True

    async def admin(self, method: str, args: tuple[Any, ...]) -> Any:
        return await getattr(self._engine, method)(*args)


class Host(EngineHost):
    """An `EngineHost` that records the requests which its port gets."""

    def __init__(self, engine: Engine) -> None:
        super().__init__("here", engine.name, EngineConfig(kind="fake").model_dump())
        self.engine = engine
        self.requests: list[tuple[Request, Enqueue]] = []

    def make_replica(self, number: str) -> Any:
        return _Replica(self.engine)

    def _open(self) -> None:
        super()._open()
        port = self.port
        enqueue = port.enqueue

        def record_and_enqueue(entries: Any, event: Enqueue) -> None:
            self.requests += [(entry.request, event) for entry in entries]
            enqueue(entries, event)

        port.enqueue = record_and_enqueue  # type: ignore[method-assign]


class _Handle:
    """A stand-in for Ray's handle of an actor.

    It pickles the arguments of calls, and fails them once the actor is lost.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._open: set[asyncio.Future[Any]] = set()
        self._lost: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return _Method(lambda *args: self._call(name, args))

    def _call(self, name: str, args: tuple[Any, ...]) -> Awaitable[Any]:
        called: asyncio.Future[Any] = asyncio.ensure_future(self._answer(name, pickle.loads(pickle.dumps(args))))
        self._open.add(called)
        called.add_done_callback(self._open.discard)
        return asyncio.shield(called)  # who gives up waiting does not stop the actor

    async def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if self._lost is not None:
            raise self._lost
        answer = getattr(self._host, name)(*args)
        try:
            return await answer if inspect.isawaitable(answer) else answer
        except asyncio.CancelledError:
            raise (self._lost or ConnectionError("closed")) from None

    async def closed(self) -> None:
        """Wait until every call is answered."""
        await asyncio.gather(*self._open, return_exceptions=True)

    def lose(self) -> None:
        """Fail all running and later calls."""
        self._lost = ConnectionError("the actor died")
        for called in list(self._open):
            called.cancel()


@dataclass(frozen=True)
class _Method:
    remote: Callable[..., Awaitable[Any]]


@dataclass
class SentRequest:
    """A request with a future for its outcome."""

    entry: EngineRequest
    outcome: Future[Any] = field(default_factory=Future)


class Cluster:
    """Hosts by engine name, and the ports of one client. Use it as an async context manager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: dict[str, Host] = {}
        self._handles: dict[str, _Handle] = {}
        self._ports: list[SharedPort] = []
        self._all_hosts: list[Host] = []
        self._sent_requests: dict[int, SentRequest] = {}
        for module in (link, engine_host):
            monkeypatch.setattr(module, "actor", self._actor)
        monkeypatch.setattr(engine_host, "was_restarted", lambda: False)

    def _actor(self, name: str) -> _Handle:
        return self._handles[name]

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        for port in self._ports:
            await port.close()
        for host in self._all_hosts:
            await host.stop()
        for handle in self._handles.values():
            await handle.closed()

    def host(self, engine: Engine, kind: type[Host] = Host) -> Host:
        """Create a host for the engine. A host that the engine had before is lost."""
        old = self._handles.get(actor_name("here", engine.name))
        host = self.hosts[engine.name] = kind(engine)
        self._all_hosts.append(host)
        self._handles[actor_name("here", engine.name)] = _Handle(host)
        if old is not None:
            old.lose()
        return host

    async def port(self, engine: str, client: str = "me") -> SharedPort:
        """Start the engine's host, and return a port to it that is open."""
        facts = await self.hosts[engine].start()
        listener = PortListener(lambda *_: None, lambda *_: None, self._ended)
        port = SharedPort("here", SharedEngine(facts), Hello(client, PROTOCOL, (3, 11), "0"), listener)
        self._ports.append(port)
        await port.open()
        return port

    def _ended(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        future = self._sent_requests[id(entry)].outcome
        future.set_result(value) if error is None else future.set_exception(error)

    def send(self, port: SharedPort, request: Request, event: Enqueue, **options: Any) -> SentRequest:
        """Send a request. Return it with its outcome."""
        sent_request = self.create_request(port, request, event)
        port.enqueue([sent_request.entry], event, **options)
        return sent_request

    def create_request(self, port: SharedPort, request: Request, event: Enqueue) -> SentRequest:
        """Create a request whose outcome is recorded, without sending it."""
        sent_request = SentRequest(EngineRequest(request, port.name, None, event.primitive))
        self._sent_requests[id(sent_request.entry)] = sent_request
        return sent_request

    @staticmethod
    async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until the condition is true. Fail after `seconds`."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


async def result(sent_request: SentRequest, seconds: float = 10.0) -> Any:
    """Return the result of a request, or raise its error. Fail after `seconds`."""
    return await asyncio.wait_for(asyncio.wrap_future(sent_request.outcome), seconds)
