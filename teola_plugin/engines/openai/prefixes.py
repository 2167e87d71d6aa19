"""Prefixes of prompts, sent to a server that keeps them: each once at a time, and none that is under way anyway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.openai import wire
from teola_plugin.engines.openai.http import json_of, refused, sent
from teola_plugin.requests.payloads import Prompt

if TYPE_CHECKING:
    import httpx


class Prefixes:
    """The prefixes and prompts in flight to the server at `base_url`, for the engine `name`."""

    def __init__(self, name: str, base_url: str) -> None:
        self._name, self._base_url = name, base_url
        self._sent: dict[tuple[str, str], asyncio.Task[int]] = {}
        """Prefixes in flight, by owner and known part."""
        self._readers: Counter[tuple[str, str]] = Counter()
        self._asked: Counter[tuple[str, str]] = Counter()
        """Whole prompts in flight."""

    @contextmanager
    def generating(self, prompt: Prompt, tenant: str) -> Iterator[None]:
        """A prompt that the server prefills itself in the body: prefixes of it need no sending."""
        key = _owner(prompt, tenant), wire.known_part(prompt)
        self._asked[key] += 1
        try:
            yield
        finally:
            self._asked[key] -= 1
            if not self._asked[key]:
                del self._asked[key]

    async def send(
        self, client: httpx.AsyncClient, prompt: Prompt, model: str, tenant: str, ordering: Mapping[str, Any]
    ) -> int:
        """Tokens of the prefix, once the server has it; 0 where something under way begins with it.

        Raises `EngineError` for what the server refuses.
        """
        key = _owner(prompt, tenant), wire.known_part(prompt)
        if key not in self._sent:
            if self._under_way(key):
                return 0
            self._sent[key] = asyncio.create_task(self._send(client, prompt, model, ordering))
        return await self._shared(key)

    def _under_way(self, key: tuple[str, str]) -> bool:
        owner, known = key
        return any(of == owner and whole.startswith(known) for of, whole in (*self._asked, *self._sent))

    async def _shared(self, key: tuple[str, str]) -> int:
        """The result of a sending that others may wait for, too; the last one that gives up ends it."""
        task = self._sent[key]
        self._readers[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key], self._sent[key]
                task.cancel()

    async def _send(self, client: httpx.AsyncClient, prompt: Prompt, model: str, ordering: Mapping[str, Any]) -> int:
        """A request for one token: what it finds in its prompt stays in the server's cache."""
        path, body = wire.prefix(prompt, model)
        if body.get("prompt") == "":  # a text that begins with what is not known
            return 0
        asked = {**body, "max_tokens": 1, "temperature": 0, **ordering}
        answer = await sent(client, f"{self._base_url}/{path}", asked, prompt)
        if answer.status_code != 200:
            raise refused(self._name, answer.status_code, answer.text, dict(answer.headers), again=False)
        return wire.prompt_tokens(json_of(answer.text))


def _owner(prompt: Prompt, tenant: str) -> str:
    """Return the owner of a prefix: its tenant, with the keys and headers of its request."""
    envelope = getattr(prompt, "envelope", None)
    return tenant if envelope is None else f"{tenant}/{envelope.identity}"
