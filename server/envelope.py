"""Around every request: an id, limits on its size and host, security headers, one line in the log, figures."""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teola_plugin.server.access.hosts import LOOPBACK, name_of
from teola_plugin.server.errors import CLIENT_GONE, HttpError, bad_request, unexpected
from teola_plugin.server.logs import log, request_line
from teola_plugin.server.service import Service
from teola_plugin.server.settings import ServerSettings
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
