"""An LLM that chooses by number and then gives a reason, and a store that tells it when it is searched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from support.llamaindex_engines import reply
from support.scripted_llm import ScriptedLLM
from teola_plugin.engines.fake import FakeStore
from teola_plugin.requests.payloads import Done, Generation, Piece, Request, Result

PATIENCE = 5.0
"""Seconds that a reason waits for a search that does not come."""


class Reasoning(ScriptedLLM):
    """Writes a reason only when a search has been made since it wrote the number, if it is `held`."""

    def __init__(self, chosen: str, reason: str) -> None:
        """`chosen`: what it writes where it has to choose; `reason`: a pattern, before which the number is written."""
        super().__init__()
        self.held = False
        self.chosen, self._begins = chosen, f"(?={reason})"
        self.searched = asyncio.Event()
        self.in_time: list[bool] = []
        """Of each reason, whether a search came before it."""

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            self.asked.append(request.payload)
            chooses = "Using only the choices above" in request.payload.prompt.flat()
            text = self.chosen if chooses else reply(request.payload)
            *numbers, last = re.split(self._begins, text)
            for piece in numbers:
                self.searched.clear()
                yield Piece(request.id, piece)
                if self.held:
                    await self._reason()
            yield Piece(request.id, last)
            yield Done(request.id, Generation(text, "stop", 7, 9, 3))

    async def _reason(self) -> None:
        try:
            await asyncio.wait_for(self.searched.wait(), PATIENCE)
        except TimeoutError:
            self.in_time.append(False)
        else:
            self.in_time.append(True)


class Told(FakeStore):
    """Tells the model of its searches."""

    def __init__(self, llm: Reasoning) -> None:
        super().__init__()
        self._llm = llm

    def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        self._llm.searched.set()
        return super().execute(batch)


def spans(fast: Any, *, outcome: str = "") -> list[str]:
    """Primitives in the trace of the last call; those with this outcome."""
    return [span.primitive for span in fast.last_trace().spans if outcome in ("", span.outcome)]


def by_hand(fast: Any) -> list[str]:
    """Calls that the plain code had to make itself."""
    return [name for name in spans(fast) if ".call#" in name]
