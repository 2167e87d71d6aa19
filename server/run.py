"""The process: a pool from its file, the server in front of it, until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import ConfigError, EngineUnavailable
from teola_plugin.server.settings import ServerSettings

if TYPE_CHECKING:
    import socket

    from teola_plugin.server.queries.store import Store
    from teola_plugin.server.service import Service

_HEAD = b"HTTP/"
"""How the head of an answer begins; no piece of a chunked body does."""


class Together(asyncio.Transport):
    """A transport that keeps what is written until the loop's next turn; an answer's head until its body comes."""

    def __init__(self, real: asyncio.Transport) -> None:
        super().__init__()
        self._real = real
        self._loop = asyncio.get_running_loop()
        self._kept: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._kept.append(bytes(data))
        if len(self._kept) == 1:
            self._loop.call_soon(self._send)
        elif len(self._kept) == 2 and self._kept[0].startswith(_HEAD):
            self._send()  # now: before what the server does when an answer is written

    def _send(self) -> None:
        kept, self._kept = self._kept, []
        if kept and not self._real.is_closing():
            self._real.write(b"".join(kept))

    def close(self) -> None:
        """What is kept is sent before."""
        self._send()
        self._real.close()

    def abort(self) -> None:
        self._kept.clear()
        self._real.abort()

    def is_closing(self) -> bool:
        return self._real.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._real.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._real.pause_reading()

    def resume_reading(self) -> None:
        self._real.resume_reading()

    def is_reading(self) -> bool:
        return self._real.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._real.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._real.get_protocol()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._kept)) + self._real.get_write_buffer_size()


def together(protocol: type[Any], clock: Callable[[], float]) -> type[Any]:
    """uvicorn's protocol, on such a transport. Requests tell under `teola.began` when their first byte came."""

    class Sending(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(Together(transport))

        def data_received(self, data: bytes) -> None:
            now, before = clock(), self.scope
            super().data_received(data)
            if self.scope is not before:  # a request has begun in it; it is not answered before the loop's next turn
                self.scope["teola.began"] = now

    return Sending


_LOOKING = 0.05
"""Seconds between looks at what is under way, while the server drains."""


def check_files(settings: ServerSettings) -> None:
    """Raises `ConfigError` for files of TLS that are not there."""
    for name in ("certificate", "private_key"):
        path = getattr(settings, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"server.{name}: there is no file {path}.", hint="give the path of a PEM file")


@contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """A socket at the address. Raises `EngineUnavailable` where it is taken."""
    import socket

    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends small pieces at once only for sockets that say they are TCP; else answers wait for the client's ack
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((settings.host.strip("[]"), settings.port))
        except OSError as error:
            raise EngineUnavailable(
                f"the server cannot listen at {settings.host}:{settings.port}: {error.strerror or error}.",
                hint="give another port (--port), or see what listens there",
            ) from error
        yield made


def address_of(settings: ServerSettings, bound: socket.socket) -> str:
    scheme = "https" if settings.certificate else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{bound.getsockname()[1]}"


def run(service: Service, store: Store, bound: socket.socket, on_ready: Callable[[], object] = lambda: None) -> None:
    """Answers until SIGTERM or SIGINT; then takes nothing new, and gives what is under way `drain` seconds."""

    def ready() -> None:
        _settle()
        on_ready()

    server = server_of(service, store, ready)
    try:
        with ending_well(server):
            asyncio.run(serve(server, store, bound))
    finally:
        gc.unfreeze()


def _settle() -> None:
    """What is there once the server is up stays: modules of frameworks, apps, engines. The garbage collector does not
    look through it any more: each whole look would hold up everybody whose request is under way."""
    gc.collect()
    gc.freeze()


@contextmanager
def ending_well(server: Any) -> Iterator[None]:
    """uvicorn sends itself the signal again once it has stopped. By its default SIGTERM would end the process there,
    and what was started would be left behind; Ray's handler exits with its number."""

    def again(number: int, _: Any) -> None:
        if not server.should_exit:  # before uvicorn listens for it
            raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, again)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def serve(server: Any, store: Store, bound: socket.socket) -> None:
    """Raises what opening the store raises, before anybody can ask."""
    try:
        await store.open()
        await server.serve(sockets=[bound])
    finally:
        await store.close()


def server_of(service: Service, store: Store, on_ready: Callable[[], object] = lambda: None) -> Any:
    """uvicorn's server, not yet running."""
    import uvicorn

    from teola_plugin.server.app import create_app

    settings = service.settings

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            on_ready()

        async def shutdown(self, sockets: Any = None) -> None:
            left = await drained(service, lambda: self.force_exit)
            self.config.timeout_graceful_shutdown = max(1, round(left))
            await super().shutdown(sockets)

    config = uvicorn.Config(
        create_app(service, store),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        ssl_certfile=settings.certificate or None,
        ssl_keyfile=settings.private_key or None,
    )
    config.load()
    config.http_protocol_class = together(config.http_protocol_class, service.clock)
    return Server(config)


async def drained(service: Service, forced: Callable[[], bool]) -> float:
    """Nothing new is taken, and what is under way ends, in `drain` seconds at most: those that are left. Until then
    the address answers, with 503 and `Retry-After` to what is new; a second signal ends it at once."""
    service.draining = True
    until = service.clock() + service.settings.drain
    while service.busy and service.clock() < until and not forced():
        await asyncio.sleep(_LOOKING)
    return max(0.0, until - service.clock())
