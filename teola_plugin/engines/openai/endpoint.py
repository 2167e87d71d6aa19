"""One generation of an OpenAI-compatible server: sent, streamed or not, and read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.http import refused, sent, unread
from teola_plugin.requests.payloads import Generate, Generation
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Result

if TYPE_CHECKING:
    import httpx

_LINES = 1000
"""Of an answer that is no stream: what is kept of it, to be told."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where generations go. `shape` is that of a whole response, see `discovery.ServerFacts`."""

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
        try:
            return wire.generation(answer.text, wire=as_is)
        except ValueError as error:  # what to make of it is for whoever asked to say
            raise unread(self.engine, error, answer.text, dict(answer.headers)) from error

    async def _stream(
        self, request: Request, path: str, body: dict[str, Any], inbox: asyncio.Queue[Result], *, as_is: bool
    ) -> Generation:
        chunks = wire.Chunks()
        answer = await sent(self.client, f"{self.base_url}/{path}", body, request.payload.prompt, stream=True)
        async with aclosing(answer):
            if answer.status_code != 200:
                content = (await answer.aread()).decode(errors="replace")
                raise refused(self.engine, answer.status_code, content, dict(answer.headers), again=not as_is)
            other: list[str] = []
            async for line in answer.aiter_lines():
                chunk = wire.chunk(line)
                if not chunk:
                    other += [line] if len(other) < _LINES and not chunks.all else []
                    continue
                text = chunks.text(chunk)
                inbox.put_nowait(wire.WirePiece(request.id, text, int(bool(text)), chunk))
                chunks.add(chunk)
            if not chunks.all:  # no stream at all
                content = "\n".join(other)
                error = ValueError(f"the answer is no completion: {content[:200]}")
                raise unread(self.engine, error, content, dict(answer.headers))
        return wire.generation(chunks.response(self.shape), wire=as_is)
