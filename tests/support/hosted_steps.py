"""An LLM with a latency for steps of workflows, and runs that are compared with the original's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import PrivateAttr

from teola_plugin import accelerate

LATENCY_S = 0.05


class HostedLLM(CustomLLM):
    """An LLM with a latency, which notes the prompts that it gets and how many calls are under way at most."""

    fails_on: str = ""
    latency_s: float = LATENCY_S
    _prompts: list[str] = PrivateAttr(default_factory=list)
    _running: int = PrivateAttr(default=0)
    _most: int = PrivateAttr(default=0)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="hosted")

    @property
    def prompts(self) -> list[str]:
        """The prompts so far, sorted."""
        return sorted(self._prompts)

    @property
    def most_at_once(self) -> int:
        """The largest number of calls that were under way at the same time."""
        return self._most

    @property
    def running(self) -> int:
        """The number of calls that are under way."""
        return self._running

    def _begin(self, prompt: str) -> None:
        with self._lock:
            self._prompts.append(prompt)
            self._running += 1
            self._most = max(self._most, self._running)

    def _end(self, prompt: str) -> str:
        with self._lock:
            self._running -= 1
        if self.fails_on and self.fails_on in prompt:
            raise ValueError(f"refused: {prompt}")
        return f"answer to {prompt}"

    async def _answer(self, prompt: str) -> str:
        self._begin(prompt)
        try:
            await asyncio.sleep(self.latency_s)
        except asyncio.CancelledError:
            self._running -= 1
            raise
        return self._end(prompt)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self._begin(prompt)
        time.sleep(self.latency_s)
        return CompletionResponse(text=self._end(prompt))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=await self._answer(prompt))

    @llm_chat_callback()
    async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        text = await self._answer(" | ".join(f"{one.role.value}: {one.content}" for one in messages))
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


async def run_with_events(workflow: Any, query: str) -> Any:
    """Return the result of a run, and its events."""
    handler = workflow.run(query=query)
    events = [(type(event).__name__, event.model_dump()) async for event in handler.stream_events()]
    return await handler, events


def called(workflow: Any, query: str = "oats") -> Any:
    """Return the result of a run, and its events."""
    return asyncio.run(run_with_events(workflow, query))


def compared(
    make: Callable[[HostedLLM], Any], *, latency_s: float = LATENCY_S, **options: Any
) -> tuple[HostedLLM, HostedLLM]:
    """Check that a workflow answers and asks as its original does. Return the model of each."""
    original_llm, llm = HostedLLM(latency_s=latency_s), HostedLLM(latency_s=latency_s)
    expected = called(make(original_llm))
    assert called(accelerate(make(llm), **options)) == expected
    assert llm.prompts == original_llm.prompts
    return original_llm, llm
