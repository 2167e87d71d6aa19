"""What a server says of itself when it is met, and what it turns out to do."""

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
    """Tokens of a prompt with its answer, where the server says so."""
    versions: Mapping[str, str] = field(default_factory=dict)
    block_size: int = 0
    """Tokens in a block of its prefix cache; 0 where it does not say."""
    prefixes: bool = True
    """Whether prefixes can be sent: where it was tried out, it has `/tokenize`."""
    shape: Mapping[str, Any] | None = None
    """A whole response, for filling in what streams leave out; None where streams do not add up to one."""


async def discover(
    client: httpx.AsyncClient, engine: str, base_url: str, model: str | None, *, tries: bool
) -> ServerFacts:
    """`model`: one that it must serve, or None for its only one. With `tries` it is sent a few short requests.

    Raises `EngineUnavailable` for a server that is not there or does not serve the model.
    """
    import httpx

    try:
        answer = await client.get(f"{base_url}/models")
    except Exception as error:
        raise unreachable(engine, base_url, error) from error
    if answer.status_code != 200:
        raise unusable_server(engine, f"{base_url}/models answered {answer.status_code}: {answer.text[:200]}")
    facts = _chosen(engine, base_url, model, _served_models(engine, base_url, text_of(answer)))
    try:
        return await _tried_out(client, engine, base_url, facts) if tries else facts
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


def _chosen(engine: str, base_url: str, model: str | None, served: Sequence[Mapping[str, Any]]) -> ServerFacts:
    names = [str(one.get("id")) for one in served]
    wanted = names[0] if model is None and len(names) == 1 else model
    if wanted is None or wanted not in names:
        asked = f"does not serve {wanted!r}" if wanted else "serves several models, or none"
        raise unusable_server(engine, f"{base_url} {asked}; it has: {', '.join(names) or 'none'}.", "name one of them")
    found = next(one for one in served if one.get("id") == wanted)
    versions = {"model": wanted, "server": str(found.get("owned_by") or "openai-compatible")}
    if found.get("root") not in (None, wanted):
        versions["root"] = str(found["root"])
    length = found.get("max_model_len")
    return ServerFacts(wanted, length if type(length) is int and length > 0 else None, versions)


async def _tried_out(client: httpx.AsyncClient, engine: str, base_url: str, facts: ServerFacts) -> ServerFacts:
    """Find out if and how prefixes can be sent, and if a streamed answer can be joined to a complete one."""
    version, block = await _version_and_block(client, base_url)
    asked = {"model": facts.model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
    found = await client.post(f"{root_of(base_url)}/tokenize", json={k: asked[k] for k in ("model", "messages")})
    prefixes = found.status_code == 200 and bool(json_of(found.text).get("tokens"))
    if not prefixes:
        log.warning("%s has no /tokenize, so %s sends no prefixes early", base_url, engine)
    return replace(
        facts,
        versions={**facts.versions, **({"version": version} if version else {})},
        block_size=block,
        prefixes=prefixes,
        shape=await _shape(client, base_url, asked),
    )


async def _version_and_block(client: httpx.AsyncClient, base_url: str) -> tuple[str, int]:
    """vLLM's version, and the tokens in a block of its prefix cache; empty and 0 for servers that do not say."""
    version = await client.get(f"{root_of(base_url)}/version")
    metrics = await client.get(f"{root_of(base_url)}/metrics")
    found = _BLOCK.search(metrics.text) if metrics.status_code == 200 else None
    said = str(json_of(version.text).get("version") or "") if version.status_code == 200 else ""
    return said, int(found[1]) if found else 0


async def _shape(client: httpx.AsyncClient, base_url: str, asked: Mapping[str, Any]) -> Mapping[str, Any] | None:
    whole = await client.post(f"{base_url}/chat/completions", json=dict(asked))
    streamed = await client.post(f"{base_url}/chat/completions", json={**asked, **wire.STREAMED})
    if whole.status_code != 200 or streamed.status_code != 200:
        return None
    shape, chunks = json_of(whole.text), wire.Chunks(strict=True)
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
