"""A service: the ASGI app with its middleware, and the process that runs it on a pool until it is told to stop.

Between the socket and uvicorn, everything written within one turn of the loop is sent in one piece: uvicorn writes the
head and the body of an answer one after the other, and each would be a system call and a wake-up of the client.
"""

from __future__ import annotations

import asyncio
import gc
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teola_plugin import __version__
from teola_plugin.errors import ConfigError, EngineUnavailable, TeolaError
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.files import files_of
from teola_plugin.server.errors import (
    CLIENT_GONE,
    HttpError,
    bad_request,
    http_error,
    invalid,
    to_anthropic,
    unexpected,
)
from teola_plugin.server.logs import describe_error, log, request_line
from teola_plugin.server.queries.runner import Queries
from teola_plugin.server.queries.store import Store
from teola_plugin.server.routes import files, messages, openai, operations, pages
from teola_plugin.server.routes import queries as queries_routes
from teola_plugin.server.service import Service
from teola_plugin.server.settings import LOOPBACK, ServerSettings, host_without_port
from teola_plugin.server.tracing import set_span_attributes
from teola_plugin.server.wire.answers import JSONAnswer
from teola_plugin.server.wire.messages import speaks_anthropic

if TYPE_CHECKING:
    import socket

    from teola_plugin.server.queries.store import Store
    from teola_plugin.server.service import Service


_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SECURITY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Envelope:
    """The outermost middleware: ids, limits and security headers of requests, and their lines in log and metrics."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._hosts = hosts_of(service.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, and record it in the log, the metrics and its span when it has ended.

        The request gets an id: the client's `X-Request-ID` if it is well formed, else a new one. Other messages, such
        as those of the server's lifespan, pass unchanged.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        scope["teola.request_id"] = client_id if _ID.fullmatch(client_id) else f"req_{secrets.token_hex(12)}"
        id_header = "request-id" if speaks_anthropic(scope["path"], headers) else "X-Request-ID"
        id_headers = {name: str(scope["teola.request_id"]) for name in ("X-Request-ID", id_header)}
        sender = _Sender(send, id_headers, tls=scope.get("scheme") == "https")
        began = scope.setdefault("teola.began", self._service.clock())
        with self._service.spans.around(scope, headers) as span:
            try:
                await self._answer(scope, headers, _LimitedReceiver(receive, self._max_bytes(headers)), sender)
            finally:
                self._record(scope, sender, self._service.clock() - began, span)

    async def _answer(self, scope: Scope, headers: Headers, body: _LimitedReceiver, sender: _Sender) -> None:
        """Pass the request to the app, or answer it with the error for which it is refused.

        An exception of the app is logged, and becomes an error 500 unless the answer has begun.
        """
        refusal = self._refusal(scope["method"], headers)
        try:
            if refusal is None:
                await self._app(scope, body, sender)
                return
        except Exception as error:
            log.error("request %s failed", scope["teola.request_id"], exc_info=error)
            refusal = unexpected(scope["teola.request_id"])
        if not sender.has_begun:
            await respond(refusal, scope, headers)(scope, body, sender)

    def _refusal(self, method: str, headers: Headers) -> HttpError | None:
        """Return the error for a request that is refused by its headers alone; None if it may go on.

        These are a foreign `Host`, a page of another site where the server has no keys, and a body that is declared too
        large.
        """
        if self._hosts and host_without_port(headers.get("host", "")) not in self._hosts:
            return bad_request("the Host header names no host of this server.", "see `hosts` in its settings")
        if not self._service.settings.keys and method not in _SAFE_METHODS and _is_cross_site(headers):
            message = "a page of another site asks, and without keys this server answers its own pages alone."
            return HttpError(403, message, hint="give the server keys", kind="permission_error", code="cross_origin")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes(headers):
            return HttpError(413, f"{size_message(self._max_bytes(headers))}.", hint="send less")
        return None

    def _max_bytes(self, headers: Headers) -> int:
        """Return the largest body, in bytes, that is read; a form may also hold documents.

        The kind of body is taken from the declared content type. A larger body is refused with 413, by its declared
        length or once more has been read.
        """
        settings = self._service.settings
        form = headers.get("content-type", "").lower().startswith("multipart/form-data")
        return settings.max_body + (settings.documents.max_bytes if form else 0)

    def _record(self, scope: Scope, sender: _Sender, seconds: float, span: Any) -> None:
        """Write the request's line in the log, and add it to the metrics and to its span.

        `seconds`: from the first byte of the request to the end of its answer.
        """
        route = scope.get("route")
        path = getattr(route, "path", "") or "unknown"
        status = sender.status or CLIENT_GONE
        self._service.metrics.request(path, status, seconds)
        session = scope.get("teola.session")
        fields = {
            "request": scope["teola.request_id"],
            "method": scope["method"],
            "route": path,
            "status": status,
            "seconds": round(seconds, 4),
            **({} if session is None else session.log_fields()),
        }
        set_span_attributes(span, fields)
        if self._service.settings.log != "off":
            request_line(fields)


def respond(error: HttpError, scope: Scope, headers: Headers) -> JSONAnswer:
    """Return the error in the form of the protocol of the request, which has this scope and these headers.

    Requests of Anthropic's protocol get its form of errors, with the request's id in the body, and its status 529 for
    an overload. All others get OpenAI's form.
    """
    if speaks_anthropic(scope["path"], headers):
        status, body = to_anthropic(error, scope["teola.request_id"])
        return JSONAnswer(body, status, headers=error.headers)
    return JSONAnswer(error.body(), error.status, headers=error.headers)


def size_message(max_bytes: int) -> str:
    return f"the request is larger than {max_bytes} bytes"


def hosts_of(settings: ServerSettings) -> frozenset[str]:
    """Return the names by which the server may be addressed; none for any.

    Without keys only loopback names count, so that a page of another site cannot reach it under a name of its own.
    """
    if settings.hosts:
        return frozenset(name.lower() for name in settings.hosts)
    return frozenset() if settings.keys else frozenset((*LOOPBACK, settings.host.strip("[]").lower()))


def _is_cross_site(headers: Headers) -> bool:
    """Return True if a browser says that a page of another site sends the request.

    Browsers send `Origin` with such a request; programs usually send none, and count as not cross-site. Only servers
    without keys call this, for methods that may change something.
    """
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


class _LimitedReceiver:
    """An ASGI receiver that raises an error for a body that is too large."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._max_bytes, self._remaining = receive, max_bytes, max_bytes

    async def __call__(self) -> Message:
        """Return the next message of the request. Raise `HTTPException` (413) once its body exceeds the limit."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._remaining -= len(message.get("body", b""))
            if self._remaining < 0:
                raise HTTPException(413, size_message(self._max_bytes))
        return message


class _Sender:
    """An ASGI sender that adds the headers that every answer has."""

    def __init__(self, send: Send, id_headers: Mapping[str, str], *, tls: bool) -> None:
        self._send, self._id_headers, self._tls = send, id_headers, tls
        self.has_begun = False
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Send a message of the answer. Its first one gets the id of the request and the security headers."""
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self._id_headers)
            for name, value in _SECURITY.items():
                headers.setdefault(name, value)
            if self._tls:
                headers.setdefault("Strict-Transport-Security", "max-age=31536000")
        await self._send(message)


_SWEEP_S = 1.0
_LAG_INTERVAL_S = 0.1
"""Seconds between measurements of how late the loop is."""


def create_app(service: Service, store: Store) -> FastAPI:
    """Return the ASGI app of a service whose pool is running."""

    documents = Documents(service.settings.documents, files_of(store), service.clock)
    queries = Queries(service, store, service.settings.keep, documents)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Recover unfinished queries and start the server's own tasks; end both when the server stops."""
        await documents.store.open()
        await service.names.open(store)  # before unfinished queries go on under these names
        await queries.open()
        sweeping = asyncio.create_task(_sweep(service, queries))
        lagging = asyncio.create_task(_observe_lag(service))
        try:
            yield
        finally:
            for task in (sweeping, lagging):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await queries.close()

    app = FastAPI(
        title="teola",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        default_response_class=JSONAnswer,
    )
    app.state.service = service
    app.state.queries = queries
    app.state.documents = documents
    app.state.tickets = pages.Tickets()
    for routes in (operations, openai, messages, queries_routes, files, pages):
        app.include_router(routes.router)
    app.add_exception_handler(TeolaError, _on_teola_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(Envelope, service=service)
    return app


async def _sweep(service: Service, queries: Queries) -> None:
    """End idle queries and delete expired results, over and over, until the server stops and cancels this task."""
    while True:
        await asyncio.sleep(min(_SWEEP_S, service.settings.joined_idle / 2, service.settings.keep / 2))
        service.live.sweep()
        try:
            await queries.expire()
        except Exception as error:
            log.warning("results cannot be expired: %s", type(error).__name__)


async def _observe_lag(service: Service) -> None:
    """Measure how late the loop runs what is due, by which every request is delayed."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_INTERVAL_S
        await asyncio.sleep(_LAG_INTERVAL_S)
        service.metrics.observe_lag(max(0.0, loop.time() - due))


def _on_teola_error(request: Request, error: Any) -> Response:
    """Answer a request whose handler raised an error of this package, in the form of the request's protocol.

    FastAPI calls it. Errors of the server itself (status 500 and above) are logged.
    """
    failure = http_error(error)
    if failure.status >= 500:
        settings = request.app.state.service.settings
        log.warning(
            "request %s failed (%s): %s",
            request.scope["teola.request_id"],
            failure.code,
            describe_error(error, settings),
        )
    return respond(failure, request.scope, request.headers)


_OWN_ADDRESSES = ("/v1/activity", "/v1/queries", "/v1/rerank")
"""Addresses that neither OpenAI's protocol nor Anthropic's has."""


def _on_invalid_body(request: Request, error: Any) -> Response:
    """Answer a request whose body or parameters do not fit the schema, in its protocol's form. FastAPI calls it."""
    path = request.url.path
    protocol = "Anthropic" if speaks_anthropic(path, request.headers) else "OpenAI"
    is_own = path.startswith(_OWN_ADDRESSES)
    reference = "/openapi.json for what this address takes" if is_own else f"{protocol}'s reference for the parameter"
    return respond(invalid(error.errors()[0], f"see {reference}"), request.scope, request.headers)


def _on_http_exception(request: Request, error: Any) -> Response:
    """Answer the framework's own errors: no such address, no such method.

    FastAPI calls it. The status and the headers of the error, such as `Allow`, are kept; the body has the form of the
    request's protocol.
    """
    hint = "see /openapi.json for the addresses" if error.status_code in (404, 405) else ""
    failure = HttpError(error.status_code, f"{error.detail}.", hint=hint, headers=error.headers)
    return respond(failure, request.scope, request.headers)


_HEAD = b"HTTP/"
"""First bytes of the head of an answer; no piece of a chunked body begins with them."""


class CoalescingTransport(asyncio.Transport):
    """A transport that buffers writes until the loop's next turn, and the head of an answer until its body."""

    def __init__(self, real: asyncio.Transport) -> None:
        """Wrap the transport of a connection. Called on the loop that serves it.

        `_buffer`: pieces that were written in this turn of the loop and are not sent yet.
        """
        super().__init__()
        self._real = real
        self._loop = asyncio.get_running_loop()
        self._buffer: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Buffer a piece of an answer, to be sent with what else this turn of the loop writes.

        The head of an answer is sent at once when its body follows.
        """
        self._buffer.append(bytes(data))
        if len(self._buffer) == 1:
            self._loop.call_soon(self._send)
        elif len(self._buffer) == 2 and self._buffer[0].startswith(_HEAD):
            self._send()  # at once: before what the server does after an answer

    def _send(self) -> None:
        """Send all buffered pieces as one. They are dropped if the connection is closing.

        Called by the loop in the turn after the first write, and earlier by `write` and `close`; then the loop's own
        call finds nothing left to send.
        """
        pieces, self._buffer = self._buffer, []
        if pieces and not self._real.is_closing():
            self._real.write(b"".join(pieces))

    def close(self) -> None:
        """Send what is buffered, and close.

        Without this, the end of an answer would be lost when uvicorn closes a connection in the turn in which it wrote.
        """
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
            """Read from the socket, and note in the scope of a request when its first byte arrived.

            The time is on the server's clock. Goals, deadlines and measured latencies of the request count from it, so
            that reading a large body is part of them.
            """
            now, before = clock(), self.scope
            super().data_received(data)
            if self.scope is not before:  # a request has begun; its answer comes in a later turn of the loop
                self.scope["teola.began"] = now

    return Sending


_POLL_S = 0.05
"""Seconds between looks at the running requests, while the server drains."""


def check_files(settings: ServerSettings) -> None:
    """Raise `ConfigError` for TLS files that do not exist.

    Called before the server starts, so that a wrong path is reported with its setting instead of an error of Python's
    ssl module.
    """
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
    """Return the URL of the server, for what `teola serve` prints.

    The port is that of the bound socket, since the settings may say 0 to get any free one. IPv6 hosts get brackets.
    """
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
            """Let running requests end before uvicorn closes its connections.

            uvicorn calls it after SIGTERM or SIGINT. What `drain` leaves of its seconds, at least one, is uvicorn's own
            limit for open connections.
            """
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
