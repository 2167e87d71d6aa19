"""Tests of Ctrl-C while the original waits for a prefetched call: handlers see the usual events."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import LLMChainExtractor
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough

from teola_plugin import accelerate

HELD = threading.Event()


class Waits(BaseChatModel):
    """Answers the first at once, and the second when it is let go."""

    @property
    def _llm_type(self) -> str:
        return "waits"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        if "second" in messages[-1].content:
            HELD.wait(10)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("said"))])

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        raise NotImplementedError("only sync calls are made here")


class FixedRetriever(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document("first"), Document("second"), Document("third")]


def extractor() -> Runnable[Any, Any]:
    chosen = LLMChainExtractor.from_llm(Waits())
    return ContextualCompressionRetriever(base_compressor=chosen, base_retriever=FixedRetriever())


def chain() -> Runnable[Any, Any]:
    calls = {
        name: ChatPromptTemplate.from_template(f"{name} of {{question}}") | Waits() for name in ("first", "second")
    }
    both = RunnablePassthrough.assign(first=calls["first"]) | RunnablePassthrough.assign(second=calls["second"])
    return (lambda question: {"question": question}) | both


class InterruptingHandler(BaseCallbackHandler):
    """Records starts and ends of calls. It raises KeyboardInterrupt when the second call of a model has started."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.runs: list[UUID] = []

    def note(self, what: str, run: UUID) -> None:
        if run not in self.runs:
            self.runs.append(run)
        self.told.append((what, self.runs.index(run)))

    def on_chain_start(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self.note("chain", run_id)

    def on_chain_end(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self.note("chain ended", run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.note(f"chain failed {error!r}", run_id)

    def on_chat_model_start(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self.note("model", run_id)
        if sum(what == "model" for what, _ in self.told) == 2:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    def on_llm_end(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self.note("model ended", run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.note(f"model failed {error!r} {kwargs.get('response')}", run_id)


@pytest.mark.parametrize("make", [extractor, chain])
def test_keyboard_interrupt_sends_the_callbacks_of_the_original(make: Callable[[], Runnable[Any, Any]]) -> None:
    seen = []
    for one in (make(), accelerate(make(), concurrent=[Waits])):
        handler = InterruptingHandler()
        HELD.clear()
        try:
            with pytest.raises(KeyboardInterrupt):
                one.invoke("q", {"callbacks": [handler]})
        finally:
            HELD.set()
        time.sleep(0.05)  # nothing comes after it
        seen.append(handler.told)
    assert seen[0] == seen[1]
    failed = [what for what, _ in seen[0] if "KeyboardInterrupt" in what]
    assert failed[0].startswith("model failed" if make is extractor else "chain failed")
