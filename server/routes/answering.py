"""What all routes that ask models do: take the request, watch its client, give it an answer or a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from teola_plugin.errors import TeolaError
from teola_plugin.server.callers import Caller, Told
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.parts import has_files
from teola_plugin.server.errors import CLIENT_GONE, HttpError, http_error, unexpected
from teola_plugin.server.live_queries import Visit
from teola_plugin.server.models.base import Model
from teola_plugin.server.models.engines import CarriedEngine
from teola_plugin.server.service import Service
from teola_plugin.server.wire.answers import JSONAnswer, event
from teola_plugin.server.wire.requests import ChatRequest

T = TypeVar("T")
log = logging.getLogger("teola_plugin.server")


def service_of(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


def caller_of(request: Request) -> Caller:
    """Who asks: every key is looked at for it, once for a request. Raises `HttpError`."""
    found: Caller | None = request.scope.get("teola.caller")
    if found is None:
        found = request.scope["teola.caller"] = service_of(request).caller(request.headers)
    return found


def model_of(request: Request, name: str, *kinds: str) -> Model:
    """The model that the request may ask. Raises `HttpError`."""
    return service_of(request).model(name, caller_of(request), *kinds)


async def with_documents_read(request: Request, model: Model, body: ChatRequest) -> ChatRequest:
    """The chat with the texts of its documents. Raises `HttpError`."""
    if not has_files(body):
        return body
    documents: Documents = request.app.state.documents
    caller = caller_of(request)
    carried = isinstance(model, CarriedEngine)
    return await while_connected(request, documents.read(caller.tenant, body, caller, carried=carried))


def terms_of(request: Request) -> Told:
    """What its headers ask for, in seconds from its first byte on. Raises `HttpError`."""
    return Told.of(request.headers, request.scope["teola.began"])


def begin(request: Request, model: Model, tokens: int) -> Visit:
    """The request has a place; end the visit. Raises `HttpError`."""
    service = service_of(request)
    caller, told = caller_of(request), terms_of(request)
    visit = service.visit(request.scope["teola.request_id"], caller, told, model, tokens)
    request.scope["teola.visit"] = visit
    return visit


async def whole(request: Request, visit: Visit, work: Awaitable[Any]) -> Response:
    """The answer as JSON. A client that leaves ends the work."""
    try:
        return Whole(visit, await while_connected(request, work))
    except BaseException as error:
        visit.end(outcome_of(error))
        raise


async def streamed(
    request: Request,
    visit: Visit,
    events: AsyncIterator[str],
    failed: Callable[[HttpError], str] = lambda error: event(error.body()),
) -> Response:
    """The events as they come. What goes wrong before the first is an error as without streaming; later it is the last
    event, spelled by `failed`."""
    try:
        first = await while_connected(request, anext(events, None))
    except BaseException as error:
        visit.end(outcome_of(error))
        raise
    return Events(visit, first, events, failed)


class Whole(JSONAnswer):
    """An answer that ends its visit once it is sent: what closing a query costs, nobody waits for."""

    def __init__(self, visit: Visit, content: Any) -> None:
        self._visit = visit
        super().__init__(content, headers=told_of(visit))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except BaseException as error:
            self._visit.end(outcome_of(error))
            raise
        self._visit.end("done")


class Events(StreamingResponse):
    """A stream of events that belongs to a visit, and ends it, however it ends."""

    def __init__(
        self, visit: Visit, first: str | None, events: AsyncIterator[str], failed: Callable[[HttpError], str]
    ) -> None:
        self._visit, self._events = visit, events
        headers = {**told_of(visit), "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._told(first, failed), media_type="text/event-stream", headers=headers)

    async def _told(self, first: str | None, failed: Callable[[HttpError], str]) -> AsyncIterator[str]:
        try:
            if first is not None:
                yield first
            async for one in self._events:
                yield one
        except TeolaError as error:
            self._visit.end("failed")
            yield failed(http_error(error))
        except Exception as error:
            self._visit.end("failed")
            log.error("request %s failed in its stream", self._visit.request_id, exc_info=error)
            yield failed(unexpected(self._visit.request_id))
        else:
            self._visit.end("done")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await asyncio.shield(close())
            self._visit.end("cancelled")


def outcome_of(error: BaseException) -> str:
    gone = isinstance(error, HttpError) and error.status == CLIENT_GONE
    return "cancelled" if gone or isinstance(error, asyncio.CancelledError) else "failed"


def told_of(visit: Visit) -> dict[str, str]:
    """Headers of every answer that a model gives."""
    return {"X-Teola-Query": visit.query.id}


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """What the work gives. It is cancelled when the client leaves: `HttpError` with `CLIENT_GONE`.

    It runs in the task of the request: with one of its own, every answer would wait for more turns of the loop.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    def leave(_: object) -> None:
        nonlocal left
        left = True
        task.cancel()

    watching = asyncio.ensure_future(_left(request))
    watching.add_done_callback(leave)
    try:
        found = await work
    except BaseException:
        if not left:
            raise
    finally:
        watching.remove_done_callback(leave)
        watching.cancel()
    if left:
        task.uncancel()
        raise HttpError(CLIENT_GONE, "the client has left.", code="cancelled")
    return found


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
