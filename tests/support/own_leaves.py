"""Models and retrievers of the user's own whose answers depend on the prompt alone. They record their calls."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import LLM, BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from pydantic import Field


class Ledger:
    """The calls of all models and retrievers that share it.

    Args:
        meet: a call waits until this many calls are under way, or for one second. 0: it does not wait.
        jitter: the longest random latency of a call, in seconds.
    """

    def __init__(self, meet: int = 0, jitter: float = 0.0) -> None:
        self.calls: Counter[str] = Counter()
        self.now = 0
        self.most_at_once = 0
        self.meet = meet
        self.jitter = jitter
        self.variables: list[Any] = []
        self.look: Callable[[], Any] | None = None
        self._lock = threading.Lock()

    def begin(self, call: str) -> None:
        with self._lock:
            self.calls[call] += 1
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            if self.look is not None:
                self.variables.append(self.look())

    def end(self) -> None:
        with self._lock:
            self.now -= 1

    def _pauses(self) -> list[float]:
        if self.jitter:
            return [random.random() * self.jitter]
        return [0.002] * 500 if self.meet else [0.0]

    def work(self, call: str, error: str = "") -> None:
        self.begin(call)
        try:
            for pause in self._pauses():
                time.sleep(pause)
                if self.meet and self.most_at_once >= self.meet:
                    break
            if error:
                raise ValueError(error)
        finally:
            self.end()

    async def awork(self, call: str, error: str = "") -> None:
        self.begin(call)
        try:
            for pause in self._pauses():
                await asyncio.sleep(pause)
                if self.meet and self.most_at_once >= self.meet:
                    break
            if error:
                raise ValueError(error)
        finally:
            self.end()


class SyncChat(BaseChatModel):
    """A chat model with sync code only, as local models are."""

    ledger: Any = Field(default_factory=Ledger)
    says: str = "model"
    error: str = ""

    @property
    def _llm_type(self) -> str:
        return "own"

    def _answer(self, messages: Any, stop: Any, kwargs: Any) -> ChatResult:
        text = f"{self.says}({messages[-1].content}{stop or ''}{kwargs or ''})"
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        self.ledger.work(f"{self.says}: {messages[-1].content}", self.error)
        return self._answer(messages, stop, kwargs)


class Chat(SyncChat):
    """A chat model with async code of its own, as models behind an API are."""

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        await self.ledger.awork(f"{self.says}: {messages[-1].content}", self.error)
        return self._answer(messages, stop, kwargs)


class Text(LLM):
    """A plain text model."""

    ledger: Any = Field(default_factory=Ledger)

    @property
    def _llm_type(self) -> str:
        return "own-text"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        self.ledger.work(f"text: {prompt}")
        return f"text({prompt})"

    async def _acall(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        await self.ledger.awork(f"text: {prompt}")
        return f"text({prompt})"


class Notes(BaseRetriever):
    """A retriever whose documents name the query."""

    ledger: Any = Field(default_factory=Ledger)
    error: str = ""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.ledger.work(f"notes: {query}", self.error)
        return [Document(f"about {query}"), Document(f"more about {query}")]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        await self.ledger.awork(f"notes: {query}", self.error)
        return [Document(f"about {query}"), Document(f"more about {query}")]
