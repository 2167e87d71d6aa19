"""Prefixes of prompts, sent to a server that keeps them: each once at a time, and none that is under way anyway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from teola_plugin.engines import openai_wire as wire
from teola_plugin.engines.openai_http import json_of, refused, root_of
from teola_plugin.engines.payloads import UNKNOWN, Prompt

if TYPE_CHECKING:
    import httpx

_FILLERS = (UNKNOWN, "x")
"""Two texts for an unknown slot. Tokens that both prompts begin with precede it, whatever stands there."""


class Prefixes:
    """What is on its way to the server at `base_url`, for the engine `name`."""

    def __init__(self, name: str, base_url: str) -> None:
        self._name, self._base_url = name, base_url
        self._sent: dict[tuple[str, str], asyncio.Task[int]] = {}
        """Prefixes in flight, by tenant and known part."""
        self._readers: Counter[tuple[str, str]] = Counter()
        self._asked: Counter[tuple[str, str]] = Counter()
        """Whole prompts in flight."""

    @contextmanager
    def generating(self, prompt: Prompt, tenant: str) -> Iterator[None]:
        """A prompt that the server prefills itself in the body: prefixes of it need no sending."""
        key = tenant, wire.known_part(prompt)
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
        key = tenant, wire.known_part(prompt)
        if key not in self._sent:
            if self._under_way(key):
                return 0
            self._sent[key] = asyncio.create_task(self._send(client, prompt, model, ordering))
        return await self._shared(key)

    def _under_way(self, key: tuple[str, str]) -> bool:
        tenant, known = key
        return any(of == tenant and whole.startswith(known) for of, whole in (*self._asked, *self._sent))

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
        ids = await self._ids(client, prompt, model)
        if ids:
            asked = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, **ordering}
            self._checked(await client.post(f"{self._base_url}/completions", json=asked))
        return len(ids)

    async def _ids(self, client: httpx.AsyncClient, prompt: Prompt, model: str) -> list[int]:
        """Ids of what precedes the first unknown slot. Never wrong, only more or less useful: see `llm_tokens`."""
        fillers = _FILLERS[:1] if prompt.complete else _FILLERS
        bodies = [wire.tokenize_body(prompt, model, filler) for filler in fillers]
        url = f"{root_of(self._base_url)}/tokenize"
        answers = await asyncio.gather(*(client.post(url, json=body) for body in bodies))
        first, *others = [list(json_of(self._checked(answer).text)["tokens"]) for answer in answers]
        for other in others:
            same = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
            first = first[: min(len(first), len(other)) if same is None else same]
        return first

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code != 200:
            raise refused(self._name, answer.status_code, answer.text, dict(answer.headers), again=False)
        return answer
