"""Facts about a server: what it says about its models, and what short trial requests show."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.http import json_of, root_of, text_of, unreachable
from teola_plugin.errors import EngineUnavailable
from teola_plugin.event_streams import DONE, read_events

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
    facts = _select_model(engine, base_url, model, _served_models(engine, base_url, text_of(answer)))
    try:
        return await _try_out(client, engine, base_url, facts) if tries else facts
    except httpx.HTTPError as error:
        raise unreachable(engine, base_url, error) from error


def _served_models(engine: str, base_url: str, content: str) -> list[Mapping[str, Any]]:
    """Return the models of a reply of `/models`. Raise EngineUnavailable for a reply that is no list of them."""
    try:
        data = wire.parse_object(content).get("data") or []
        if isinstance(data, list) and all(isinstance(one, Mapping) for one in data):
            return data
        fault = "data is not a list of objects"
    except wire.MalformedReply as error:
        fault = str(error)
    raise unusable_server(engine, f"the reply of {base_url}/models is no list of models: {fault}: {content[:200]!r}")


def _select_model(engine: str, base_url: str, model: str | None, models: Sequence[Mapping[str, Any]]) -> ServerFacts:
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
        log.warning("%s has no /tokenize, so %s sends no prefixes early", base_url, engine)
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
