"""The engine of an OpenAI-compatible server that is already there: vLLM's API server, SGLang, or any other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.openai.http import (
    failed_by_network,
    json_of,
    not_started,
    refused,
    root_of,
    sent,
    unreachable,
    unread,
)
from teola_plugin.engines.openai.measure import measure, version_and_block
from teola_plugin.engines.openai.prefixes import Prefixes
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Warmed, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Piece, Result

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("teola_plugin")
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_LAST = 1 << 40
"""Added to the priority of background work: after everything that somebody waits for."""


class OpenAIServer:
    """An LLM behind `base_url` (as clients write it, e.g. `http://localhost:8000/v1`), started by somebody else.

    `model` is a name that the server knows; without it, the only one it serves. `prefix_caching` declares that the
    server keeps the keys and values of prefixes, and may be sent some ahead of time: a request for one token on the
    known part of a prompt. Such a server is one's own: where it has no `/tokenize`, as vLLM has, nothing is sent early.
    `calibrate`: whether a pool that starts it measures the server (some 20 requests in 3 s, once: figures are kept),
    so that prefixes go early only where that pays. Without a word it does where prefixes are kept, and nowhere else.
    `priorities` declares that the server orders by `priority` (vLLM with `--scheduling-policy priority`).
    `max_requests` bounds the requests in flight; `timeout` is in seconds, between two signs of life.
    """

    kinds: frozenset[PrimitiveKind] = LLM_KINDS
    carries_openai = True
    """Requests of clients of the `openai` package go over the wire as they wrote them: see `WirePrompt`."""

    def __init__(
        self,
        name: str = "llm",
        *,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        prefix_caching: bool = False,
        calibrate: bool | None = None,
        priorities: bool = False,
        max_requests: int = 256,
        timeout: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.base_url, self.model = name, without_credentials(base_url).rstrip("/"), model
        self.prefix_caching, self._priorities, self._calibrate = prefix_caching, priorities, calibrate
        self._timeout = timeout
        self._headers = {**({"Authorization": f"Bearer {api_key}"} if api_key else {}), **(headers or {})}
        parts = urlsplit(base_url)
        self._login = (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None
        self._profile = EngineProfile(
            batching=Batching.CONTINUOUS,
            max_batch=1 << 20,  # the server forms its own batches
            max_efficient_batch=1 << 20,
            max_requests=max_requests,
            device=self.base_url,
            prefix_caching=prefix_caching,
        )
        self._prefixes = Prefixes(name, self.base_url)
        self._client: httpx.AsyncClient | None = None
        self._versions: dict[str, str] = {"model": model} if model else {}
        self.max_model_len: int | None = None
        """Tokens of a prompt with its answer, where the server says so."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._characters = 4.0
        self._shape: dict[str, Any] | None = None
        """A whole response, for filling in what streams leave out; None where streams do not add up to one."""

    # Life cycle

    async def start(self) -> None:
        """Idempotent. Raises `EngineUnavailable` for a server that is not there or does not serve the model."""
        if self._client is not None:
            return
        try:
            import httpx
        except ImportError as error:
            raise EngineUnavailable("httpx is not installed.", engine=self.name, hint="pip install httpx") from error
        limits = httpx.Limits(max_connections=self._profile.max_requests + 8)
        timeout = httpx.Timeout(self._timeout, connect=min(10.0, self._timeout))
        client = httpx.AsyncClient(headers=self._headers, auth=self._login, timeout=timeout, limits=limits)
        try:
            await self._look_around(client)
        except BaseException:
            await client.aclose()
            raise
        self._client = client

    async def _look_around(self, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.get(f"{self.base_url}/models")
        except Exception as error:
            raise unreachable(self.name, self.base_url, error) from error
        if answer.status_code != 200:
            raise _unusable(self.name, f"{self.base_url}/models answered {answer.status_code}: {answer.text[:200]}")
        self._choose(json_of(answer.text).get("data") or [])
        if self.prefix_caching:
            await self._try_out(client)

    def _choose(self, served: Sequence[Mapping[str, Any]]) -> None:
        names = [str(one.get("id")) for one in served]
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            asked = f"does not serve {self.model!r}" if self.model else "serves several models, or none"
            raise _unusable(
                self.name, f"{self.base_url} {asked}; it has: {', '.join(names) or 'none'}.", "name one of them"
            )
        found = next(one for one in served if one.get("id") == self.model)
        self.max_model_len = found.get("max_model_len")
        self._versions = {"model": str(self.model), "server": str(found.get("owned_by") or "openai-compatible")}
        if found.get("root") not in (None, self.model):
            self._versions["root"] = str(found["root"])

    async def _try_out(self, client: httpx.AsyncClient) -> None:
        """Whether prefixes can be sent, how, and whether a streamed answer adds up to one that comes whole."""
        version, block = await version_and_block(client, self.base_url)
        if version:
            self._versions["version"] = version
        self._profile = replace(self._profile, min_split_tokens=max(self._profile.min_split_tokens, block))
        asked = {"model": self.model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        found = await client.post(
            f"{root_of(self.base_url)}/tokenize", json={k: asked[k] for k in ("model", "messages")}
        )
        if found.status_code != 200 or not json_of(found.text).get("tokens"):
            log.warning("%s has no /tokenize, so %s sends no prefixes early", self.base_url, self.name)
            self._profile = replace(self._profile, prefix_caching=False)
        whole = await client.post(f"{self.base_url}/chat/completions", json=asked)
        streamed = await client.post(f"{self.base_url}/chat/completions", json={**asked, **_STREAMED})
        if whole.status_code == 200 and streamed.status_code == 200:
            shape, chunks = json_of(whole.text), wire.Chunks()
            for chunk in filter(None, map(_chunk, streamed.text.splitlines())):
                chunks.add(chunk)
            if wire.same_fields(json_of(chunks.response(shape)), shape):
                self._shape = shape

    @property
    def joins(self) -> bool:
        """Whether a streamed answer of this server adds up to the very answer that comes whole."""
        return self._shape is not None

    async def stop(self) -> None:
        """Idempotent. Requests in flight fail; the server goes on."""
        client, self._client = self._client, None
        for task in list(self._tasks.values()):
            task.cancel()
        if client is not None:
            await client.aclose()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Results of all requests as they come. Whoever stops reading gives the unfinished ones up."""
        inbox: asyncio.Queue[Result] = asyncio.Queue()
        tasks = {request.id: self._begin(request, inbox) for request in batch}
        self._tasks.update(tasks)
        try:
            left = set(tasks)
            while left:
                result = await inbox.get()
                if not isinstance(result, Piece):
                    left.discard(result.request_id)
                    self._forget(result.request_id, tasks)
                yield result
        finally:
            for request_id, task in tasks.items():
                task.cancel()
                self._forget(request_id, tasks)
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _forget(self, request_id: str, tasks: Mapping[str, asyncio.Task[None]]) -> None:
        if self._tasks.get(request_id) is tasks[request_id]:
            del self._tasks[request_id]

    def _begin(self, request: Request, inbox: asyncio.Queue[Result]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # maybe before it began
                error = EngineError(f"{request.id} was cancelled.", engine=self.name)
                inbox.put_nowait(Failed(request.id, error))

        task = asyncio.create_task(self._serve(request, inbox))
        task.add_done_callback(ended)
        return task

    async def _serve(self, request: Request, inbox: asyncio.Queue[Result]) -> None:
        begun = time.perf_counter()
        try:
            value = await self._value(request, inbox)
        except EngineError as error:
            end: Result = Failed(request.id, error)
        except Exception as error:
            again = not isinstance(getattr(request.payload, "prompt", None), wire.WirePrompt)
            end = Failed(request.id, failed_by_network(self.name, self.base_url, error, again=again))
        else:
            end = Done(request.id, value, {"seconds": time.perf_counter() - begun})
        inbox.put_nowait(end)

    async def _value(self, request: Request, inbox: asyncio.Queue[Result]) -> Generation | Warmed:
        as_is = isinstance(getattr(request.payload, "prompt", None), wire.WirePrompt)
        if self._client is None:
            raise not_started(self.name, again=not as_is)
        match request.payload:
            case Warmup() if request.kind in self.kinds:
                return await self._warm_up(self._client, request, request.payload)
            case Generate() if request.kind in self.kinds:
                with self._prefixes.generating(request.payload.prompt, request.tenant):
                    value = await self._generate(self._client, request, request.payload, inbox)
                self._learn(request, value)
                return value
        reason = f"{self.name} takes Generate or Warmup, not {type(request.payload).__name__} ({request.kind.name})."
        raise EngineError(reason, engine=self.name, hint="see requests/payloads.py")

    async def _generate(
        self, client: httpx.AsyncClient, request: Request, asked: Generate, inbox: asyncio.Queue[Result]
    ) -> Generation:
        prompt = asked.prompt
        path, body = wire.path_and_body(prompt, asked.sampling, self.model or "")
        body |= self._ordering(request)
        as_is = isinstance(prompt, wire.WirePrompt)
        exact = isinstance(prompt, wire.WirePrompt) and prompt.exact
        if body.get("stream") if exact else request.stream:
            body = body if exact else {**body, **_STREAMED}
            return await self._stream(client, request, path, body, inbox, as_is=as_is)
        answer = await sent(client, f"{self.base_url}/{path}", body, prompt)
        if answer.status_code != 200:
            raise refused(self.name, answer.status_code, answer.text, dict(answer.headers), again=not as_is)
        try:
            return wire.generation(answer.text, wire=as_is)
        except ValueError as error:  # what to make of it is for whoever asked to say
            raise unread(self.name, error, answer.text, dict(answer.headers)) from error

    async def _stream(
        self,
        client: httpx.AsyncClient,
        request: Request,
        path: str,
        body: dict[str, Any],
        inbox: asyncio.Queue[Result],
        *,
        as_is: bool,
    ) -> Generation:
        chunks = wire.Chunks()
        answer = await sent(client, f"{self.base_url}/{path}", body, request.payload.prompt, stream=True)
        async with aclosing(answer):
            if answer.status_code != 200:
                content = (await answer.aread()).decode(errors="replace")
                raise refused(self.name, answer.status_code, content, dict(answer.headers), again=not as_is)
            async for line in answer.aiter_lines():
                chunk = _chunk(line)
                if not chunk:
                    continue
                text = chunks.text(chunk)
                inbox.put_nowait(wire.WirePiece(request.id, text, int(bool(text)), chunk))
                chunks.add(chunk)
        return wire.generation(chunks.response(self._shape), wire=as_is)

    def _ordering(self, request: Request) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if self._priorities:
            added["priority"] = request.priority + (_LAST if request.background else 0)
        if request.tenant and self.prefix_caching:
            added["cache_salt"] = request.tenant
        return added

    async def cancel(self, request_id: str) -> None:
        """The connection is closed, at which servers give a generation up."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def _warm_up(self, client: httpx.AsyncClient, request: Request, asked: Warmup) -> Warmed:
        """Nothing is sent to a server that was not declared to keep it."""
        if not self._profile.prefix_caching:
            return Warmed(0)
        ordering = self._ordering(request)
        return Warmed(await self._prefixes.send(client, asked.prompt, self.model or "", request.tenant, ordering))

    # Figures

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    @property
    def measurable(self) -> bool:
        """Whether it may be sent requests of nobody's: see `calibrate`."""
        return self._profile.prefix_caching if self._calibrate is None else self._calibrate

    def adopt(self, profile: EngineProfile) -> None:
        """Take measured figures from `profile`; limits stay as they are."""
        self._profile = replace(
            self._profile,
            curves=profile.curves,
            warmup_chunk=profile.warmup_chunk,
            interference=profile.interference,
        )

    async def measure(self) -> EngineProfile:
        """Measures seconds by tokens on the idle server, adopts and returns the profile. About 3 s on a small model."""
        self.adopt(await measure(self))
        return self._profile

    def size(self, request: Request) -> int:
        """Prompt tokens, estimated by characters; the ratio is learnt. The server says what is too large."""
        prompt = request.payload.prompt
        text = prompt.known() if isinstance(request.payload, Warmup) else prompt.flat()
        return min(max(1, round(len(text) / self._characters)), self.max_model_len or 1 << 20)

    def _learn(self, request: Request, value: Generation) -> None:
        if value.prompt_tokens >= 32:
            seen = len(request.payload.prompt.flat()) / value.prompt_tokens
            self._characters += 0.2 * (max(0.5, seen) - self._characters)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._tasks))

    async def reset(self) -> None:
        """Empties the prefix cache where the server offers that (vLLM in development mode); else nothing happens."""
        if self._client is not None and self.prefix_caching:
            await self._client.post(f"{root_of(self.base_url)}/reset_prefix_cache")

    def versions(self) -> Mapping[str, str]:
        """The model and the kind of server; only the model before the first start, if it was named."""
        return self._versions


def _chunk(line: str) -> str:
    """What a line of a stream carries; empty for its end and for lines between."""
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    return "" if data == "[DONE]" else data


def _unusable(name: str, reason: str, hint: str = "check base_url and api_key") -> EngineUnavailable:
    return EngineUnavailable(f"{name}: {reason}", engine=name, hint=hint)
