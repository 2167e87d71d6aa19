"""One generation of an OpenAI-compatible server: sent, streamed or not, and read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.http import malformed, refused, sent, text_of
from teola_plugin.event_streams import DONE, aread_events
from teola_plugin.requests.payloads import Generate, Generation
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Result

if TYPE_CHECKING:
    import httpx

_MAX_START_BYTES = 1 << 20
"""Of a reply that turns out to be no event stream: so much is kept, for the error and for the client that reads it."""
_END_TIMEOUT_S = 0.1
"""Time that a server has to end a reply after the event that ends the stream; then the connection is closed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address for generations. `shape` is the shape of a complete response (see `discovery.ServerFacts`)."""

    client: httpx.AsyncClient
    engine: str
    base_url: str
    model: str
    shape: Mapping[str, Any] | None
    seldom: bool = False
    """Whether the server is vLLM, which puts pieces together that nobody reads."""

    async def generate(
        self, request: Request, asked: Generate, ordering: Mapping[str, Any], inbox: asyncio.Queue[Result]
    ) -> Generation:
        """`ordering` goes into the body; pieces go to `inbox`. Raises `EngineError` and what httpx raises."""
        prompt = asked.prompt
        path, body = wire.path_and_body(prompt, asked.sampling, self.model)
        body |= ordering
        as_is = isinstance(prompt, wire.WirePrompt)
        exact = isinstance(prompt, wire.WirePrompt) and prompt.exact
        if body.get("stream") if exact else request.stream:
            body = body if exact else {**body, **wire.STREAMED}
            if request.unread and self.seldom and not as_is:
                body |= wire.SELDOM
            return await self._stream(request, path, body, inbox, as_is=as_is)
        answer = await sent(self.client, f"{self.base_url}/{path}", body, prompt)
        if answer.status_code != 200:
            raise refused(self.engine, answer.status_code, answer.text, dict(answer.headers), again=not as_is)
        content, headers = text_of(answer), tuple(answer.headers.multi_items())
        try:
            return wire.generation(content, wire=as_is, headers=headers)
        except wire.MalformedReply as error:  # a client that wrote the request decides itself what it makes of it
            raise malformed(self.engine, self.base_url, error, content, headers) from error

    async def _stream(
        self, request: Request, path: str, body: dict[str, Any], inbox: asyncio.Queue[Result], *, as_is: bool
    ) -> Generation:
        chunks = wire.Chunks(strict=not as_is)
        answer = await sent(self.client, f"{self.base_url}/{path}", body, request.payload.prompt, stream=True)
        headers = tuple(answer.headers.multi_items())
        start = bytearray()
        raw = answer.aiter_bytes()

        async def received() -> AsyncGenerator[bytes, None]:
            async for data in raw:
                if not chunks.all and len(start) < _MAX_START_BYTES:
                    start.extend(data)
                yield data

        async with aclosing(answer):
            if answer.status_code != 200:
                content = (await answer.aread()).decode(errors="replace")
                raise refused(self.engine, answer.status_code, content, dict(answer.headers), again=not as_is)
            try:
                async with aclosing(received()) as pieces, aclosing(aread_events(pieces)) as events:
                    async for event in events:
                        if event.data.startswith(DONE):
                            break
                        if event.data:
                            text = chunks.text(event.data)
                            first = () if chunks.all else headers
                            inbox.put_nowait(wire.WirePiece(request.id, text, int(bool(text)), event.data, first))
                            chunks.add(event.data)
                if not chunks.all or not (as_is or chunks.has_choices):
                    raise wire.MalformedReply(
                        "it is no stream of chunks" if not chunks.all else "no chunk has a choice"
                    )
                value = wire.generation(chunks.response(self.shape), wire=as_is, headers=headers)
            except wire.MalformedReply as error:
                raise malformed(self.engine, self.base_url, error, start.decode(errors="replace"), headers) from error
            await _end(raw)
        return value


async def _end(raw: AsyncIterator[bytes]) -> None:
    """Read a reply to its end, so that its connection can be used again, unless the server keeps it open."""
    with suppress(Exception):  # the answer is complete: nothing that goes wrong now changes it
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in raw:
                pass
