"""A LangChain callback handler that records events in their order, and the threads they come on."""

from __future__ import annotations

import threading
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler


class EventOrder(BaseCallbackHandler):
    """Records each event with its content, in order, and the threads of all events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()

    def _hear(self, *said: object) -> None:
        self.events.append(" ".join(map(str, said)))
        self.threads.add(threading.get_ident())

    def on_chain_start(self, _: Any, inputs: Any, **details: Any) -> None:
        self._hear("chain", details.get("name"), details["tags"], details["metadata"])

    def on_retriever_start(self, _: Any, query: str, **details: Any) -> None:
        self._hear("retriever", query, details["tags"], details["metadata"])

    def on_retriever_end(self, documents: Any, **_: Any) -> None:
        self._hear("found", documents)

    def on_chat_model_start(self, _: Any, messages: Any, **details: Any) -> None:
        self._hear("model", messages[0][0].content, details["tags"], details["metadata"], details.get("batch_size"))

    def on_llm_start(self, _: Any, prompts: Any, **details: Any) -> None:
        self._hear("model", prompts, details["tags"])

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self._hear("said", response.generations[0][0].text)

    def on_llm_error(self, error: Any, **_: Any) -> None:
        self._hear("failed", repr(error))

    def on_retriever_error(self, error: Any, **_: Any) -> None:
        self._hear("failed", repr(error))
