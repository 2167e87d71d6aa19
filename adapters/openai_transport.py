"""The transport of a client of the `openai` package: chat completions are carried by an engine of the pool.

A request goes past the engine, by the client that the object came with, only where the engine never took it: requests
of other kinds, to other addresses, or with means of their own (hooks, logins); requests that are too large for it; and
where something here fails before anything is sent. What became of a request that was taken is told to the client as
its server and its connection would have told it. What the pool itself says (`QueryTimeout`, `QueryCancelled`,
`EngineOverloaded`, `EngineUnavailable`) reaches the caller of the object as it is, past a client that retries or wraps
every `Exception`: see `raising_pool_errors`.

That package uses `httpx`, or `httpx2` from its version 3 on; whichever it is, it is found through the client's class.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.envelope import Envelope, without_credentials
from teola_plugin.engines.openai.http import broken_in, refusal_in, unsent
from teola_plugin.errors import (
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    QueryError,
    RequestTooLarge,
    TeolaError,
)
from teola_plugin.event_streams import DONE, write_event
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import AnswerForm, Generate
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.context import current_run
from teola_plugin.runtime.handles import CallHandle, PieceLog

T = TypeVar("T")
_END = object()
_capture: ContextVar[bool] = ContextVar("teola_capture", default=False)
_raising: ContextVar[bool] = ContextVar("teola_raising", default=False)


class Captured(BaseException):
    """A request that was asked for, in place of its answer. No `Exception`, so that no client retries it."""

    def __init__(self, asked: Generate) -> None:
        super().__init__()
        self.asked = asked


class Bypass(BaseException):
    """An error of the pool on its way through the client. No `Exception`, so that no client retries or wraps it."""

    def __init__(self, error: TeolaError) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Requests in the body raise `Captured` and are not sent."""
    token = _capture.set(True)
    try:
        yield
    finally:
        _capture.reset(token)


@contextlib.contextmanager
def raising_pool_errors() -> Iterator[None]:
    """The body uses a client: what the pool says of its requests is raised as it is, past what the client would do.

    Around whatever of an object's methods sends requests. Outside of it a client is told that the connection broke.
    """
    token = _raising.set(True)
    try:
        yield
    except Bypass as bypass:
        raise bypass.error from bypass.error.__cause__
    finally:
        _raising.reset(token)


def raising_pool_errors_in(items: Iterator[T]) -> Iterator[T]:
    """The items, each made inside `raising_pool_errors()`."""
    with contextlib.closing(items):  # type: ignore[type-var]
        while True:
            with raising_pool_errors():
                item = next(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


async def araising_pool_errors_in(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """`raising_pool_errors_in` in a loop."""
    async with contextlib.aclosing(items):  # type: ignore[type-var]
        while True:
            with raising_pool_errors():
                item = await anext(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


def raise_past_client(error: TeolaError) -> None:
    """Raises it past the client, inside of `raising_pool_errors()`; does nothing elsewhere."""
    if _raising.get():
        raise Bypass(error)


def raise_captured(asked: Generate) -> None:
    """Raises `Captured`, inside of `capturing()`; does nothing elsewhere."""
    if _capture.get():
        raise Captured(asked)


log = logging.getLogger("teola_plugin")
_OF_THE_POOL = (QueryError, EngineUnavailable, EngineOverloaded)


class EventEncoder:
    """An encoder of chunks to the bytes that the server would have sent to this client alone.

    An engine asks for the usage, which comes in a chunk of its own at the end. For a client that did not ask for it,
    that chunk is left out, and what else it says about the answer goes to the last of the others.
    """

    def __init__(self, asked: Generate, body: Mapping[str, Any]) -> None:
        exact = isinstance(asked.prompt, wire.WirePrompt) and asked.prompt.exact
        self.is_exact = exact or bool((body.get("stream_options") or {}).get("include_usage"))
        """Whether every chunk is passed on as it came."""
        self._last: dict[str, Any] | None = None
        """A chunk that ends a choice, and is not sent yet: perhaps the last."""

    def encode(self, chunk: str) -> bytes:
        data = json.loads(chunk)
        if self.is_exact or not isinstance(data.get("choices", 0), list | None):
            return self.flush() + _event(data)
        data.pop("usage", None)
        if not data["choices"]:
            if self._last is not None:
                self._last = {**data, **self._last}
            return b""
        before, choice = self.flush(), data["choices"][0]
        if isinstance(choice, Mapping) and choice.get("finish_reason"):
            self._last = data
            return before
        return before + _event(data)

    def flush(self) -> bytes:
        last, self._last = self._last, None
        return b"" if last is None else _event(last)


def _event(data: Mapping[str, Any]) -> bytes:
    return write_event(json.dumps(data)).encode()


class _Taken(NamedTuple):
    """A request that the engine has."""

    handle: CallHandle
    asked: Generate
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


class _Transport:
    """What both kinds of transport have in common. `inner` is the client that the object came with."""

    def __init__(self, inner: Any, pool: EnginePool, engine: str, http: Any) -> None:
        self._inner, self._pool, self._engine, self._http = inner, pool, engine, http

    def _take(self, request: Any) -> _Taken | None:
        """None for a request that goes past the engine. Whatever fails here, nothing was sent."""
        try:
            found = self._asked(request)
            if found is None:
                return None
            asked, body = found
            raise_captured(asked)
            run = current_run.get()  # the adapters see to it that it is set, or the terms
            stream = bool(body.get("stream"))
            handle = self._pool.call(PrimitiveKind.PREFILLING, self._engine, [asked], stream=stream, run=run)
        except Exception as error:
            bug = None if isinstance(error, TeolaError) else error
            log.warning("a request goes past engine %s: %s", self._engine, type(error).__name__, exc_info=bug)
            return None
        return _Taken(handle, asked, body)

    def _asked(self, request: Any) -> tuple[Generate, dict[str, Any]] | None:
        """The generation that a request asks for, and its body; None for any other request."""
        server: Any = self._pool.engine(self._engine)
        if request.method != "POST" or not self._reaches(request.url, server):
            return None
        if self._inner.auth is not None or any(self._inner.event_hooks.values()):
            return None
        body = json.loads(request.content)
        envelope = Envelope.of(str(request.url), request.url.params.multi_items(), request.headers.multi_items())
        exact = not (server.joins and wire.joinable(body))
        prompt = wire.WirePrompt.of(body, exact=exact, envelope=envelope)
        form = AnswerForm.STREAMED if body.get("stream") else AnswerForm.WHOLE
        return Generate(prompt, prompt.sampling, form if exact else None), body

    def _reaches(self, url: Any, server: Any) -> bool:
        """Whether a request for this address asks the engine's server for a chat completion."""
        known = str(self._http.URL(f"{server.base_url}/chat/completions"))
        return without_credentials(str(url)) == without_credentials(known)

    def _whole(self, value: Any) -> Any:
        """Return a response with the headers that the server sent."""
        content = value.response.encode("utf-8", "surrogatepass")
        response = self._http.Response(200, headers={"content-type": "application/json"}, content=content)
        response.headers = self._http.Headers(wire.whole_headers(value.headers))
        return response  # a content-encoding is among them only now: it is already undone

    def _answer(self, error: TeolaError, request: Any) -> Any:
        """What the client gets for a request that was taken and failed: the server's own answer, if it gave one. Its
        meaning, and whether to try again, is the object's to say."""
        refusal = refusal_in(error) if isinstance(error, EngineError) else None
        if refusal is not None:
            kept = {k: v for k, v in refusal.headers.items() if k.lower() not in ("content-length", "content-encoding")}
            return self._http.Response(refusal.status, headers=kept, content=refusal.content.encode())
        if not _broken(error):
            raise_past_client(error)
        raise self._as_the_connection(error, request) from error

    def _as_the_connection(self, error: TeolaError, request: Any) -> Any:
        """The exception by which the client would have learnt of it from its own connection."""
        kind: Any = getattr(self._http, _broken(error) or "ReadError", None)
        known = isinstance(kind, type) and issubclass(kind, self._http.TransportError)
        return (kind if known else self._http.ReadError)(str(error), request=request)

    @contextlib.contextmanager
    def _streaming(self, handle: CallHandle, request: Any) -> Iterator[None]:
        """Whoever leaves a stream early no longer wants it; a stream that fails does so as the client's own would."""
        try:
            with self._in_time(handle, request):
                yield
        except _OF_THE_POOL:
            raise
        except TeolaError as error:
            raise self._as_the_connection(error, request) from error
        except BaseException:
            handle.cancel()
            raise

    @contextlib.contextmanager
    def _in_time(self, handle: CallHandle, request: Any) -> Iterator[None]:
        """What comes too late is given up, and told as the client's own connection tells it."""
        try:
            yield
        except _OF_THE_POOL:
            raise
        except TimeoutError as error:
            handle.cancel()
            raise self._http.ReadTimeout(str(error), request=request) from error

    def _streamed(self, stream: Any, headers: wire.Headers) -> Any:
        return self._http.Response(200, headers=headers, stream=stream)


def _broken(error: TeolaError) -> str:
    return broken_in(error) if isinstance(error, EngineError) else ""


def _never_sent(error: TeolaError) -> bool:
    """Whether the engine said beforehand that it does not carry the request."""
    return unsent(error) or (isinstance(error, RequestTooLarge) and refusal_in(error) is None)


def _seconds(request: Any) -> float | None:
    return (request.extensions.get("timeout") or {}).get("read")  # type: ignore[no-any-return]


async def _within(pieces: PieceLog, seconds: float | None) -> AsyncIterator[Piece]:
    """The pieces. Raises `TimeoutError` when the next one takes longer than that."""
    async with contextlib.aclosing(aiter(pieces)) as found:  # type: ignore[type-var]
        while True:
            async with asyncio.timeout(seconds):
                piece = await anext(found, None)
            if piece is None:
                return
            yield piece


def _like(inner: Any) -> dict[str, Any]:
    """What a client makes its requests of; logins and hooks are applied by `inner` itself, when it sends."""
    names = ("base_url", "timeout", "headers", "params", "cookies", "follow_redirects")
    return {name: getattr(inner, name) for name in names}


class EngineTransport(_Transport):
    @classmethod
    def client(cls, inner: Any, pool: EnginePool, engine: str) -> Any:
        """A client as `inner` is one, whose chat completions the engine carries."""
        http = _http_of(inner, "Client")
        return http.Client(transport=cls(inner, pool, engine, http), **_like(inner))

    def handle_request(self, request: Any) -> Any:
        taken = self._take(request)
        if taken is None:
            return self._inner.send(request, stream=True)
        try:
            if taken.streamed:
                return self._stream(taken, request)
            [value] = taken.handle.result(_seconds(request))
        except TimeoutError as error:
            raise self._http.ReadTimeout(str(error), request=request) from error
        except TeolaError as error:
            return self._inner.send(request, stream=True) if _never_sent(error) else self._answer(error, request)
        return self._whole(value)

    def _stream(self, taken: _Taken, request: Any) -> Any:
        """Waits for the first chunk, so that a refusal is one."""
        handle, encoder = taken.handle, EventEncoder(taken.asked, taken.body)
        pieces = handle.pieces.within(_seconds(request))
        with self._in_time(handle, request):
            first: Any = next(pieces, None)
        headers = first.headers if first is not None else handle.result()[0].headers  # raises what the server said

        def events() -> Iterator[bytes]:
            with self._streaming(handle, request):
                for piece in itertools.chain([] if first is None else [first], pieces):
                    yield encoder.encode(piece.chunk)
                [value] = handle.result()
                for chunk in wire.chunks_of(value.response) if first is None else ():
                    yield encoder.encode(chunk)
                yield encoder.flush() + write_event(DONE).encode()

        stream = type("Stream", (self._http.SyncByteStream,), {"__iter__": lambda _: events(), "close": lambda _: None})
        return self._streamed(stream(), wire.stream_headers(headers, is_exact=encoder.is_exact))

    def __enter__(self) -> EngineTransport:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """The client that the object came with stays open: it is the object's."""


class AsyncEngineTransport(_Transport):
    @classmethod
    def client(cls, inner: Any, pool: EnginePool, engine: str) -> Any:
        """`EngineTransport.client` for a loop."""
        http = _http_of(inner, "AsyncClient")
        return http.AsyncClient(transport=cls(inner, pool, engine, http), **_like(inner))

    async def handle_async_request(self, request: Any) -> Any:
        taken = self._take(request)
        if taken is None:
            return await self._inner.send(request, stream=True)
        try:
            if taken.streamed:
                return await self._stream(taken, request)
            async with asyncio.timeout(_seconds(request)):
                [value] = await taken.handle
        except TimeoutError as error:
            raise self._http.ReadTimeout(str(error), request=request) from error
        except TeolaError as error:
            past = _never_sent(error)
            return await self._inner.send(request, stream=True) if past else self._answer(error, request)
        return self._whole(value)

    async def _stream(self, taken: _Taken, request: Any) -> Any:
        handle, encoder = taken.handle, EventEncoder(taken.asked, taken.body)
        pieces = _within(handle.pieces, _seconds(request))
        with self._in_time(handle, request):
            first: Any = await anext(pieces, None)
        headers = first.headers if first is not None else (await handle)[0].headers

        async def events() -> AsyncIterator[bytes]:
            with self._streaming(handle, request):
                if first is not None:
                    yield encoder.encode(first.chunk)
                async for piece in pieces:
                    yield encoder.encode(piece.chunk)  # type: ignore[attr-defined]
                [value] = await handle
                for chunk in wire.chunks_of(value.response) if first is None else ():
                    yield encoder.encode(chunk)
                yield encoder.flush() + write_event(DONE).encode()

        async def aclose(_: Any) -> None: ...

        stream = type("Stream", (self._http.AsyncByteStream,), {"__aiter__": lambda _: events(), "aclose": aclose})
        return self._streamed(stream(), wire.stream_headers(headers, is_exact=encoder.is_exact))

    async def __aenter__(self) -> AsyncEngineTransport:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def aclose(self) -> None:
        """As `EngineTransport.close`."""


def _http_of(client: Any, name: str) -> Any:
    """The module (`httpx` or `httpx2`) that a client's class comes from."""
    base = next(cls for cls in type(client).__mro__ if cls.__name__ == name and cls.__module__.startswith("httpx"))
    return import_module(base.__module__.partition(".")[0])
