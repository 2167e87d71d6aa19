"""The transport of a client of the `openai` package: an engine of the pool carries chat completions, or embeddings.

The clients of `huggingface_hub` use it, too, for embeddings in the form of Text Embeddings Inference (TEI).

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
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from teola_plugin.adapters.calls import aitems_inside, carries_embeddings, items_inside
from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.embedding_server import WireEmbedding, embeds_in_tei_form
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
from teola_plugin.requests.payloads import AnswerForm, Generate, Piece, ScorePair
from teola_plugin.runtime.loop_thread import CallHandle, PieceLog
from teola_plugin.runtime.query_run import current_run, during

T = TypeVar("T")
_capture: ContextVar[bool] = ContextVar("teola_capture", default=False)
_raising: ContextVar[bool] = ContextVar("teola_raising", default=False)


class Captured(BaseException):
    """A captured request, raised in place of its answer. No `Exception`, so that no client retries it."""

    def __init__(self, generation: Generate) -> None:
        super().__init__()
        self.generation = generation


class Bypass(BaseException):
    """An error of the pool on its way through the client. No `Exception`, so that no client retries or wraps it."""

    def __init__(self, error: TeolaError) -> None:
        super().__init__()
        self.error = error


def capturing() -> AbstractContextManager[None]:
    """Return a context in which requests raise `Captured`, and none is sent."""
    return during(_capture, True)


@contextlib.contextmanager
def raising_pool_errors() -> Iterator[None]:
    """Raise errors of the pool as they are, past a client that the body uses.

    It stands around the method of an object that sends requests. Elsewhere the client sees a broken connection.
    """
    try:
        with during(_raising, True):
            yield
    except Bypass as bypass:
        raise bypass.error from bypass.error.__cause__


def raising_pool_errors_in(items: Iterator[T]) -> Iterator[T]:
    """Return the items, each made inside `raising_pool_errors()`."""
    return items_inside(raising_pool_errors, items)


def araising_pool_errors_in(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Return the items as `raising_pool_errors_in` does, in a loop."""
    return aitems_inside(raising_pool_errors, items)


def raise_past_client(error: TeolaError) -> None:
    """Raise an error past the client, inside of `raising_pool_errors()`; do nothing elsewhere.

    The `openai` client would otherwise turn an exception of its transport into an error of its own, and might retry.
    """
    if _raising.get():
        raise Bypass(error)


def raise_captured(generation: Generate) -> None:
    """Raise `Captured` inside of `capturing()`; do nothing elsewhere.

    With it the request that a model would send is read without sending it. The transport calls it before an engine
    carries a request.
    """
    if _capture.get():
        raise Captured(generation)


log = logging.getLogger("teola_plugin")
_OF_THE_POOL = (QueryError, EngineUnavailable, EngineOverloaded)


class EventEncoder:
    """An encoder of chunks to the bytes that the server would have sent to this client alone.

    An engine asks for the usage, which comes in a chunk of its own at the end. For a client that did not ask for it,
    that chunk is left out, and what else it says about the answer goes to the last of the others.
    """

    def __init__(self, generation: Generate, body: Mapping[str, Any]) -> None:
        exact = isinstance(generation.prompt, wire.WirePrompt) and generation.prompt.exact
        self.is_exact = exact or bool((body.get("stream_options") or {}).get("include_usage"))
        """True if every chunk is passed on as it came."""
        self._last: dict[str, Any] | None = None
        """A chunk that ends a choice and is not sent yet, as it may be the last."""

    def encode(self, chunk: str) -> bytes:
        """Return the bytes that the client gets for one chunk (JSON text) of the engine's stream.

        May be empty: the usage is left out if the client did not ask for it, and a chunk that ends a choice waits for
        the next chunk or for `flush`.
        """
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


class _CarriedRequest(NamedTuple):
    """A request that the engine carries."""

    handle: CallHandle
    payload: Generate | WireEmbedding
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        return isinstance(self.payload, Generate) and bool(self.body.get("stream"))

    def encoder(self) -> EventEncoder:
        """Return the encoder of the chunks of a streamed answer."""
        assert isinstance(self.payload, Generate)
        return EventEncoder(self.payload, self.body)


class _Transport:
    """The common base of both transports. `inner` is the client that the object came with."""

    def __init__(self, inner: Any, pool: EnginePool, engine: str, http: Any) -> None:
        self._inner, self._pool, self._engine, self._http = inner, pool, engine, http

    def _carry(self, request: Any) -> _CarriedRequest | None:
        """Hand a request to the engine; return None if it goes past the engine. If this fails, nothing was sent."""
        try:
            payload_and_body = self._payload_in(request)
            if payload_and_body is None:
                return None
            payload, body = payload_and_body
            run = current_run.get()  # the adapters see to it that it is set, or the request context
            if isinstance(payload, WireEmbedding):
                handle = self._pool.call(PrimitiveKind.EMBEDDING, self._engine, [payload], run=run)
                return _CarriedRequest(handle, payload, body)
            raise_captured(payload)
            stream = bool(body.get("stream"))
            handle = self._pool.call(PrimitiveKind.PREFILLING, self._engine, [payload], stream=stream, run=run)
        except Exception as error:
            bug = None if isinstance(error, TeolaError) else error
            log.warning("a request goes past engine %s: %s", self._engine, type(error).__name__, exc_info=bug)
            return None
        return _CarriedRequest(handle, payload, body)

    def _payload_in(self, request: Any) -> tuple[Generate | WireEmbedding, dict[str, Any]] | None:
        """Return what a request asks of the engine, and its body; None for any other request."""
        server: Any = self._pool.engine(self._engine)
        url = str(request.url)
        is_tei = carries_embeddings(server) and embeds_in_tei_form(url, str(self._http.URL(server.base_url)))
        if request.method != "POST" or not (is_tei or self._reaches(request.url, server)):
            return None
        has_own_hooks = any(self._inner.event_hooks.values()) and not _hooks_of_hub(self._inner)
        if self._inner.auth is not None or has_own_hooks:
            return None
        body = json.loads(request.content)
        envelope = Envelope.of(url, request.url.params.multi_items(), request.headers.multi_items())
        if carries_embeddings(server):
            return WireEmbedding.of(body, envelope, without_credentials(url) if is_tei else ""), body
        exact = not (server.joins and wire.joinable(body))
        prompt = wire.WirePrompt.of(body, exact=exact, envelope=envelope)
        form = AnswerForm.STREAMED if body.get("stream") else AnswerForm.WHOLE
        return Generate(prompt, prompt.sampling, form if exact else None), body

    def _reaches(self, url: Any, server: Any) -> bool:
        """Return True if a request for this address asks the engine's server for what the engine does."""
        path = "embeddings" if carries_embeddings(server) else "chat/completions"
        server_address = str(self._http.URL(f"{server.base_url}/{path}"))
        return without_credentials(str(url)) == without_credentials(server_address)

    def _whole_response(self, value: Any) -> Any:
        """Return a response with the headers that the server sent.

        The status is 200: an engine reports other replies as errors. The body is not compressed any more, so the
        headers are set after it; the client would otherwise decompress it again.
        """
        content = value.response.encode("utf-8", "surrogatepass")
        response = self._http.Response(200, headers={"content-type": "application/json"}, content=content)
        response.headers = self._http.Headers(wire.whole_headers(value.headers))
        return response  # a content-encoding is among them only now: it is already undone

    def _error_response(self, error: TeolaError, request: Any) -> Any:
        """Return the response for a carried request that failed: the server's own answer, if it gave one.

        The object decides what it means, and whether to try again. Raise the error if there was no answer.
        """
        refusal = refusal_in(error) if isinstance(error, EngineError) else None
        if refusal is not None:
            headers = {
                k: v for k, v in refusal.headers.items() if k.lower() not in ("content-length", "content-encoding")
            }
            return self._http.Response(refusal.status, headers=headers, content=refusal.content.encode())
        if not _connection_error(error):
            raise_past_client(error)
        raise self._as_the_connection(error, request) from error

    def _as_the_connection(self, error: TeolaError, request: Any) -> Any:
        """Return the exception that the client's own connection would have raised.

        It is one of httpx's transport errors, by default `ReadError`, so that the `openai` client retries or reports it
        as it does without this package.
        """
        kind: Any = getattr(self._http, _connection_error(error) or "ReadError", None)
        is_transport_error = isinstance(kind, type) and issubclass(kind, self._http.TransportError)
        return (kind if is_transport_error else self._http.ReadError)(str(error), request=request)

    @contextlib.contextmanager
    def _streaming(self, handle: CallHandle, request: Any) -> Iterator[None]:
        """Cancel a stream that is left early; let a stream fail as the client's own would."""
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
        """Cancel a request that takes too long, and raise the timeout of the client's own connection."""
        try:
            yield
        except _OF_THE_POOL:
            raise
        except TimeoutError as error:
            handle.cancel()
            raise self._http.ReadTimeout(str(error), request=request) from error

    def _streamed(self, stream: Any, headers: wire.Headers) -> Any:
        return self._http.Response(200, headers=headers, stream=stream)


def _connection_error(error: TeolaError) -> str:
    return broken_in(error) if isinstance(error, EngineError) else ""


def _never_sent(error: TeolaError) -> bool:
    """Return True if the engine refused the request before sending it."""
    return unsent(error) or (isinstance(error, RequestTooLarge) and refusal_in(error) is None)


def _seconds(request: Any) -> float | None:
    return (request.extensions.get("timeout") or {}).get("read")  # type: ignore[no-any-return]


async def _within(pieces: PieceLog, seconds: float | None) -> AsyncIterator[Piece]:
    """Yield the pieces. Raise `TimeoutError` if the next one takes longer than `seconds`."""
    async with contextlib.aclosing(aiter(pieces)) as piece_log:  # type: ignore[type-var]
        while True:
            async with asyncio.timeout(seconds):
                piece = await anext(piece_log, None)
            if piece is None:
                return
            yield piece


def _settings_of(inner: Any) -> dict[str, Any]:
    """Return the settings of a client; `inner` itself applies logins and hooks when it sends."""
    names = ("base_url", "timeout", "headers", "params", "cookies", "follow_redirects")
    return {name: getattr(inner, name) for name in names} | {"event_hooks": _hooks_of_hub(inner)}


def _hooks_of_hub(inner: Any) -> dict[str, list[Any]]:
    """Return the hooks of a client as `huggingface_hub` makes it; none for a client with any hook of the user's.

    They give a request an id, refuse it offline, and read answers that are errors. They may run more than once.
    """
    hooks: dict[str, list[Any]] = inner.event_hooks
    homes = {str(getattr(one, "__module__", "")).partition(".")[0] for group in hooks.values() for one in group}
    return hooks if homes == {"huggingface_hub"} else {}


class EngineTransport(_Transport):
    @classmethod
    def client(cls, inner: Any, pool: EnginePool, engine: str) -> Any:
        """Create a client with the settings of `inner`, whose requests the engine carries."""
        http = _http_of(inner, "Client")
        return http.Client(transport=cls(inner, pool, engine, http), **_settings_of(inner))

    def handle_request(self, request: Any) -> Any:
        """Answer a request of the HTTP client, by the engine if that carries it, else by the object's own client.

        The method that `httpx` calls. Errors look as the server or the connection would have made them; a request that
        the engine refused before sending it goes to the object's own client.
        """
        carried = self._carry(request)
        if carried is None:
            return self._inner.send(request, stream=True)
        try:
            if carried.streamed:
                return self._stream(carried, request)
            [value] = carried.handle.result(_seconds(request))
        except TimeoutError as error:
            raise self._http.ReadTimeout(str(error), request=request) from error
        except TeolaError as error:
            return (
                self._inner.send(request, stream=True) if _never_sent(error) else self._error_response(error, request)
            )
        return self._whole_response(value)

    def _stream(self, carried: _CarriedRequest, request: Any) -> Any:
        """Wait for the first chunk, so that a refusal becomes a response, and return the stream."""
        handle, encoder = carried.handle, carried.encoder()
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
        """Leave the object's client open: it belongs to the object."""


class AsyncEngineTransport(_Transport):
    @classmethod
    def client(cls, inner: Any, pool: EnginePool, engine: str) -> Any:
        """Create an asynchronous client, as `EngineTransport.client` does."""
        http = _http_of(inner, "AsyncClient")
        return http.AsyncClient(transport=cls(inner, pool, engine, http), **_settings_of(inner))

    async def handle_async_request(self, request: Any) -> Any:
        """Answer a request as `EngineTransport.handle_request` does, for an asynchronous client."""
        carried = self._carry(request)
        if carried is None:
            return await self._inner.send(request, stream=True)
        try:
            if carried.streamed:
                return await self._stream(carried, request)
            async with asyncio.timeout(_seconds(request)):
                [value] = await carried.handle
        except TimeoutError as error:
            raise self._http.ReadTimeout(str(error), request=request) from error
        except TeolaError as error:
            past = _never_sent(error)
            return await self._inner.send(request, stream=True) if past else self._error_response(error, request)
        return self._whole_response(value)

    async def _stream(self, carried: _CarriedRequest, request: Any) -> Any:
        """Wait for the first chunk, so that a refusal becomes a response, and return the stream."""
        handle, encoder = carried.handle, carried.encoder()
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
        """Leave the object's client open, as `EngineTransport.close` does."""


def _http_of(client: Any, name: str) -> Any:
    """Return the module (`httpx` or `httpx2`) of a client's class.

    `name`: `Client` or `AsyncClient`. A client of a user's subclass is recognized by its base class.
    """
    base = next(cls for cls in type(client).__mro__ if cls.__name__ == name and cls.__module__.startswith("httpx"))
    return import_module(base.__module__.partition(".")[0])


# ------------------------------------------------------------ Cohere's client


class RerankingClient:
    """A replacement of the `cohere.ClientV2` of a reranker: an engine scores documents, which are ordered here."""

    def __init__(self, client: Any, model: str, pool: EnginePool, engine: str) -> None:
        """`client`: the reranker's own. `model`: the one that the engine asks for."""
        self._client, self._model, self._pool, self._engine = client, model, pool, engine

    def rerank(
        self, *, query: str, documents: Sequence[str], model: str, top_n: int | None = None, **options: Any
    ) -> Any:
        """Return the best documents, best first, as the client does. It makes calls with options of their own."""
        is_usual = model == self._model and not any(value is not None for value in options.values())
        if not is_usual or not documents:
            return self._client.rerank(query=query, documents=documents, model=model, top_n=top_n, **options)
        pairs = [ScorePair(query, text) for text in documents]
        scores = self._pool.call(PrimitiveKind.RERANKING, self._engine, pairs, run=current_run.get()).result()
        order = best_first(scores, top_n)
        return SimpleNamespace(results=[SimpleNamespace(index=n, relevance_score=scores[n]) for n in order])


def best_first(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Return the positions of the `top_n` best scores, best first; equal ones in their order. None: of all scores."""
    return sorted(range(len(scores)), key=lambda position: -scores[position])[:top_n]
