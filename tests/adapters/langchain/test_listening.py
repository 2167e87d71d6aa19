"""Tests of callback handlers of a model that streams: the same events, and the same answer with any handler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from support.scripted_llm import ScriptedLLM

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.listening import ModelCall, current_agent
from teola_plugin.errors import EngineError
from teola_plugin.graph import Query
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Message
from teola_plugin.runtime.query_run import current_run


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


CALLS = "I add. " + "".join(
    f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': one, 'b': 2}})}</tool_call> " for one in (1, 2)
)


class Listener:
    """Writes down what it hears; may break on the way."""

    def __init__(self, breaks: str = "") -> None:
        self.heard: list[Any] = []
        self.calls: list[ModelCall] = []
        self._breaks = breaks

    def _note(self, what: str, *details: Any) -> None:
        self.heard.append((what, *details))
        if what == self._breaks:
            raise RuntimeError("the listener broke")

    def listener_for(self, call: ModelCall) -> Listener:
        self.calls.append(call)
        self._note("asked")
        return self

    def called(self, index: int, call: Any) -> None:
        self._note("called", index, call.name, call.args)

    def answered(self, message: AIMessage) -> None:
        self._note("answered", len(message.tool_calls))

    def failed(self) -> None:
        self._note("failed")


@contextmanager
def listening(pool: EnginePool, listener: Any, *, live: bool = True) -> Iterator[None]:
    run = pool.runtime.watch(Query({"input": None}), joins=True) if live else None
    tokens = current_run.set(run), current_agent.set(listener)
    try:
        yield
    finally:
        current_agent.reset(tokens[1])
        current_run.reset(tokens[0])
        if run is not None:
            run.close()


@pytest.fixture
def model(llm_pool: EnginePool, llm: ScriptedLLM) -> Any:
    llm.answer = lambda request: CALLS
    return ChatTeola(pool=llm_pool).bind_tools([add])


HEARD = [
    ("asked",),
    ("called", 0, "add", {"a": 1, "b": 2}),
    ("called", 1, "add", {"a": 2, "b": 2}),
    ("answered", 2),
]


async def test_tool_call_listener_gets_calls_and_leaves_the_answer_unchanged(model: Any, llm_pool: EnginePool) -> None:
    plain = model.invoke("hi")
    listener = Listener()
    with listening(llm_pool, listener):
        made = [model.invoke("hi"), await model.ainvoke("hi"), model.batch(["hi"])[0]]
        streamed = list(model.stream("hi"))
    for one in (*made, sum(streamed[1:], streamed[0])):
        assert (one.content, one.usage_metadata) == (plain.content, plain.usage_metadata)
        assert [c["args"] for c in one.tool_calls] == [c["args"] for c in plain.tool_calls]
    assert listener.heard == HEARD * 4


def test_listener_call_builds_the_prompt_of_the_next_turn(model: Any, llm_pool: EnginePool) -> None:
    listener = Listener()
    with listening(llm_pool, listener):
        made = model.invoke("hi")
    [call] = listener.calls
    prompt = call.prompt_with([made, ToolMessage("3", tool_call_id="x")])
    assert prompt.tools == call.prompt.tools and prompt.messages[:1] == call.prompt.messages
    assert prompt.messages[1].role == "assistant" and prompt.messages[2] == Message("tool", "3")
    assert call.engine == "llm" and call.names == ("add",) and call.pool is llm_pool


@pytest.mark.parametrize("breaks", ["asked", "called", "answered"])
async def test_failing_listener_is_logged_and_the_call_succeeds(
    model: Any, llm_pool: EnginePool, breaks: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(breaks)
    with listening(llm_pool, listener):
        for made in (model.invoke("hi"), await model.ainvoke("hi")):
            assert len(made.tool_calls) == 2
    assert "please report it" in caplog.text
    assert [what for what, *_ in listener.heard].count(breaks) == 2, "it is asked once for each answer, then left alone"


@pytest.mark.parametrize("live", [False, True])
async def test_listener_gets_nothing_without_live_query_or_tools(model: Any, llm_pool: EnginePool, live: bool) -> None:
    """A listener gets nothing outside queries, from models without tools, and from agents without listeners."""
    listener = Listener()
    with listening(llm_pool, listener, live=False):
        model.invoke("hi")
    with listening(llm_pool, listener):
        model.bound.invoke("hi")
        await model.bound.ainvoke("hi")
    assert listener.heard == []

    class Deaf(Listener):
        def listener_for(self, call: ModelCall) -> Any:
            return None

    with listening(llm_pool, Deaf(), live=live):
        assert len(model.invoke("hi").tool_calls) == 2


async def test_listener_gets_failure_of_the_answer(model: Any, llm_pool: EnginePool, llm: ScriptedLLM) -> None:
    def broken(request: Any) -> str:
        raise ValueError("no answer")

    llm.answer = broken
    listener = Listener()
    asks: list[Callable[[], Any]] = [lambda: model.invoke("hi")]
    with listening(llm_pool, listener):
        with pytest.raises(EngineError):
            asks[0]()
        with pytest.raises(EngineError):
            await model.ainvoke("hi")
    assert listener.heard == [("asked",), ("failed",)] * 2
