"""The process: a pool from its file, the server in front of it, until it is told to stop.

Between the socket and uvicorn, what is written within one turn of the loop is sent in one piece: uvicorn writes the
head and the body of an answer one after the other, and each would be a system call and a wake-up of the client.
"""

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
"""First bytes of the head of an answer; no piece of a chunked body begins with them."""


class CoalescingTransport(asyncio.Transport):
    """A transport that buffers writes until the loop's next turn, and the head of an answer until its body."""

    def __init__(self, real: asyncio.Transport) -> None:
        super().__init__()
        self._real = real
        self._loop = asyncio.get_running_loop()
        self._buffer: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._buffer.append(bytes(data))
        if len(self._buffer) == 1:
            self._loop.call_soon(self._send)
        elif len(self._buffer) == 2 and self._buffer[0].startswith(_HEAD):
            self._send()  # at once: before what the server does after an answer

    def _send(self) -> None:
        pieces, self._buffer = self._buffer, []
        if pieces and not self._real.is_closing():
            self._real.write(b"".join(pieces))

    def close(self) -> None:
        """Send what is buffered, and close."""
        self._send()
        self._real.close()

    def abort(self) -> None:
        self._buffer.clear()
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
        return sum(map(len, self._buffer)) + self._real.get_write_buffer_size()


def coalescing_protocol(protocol: type[Any], clock: Callable[[], float]) -> type[Any]:
    """Return uvicorn's protocol on a `CoalescingTransport`. It sets `teola.began` to a request's first byte."""

    class Sending(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(CoalescingTransport(transport))

        def data_received(self, data: bytes) -> None:
            now, before = clock(), self.scope
            super().data_received(data)
            if self.scope is not before:  # a request has begun; its answer comes in a later turn of the loop
                self.scope["teola.began"] = now

    return Sending


_POLL_S = 0.05
"""Seconds between looks at the running requests, while the server drains."""


def check_files(settings: ServerSettings) -> None:
    """Raise `ConfigError` for TLS files that do not exist."""
    for name in ("certificate", "private_key"):
        path = getattr(settings, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"server.{name}: there is no file {path}.", hint="give the path of a PEM file")


@contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """Open a socket at the configured address. Raise `EngineUnavailable` if the address is in use."""
    import socket

    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends small pieces at once only on sockets of IPPROTO_TCP; else answers wait for the client's ACK
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host.strip("[]"), settings.port))
        except OSError as error:
            raise EngineUnavailable(
                f"the server cannot listen at {settings.host}:{settings.port}: {error.strerror or error}.",
                hint="give another port (--port), or see what listens there",
            ) from error
        yield listener


def address_of(settings: ServerSettings, bound: socket.socket) -> str:
    scheme = "https" if settings.certificate else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{bound.getsockname()[1]}"


def run(service: Service, store: Store, bound: socket.socket, on_ready: Callable[[], object] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new requests, and give running ones `drain` seconds to end."""

    def ready() -> None:
        _freeze_objects()
        on_ready()

    server = server_of(service, store, ready)
    try:
        with exiting_after_cleanup(server):
            asyncio.run(serve(server, store, bound))
    finally:
        gc.unfreeze()


def _freeze_objects() -> None:
    """Keep the garbage collector from scanning what was loaded until now: frameworks, apps, engines.

    Each full scan would delay all running requests.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def exiting_after_cleanup(server: Any) -> Iterator[None]:
    """Handle SIGTERM in the body so that cleanup runs.

    uvicorn sends itself the signal again once it has stopped. By default SIGTERM would then end the process, and the
    processes that it started would stay; Ray's handler would exit with the signal's number.
    """

    def on_sigterm(number: int, _: Any) -> None:
        if not server.should_exit:  # before uvicorn handles the signal
            raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


async def serve(server: Any, store: Store, bound: socket.socket) -> None:
    """Serve until the server stops. Raise what opening the store raises, before any request is accepted."""
    try:
        await store.open()
        await server.serve(sockets=[bound])
    finally:
        await store.close()


def server_of(service: Service, store: Store, on_ready: Callable[[], object] = lambda: None) -> Any:
    """Return uvicorn's server, not yet running."""
    import uvicorn

    from teola_plugin.server.app import create_app

    settings = service.settings

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            on_ready()

        async def shutdown(self, sockets: Any = None) -> None:
            seconds = await drain(service, lambda: self.force_exit)
            self.config.timeout_graceful_shutdown = max(1, round(seconds))
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
    config.http_protocol_class = coalescing_protocol(config.http_protocol_class, service.clock)
    return Server(config)


async def drain(service: Service, forced: Callable[[], bool]) -> float:
    """Refuse new requests, and wait at most `drain` seconds until running ones have ended. Return the seconds left.

    Meanwhile new requests get 503 and `Retry-After`. A second signal ends the wait at once.
    """
    service.draining = True
    until = service.clock() + service.settings.drain
    while service.is_busy and service.clock() < until and not forced():
        await asyncio.sleep(_POLL_S)
    return max(0.0, until - service.clock())
