"""The ASGI app of a service, and the middleware around every request."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teola_plugin import __version__
from teola_plugin.errors import TeolaError
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.files import files_of
from teola_plugin.server.errors import CLIENT_GONE, HttpError, bad_request, http_error, invalid, unexpected
from teola_plugin.server.logs import log, named, request_line
from teola_plugin.server.queries.runner import Queries
from teola_plugin.server.queries.store import Store
from teola_plugin.server.routes import files, openai, operations, pages
from teola_plugin.server.routes import queries as queries_routes
from teola_plugin.server.service import Service
from teola_plugin.server.settings import LOOPBACK, ServerSettings, name_of
from teola_plugin.server.tracing import tell
from teola_plugin.server.wire.answers import JSONAnswer

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_READING = ("GET", "HEAD", "OPTIONS")
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
    """ASGI middleware; the outermost of ours."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._hosts = hosts_of(service.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        scope["teola.request_id"] = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        sent = _Sent(send, scope["teola.request_id"], tls=scope.get("scheme") == "https")
        began = scope.setdefault("teola.began", self._service.clock())
        with self._service.spans.around(scope, headers) as span:
            try:
                await self._answer(scope, headers, _Limited(receive, self._most(headers)), sent)
            finally:
                self._told(scope, sent, self._service.clock() - began, span)

    async def _answer(self, scope: Scope, headers: Headers, body: _Limited, sent: _Sent) -> None:
        refusal = self._refusal(scope["method"], headers)
        try:
            if refusal is None:
                await self._app(scope, body, sent)
                return
        except Exception as error:
            log.error("request %s failed", scope["teola.request_id"], exc_info=error)
            refusal = unexpected(scope["teola.request_id"])
        if not sent.begun:
            await respond(refusal)(scope, body, sent)

    def _refusal(self, method: str, headers: Headers) -> HttpError | None:
        if self._hosts and name_of(headers.get("host", "")) not in self._hosts:
            return bad_request("the Host header names no host of this server.", "see `hosts` in its settings")
        if not self._service.settings.keys and method not in _READING and _elsewhere(headers):
            what = "a page of another site asks, and without keys this server answers its own pages alone."
            return HttpError(403, what, hint="give the server keys", kind="permission_error", code="cross_origin")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._most(headers):
            return HttpError(413, f"{told_of_size(self._most(headers))}.", hint="send less")
        return None

    def _most(self, headers: Headers) -> int:
        """Bytes of a body; of a form, with documents."""
        settings = self._service.settings
        form = headers.get("content-type", "").lower().startswith("multipart/form-data")
        return settings.max_body + (settings.documents.max_bytes if form else 0)

    def _told(self, scope: Scope, sent: _Sent, seconds: float, span: Any) -> None:
        route = scope.get("route")
        where = getattr(route, "path", "") or "unknown"
        status = sent.status or CLIENT_GONE
        self._service.metrics.request(where, status, seconds)
        visit = scope.get("teola.visit")
        about = {
            "request": scope["teola.request_id"],
            "method": scope["method"],
            "route": where,
            "status": status,
            "seconds": round(seconds, 4),
            **({} if visit is None else visit.about()),
        }
        tell(span, about)
        if self._service.settings.log != "off":
            request_line(about)


def respond(error: HttpError) -> JSONAnswer:
    return JSONAnswer(error.body(), error.status, headers=error.headers)


def told_of_size(most: int) -> str:
    return f"the request is larger than {most} bytes"


def hosts_of(settings: ServerSettings) -> frozenset[str]:
    """Names by which it may be addressed; none for any. Where no key is asked for, a page of somebody else's must not
    reach it under a name of its own."""
    if settings.hosts:
        return frozenset(name.lower() for name in settings.hosts)
    return frozenset() if settings.keys else frozenset((*LOOPBACK, settings.host.strip("[]").lower()))


def _elsewhere(headers: Headers) -> bool:
    """Whether a browser says that the request is of a page of another site: forms of any site may be sent here."""
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


class _Limited:
    """Receives no more than so many bytes of a body."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most, self._left = receive, most, most

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, told_of_size(self._most))
        return message


class _Sent:
    """Sends, with the headers that every answer has."""

    def __init__(self, send: Send, request_id: str, *, tls: bool) -> None:
        self._send, self._id, self._tls = send, request_id, tls
        self.begun = False
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self._id
            for name, value in _SECURITY.items():
                headers.setdefault(name, value)
            if self._tls:
                headers.setdefault("Strict-Transport-Security", "max-age=31536000")
        await self._send(message)


_SWEEP = 1.0
_LOOKING = 0.1
"""Seconds between looks at how late the loop is."""


def create_app(service: Service, store: Store) -> FastAPI:
    """The addresses of a service whose pool is running."""

    documents = Documents(service.settings.documents, files_of(store), service.clock)
    queries = Queries(service, store, service.settings.keep, documents)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await documents.store.open()
        await service.names.open(store)  # before queries that were left go on under them
        await queries.open()
        sweeping = asyncio.create_task(_sweep(service, queries))
        lagging = asyncio.create_task(_lag(service))
        try:
            yield
        finally:
            for task in (sweeping, lagging):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await queries.close()

    made = FastAPI(
        title="teola",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        default_response_class=JSONAnswer,
    )
    made.state.service = service
    made.state.queries = queries
    made.state.documents = documents
    made.state.tickets = pages.Tickets()
    for rooms in (operations, openai, queries_routes, files, pages):
        made.include_router(rooms.router)
    made.add_exception_handler(TeolaError, _failed)
    made.add_exception_handler(RequestValidationError, _invalid)
    made.add_exception_handler(HTTPException, _refused)
    made.add_middleware(Envelope, service=service)
    return made


async def _sweep(service: Service, queries: Queries) -> None:
    while True:
        await asyncio.sleep(min(_SWEEP, service.settings.joined_idle / 2, service.settings.keep / 2))
        service.live.sweep()
        try:
            await queries.expire()
        except Exception as error:
            log.warning("results cannot be expired: %s", type(error).__name__)


async def _lag(service: Service) -> None:
    """How late the loop comes to what is due: whoever asks waits so much longer."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LOOKING
        await asyncio.sleep(_LOOKING)
        service.metrics.lagged(max(0.0, loop.time() - due))


def _failed(request: Request, error: Any) -> Response:
    found = http_error(error)
    if found.status >= 500:
        settings = request.app.state.service.settings
        log.warning("request %s failed (%s): %s", request.scope["teola.request_id"], found.code, named(error, settings))
    return respond(found)


_OUR_OWN = ("/v1/activity", "/v1/queries", "/v1/rerank")
"""Addresses that OpenAI's protocol has not."""


def _invalid(request: Request, error: Any) -> Response:
    of_openai = not request.url.path.startswith(_OUR_OWN)
    reference = "OpenAI's reference for the parameter" if of_openai else "/openapi.json for what this address takes"
    return respond(invalid(error.errors()[0], f"see {reference}"))


def _refused(request: Request, error: Any) -> Response:
    """What the framework says itself: no such address, no such method."""
    hint = "see /openapi.json for the addresses" if error.status_code in (404, 405) else ""
    made = HttpError(error.status_code, f"{error.detail}.", hint=hint, headers=error.headers)
    return respond(made)
