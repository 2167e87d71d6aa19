"""An LLM engine that writes in pieces, and waits between two pieces until something has happened elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from support.scripted_llm import ScriptedLLM
from teola_plugin.graph import Batching, EngineProfile
from teola_plugin.requests.payloads import Done, Generate, Generation, Piece, Prompt, Request, Result, Warmed, Warmup

Written = str | Callable[[], bool]
"""A piece of text, or a condition to wait for before the next piece."""
PATIENCE = 5.0
"""Seconds after which it writes the next piece, even if the condition is still false."""


class WritingLLM(ScriptedLLM):
    """An LLM engine whose `writes` returns the pieces for a prompt.

    It records the prompts that it warms up; nothing takes time.
    """

    profile = EngineProfile(
        batching=Batching.CONTINUOUS, prefix_caching=True, max_request_size=100_000, max_requests=64, max_batch=100_000
    )

    def __init__(self) -> None:
        super().__init__()
        self.writes: Callable[[Prompt], Sequence[Written]] = lambda prompt: ["done"]
        self.fulfilled_waits: list[bool] = []
        """For each condition that it waited for, True if the condition became true in time."""
        self.warmed: list[Prompt] = []

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            payload: Generate | Warmup = request.payload
            if isinstance(payload, Warmup):
                self.warmed.append(payload.prompt)
                yield Done(request.id, Warmed(len(payload.prompt.known_prefix()) // 4))
                continue
            self.requests.append(payload)
            text = ""
            for one in self.writes(payload.prompt):
                if isinstance(one, str):
                    text += one
                    yield Piece(request.id, one)
                else:
                    self.fulfilled_waits.append(await _until(one))
            yield Done(request.id, Generation(text, "stop", 7, len(text) // 4, 0))


async def _until(happened: Callable[[], bool]) -> bool:
    for _ in range(int(PATIENCE / 0.005)):
        if happened():
            return True
        await asyncio.sleep(0.005)
    return False


def call(name: str, **args: Any) -> str:
    """Return a call of a tool, as models write it."""
    return "<tool_call>" + json.dumps({"name": name, "arguments": args}) + "</tool_call>"
