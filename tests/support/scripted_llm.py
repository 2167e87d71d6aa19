"""An LLM engine whose answers are set by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from teola_plugin.engines.base import EngineLoad
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Generate, Generation, Piece, Request, Result


class ScriptedLLM:
    """An LLM engine that answers by a function of the payload, streams word by word, and records the payloads."""

    name = "llm"
    kinds = frozenset({PrimitiveKind.PREFILLING, PrimitiveKind.DECODING})
    profile = EngineProfile(batching=Batching.CONTINUOUS)

    def __init__(self) -> None:
        self.answer: Callable[[Generate], str] = lambda asked: f"you said: {asked.prompt.flat()}"
        self.requests: list[Generate] = []
        self.cancelled: list[str] = []
        self.endless = False

    def clear(self) -> None:
        """Forget the recorded requests."""
        self.requests.clear()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            self.requests.append(request.payload)
            text = self.answer(request.payload)
            words = [word + " " for word in text.split(" ")]
            words[-1] = words[-1][:-1]
            for word in words if request.stream else ():
                yield Piece(request.id, word)
            yield Done(request.id, Generation(text, "stop", 7, len(words), 3))

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    def versions(self) -> Mapping[str, str]:
        return {"model": "scripted-1"}
