"""Requests to an OpenAI-compatible server: generations, prefixes that it caches, and draft texts.

Draft texts (docs/drafts.md, "On a vLLM server of your own") travel in `vllm_xargs`, which vLLM passes to its worker and
which change no answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.http import json_of, malformed, refusal_error, send_body, text_of
from teola_plugin.engines.openai.wire import WirePrompt
from teola_plugin.event_streams import DONE, aread_events
from teola_plugin.requests.draft_texts import (
    APP,
    FORGET_ALL,
    FORGET_TENANT,
    KEY,
    MAX_TEXTS,
    TENANT,
    calls_in,
    forms_of_tools,
)
from teola_plugin.requests.json_forms import forms_of_schema
from teola_plugin.requests.payloads import Generate, Generation, Message, Prompt, Request, Result

if TYPE_CHECKING:
    import httpx

_MAX_START_BYTES = 1 << 20
"""Bytes that are kept of a reply that turns out to be no event stream, for the error and for the client."""
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
    merges_unread: bool = False
    """True if the server is vLLM, which can merge the pieces of a stream that nobody reads."""

    async def generate(
        self, request: Request, payload: Generate, ordering: Mapping[str, Any], inbox: asyncio.Queue[Result]
    ) -> Generation:
        """Send a generation, put its pieces into `inbox`, and return its value.

        `ordering` is added to the body. Raises `EngineError` and exceptions of httpx.
        """
        prompt = payload.prompt
        path, body = wire.path_and_body(prompt, payload.sampling, self.model)
        body |= ordering
        is_wire = isinstance(prompt, wire.WirePrompt)
        is_exact = isinstance(prompt, wire.WirePrompt) and prompt.exact
        if body.get("stream") if is_exact else request.stream:
            body = body if is_exact else {**body, **wire.STREAMED}
            if request.unread and self.merges_unread and not is_wire:
                body |= wire.MERGE_UNREAD
            return await self._stream(request, path, body, inbox, is_wire=is_wire)
        response = await send_body(self.client, f"{self.base_url}/{path}", body, prompt)
        if response.status_code != 200:
            raise refusal_error(
                self.engine, response.status_code, response.text, dict(response.headers), retryable=not is_wire
            )
        content, headers = text_of(response), tuple(response.headers.multi_items())
        try:
            return wire.generation(content, wire=is_wire, headers=headers)
        except wire.MalformedReply as error:  # the client that wrote the request decides what to do
            raise malformed(self.engine, self.base_url, error, content, headers) from error

    async def _stream(
        self, request: Request, path: str, body: dict[str, Any], inbox: asyncio.Queue[Result], *, is_wire: bool
    ) -> Generation:
        chunks = wire.Chunks(strict=not is_wire)
        response = await send_body(self.client, f"{self.base_url}/{path}", body, request.payload.prompt, stream=True)
        headers = tuple(response.headers.multi_items())
        start = bytearray()
        raw = response.aiter_bytes()

        async def received() -> AsyncGenerator[bytes, None]:
            async for data in raw:
                if not chunks.all and len(start) < _MAX_START_BYTES:
                    start.extend(data)
                yield data

        async with aclosing(response):
            if response.status_code != 200:
                content = (await response.aread()).decode(errors="replace")
                raise refusal_error(
                    self.engine, response.status_code, content, dict(response.headers), retryable=not is_wire
                )
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
                if not chunks.all or not (is_wire or chunks.has_choices):
                    raise wire.MalformedReply(
                        "it is no stream of chunks" if not chunks.all else "no chunk has a choice"
                    )
                value = wire.generation(chunks.response(self.shape), wire=is_wire, headers=headers)
            except wire.MalformedReply as error:
                raise malformed(self.engine, self.base_url, error, start.decode(errors="replace"), headers) from error
            await _read_to_end(raw)
        return value


async def _read_to_end(raw: AsyncIterator[bytes]) -> None:
    """Read a reply to its end, so that its connection can be used again, unless the server keeps it open."""
    with suppress(Exception):  # the answer is complete: nothing that goes wrong now changes it
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in raw:
                pass


class Prefixes:
    """The prefixes and prompts in flight to the server at `base_url`, for the engine `name`."""

    def __init__(self, name: str, base_url: str) -> None:
        self._name, self._base_url = name, base_url
        self._sending: dict[tuple[str, str], asyncio.Task[int]] = {}
        """Prefixes in flight, by owner and known part."""
        self._readers: Counter[tuple[str, str]] = Counter()
        self._generating: Counter[tuple[str, str]] = Counter()
        """Whole prompts in flight."""

    @contextmanager
    def generating(self, prompt: Prompt, tenant: str) -> Iterator[None]:
        """Mark a prompt as being prefilled during the `with` block: its prefixes need no sending."""
        key = _owner(prompt, tenant), wire.known_part(prompt)
        self._generating[key] += 1
        try:
            yield
        finally:
            self._generating[key] -= 1
            if not self._generating[key]:
                del self._generating[key]

    async def send(
        self, client: httpx.AsyncClient, prompt: Prompt, model: str, tenant: str, ordering: Mapping[str, Any]
    ) -> int:
        """Send a prefix. Return its number of tokens, or 0 if a request under way begins with it.

        Raises `EngineError` if the server refuses it.
        """
        key = _owner(prompt, tenant), wire.known_part(prompt)
        if key not in self._sending:
            if self._is_under_way(key):
                return 0
            self._sending[key] = asyncio.create_task(self._send(client, prompt, model, ordering))
        return await self._await_shared(key)

    def _is_under_way(self, key: tuple[str, str]) -> bool:
        owner, known_part = key
        under_way = (*self._generating, *self._sending)
        return any(of_owner == owner and text.startswith(known_part) for of_owner, text in under_way)

    async def _await_shared(self, key: tuple[str, str]) -> int:
        """Wait for a sending that others may wait for, too. It is cancelled once the last of them gives up."""
        task = self._sending[key]
        self._readers[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key], self._sending[key]
                task.cancel()

    async def _send(self, client: httpx.AsyncClient, prompt: Prompt, model: str, ordering: Mapping[str, Any]) -> int:
        """Request one token, so that the prompt stays in the server's cache. Return the prompt's tokens."""
        path, body = wire.prefix(prompt, model)
        if body.get("prompt") == "":  # a text that begins with an unknown slot
            return 0
        request = {**body, "max_tokens": 1, "temperature": 0, **ordering}
        answer = await send_body(client, f"{self._base_url}/{path}", request, prompt)
        if answer.status_code != 200:
            raise refusal_error(self._name, answer.status_code, answer.text, dict(answer.headers), retryable=False)
        return wire.prompt_tokens(json_of(answer.text))


def _owner(prompt: Prompt, tenant: str) -> str:
    """Return the owner of a prefix: its tenant, with the keys and headers of its request."""
    envelope = getattr(prompt, "envelope", None)
    return tenant if envelope is None else f"{tenant}/{envelope.identity}"


DRAFT_TOKENS = 16
"""Number of tokens that are drafted for a request in a step with the documented flags."""
XARGS = "vllm_xargs"


def draft_fields(request: Request) -> dict[str, Any]:
    """Return the fields with draft texts for the body of a generation; {} for one that samples."""
    payload = request.payload
    if not isinstance(payload, Generate) or not payload.sampling.greedy:
        return {}
    body = json.loads(payload.prompt.body) if isinstance(payload.prompt, WirePrompt) else {}
    texts = dict.fromkeys(request.drafts)
    with suppress(Exception):  # a body of another form is for the server to refuse
        texts |= dict.fromkeys(_texts_from(body))
    fields = {KEY: list(texts)[:MAX_TEXTS], APP: request.app, TENANT: request.tenant}
    return {XARGS: {**(body.get(XARGS) or {}), **{key: value for key, value in fields.items() if value}}}


def _texts_from(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the draft texts that follow from a request which is sent in the form its client wrote."""
    if (body.get("response_format") or {}).get("type") == "json_schema":
        yield from forms_of_schema(json.dumps(body["response_format"].get("json_schema", {}).get("schema")))
    elif body.get("tools"):
        yield from calls_in([Message("assistant", call) for message in body["messages"] for call in _calls(message)])
        yield from forms_of_tools(json.dumps(body["tools"]))


def _calls(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tool calls of a message in the form in which models write them."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments") or "{}"
        yield f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}'


async def forget_outputs(client: httpx.AsyncClient, engine: str, base_url: str, model: str, tenant: str | None) -> None:
    """Let the server forget outputs that it drafts from: a tenant's, or all.

    A request for one token says so, as clients have no other means. Raises `EngineError` and exceptions of httpx.
    """
    order: dict[str, Any] = {FORGET_ALL: 1} if tenant is None else {FORGET_TENANT: tenant}
    body = {"model": model, "prompt": "-", "max_tokens": 1, "temperature": 0, XARGS: order}
    answer = await client.post(f"{base_url}/completions", json=body)
    if answer.status_code != 200:
        raise refusal_error(engine, answer.status_code, answer.text, dict(answer.headers), retryable=True)
