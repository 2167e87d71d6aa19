"""The process: a pool from its file, the server in front of it, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
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
    asyncio.run(serve(server_of(service, store, on_ready), store, bound))


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
            service.draining = True
            await super().shutdown(sockets)

    config = uvicorn.Config(
        create_app(service, store),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_graceful_shutdown=max(1, round(settings.drain)),
        ssl_certfile=settings.certificate or None,
        ssl_keyfile=settings.private_key or None,
    )
    return Server(config)


def log_to_stderr(settings: ServerSettings) -> None:
    """One line for each request, unless the settings say otherwise."""
    if settings.log == "off":
        return
    handler = logging.StreamHandler(sys.stderr)
    form = "%(message)s" if settings.log == "json" else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(form))
    logger = logging.getLogger("teola_plugin.server")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
