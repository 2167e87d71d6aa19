"""Tests of prefetched calls of read-only tools: made once and claimed in the tool's method.

No other part of a tool runs early.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Iterator
from typing import Annotated, Any
from unittest import mock

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import StructuredTool, ToolException, tool
from langgraph.prebuilt import InjectedState
from support.agents import INPUT, World, agent, run, summarize_messages, world
from support.writing_llm import call

import teola_plugin
from teola_plugin.langchain import read_only

WAYS = ["invoke", "ainvoke"]


@pytest.fixture
def at() -> Iterator[World]:
    with world() as made:
        yield made


def look_of(at: World, *, on_loop: bool = False, error: Exception | None = None, **options: Any) -> Any:
    """Return a read-only tool that returns a text and an artifact, or raises."""

    def look(city: str) -> tuple[str, list[str]]:
        """Look at a city."""
        at.ran.append(city)
        if error is not None:
            raise error
        return f"sunny in {city}", [city]

    async def alook(city: str) -> tuple[str, list[str]]:
        """Look at a city."""
        await asyncio.sleep(0)
        return look(city)

    coroutine = alook if on_loop else None
    return read_only(StructuredTool.from_function(look, coroutine, response_format="content_and_artifact", **options))


def speculative_outcomes(graph: Any) -> list[str]:
    return [step.outcome for step in graph.last_trace().steps if step.kind == "tool" and step.is_prefetched]


def comparable(events: list[Any]) -> list[Any]:
    """Return events of version 2 without ids, times and pieces of text, which depend on the engine's speed."""
    names = {event["run_id"]: event["name"] for event in events}
    return [
        (
            event["event"],
            event["name"],
            [names[one] for one in event["parent_ids"]],
            event["tags"],
            str_of(event["data"]),
        )
        for event in events
        if event["event"] != "on_chat_model_stream"
    ]


def str_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: str_of(one) for key, one in value.items() if key not in ("id", "tool_call_id")}
    if isinstance(value, list | tuple):
        return [str_of(one) for one in value]
    if hasattr(value, "content"):
        return type(value).__name__, value.content, getattr(value, "artifact", None), getattr(value, "status", None)
    return repr(value) if isinstance(value, Exception | str | int) else type(value).__name__


async def events_of(graph: Any) -> list[Any]:
    events: list[Any] = []
    with contextlib.suppress(ZeroDivisionError):
        async for event in graph.astream_events(INPUT, version="v2"):
            events.append(event)
    return comparable(events)


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("error", [None, ToolException("ask later"), ZeroDivisionError("no weather")])
async def test_events_of_a_prefetched_tool_equal_the_originals(
    at: World, on_loop: bool, error: Exception | None
) -> None:
    plain = agent(at.model, [look_of(at, on_loop=on_loop, error=error, handle_tool_error=True)])
    at.writes(call("look", city="Rome"), at.has_run())
    fast = at.fast(plain)
    events = await events_of(fast)
    assert at.llm.fulfilled_waits == [True]
    assert speculative_outcomes(fast) == ["claimed"]
    at.writes(call("look", city="Rome"))
    assert events == await events_of(plain)
    assert at.ran == ["Rome"] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_loop", [False, True])
def test_artifact_of_a_prefetched_tool_is_the_same_object(at: World, way: str, on_loop: bool) -> None:
    artifacts: list[Any] = [object()]

    def look(city: str) -> tuple[str, Any]:
        """Look at a city."""
        at.ran.append(city)
        return city, artifacts[0]

    async def alook(city: str) -> tuple[str, Any]:
        """Look at a city."""
        return look(city)

    made = StructuredTool.from_function(look, alook if on_loop else None, response_format="content_and_artifact")
    at.writes(call("look", city="Rome"), at.has_run())
    message = run(at.fast(agent(at.model, [read_only(made)])), way)[2]
    assert at.llm.fulfilled_waits == [True]
    assert (message.content, message.artifact) == ("Rome", artifacts[0])
    assert at.ran == ["Rome"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [ConnectionError("lost"), TimeoutError("late")])
def test_failed_prefetched_tool_is_not_called_again(at: World, way: str, error: Exception) -> None:
    at.writes(call("look", city="Rome"), at.has_run())
    with pytest.raises(type(error)):
        run(at.fast(agent(at.model, [look_of(at, error=error)])), way)
    assert at.llm.fulfilled_waits == [True]
    assert at.ran == ["Rome"]


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.starts: list[str] = []

    def on_tool_start(self, serialized: Any, input_str: str, **kwargs: Any) -> None:
        self.starts.append(input_str)


def test_callbacks_of_a_prefetched_tool_run_only_when_claimed(at: World) -> None:
    handled: list[str] = []

    def handle(error: ToolException) -> str:
        handled.append(str(error))
        return "handled"

    listener = Listener()
    made = look_of(at, error=ToolException("ask later"), handle_tool_error=handle, callbacks=[listener])
    at.writes(call("look", city="Rome"), at.has_run(), lambda: handled == [] and listener.starts == [])
    messages = run(at.fast(agent(at.model, [made])), "invoke")
    assert at.llm.fulfilled_waits == [True, True]
    assert messages[2].content == "handled"
    assert (handled, len(listener.starts)) == (["ask later"], 1)


def test_accelerated_agent_uses_the_tool_objects_of_the_original(at: World) -> None:
    made = look_of(at)
    fast = at.fast(agent(at.model, [made]))
    assert fast.nodes["tools"].bound.tools_by_name["look"] is made
    assert fast._teola.runner.nodes["tools"].bound.tools_by_name["look"] is made


@pytest.mark.parametrize("way", WAYS)
def test_tool_with_config_or_state_is_not_prefetched(at: World, way: str) -> None:
    @read_only
    @tool
    def configured(city: str, config: RunnableConfig) -> str:
        """Know the config."""
        at.ran.append(city)
        return str(config["configurable"]["user"])

    @read_only
    @tool
    def informed(city: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
        """Know the state."""
        at.ran.append(city)
        return str(len(state["messages"]))

    fast = at.fast(agent(at.model, [configured, informed]))
    at.writes(call("configured", city="Rome"), call("informed", city="Oslo"))
    messages = run(fast, way, config={"configurable": {"user": "ann"}})
    assert [message.content for message in messages[2:4]] == ["ann", "2"]
    assert sorted(at.ran) == ["Oslo", "Rome"]
    assert speculative_outcomes(fast) == []


def test_tool_that_ignores_its_stop_is_wasted_and_run_again(at: World) -> None:
    @read_only
    @tool
    def stubborn(city: str) -> str:
        """Catch everything."""
        at.ran.append(city)
        try:
            where = [*context()["metadata"]["langgraph_path"]]
        except BaseException:
            where = []
        return f"{city} {bool(where)}"

    def context() -> Any:
        from langchain_core.runnables import config

        return vars(config)["var_child_" + "runnable_config"].get()

    at.writes(call("stubborn", city="Rome"), at.has_run())
    fast = at.fast(agent(at.model, [stubborn]))
    assert run(fast, "invoke")[2].content == "Rome True"
    assert speculative_outcomes(fast) == ["wasted"]
    assert at.ran == ["Rome"] * 2


@pytest.mark.parametrize("way", WAYS)
def test_uninstall_turns_off_tool_prefetch(at: World, way: str) -> None:
    fast = at.fast(agent(at.model, [look_of(at)]))
    teola_plugin.uninstall()
    at.writes(call("look", city="Rome"))
    assert run(fast, way)[2].content == "sunny in Rome"
    assert speculative_outcomes(fast) == []
    assert at.ran == ["Rome"]


def test_tool_with_replaced_run_method_is_not_prefetched(at: World) -> None:
    fast = at.fast(agent(at.model, [look_of(at)]))
    at.writes(call("look", city="Rome"))
    with mock.patch.object(StructuredTool, "_run", lambda self, **kwargs: ("replaced", None)):
        assert run(fast, "invoke")[2].content == "replaced"
    assert speculative_outcomes(fast) == []
    assert at.ran == []


class Ends(AsyncCallbackHandler):
    """Records the events of a chain that a tool calls, and of the tool."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.tool_has_started = False
        self._names: dict[Any, str] = {}

    async def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: Any, name: str = "", **kwargs: Any) -> None:
        self._note("start", run_id, name)

    async def on_tool_start(self, serialized: Any, input_str: str, **kwargs: Any) -> None:
        self.tool_has_started = True

    async def on_chain_error(self, error: BaseException, *, run_id: Any, **kwargs: Any) -> None:
        self._note("error", run_id, type(error).__name__)

    def _note(self, event: str, run_id: Any, what: str) -> None:
        name = self._names.setdefault(run_id, what)
        if name == "waiting":
            self.events.append((event, what))


async def test_cancelled_call_cancels_prefetched_tool_and_sends_error_events(at: World) -> None:
    async def wait(city: str) -> str:
        at.ran.append(city)
        await asyncio.sleep(60)
        return city

    waiting = RunnableLambda(wait).with_config(run_name="waiting")

    @read_only
    @tool
    async def look(city: str) -> str:
        """Look at a city."""
        return str(await waiting.ainvoke(city))

    async def ended_events(graph: Any, *until: Any) -> list[Any]:
        at.ran.clear()
        at.writes(call("look", city="Rome"), *until)
        handler = Ends()
        task = asyncio.create_task(graph.ainvoke(INPUT, {"callbacks": [handler]}))
        while not (at.ran and handler.tool_has_started):
            await asyncio.sleep(0.005)
        for _ in range(50):  # the original waits for the tool then
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return handler.events

    plain = agent(at.model, [look])
    fast = at.fast(plain)
    events = await ended_events(fast, at.has_run())
    assert at.llm.fulfilled_waits == [True]
    assert events == await ended_events(plain) == [("start", "waiting"), ("error", "CancelledError")]
    assert speculative_outcomes(fast) == ["wasted"]


def test_prefetched_tool_with_date_arguments_gives_the_same_messages(at: World) -> None:
    @read_only
    @tool
    def plan(day: datetime.date) -> str:
        """Plan a day."""
        at.ran.append(day)
        return day.isoformat()

    plain = agent(at.model, [plan])
    at.writes(call("plan", day="2026-01-02"), at.has_run())
    fast = at.fast(plain)
    messages = summarize_messages(run(fast, "invoke"))
    assert speculative_outcomes(fast) == ["claimed"]
    at.writes(call("plan", day="2026-01-02"))
    assert messages == summarize_messages(run(plain, "invoke"))
    assert at.ran == [datetime.date(2026, 1, 2)] * 2
