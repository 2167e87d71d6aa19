"""A model of the user's own that answers sync, async and streamed, and a server that counts its calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import Field

PAUSE_S = 0.25
"""Seconds that a call takes."""


class Server:
    """Counts calls by method and prompt, and the largest number of calls that were under way at the same time."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.running = self.most_at_once = 0
        self._lock = threading.Lock()

    def begin(self, method: str, prompt: str) -> None:
        with self._lock:
            self.calls[method, prompt] += 1
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)

    def end(self) -> None:
        with self._lock:
            self.running -= 1


class Model(BaseChatModel):
    """A chat model that streams three chunks. It reports them to its run itself, as some integrations do."""

    server: Any = Field(default_factory=Server)
    label: str = ""

    @property
    def _llm_type(self) -> str:
        return "model"

    def _texts(self, method: str, messages: Any) -> list[str]:
        self.server.begin(method, messages[-1].content)
        return [self.label, ":", str(len(messages[-1].content))]

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        texts = self._texts("_generate", messages)
        time.sleep(PAUSE_S)
        self.server.end()
        return ChatResult(generations=[ChatGeneration(message=AIMessage("".join(texts)))])

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        texts = self._texts("_agenerate", messages)
        await asyncio.sleep(PAUSE_S)
        self.server.end()
        return ChatResult(generations=[ChatGeneration(message=AIMessage("".join(texts)))])

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        for text in self._texts("_stream", messages):
            time.sleep(PAUSE_S / 3)
            if run_manager:
                run_manager.on_llm_new_token(text)
            yield ChatGenerationChunk(message=AIMessageChunk(text))
        self.server.end()

    async def _astream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        for text in self._texts("_astream", messages):
            await asyncio.sleep(PAUSE_S / 3)
            if run_manager:
                await run_manager.on_llm_new_token(text)
            yield ChatGenerationChunk(message=AIMessageChunk(text))
        self.server.end()
