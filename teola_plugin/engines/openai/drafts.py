"""What goes along to a vLLM server that drafts (docs/drafts.md, "On a vLLM server of your own"): in `vllm_xargs`, which
vLLM hands to its worker as it is, and which changes no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.openai.http import refused
from teola_plugin.engines.openai.wire import WirePrompt
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
from teola_plugin.requests.payloads import Generate, Message
from teola_plugin.requests.request import Request

if TYPE_CHECKING:
    import httpx

TOKENS = 16
"""Drafted for a request at once where the documented flags are taken as they are."""
XARGS = "vllm_xargs"


def extra(request: Request) -> dict[str, Any]:
    """Return the fields with draft texts for the body of a generation; {} for one that samples."""
    payload = request.payload
    if not isinstance(payload, Generate) or not payload.sampling.greedy:
        return {}
    body = json.loads(payload.prompt.body) if isinstance(payload.prompt, WirePrompt) else {}
    texts = dict.fromkeys(request.drafts)
    with suppress(Exception):  # a body of another form is for the server to refuse
        texts |= dict.fromkeys(_told(body))
    fields = {KEY: list(texts)[:MAX_TEXTS], APP: request.app, TENANT: request.tenant}
    return {XARGS: {**(body.get(XARGS) or {}), **{key: value for key, value in fields.items() if value}}}


def _told(body: Mapping[str, Any]) -> Iterator[str]:
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


async def forget(client: httpx.AsyncClient, engine: str, base_url: str, model: str, tenant: str | None) -> None:
    """The server forgets outputs that it drafts from: a tenant's, or all. A request for one token tells it so, as it
    has no other way that is open to its clients. Raises `EngineError`, and what httpx raises."""
    told: dict[str, Any] = {FORGET_ALL: 1} if tenant is None else {FORGET_TENANT: tenant}
    body = {"model": model, "prompt": "-", "max_tokens": 1, "temperature": 0, XARGS: told}
    answer = await client.post(f"{base_url}/completions", json=body)
    if answer.status_code != 200:
        raise refused(engine, answer.status_code, answer.text, dict(answer.headers), again=True)
