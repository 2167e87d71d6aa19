"""The engine of an OpenAI-compatible server that is already there: vLLM's API server, SGLang, or any other.

Facts about the server come from its list of models and from short trial requests.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.openai.http import (
    failed_by_network,
    json_of,
    new_client,
    not_started,
    root_of,
    text_of,
    unreachable,
)
from teola_plugin.engines.openai.server_requests import (
    DRAFT_TOKENS,
    Endpoint,
    Prefixes,
    ServingHints,
    draft_fields,
    forget_outputs,
)
from teola_plugin.engines.request_tasks import Inbox, RequestTasks
from teola_plugin.engines.token_estimate import TokenEstimate
from teola_plugin.engines.vllm import measure as llm_measure
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.event_streams import DONE, read_events
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Request, Result, Warmed, Warmup

if TYPE_CHECKING:
    import httpx


log = logging.getLogger("teola_plugin")
_BLOCK = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One model of a server."""

    model: str
    max_model_len: int | None = None
    """Maximum tokens of a prompt with its answer; None if the server does not say."""
    versions: Mapping[str, str] = field(default_factory=dict)
    block_size: int = 0
    """Tokens in a block of its prefix cache; 0 if unknown."""
    prefixes: bool = True
    """False if trial requests showed that prefixes cannot be sent, because it has no `/tokenize`."""
    shape: Mapping[str, Any] | None = None
    """A complete response, for filling in what streams leave out; None if streams cannot be joined to one."""


async def discover(
    client: httpx.AsyncClient, engine: str, base_url: str, model: str | None, *, tries: bool
) -> ServerFacts:
    """Return the facts about a server and its `model`, or its only model if None.

    With `tries` it is sent a few short requests.

    Raises `EngineUnavailable` for a server that is not there or does not serve the model.
    """
    import httpx

    try:
        answer = await client.get(f"{base_url}/models")
    except Exception as error:
        raise unreachable(engine, base_url, error) from error
    if answer.status_code != 200:
        raise unusable_server(engine, f"{base_url}/models answered {answer.status_code}: {answer.text[:200]}")
    facts = select_model(engine, base_url, model, served_models(engine, base_url, text_of(answer)))
    try:
        return await _try_out(client, engine, base_url, facts) if tries else facts
    except httpx.HTTPError as error:
        raise unreachable(engine, base_url, error) from error


def served_models(engine: str, base_url: str, content: str) -> list[Mapping[str, Any]]:
    """Return the models of a reply of `/models`. Raise EngineUnavailable for a reply that is no list of them."""
    try:
        data = wire.parse_object(content).get("data") or []
        if isinstance(data, list) and all(isinstance(one, Mapping) for one in data):
            return data
        fault = "data is not a list of objects"
    except wire.MalformedReply as error:
        fault = str(error)
    raise unusable_server(engine, f"the reply of {base_url}/models is no list of models: {fault}: {content[:200]!r}")


def select_model(engine: str, base_url: str, model: str | None, models: Sequence[Mapping[str, Any]]) -> ServerFacts:
    """Return the facts about `model`, or about the only one if None. Raise EngineUnavailable if there is none such."""
    names = [str(entry.get("id")) for entry in models]
    name = names[0] if model is None and len(names) == 1 else model
    if name is None or name not in names:
        complaint = f"does not serve {name!r}" if name else "serves several models, or none"
        raise unusable_server(
            engine, f"{base_url} {complaint}; it has: {', '.join(names) or 'none'}.", "name one of them"
        )
    entry = next(entry for entry in models if entry.get("id") == name)
    versions = {"model": name, "server": str(entry.get("owned_by") or "openai-compatible")}
    if entry.get("root") not in (None, name):
        versions["root"] = str(entry["root"])
    length = entry.get("max_model_len")
    return ServerFacts(name, length if type(length) is int and length > 0 else None, versions)


async def _try_out(client: httpx.AsyncClient, engine: str, base_url: str, facts: ServerFacts) -> ServerFacts:
    """Find out if and how prefixes can be sent, and if a streamed answer can be joined to a complete one."""
    version, block = await _version_and_block(client, base_url)
    body = {"model": facts.model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
    reply = await client.post(f"{root_of(base_url)}/tokenize", json={k: body[k] for k in ("model", "messages")})
    prefixes = reply.status_code == 200 and bool(json_of(reply.text).get("tokens"))
    if not prefixes:
        log.warning("/tokenize is missing at %s, so %s sends no prefixes early", base_url, engine)
    return replace(
        facts,
        versions={**facts.versions, **({"version": version} if version else {})},
        block_size=block,
        prefixes=prefixes,
        shape=await _response_shape(client, base_url, body),
    )


async def _version_and_block(client: httpx.AsyncClient, base_url: str) -> tuple[str, int]:
    """Return vLLM's version and the tokens in a block of its prefix cache; "" and 0 if unknown."""
    version = await client.get(f"{root_of(base_url)}/version")
    metrics = await client.get(f"{root_of(base_url)}/metrics")
    block = _BLOCK.search(metrics.text) if metrics.status_code == 200 else None
    version_text = str(json_of(version.text).get("version") or "") if version.status_code == 200 else ""
    return version_text, int(block[1]) if block else 0


async def _response_shape(
    client: httpx.AsyncClient, base_url: str, body: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return a complete response to a short trial request, if the pieces of a streamed one join to the same fields.

    Return None if they do not, or if the server refuses. Then streams are not joined for clients that want whole
    answers.
    """
    complete = await client.post(f"{base_url}/chat/completions", json=dict(body))
    streamed = await client.post(f"{base_url}/chat/completions", json={**body, **wire.STREAMED})
    if complete.status_code != 200 or streamed.status_code != 200:
        return None
    shape, chunks = json_of(complete.text), wire.Chunks(strict=True)
    try:
        for event in itertools.takewhile(
            lambda event: not event.data.startswith(DONE), read_events([streamed.content])
        ):
            if event.data:
                chunks.add(event.data)
    except wire.MalformedReply:
        return None
    return shape if wire.same_fields(json_of(chunks.response(shape)), shape) else None


def unusable_server(engine: str, reason: str, hint: str = "check base_url and api_key") -> EngineUnavailable:
    return EngineUnavailable(f"{engine}: {reason}", engine=engine, hint=hint)


_BACKGROUND_PRIORITY = 1 << 40
"""Added to the priority of background work: it comes after all requests that a caller waits for."""


class OpenAIServer:
    """An LLM behind an OpenAI-compatible server that is already running.

    Attributes and arguments:
        base_url: The address as clients write it, e.g. `http://localhost:8000/v1`.
        model: A name that the server knows; by default the only model that it serves.
        dedicated: Declares that the server is there for your apps, and may get speculative requests. Without it the
            server gets only requests that the original app would send: no prefixes, no predicted items, nothing for
            arms that are not chosen yet, no measurements.
        prefix_caching: True if the server caches the keys and values of prefixes. It then gets some in advance, as
            requests for one token on the known part of a prompt. By default a dedicated server does; True declares a
            server as dedicated. A server without `/tokenize`, which vLLM has, gets none.
        calibrate: True if a pool measures the server at its start (some 20 requests in 3 s, once, as figures are
            kept), so that prefixes are sent only where that pays. By default it does if prefixes are cached.
        drafts: Declares that the server is vLLM, started with the two flags of docs/drafts.md: draft texts are sent
            with greedy requests, with app and tenant, in `vllm_xargs`. No other server gets them.
        priorities: Declares that the server orders by `priority` (vLLM with `--scheduling-policy priority`).
        hints: Declares a server that understands hints, which change no answer. `"vllm"`: `priority`, as with
            `priorities`. `"dynamo"` (NVIDIA Dynamo): `nvext.agent_hints` with a priority and the expected output length
            in tokens, and the id of the query in the header `X-Dynamo-Session-ID`. Other servers get none.
        session_header: The name of a header in which a router in front of the server gets the id of the query, so that
            it can send requests of one query to one replica.
        max_requests: Maximum number of requests in flight.
        timeout: Maximum seconds between two signs of life.
        check: False if the start shall not check that the server serves the model.

    Raises `RegistrationError` for unknown `hints`, and for a `session_header` that is no name of a header.
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
        dedicated: bool = False,
        prefix_caching: bool | None = None,
        calibrate: bool | None = None,
        priorities: bool = False,
        drafts: bool = False,
        max_requests: int = 256,
        timeout: float = 600.0,
        headers: Mapping[str, str] | None = None,
        check: bool = True,
        hints: str | None = None,
        session_header: str | None = None,
    ) -> None:
        self.name, self.base_url, self.model = name, without_credentials(base_url).rstrip("/"), model
        self.dedicated = dedicated or bool(prefix_caching)
        self.prefix_caching = self.dedicated if prefix_caching is None else prefix_caching
        self._priorities, self._calibrate = priorities or hints == "vllm", calibrate
        self._hints = ServingHints(hints, session_header)
        self._check = check
        self._new_client = partial(new_client, base_url, api_key, headers, timeout, max_requests + 8)
        self._profile = EngineProfile(
            batching=Batching.CONTINUOUS,
            max_batch=1 << 20,  # the server forms its own batches
            max_efficient_batch=1 << 20,
            max_requests=max_requests,
            device=self.base_url,
            dedicated=self.dedicated,
            prefix_caching=self.prefix_caching,
            drafts=DRAFT_TOKENS if drafts else 0,
        )
        self._prefixes = Prefixes(name, self.base_url)
        self._client: httpx.AsyncClient | None = None
        self._versions: dict[str, str] = {"model": model} if model else {}
        self.max_model_len: int | None = None
        """Maximum tokens of a prompt with its answer; None if the server does not say."""
        self._tasks = RequestTasks(name)
        self._estimate = TokenEstimate()
        self._has_reported_cached = False
        self._shape: Mapping[str, Any] | None = None
        """A complete response, for filling in what streams leave out; None if streams cannot be joined to one."""

    # Life cycle

    async def start(self) -> None:
        """Idempotent. Raises `EngineUnavailable` for a server that is not there or does not serve the model."""
        if self._client is not None:
            return
        client = self._new_client(self.name)
        if self._check or self.model is None or self.prefix_caching:
            try:
                facts = await discover(client, self.name, self.base_url, self.model, tries=self.prefix_caching)
            except BaseException:
                await client.aclose()
                raise
            self._set_facts(facts)
        self._client = client

    def _set_facts(self, facts: ServerFacts) -> None:
        """Adopt what was found out about the server: model, limits, block size, and what its prefix cache and drafts
        allow."""
        self.model, self.max_model_len, self._versions = facts.model, facts.max_model_len, dict(facts.versions)
        self._shape = facts.shape
        self._profile = replace(
            self._profile,
            min_split_tokens=max(self._profile.min_split_tokens, facts.block_size),
            prefix_caching=self._profile.prefix_caching and facts.prefixes,
            drafts=self._drafted_tokens(facts),
        )

    def _drafted_tokens(self, facts: ServerFacts) -> int:
        """Return the number of drafted tokens; 0 for a server that says that it is not vLLM."""
        kind = facts.versions.get("server", "vllm")
        if self._profile.drafts and kind != "vllm":
            log.warning("%s says that it is %s instead of vLLM: %s sends it no drafts", self.base_url, kind, self.name)
            return 0
        return self._profile.drafts

    @property
    def joins(self) -> bool:
        """True if the pieces of a streamed answer of this server can be joined to the complete answer."""
        return self._shape is not None

    @property
    def tells_cached(self) -> bool | None:
        """True if answers report the number of cached prompt tokens; None until one has."""
        return self._has_reported_cached or None

    async def stop(self) -> None:
        """Idempotent. Requests in flight fail; the server goes on."""
        client, self._client = self._client, None
        self._tasks.cancel_all()
        if client is not None:
            await client.aclose()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield the results of all requests as they come. A caller that stops reading cancels the others."""
        async with aclosing(self._tasks.serving(batch, self._answer)) as results:
            async for result in results:
                yield result

    async def _answer(self, request: Request, inbox: Inbox) -> Generation | Warmed:
        """Execute one request. Network errors become `EngineError`, retryable unless a client wrote the request."""
        try:
            return await self._generate_or_warm_up(request, inbox)
        except EngineError:
            raise
        except Exception as error:
            retryable = not isinstance(getattr(request.payload, "prompt", None), wire.WirePrompt)
            raise failed_by_network(self.name, self.base_url, error, retryable=retryable) from error

    async def _generate_or_warm_up(self, request: Request, inbox: Inbox) -> Generation | Warmed:
        """Send a generation, or a prefix for the server's cache; return its value. Raise `EngineError` for others."""
        is_wire = isinstance(getattr(request.payload, "prompt", None), wire.WirePrompt)
        if self._client is None:
            raise not_started(self.name, retryable=not is_wire)
        match request.payload:
            case Warmup() if request.kind in self.kinds:
                return await self._warm_up(self._client, request, request.payload)
            case Generate() if request.kind in self.kinds:
                with self._prefixes.generating(request.payload.prompt, request.tenant):
                    merges_unread = self._versions.get("server") == "vllm"
                    endpoint = Endpoint(
                        self._client,
                        self.name,
                        self.base_url,
                        self.model or "",
                        self._shape,
                        merges_unread,
                        self._hints.headers(request),
                    )
                    ordering, hints = self._ordering(request), self._hints.fields(request)
                    value = await endpoint.generate(request, request.payload, ordering, hints, inbox)
                self._hints.learn(request, value.completion_tokens)
                self._estimate.learn(request.payload, value.prompt_tokens)
                self._has_reported_cached |= value.cached_tokens > 0
                return value
        reason = f"{self.name} takes Generate or Warmup, not {type(request.payload).__name__} ({request.kind.name})."
        raise EngineError(reason, engine=self.name, hint="see requests/payloads.py")

    def _ordering(self, request: Request) -> dict[str, Any]:
        """Return the fields that are added to a request's body: priority, a cache salt by tenant, and draft texts."""
        added: dict[str, Any] = {}
        if self._priorities:
            added["priority"] = request.priority + (_BACKGROUND_PRIORITY if request.background else 0)
        if request.tenant and self.prefix_caching:
            added["cache_salt"] = request.tenant
        return added | (draft_fields(request) if self._profile.drafts else {})

    async def cancel(self, request_id: str) -> None:
        """Close the connection, at which servers stop the generation."""
        self._tasks.cancel(request_id)

    async def _warm_up(self, client: httpx.AsyncClient, request: Request, payload: Warmup) -> Warmed:
        """Send a prefix to a server that was declared to cache it; do nothing for any other."""
        if not self._profile.prefix_caching:
            return Warmed(0)
        added, headers = self._ordering(request) | self._hints.fields(request), self._hints.headers(request)
        model = self.model or ""
        return Warmed(await self._prefixes.send(client, payload.prompt, model, request.tenant, added, headers))

    # Figures

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    @property
    def measurable(self) -> bool:
        """True if the server may get requests that no query asked for (see `calibrate`)."""
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
        """Measure seconds by tokens on the idle server, adopt and return the profile. Takes some 3 s."""
        self.adopt(await _measure(self))
        return self._profile

    def size(self, request: Request) -> int:
        """Return the prompt tokens, estimated by characters. The server refuses what is too large."""
        return min(self._estimate.tokens(request.payload), self.max_model_len or 1 << 20)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._tasks))

    async def reset(self) -> None:
        """Forget outputs to draft from, and empty the prefix cache if the server can (vLLM in development mode)."""
        if self._client is not None and self.prefix_caching:
            await self._client.post(f"{root_of(self.base_url)}/reset_prefix_cache")
        await self._forget_outputs(None)

    async def forget(self, tenant: str) -> None:
        """Stop drafting from texts that this tenant's requests have produced so far.

        Raises:
            EngineError: The server could not be told.
        """
        await self._forget_outputs(tenant)

    async def _forget_outputs(self, tenant: str | None) -> None:
        if self._client is not None and self._profile.drafts:
            await forget_outputs(self._client, self.name, self.base_url, self.model or "", tenant)

    def versions(self) -> Mapping[str, str]:
        """The model and the kind of server; only the model before the first start, if it was named."""
        return self._versions


async def _measure(engine: OpenAIServer) -> EngineProfile:
    """Measure a server with some 20 requests in 3 s. Raise EngineError if replies do not say how long prompts are."""
    try:
        profile = await llm_measure.measure(engine, limit=engine.max_model_len)
    except ZeroDivisionError as error:
        raise _missing_usage(engine) from error
    sizes = [size for size, _ in profile.curves[PrimitiveKind.PREFILLING].points]
    if sizes != sorted(set(sizes)):
        raise _missing_usage(engine)
    return replace(profile, interference=await llm_measure.interference(engine, profile))


def _missing_usage(engine: OpenAIServer) -> EngineError:
    """Return the error for a server that cannot be measured, since its answers do not count prompt tokens."""
    return EngineError(
        f"{engine.name}: the usage in the server's answers does not tell how many tokens a prompt has.",
        engine=engine.name,
        hint=f"OpenAIServer({engine.name!r}, ..., calibrate=False)",
    )
