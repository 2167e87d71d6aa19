"""Models and a retriever of the user's own. They have a latency, answer by content, and count every call."""

from __future__ import annotations

import asyncio
import time
import zlib
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from support.request_counts import POISON

OWN = "own "
"""How the notes of their calls begin."""


def _start_call(counts: Any, scale: float, what: str) -> float:
    """Count the call and return its seconds. Raise an error if its content holds `POISON`."""
    counts.note(f"{OWN}{what}")
    return zlib.crc32(what.encode()) % 1000 / 1000 * 0.004 * scale


def _checked(counts: Any, what: str) -> None:
    if POISON in what:
        counts.poisoned_calls += 1
        raise ConnectionError(f"the service failed on {len(what)} characters")


class Local(BaseChatModel):
    """A local model: no async code of its own."""

    counts: Any = None
    scale: float = 1.0
    says: str = "local"

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        what = f"{self.says}: {messages[-1].content}"
        time.sleep(_start_call(self.counts, self.scale, what))
        return self._answer(what)

    def _answer(self, what: str) -> ChatResult:
        _checked(self.counts, what)
        text = f"{self.says}-{zlib.crc32(what.encode()) % 9973}"
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


class Hosted(Local):
    """A model behind an API: async of its own."""

    says: str = "hosted"

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        what = f"{self.says}: {messages[-1].content}"
        await asyncio.sleep(_start_call(self.counts, self.scale, what))
        return self._answer(what)


class Notes(BaseRetriever):
    """Finds two documents for anything."""

    counts: Any = None
    scale: float = 1.0

    def _found(self, query: str) -> list[Document]:
        _checked(self.counts, query)
        return [Document(page_content=f"{word} of {query}") for word in ("source", "origin")]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        time.sleep(_start_call(self.counts, self.scale, f"notes: {query}"))
        return self._found(query)

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        await asyncio.sleep(_start_call(self.counts, self.scale, f"notes: {query}"))
        return self._found(query)
