"""An LLM that writes the number of its choice before the reason, and a store that notifies it of searches."""

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
"""Seconds that a reason waits for a search before it is written anyway."""


class ReasoningLLM(ScriptedLLM):
    """An LLM that chooses. With `waits_for_search` it writes the reason only after a search that follows the number."""

    def __init__(self, choice: str, reason: str) -> None:
        """Create the LLM.

        Args:
            choice: the text that it writes when it has to choose.
            reason: a regular expression that matches where the reason begins.
        """
        super().__init__()
        self.waits_for_search = False
        self.choice, self._begins = choice, f"(?={reason})"
        self.searched = asyncio.Event()
        self.in_time: list[bool] = []
        """For each reason, True if a search came before it."""

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            self.requests.append(request.payload)
            chooses = "Using only the choices above" in request.payload.prompt.flat()
            text = self.choice if chooses else reply(request.payload)
            *numbers, last = re.split(self._begins, text)
            for piece in numbers:
                self.searched.clear()
                yield Piece(request.id, piece)
                if self.waits_for_search:
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


class ObservedStore(FakeStore):
    """A fake store that notifies the LLM of each search."""

    def __init__(self, llm: ReasoningLLM) -> None:
        super().__init__()
        self._llm = llm

    def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        self._llm.searched.set()
        return super().execute(batch)


def spans(fast: Any, *, outcome: str = "") -> list[str]:
    """Return the primitives in the trace of the last call, or only those with this outcome."""
    return [span.primitive for span in fast.last_trace().spans if outcome in ("", span.outcome)]


def calls_of_the_original(fast: Any) -> list[str]:
    """Return the calls that the original had to make itself."""
    return [name for name in spans(fast) if ".call#" in name]
