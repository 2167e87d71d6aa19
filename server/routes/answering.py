"""What all routes that ask models share: begin a session, watch the client, send an answer or a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from teola_plugin.errors import TeolaError
from teola_plugin.server.callers import Caller, RequestHeaders
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.parts import has_files
from teola_plugin.server.errors import CLIENT_GONE, HttpError, http_error, unexpected
from teola_plugin.server.live_queries import RequestSession
from teola_plugin.server.models.base import ChatModel, Model
from teola_plugin.server.models.engines import CarriedEngine
from teola_plugin.server.service import Service
from teola_plugin.server.wire.answers import Answer, Delta, JSONAnswer, event
from teola_plugin.server.wire.requests import ChatRequest

T = TypeVar("T")
log = logging.getLogger("teola_plugin.server")


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> Caller:
    """Return the caller, which is looked up once for a request. Raise `HttpError`.

    The error is 401, for a missing or unknown key. A server without keys has one caller for all requests.
    """
    caller: Caller | None = request.scope.get("teola.caller")
    if caller is None:
        caller = request.scope["teola.caller"] = service_of(request).caller(request.headers)
    return caller


def model_of(request: Request, name: str, *kinds: str) -> Model:
    """Return a model that the request may ask. Raise `HttpError`."""
    return service_of(request).model(name, caller_of(request), *kinds)


async def with_documents_read(request: Request, model: Model, body: ChatRequest) -> ChatRequest:
    """Return the chat with the texts of its documents. Raise `HttpError`."""
    if not has_files(body):
        return body
    documents: Documents = request.app.state.documents
    caller = caller_of(request)
    carried = isinstance(model, CarriedEngine)
    return await while_connected(request, documents.with_texts(caller.tenant, body, caller, carried=carried))


def request_headers_of(request: Request) -> RequestHeaders:
    """Return what the X-Teola headers ask for, in seconds from the request's first byte. Raise `HttpError`."""
    return RequestHeaders.parse(request.headers, request.scope["teola.began"])


def begin_session(request: Request, model: Model, tokens: int) -> RequestSession:
    """Begin the request's session, which the caller has to end. Raise `HttpError` if the request is refused.

    `tokens`: an estimate for prompt and answer, for the bounds of the queue. Refused are malformed X-Teola headers
    (400), requests beyond a limit of the key or the queue (429), and all while the server drains (503).
    """
    caller, headers = caller_of(request), request_headers_of(request)
    session = service_of(request).begin_session(request.scope["teola.request_id"], caller, headers, model, tokens)
    request.scope["teola.session"] = session
    return session


async def respond(request: Request, session: RequestSession, work: Awaitable[Any]) -> Response:
    """Return the answer as JSON. The work is cancelled if the client leaves."""
    try:
        return SessionResponse(session, await while_connected(request, work))
    except BaseException as error:
        session.end(outcome_of(error))
        raise


async def respond_stream(
    request: Request,
    session: RequestSession,
    events: AsyncIterator[str],
    failed: Callable[[HttpError], str] = lambda error: event(error.body()),
) -> Response:
    """Return a stream of the events.

    An error before the first event has its own status; a later one becomes the last event, which `failed` writes.
    """
    try:
        first = await while_connected(request, anext(events, None))
    except BaseException as error:
        session.end(outcome_of(error))
        raise
    return SessionStream(session, first, events, failed)


class AnswerWriter(Protocol):
    """A writer of one answer in the form of a protocol, whole or event by event."""

    def to_json(self, answer: Answer) -> dict[str, Any]: ...

    def begin_events(self) -> Iterator[str]: ...

    def events_of(self, delta: Delta) -> Iterator[str]: ...

    def failure_event(self, error: HttpError) -> str: ...


async def respond_written(
    request: Request, model: ChatModel, chat: ChatRequest, writer: AnswerWriter, max_tokens: int | None, *, stream: bool
) -> Response:
    """Let the model answer the chat of another protocol, and return the answer in that protocol's form.

    `max_tokens`: tokens that the answer may have, None for the model's limit. Raise `HttpError`.
    """
    chat = await with_documents_read(request, model, chat)
    session = begin_session(request, model, model.estimate_tokens(chat.characters, max_tokens, 1))
    if stream:
        return await respond_stream(
            request, session, _written_events(model, chat, writer, session), writer.failure_event
        )
    return await respond(request, session, _written_answer(model, chat, writer, session))


async def _written_answer(
    model: ChatModel, chat: ChatRequest, writer: AnswerWriter, session: RequestSession
) -> dict[str, Any]:
    return writer.to_json((await model.answer(chat, session))[0])


async def _written_events(
    model: ChatModel, chat: ChatRequest, writer: AnswerWriter, session: RequestSession
) -> AsyncIterator[str]:
    """Yield a model's streamed answer as events in the form that `writer` writes.

    The first events wait for the model's first piece, so that a refusal still has its own HTTP status.
    """
    has_begun = False
    async with aclosing(model.stream(chat, session)) as deltas:
        async for delta in deltas:
            if not has_begun:  # not earlier, so that a refusal keeps its status
                has_begun = True
                for line in writer.begin_events():
                    yield line
            for line in writer.events_of(delta):
                yield line


class SessionResponse(JSONAnswer):
    """An answer that ends its session once it is sent, so that no client waits for the end of a query."""

    def __init__(self, session: RequestSession, content: Any) -> None:
        self._session = session
        super().__init__(content, headers=session_headers(session))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then end the session: as done, failed, or cancelled if the client has left."""
        try:
            await super().__call__(scope, receive, send)
        except BaseException as error:
            self._session.end(outcome_of(error))
            raise
        self._session.end("done")


class SessionStream(StreamingResponse):
    """A stream of events that ends its session, however the stream ends."""

    def __init__(
        self, session: RequestSession, first: str | None, events: AsyncIterator[str], failed: Callable[[HttpError], str]
    ) -> None:
        """Prepare the stream. Its headers keep proxies from storing or buffering it.

        `first`: the event that was read before the answer began; None if there was none. `failed`: writes an error that
        comes later as the last event.
        """
        self._session, self._events = session, events
        headers = {**session_headers(session), "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._lines(first, failed), media_type="text/event-stream", headers=headers)

    async def _lines(self, first: str | None, failed: Callable[[HttpError], str]) -> AsyncIterator[str]:
        """Yield the lines of the stream, and end the session as done or failed. An error becomes the last event.

        `first`: the event that was read before the answer began.
        """
        try:
            if first is not None:
                yield first
            async for line in self._events:
                yield line
        except TeolaError as error:
            self._session.end("failed")
            yield failed(http_error(error))
        except Exception as error:
            self._session.end("failed")
            log.error("request %s failed in its stream", self._session.request_id, exc_info=error)
            yield failed(unexpected(self._session.request_id))
        else:
            self._session.end("done")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. However it ends, close the source of its events and the session.

        Ending the session as cancelled has no effect if the stream has ended it before.
        """
        try:
            await super().__call__(scope, receive, send)
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await asyncio.shield(close())
            self._session.end("cancelled")


def outcome_of(error: BaseException) -> str:
    client_left = isinstance(error, HttpError) and error.status == CLIENT_GONE
    return "cancelled" if client_left or isinstance(error, asyncio.CancelledError) else "failed"


def session_headers(session: RequestSession) -> dict[str, str]:
    """Return the headers of every answer that a model gives."""
    return {"X-Teola-Query": session.query.id}


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the work's result. Cancel the work if the client leaves, and raise `HttpError` (`CLIENT_GONE`).

    The work runs in the task of the request: a task of its own would delay every answer by turns of the loop.
    """
    task, has_left = asyncio.current_task(), False
    assert task is not None

    def leave(_: object) -> None:
        """Cancel the request's task, and note that it was the client's leaving that did so.

        Called on the loop when the connection has ended while the work runs.
        """
        nonlocal has_left
        has_left = True
        task.cancel()

    async def until_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(until_disconnect())
    watching.add_done_callback(leave)
    try:
        result = await work
    except BaseException:
        if not has_left:
            raise
    finally:
        watching.remove_done_callback(leave)
        watching.cancel()
    if has_left:
        task.uncancel()
        raise HttpError(CLIENT_GONE, "the client has left.", code="cancelled")
    return result
