"""The transport of a client of the `openai` package: chat completions are carried by an engine of the pool.

That package uses `httpx`, or `httpx2` from its version 3 on; whichever it is, it is found through the client's class.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from teola_plugin.engines import openai_wire as wire
from teola_plugin.engines.openai_http import refusal_in
from teola_plugin.engines.payloads import Generate
from teola_plugin.errors import EngineError, TeolaError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.context import current_run
from teola_plugin.runtime.handles import CallHandle

_capture: ContextVar[bool] = ContextVar("teola_capture", default=False)


class Captured(BaseException):
    """A request that was asked for, in place of its answer. No `Exception`, so that no client retries it."""

    def __init__(self, asked: Generate) -> None:
        super().__init__()
        self.asked = asked


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Requests in the body raise `Captured` and are not sent."""
    token = _capture.set(True)
    try:
        yield
    finally:
        _capture.reset(token)


class _Carries:
    """What both kinds of transport have in common. `inner` is the client that the object came with."""

    def __init__(self, inner: Any, pool: EnginePool, engine: str, http: Any) -> None:
        self._inner, self._pool, self._engine, self._http = inner, pool, engine, http

    def _asked(self, request: Any) -> tuple[Generate, dict[str, Any]] | None:
        """The generation that a request asks for, and its body; None for any other request."""
        if request.method != "POST" or not request.url.path.endswith("/chat/completions"):
            return None
        body = json.loads(request.content)
        server: Any = self._pool.engine(self._engine)
        prompt = wire.WirePrompt.of(body, exact=not (server.joins and wire.joinable(body)))
        asked = Generate(prompt, prompt.sampling)
        if _capture.get():
            raise Captured(asked)
        return asked, body

    def _call(self, asked: Generate, *, stream: bool) -> CallHandle:
        run = current_run.get()  # the adapters see to it that it is set
        return self._pool.call(PrimitiveKind.PREFILLING, self._engine, [asked], stream=stream, run=run)

    def _whole(self, value: Any) -> Any:
        headers = {"content-type": "application/json"}
        return self._http.Response(200, headers=headers, content=value.response.encode())

    def _refused(self, error: TeolaError) -> Any:
        """The server's own answer, if it gave one: its meaning, and whether to try again, is the object's to say."""
        refusal = refusal_in(error) if isinstance(error, EngineError) else None
        if refusal is None:
            return None
        kept = {k: v for k, v in refusal.headers.items() if k.lower() not in ("content-length", "content-encoding")}
        return self._http.Response(refusal.status, headers=kept, content=refusal.content.encode())

    @contextlib.contextmanager
    def _told(self, handle: CallHandle, request: Any) -> Iterator[None]:
        """Whoever leaves a stream early no longer wants it; a stream that fails does so as the client's own would."""
        try:
            yield
        except TeolaError as error:
            raise self._http.ReadError(str(error), request=request) from error
        except BaseException:
            handle.cancel()
            raise

    def _streamed(self, stream: Any) -> Any:
        return self._http.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)


def _seconds(request: Any) -> float | None:
    return (request.extensions.get("timeout") or {}).get("read")  # type: ignore[no-any-return]


class _Relay:
    """Chunks on their way to the client, as the server would have sent them to it alone.

    An engine asks for the usage, which comes in a chunk of its own at the end. For a client that did not ask for it,
    that chunk is left out, and what else it says about the answer goes to the last of the others.
    """

    def __init__(self, asked: Generate, body: Mapping[str, Any]) -> None:
        exact = isinstance(asked.prompt, wire.WirePrompt) and asked.prompt.exact
        self._as_is = exact or bool((body.get("stream_options") or {}).get("include_usage"))
        self._held: dict[str, Any] | None = None
        """A chunk that ends a choice: perhaps the last."""

    def take(self, chunk: str) -> bytes:
        data = json.loads(chunk)
        if self._as_is or "choices" not in data:
            return self.end() + _event(data)
        data.pop("usage", None)
        if not data["choices"]:
            if self._held is not None:
                self._held = {**data, **self._held}
            return b""
        before = self.end()
        if data["choices"][0].get("finish_reason"):
            self._held = data
            return before
        return before + _event(data)

    def end(self) -> bytes:
        held, self._held = self._held, None
        return b"" if held is None else _event(held)


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


_END = b"data: [DONE]\n\n"


class Carrier(_Carries):
    @classmethod
    def client(cls, inner: Any, pool: EnginePool, engine: str) -> Any:
        """A client as `inner` is one, whose chat completions the engine carries."""
        http = _http_of(inner, "Client")
        return http.Client(transport=cls(inner, pool, engine, http), base_url=inner.base_url, timeout=inner.timeout)

    def handle_request(self, request: Any) -> Any:
        found = self._asked(request)
        if found is None:
            return self._inner.send(request, stream=True)
        asked, body = found
        try:
            if body.get("stream"):
                return self._stream(asked, request, body)
            [value] = self._call(asked, stream=False).result(_seconds(request))
        except TimeoutError as error:
            raise self._http.ReadTimeout(str(error), request=request) from error
        except TeolaError as error:
            return self._refused(error) or self._inner.send(request, stream=True)
        return self._whole(value)

    def _stream(self, asked: Generate, request: Any, body: dict[str, Any]) -> Any:
        """Waits for the first chunk, so that a refusal is one."""
        handle, relay = self._call(asked, stream=True), _Relay(asked, body)
        pieces = iter(handle.pieces)
        first = next(pieces, None)
        if first is None:
            handle.result()  # raises what the server said

        def events() -> Iterator[bytes]:
            with self._told(handle, request):
                for piece in itertools.chain([] if first is None else [first], pieces):
                    yield relay.take(piece.chunk)  # type: ignore[attr-defined]
                [value] = handle.result()
                for chunk in wire.chunks_of(value.response) if first is None else ():
                    yield relay.take(chunk)
                yield relay.end() + _END

        stream = type("Stream", (self._http.SyncByteStream,), {"__iter__": lambda _: events(), "close": lambda _: None})
        return self._streamed(stream())

    def __enter__(self) -> Carrier:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """The client that the object came with stays open: it is the object's."""


class AsyncCarrier(_Carries):
    @classmethod
    def client(cls, inner: Any, pool: EnginePool, engine: str) -> Any:
        """`Carrier.client` for a loop."""
        http = _http_of(inner, "AsyncClient")
        transport = cls(inner, pool, engine, http)
        return http.AsyncClient(transport=transport, base_url=inner.base_url, timeout=inner.timeout)

    async def handle_async_request(self, request: Any) -> Any:
        found = self._asked(request)
        if found is None:
            return await self._inner.send(request, stream=True)
        asked, body = found
        try:
            if body.get("stream"):
                return await self._stream(asked, request, body)
            async with asyncio.timeout(_seconds(request)):
                [value] = await self._call(asked, stream=False)
        except TimeoutError as error:
            raise self._http.ReadTimeout(str(error), request=request) from error
        except TeolaError as error:
            return self._refused(error) or await self._inner.send(request, stream=True)
        return self._whole(value)

    async def _stream(self, asked: Generate, request: Any, body: dict[str, Any]) -> Any:
        handle, relay = self._call(asked, stream=True), _Relay(asked, body)
        pieces = aiter(handle.pieces)
        first = await anext(pieces, None)
        if first is None:
            await handle

        async def events() -> AsyncIterator[bytes]:
            with self._told(handle, request):
                if first is not None:
                    yield relay.take(first.chunk)  # type: ignore[attr-defined]
                async for piece in pieces:
                    yield relay.take(piece.chunk)  # type: ignore[attr-defined]
                [value] = await handle
                for chunk in wire.chunks_of(value.response) if first is None else ():
                    yield relay.take(chunk)
                yield relay.end() + _END

        async def aclose(_: Any) -> None: ...

        stream = type("Stream", (self._http.AsyncByteStream,), {"__aiter__": lambda _: events(), "aclose": aclose})
        return self._streamed(stream())

    async def __aenter__(self) -> AsyncCarrier:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def aclose(self) -> None:
        """As `Carrier.close`."""


def _http_of(client: Any, name: str) -> Any:
    """The module (`httpx` or `httpx2`) that a client's class comes from."""
    base = next(cls for cls in type(client).__mro__ if cls.__name__ == name and cls.__module__.startswith("httpx"))
    return import_module(base.__module__.partition(".")[0])
