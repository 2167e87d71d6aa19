"""A chat model with a latency, which notes its prompts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import PrivateAttr

LATENCY_S = 0.1


class HostedModel(BaseChatModel):
    """A chat model with a latency, which notes the prompts that it gets and how many calls are under way at most."""

    fails_on: str = ""
    failures: int = 1_000_000
    """How often it fails on each of these prompts."""
    latency_s: float = LATENCY_S
    _prompts: list[str] = PrivateAttr(default_factory=list)
    _running: int = PrivateAttr(default=0)
    _most: int = PrivateAttr(default=0)
    _failures: Counter[str] = PrivateAttr(default_factory=Counter)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "hosted"

    @property
    def prompts(self) -> list[str]:
        """The prompts so far, sorted."""
        return sorted(self._prompts)

    @property
    def most_at_once(self) -> int:
        """The largest number of calls that were under way at the same time."""
        return self._most

    def _begin(self, messages: list[BaseMessage]) -> str:
        prompt = "\n".join(str(message.content) for message in messages)
        with self._lock:
            self._prompts.append(prompt)
            self._running += 1
            self._most = max(self._most, self._running)
        return prompt

    def _end(self, prompt: str) -> ChatResult:
        with self._lock:
            self._running -= 1
            fails = bool(self.fails_on) and self.fails_on in prompt and self._failures[prompt] < self.failures
            self._failures[prompt] += fails
        if fails:
            raise ValueError(f"refused: {prompt}")
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"answer to {prompt}"))])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt = self._begin(messages)
        time.sleep(self.latency_s)
        return self._end(prompt)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt = self._begin(messages)
        try:
            await asyncio.sleep(self.latency_s)
        except asyncio.CancelledError:
            with self._lock:
                self._running -= 1
            raise
        return self._end(prompt)
