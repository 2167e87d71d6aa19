"""Requests to an OpenAI-compatible server: generations, prefixes that it caches, and draft texts.

Draft texts (docs/drafts.md, "On a vLLM server of your own") travel in `vllm_xargs`, which vLLM passes to its worker and
which change no answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.http import json_of, malformed, refusal_error, send_body, text_of
from teola_plugin.engines.openai.wire import WirePrompt
from teola_plugin.errors import RegistrationError, unknown_name
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
    hint_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for a router in front of the server; see `ServingHints`."""

    async def generate(
        self,
        request: Request,
        payload: Generate,
        ordering: Mapping[str, Any],
        hints: Mapping[str, Any],
        inbox: asyncio.Queue[Result],
    ) -> Generation:
        """Send a generation, put its pieces into `inbox`, and return its value.

        `ordering` is added to the body; so is what it has not of `hints`. Raises `EngineError` and exceptions of httpx.
        """
        prompt = payload.prompt
        path, body = wire.path_and_body(prompt, payload.sampling, self.model)
        body = with_hints({**body, **ordering}, hints)
        is_wire = isinstance(prompt, wire.WirePrompt)
        is_exact = isinstance(prompt, wire.WirePrompt) and prompt.exact
        if body.get("stream") if is_exact else request.stream:
            body = body if is_exact else {**body, **wire.STREAMED}
            if request.unread and self.merges_unread and not is_wire:
                body |= wire.MERGE_UNREAD
            return await self._stream(request, path, body, inbox, is_wire=is_wire)
        response = await send_body(self.client, f"{self.base_url}/{path}", body, prompt, hints=self.hint_headers)
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
        """Send a generation that is streamed, put each piece into `inbox`, and return the joined value.

        Raise `EngineError` if the server refuses it, or if the reply is not a stream of completion chunks.
        """
        chunks = wire.Chunks(strict=not is_wire)
        url, prompt = f"{self.base_url}/{path}", request.payload.prompt
        response = await send_body(self.client, url, body, prompt, stream=True, hints=self.hint_headers)
        headers = tuple(response.headers.multi_items())
        start = bytearray()
        raw = response.aiter_bytes()

        async def received() -> AsyncGenerator[bytes, None]:
            """Yield the reply's bytes; keep its beginning, up to `_MAX_START_BYTES`, until the first chunk is read."""
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
    """Read a reply to its end, so that its connection can be used again, unless the server keeps it open.

    It waits 0.1 s at most, and raises nothing.
    """
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
        self,
        client: httpx.AsyncClient,
        prompt: Prompt,
        model: str,
        tenant: str,
        ordering: Mapping[str, Any],
        hint_headers: Mapping[str, str],
    ) -> int:
        """Send a prefix. Return its number of tokens, or 0 if a request under way begins with it.

        `ordering` is added to the body, `hint_headers` to the headers.

        Raises `EngineError` if the server refuses it.
        """
        key = _owner(prompt, tenant), wire.known_part(prompt)
        if key not in self._sending:
            if self._is_under_way(key):
                return 0
            self._sending[key] = asyncio.create_task(self._send(client, prompt, model, ordering, hint_headers))
        return await self._await_shared(key)

    def _is_under_way(self, key: tuple[str, str]) -> bool:
        """Return True if a request of the same owner is being sent or answered whose prompt begins with this prefix.

        A warm-up of the prefix is then left out: the server fills its cache by the other request.
        """
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

    async def _send(
        self,
        client: httpx.AsyncClient,
        prompt: Prompt,
        model: str,
        ordering: Mapping[str, Any],
        hint_headers: Mapping[str, str],
    ) -> int:
        """Request one token, so that the prompt stays in the server's cache. Return the prompt's tokens."""
        path, body = wire.prefix(prompt, model)
        if body.get("prompt") == "":  # a text that begins with an unknown slot
            return 0
        request = {**body, "max_tokens": 1, "temperature": 0, **ordering}
        answer = await send_body(client, f"{self._base_url}/{path}", request, prompt, hints=hint_headers)
        if answer.status_code != 200:
            raise refusal_error(self._name, answer.status_code, answer.text, dict(answer.headers), retryable=False)
        return wire.prompt_tokens(json_of(answer.text))


def _owner(prompt: Prompt, tenant: str) -> str:
    """Return the owner of a prefix: its tenant, with the keys and headers of its request."""
    envelope = getattr(prompt, "envelope", None)
    return tenant if envelope is None else f"{tenant}/{envelope.identity}"


# ------------------------------------------------------------ serving hints

HINTS = ("vllm", "dynamo")
"""Servers whose fields for hints are known."""
_DYNAMO_SESSION = "X-Dynamo-Session-ID"
_DYNAMO_PRIORITIES = {"latency": 2, "throughput": 1}
"""By the objective of a request; Dynamo takes higher numbers first. Background work has 0."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_LENGTHS = 1024
"""Kinds of requests whose output lengths are remembered."""
_NEWEST_SHARE = 0.2
"""The share of the newest answer in an expected output length."""


class ServingHints:
    """The hints that a server gets beside a prompt, so that it can order requests and choose a replica.

    `dynamo`: `nvext.agent_hints` of NVIDIA Dynamo with `priority`, from the request's objective, and `osl`, the
    expected output length in tokens, from earlier answers to requests of the same kind; the id of the query in a
    header. A value that is not known is left out. No field of Dynamo's takes the number of calls that remain.
    """

    def __init__(self, kind: str | None, session_header: str | None) -> None:
        """`kind`: one of `HINTS`, or None. `session_header`: the name of the header that has the id of the query.

        Raises `RegistrationError` for an unknown kind, and for what is no name of a header.
        """
        if kind is not None and kind not in HINTS:
            raise unknown_name("value of hints", str(kind), list(HINTS))
        if session_header is not None and not _HEADER_NAME.fullmatch(str(session_header)):
            raise RegistrationError(
                f"session_header is {session_header!r}, which is no name of a header.",
                hint='e.g. session_header="X-Session-ID"',
            )
        self._kind = kind
        self._header = session_header or (_DYNAMO_SESSION if kind == "dynamo" else None)
        self._process = uuid.uuid4().hex[:12]
        self._lengths: dict[tuple[Any, ...], float] = {}
        """Expected output tokens by the kind of request."""

    def fields(self, request: Request) -> dict[str, Any]:
        """Return the fields for the body of a request."""
        if self._kind != "dynamo":
            return {}
        hints = {"priority": 0 if request.background else _DYNAMO_PRIORITIES.get(request.objective, 0)}
        length = self._lengths.get(_kind_of_request(request)) if isinstance(request.payload, Generate) else 1
        if length is not None:
            hints["osl"] = max(1, round(length))
        return {"nvext": {"agent_hints": hints}}

    def headers(self, request: Request) -> dict[str, str]:
        """Return the headers for a request; none for one of no query."""
        return {} if self._header is None or not request.query else {self._header: f"{self._process}-{request.query}"}

    def learn(self, request: Request, output_tokens: int) -> None:
        """Take the length of an answer into account. 0: the server did not say."""
        if output_tokens <= 0:
            return
        kind = _kind_of_request(request)
        expected = self._lengths.pop(kind, float(output_tokens))
        self._lengths[kind] = expected + _NEWEST_SHARE * (output_tokens - expected)
        if len(self._lengths) > _MAX_LENGTHS:
            del self._lengths[next(iter(self._lengths))]


def _kind_of_request(request: Request) -> tuple[Any, ...]:
    """Return what requests whose answers are about as long have in common."""
    sampling = request.payload.sampling
    return request.tenant, request.app, request.depth, sampling.max_tokens, sampling.json_schema


def with_hints(body: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with hints, below the fields that it has itself."""
    result = dict(body)
    for name, value in hints.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = with_hints(result[name], value)
        else:
            result.setdefault(name, value)
    return result


# ------------------------------------------------------------ draft texts

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
