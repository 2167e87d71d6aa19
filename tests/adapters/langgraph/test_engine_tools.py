"""Tests of agents' tools on an engine: the same conversation, read-only tools early and once, others in their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from langchain_core.tools import BaseTool, ToolException, tool
from langgraph.prebuilt import InjectedState
from support.agents import World, agent, run, summarize_messages, world
from support.writing_llm import call

from teola_plugin.engines.tools import ToolEngine, ToolFunction
from teola_plugin.errors import RegistrationError
from teola_plugin.langchain import on_engine, read_only, tool_engine

WAYS = ["invoke", "ainvoke"]


@pytest.fixture
def at() -> Iterator[World]:
    with world() as made:
        yield made


def tools_of(at: World, raises: BaseException | None = None) -> list[BaseTool]:
    @read_only
    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        at.ran.append((city, threading.current_thread().name.partition("_")[0]))
        if raises is not None:
            raise raises
        return f"sunny in {city}"

    @tool
    async def send(to: str, text: str = "hello") -> str:
        """Send a mail."""
        at.ran.append((to, text))
        return f"sent to {to}"

    return [weather, send]


@pytest.mark.parametrize("way", WAYS)
def test_read_only_tool_on_an_engine_is_prefetched_once(at: World, way: str) -> None:
    tools = tools_of(at)
    at.pool.add(tool_engine(tools))
    plain, there = agent(at.model, tools), agent(at.model, on_engine(tools, at.pool))
    at.writes("I look. ", call("weather", city="Rome"), at.has_run(), " So.")
    fast = at.fast(there)
    made = run(fast, way)
    assert at.llm.fulfilled_waits == [True] and at.ran == [("Rome", "teola-tools")]
    at.writes("I look. ", call("weather", city="Rome"), " So.")
    assert summarize_messages(made) == summarize_messages(run(there, way)) == summarize_messages(run(plain, way))
    assert [one[0] for one in at.ran] == ["Rome"] * 3


def test_writing_tool_on_an_engine_is_not_prefetched(at: World) -> None:
    tools = tools_of(at)
    at.pool.add(tool_engine(tools))
    there = agent(at.model, on_engine(tools, at.pool))
    while_writing: list[int] = []

    def a_while() -> bool:
        while_writing.append(len(at.ran))
        return len(while_writing) > 40

    at.writes("I write. ", call("send", to="Ann"), a_while, " So.")
    made = run(at.fast(there), "ainvoke")
    assert not any(while_writing) and at.ran == [("Ann", "hello")] and made[2].content == "sent to Ann"


@pytest.mark.parametrize("way", WAYS)
def test_error_of_a_tool_on_an_engine_is_raised(at: World, way: str) -> None:
    tools = tools_of(at, ZeroDivisionError("no weather"))
    at.pool.add(tool_engine(tools))
    at.writes(call("weather", city="Rome"))
    for graph in (agent(at.model, on_engine(tools, at.pool)), at.fast(agent(at.model, on_engine(tools, at.pool)))):
        with pytest.raises(ZeroDivisionError, match="no weather"):
            run(graph, way)
    at.pool.add(tool_engine(handled_tools := [tools_of(at, ToolException("later"))[0]], "others"))
    moved = on_engine(handled_tools, at.pool, "others")[0].model_copy(update={"handle_tool_error": True})
    assert summarize_messages(run(agent(at.model, [moved]), way))[2][1] == "later"


def test_tool_on_an_engine_keeps_its_schema_and_description(at: World) -> None:
    tools = tools_of(at)
    at.pool.add(tool_engine(tools))
    for before, after in zip(tools, on_engine(tools, at.pool), strict=True):
        assert after.args == before.args and after.description == before.description and after.name == before.name
        assert after is not before and after.metadata == before.metadata


def test_tool_engine_raises_for_tools_with_injected_state(at: World) -> None:
    @tool
    def looks(city: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
        """It looks."""
        return city

    with pytest.raises(RegistrationError, match="state"):
        tool_engine([looks])
    at.pool.add(ToolEngine("tools", [ToolFunction("add", max)]))
    with pytest.raises(RegistrationError, match="unknown engine"):
        on_engine([], at.pool, "tolls")
