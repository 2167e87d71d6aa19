"""Tests that an accelerated call adds no callback handler to steps if no code of the user's runs."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain import runnable, started_calls
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.langchain import ChatTeola

SEEN: list[str] = []


def seen(text: str) -> str:
    SEEN.append(text)
    return text


def chain(pool: EnginePool, *behind: Runnable[Any, Any]) -> Runnable[Any, Any]:
    llm = ChatTeola(pool=pool, max_tokens=4)
    first = RunnablePassthrough.assign(a=ChatPromptTemplate.from_template("a {q}") | llm | StrOutputParser())
    second = RunnablePassthrough.assign(b=ChatPromptTemplate.from_template("b {q}") | llm | StrOutputParser())
    made: Runnable[Any, Any] = first | second
    for one in behind:
        made = made | one
    return made


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list of all handlers that are created."""
    made: list[object] = []

    class Counted(runnable.SessionHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(runnable, "SessionHandler", Counted)
    return made


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_chain_without_user_code_needs_no_session_handler(way: str, handlers: list[object]) -> None:
    with EnginePool.local([FakeLLM("llm")]) as pool:
        plain, fast = chain(pool), accelerate(chain(pool))
        made = fast.invoke({"q": "x"}) if way == "invoke" else asyncio.run(fast.ainvoke({"q": "x"}))
        trace = fast.last_trace()
        assert made == plain.invoke({"q": "x"})
    assert trace is not None and handlers == []
    assert sum(span.kind == "DECODING" or span.kind == "GENERATION" for span in trace.spans if span.engine) == 2


def test_user_code_and_batches_get_a_session_handler(handlers: list[object]) -> None:
    with EnginePool.local([FakeLLM("llm")]) as pool:
        accelerate(chain(pool, RunnableLambda(str) | RunnableLambda(seen))).invoke({"q": "x"})
        assert len(handlers) == 1
        accelerate(chain(pool)).batch([{"q": "x"}, {"q": "y"}])
    assert len(handlers) == 3


async def test_session_handler_ignores_tokens_and_errors_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework runs a handler's sync method on a thread: for each token that a model streams."""
    loop, calls_on_threads = asyncio.get_running_loop(), list[object]()
    original = loop.run_in_executor

    def counted(*args: Any) -> Any:
        calls_on_threads.append(args)
        return original(*args)

    monkeypatch.setattr(loop, "run_in_executor", counted)
    handler = object.__new__(started_calls.SessionHandler)
    handler._ignored = False
    manager = AsyncCallbackManagerForLLMRun(run_id=uuid4(), handlers=[handler], inheritable_handlers=[])

    await manager.on_llm_new_token("a")
    await manager.on_llm_error(ValueError("no answer"))

    assert calls_on_threads == []
