"""Tests of tools of MCP servers in accelerated agents: read-only ones start early if the user allows the server.

The server is a process. The calls it receives are compared with those of the original agent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, tool
from langchain_mcp_adapters.callbacks import Callbacks
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools
from langgraph.graph import START, MessagesState, StateGraph
from llama_index.core import SummaryIndex
from llama_index.core.llms import MockLLM
from support.agents import INPUT, World, agent, summarize_messages, world
from support.writing_llm import call

from teola_plugin import accelerate
from teola_plugin.adapters.named_objects import Target
from teola_plugin.adapters.plan_report import Reason, Status
from teola_plugin.cli.compare.options import accelerate_arguments
from teola_plugin.errors import RegistrationError
from teola_plugin.langchain import ChatTeola
from teola_plugin.server.models.apps import app
from teola_plugin.server.settings import AppSettings

SERVER = Path(__file__).parents[2] / "support" / "mcp_server.py"


@pytest.fixture
def at() -> Iterator[World]:
    with world() as made:
        yield made


class WeatherServer:
    """The connection to the server's program, and the calls that its processes received."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.connection: Any = {"command": sys.executable, "args": [str(SERVER), str(log)], "transport": "stdio"}

    def client(self, **options: Any) -> MultiServerMCPClient:
        return MultiServerMCPClient({"weather": self.connection}, **options)

    def received(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def received_calls(self) -> list[tuple[str, dict[str, Any]]]:
        calls = [(one["tool"], one["arguments"]) for one in self.received()]
        self.log.unlink(missing_ok=True)
        return calls


@pytest.fixture
def server(tmp_path: Path) -> WeatherServer:
    return WeatherServer(tmp_path / "calls.jsonl")


def early_outcomes(graph: Any) -> list[str]:
    return [step.outcome for step in graph.last_trace().steps if step.kind == "tool" and step.is_prefetched]


def said_without_ids(messages: list[Any]) -> list[Any]:
    """Return what messages say, without the ids that LangChain draws for parts of their contents."""
    return [
        (kind, [{**part, "id": ""} for part in content] if isinstance(content, list) else content, *rest)
        for kind, content, *rest in summarize_messages(messages)
    ]


async def run_both(
    at: World, server: WeatherServer, tools: list[BaseTool], pieces: list[Any], **options: Any
) -> tuple[Any, Any, Any]:
    """Run the agent plain, then accelerated. Return what each said and what the server received, and the graph."""
    plain = agent(at.model, tools)
    at.writes(*(piece for piece in pieces if isinstance(piece, str)))
    original = said_without_ids((await plain.ainvoke(INPUT))["messages"]), server.received_calls()
    at.writes(*pieces)
    fast = at.fast(plain, **options)
    accelerated = said_without_ids((await fast.ainvoke(INPUT))["messages"]), server.received_calls()
    return original, accelerated, fast


def test_hinted_tool_of_an_allowed_server_is_prefetched(at: World, server: WeatherServer) -> None:
    async def main() -> None:
        pieces = ["I look. ", call("weather", city="Rome"), lambda: bool(server.received()), " So."]
        tools = await server.client().get_tools()
        original, accelerated, fast = await run_both(at, server, tools, pieces, read_only=["mcp:weather"])
        assert accelerated == original
        assert original[1] == [("weather", {"city": "Rome", "days": 1})]
        assert at.llm.fulfilled_waits == [True]
        assert early_outcomes(fast) == ["claimed"]

    asyncio.run(main())


Allow = Callable[[MultiServerMCPClient, list[BaseTool]], list[Any]]


def statuses(graph: Any) -> dict[str, Status]:
    """Return the status of each tool in the report."""
    return {row.name: row.status for row in graph.report().calls}


@pytest.mark.parametrize(
    "allow",
    [
        lambda client, tools: [client],
        lambda client, tools: ["weather"],
        lambda client, tools: [next(tool for tool in tools if tool.name == "weather")],
        lambda client, tools: [lambda tool: tool.name.startswith("wea")],
    ],
    ids=["client", "name", "tool", "predicate"],
)
def test_each_form_of_read_only_entry_allows_the_tool(at: World, server: WeatherServer, allow: Allow) -> None:
    client = server.client()
    tools = asyncio.run(client.get_tools())
    by_name = statuses(at.fast(agent(at.model, tools), read_only=allow(client, tools)))
    assert by_name["weather"] is Status.PREFETCHED
    assert by_name["book"] is by_name["unmarked"] is Status.IN_PLACE


@pytest.mark.parametrize("name", ["book", "unmarked"])
def test_tool_without_read_only_hint_is_not_prefetched(at: World, server: WeatherServer, name: str) -> None:
    async def main() -> None:
        tools = await server.client().get_tools()
        pieces = [call(name, city="Rome")]
        original, accelerated, fast = await run_both(at, server, tools, pieces, read_only=["mcp:weather"])
        assert accelerated == original
        assert original[1] == [(name, {"city": "Rome"})]
        assert early_outcomes(fast) == []

    asyncio.run(main())


def test_read_only_hint_without_option_is_not_trusted(at: World, server: WeatherServer) -> None:
    async def main() -> None:
        tools = await server.client().get_tools()
        original, accelerated, fast = await run_both(at, server, tools, [call("weather", city="Rome")])
        assert accelerated == original
        assert early_outcomes(fast) == []
        rows = {row.name: row for row in fast.report().calls}
        assert rows["weather"].reason is Reason.HINTED_READ_ONLY
        assert rows["weather"].fix == 'accelerate(..., read_only=["mcp:weather"])'
        assert rows["book"].reason is Reason.NOT_READ_ONLY
        applied = statuses(at.fast(fast, read_only=["mcp:weather"]))
        assert applied["weather"] is Status.PREFETCHED
        assert applied["book"] is Status.IN_PLACE

    asyncio.run(main())


def test_read_only_tool_behind_one_that_may_write_waits(at: World, server: WeatherServer) -> None:
    async def main() -> None:
        tools = await server.client().get_tools()
        pieces = [call("book", city="Rome"), call("weather", city="Rome")]
        original, accelerated, fast = await run_both(at, server, tools, pieces, read_only=["mcp:weather"])
        assert accelerated[0] == original[0]
        assert sorted(map(str, accelerated[1])) == sorted(map(str, original[1]))
        assert early_outcomes(fast) == []

    asyncio.run(main())


def test_session_is_shared_by_prefetched_and_other_calls(at: World, server: WeatherServer) -> None:
    async def main() -> None:
        async with server.client().session("weather") as session:
            tools = await load_mcp_tools(session)
            pieces = [call("weather", city="Rome"), lambda: bool(server.received()), call("book", city="Oslo")]
            plain = agent(at.model, tools)
            at.writes(*pieces)
            fast = at.fast(plain, read_only=[session])
            await fast.ainvoke(INPUT)
            assert early_outcomes(fast) == ["claimed"]
            assert len({one["pid"] for one in server.received()}) == 1
            assert [one["tool"] for one in server.received()] == ["weather", "book"]

    asyncio.run(main())


def test_session_with_callbacks_disables_prefetch_of_its_tools(at: World, server: WeatherServer) -> None:
    async def on_log(params: Any, context: Any) -> None: ...

    async def main() -> None:
        tools = await server.client(callbacks=Callbacks(on_logging_message=on_log)).get_tools()
        original, accelerated, fast = await run_both(
            at, server, tools, [call("weather", city="Rome")], read_only=["mcp:weather"]
        )
        assert accelerated == original
        assert early_outcomes(fast) == []
        assert next(row for row in fast.report().calls if row.name == "weather").reason is Reason.MCP_CALLBACKS

    asyncio.run(main())


def test_tool_interceptor_disables_prefetch_of_tools(at: World, server: WeatherServer) -> None:
    async def intercept(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await handler(request)

    async def main() -> None:
        tools = await server.client(tool_interceptors=[intercept]).get_tools()
        original, accelerated, fast = await run_both(
            at, server, tools, [call("weather", city="Rome")], read_only=["mcp:weather"]
        )
        assert accelerated == original
        assert early_outcomes(fast) == []

    asyncio.run(main())


def test_tool_error_reaches_the_model_as_in_the_original(at: World, server: WeatherServer) -> None:
    async def main() -> None:
        tools = await server.client().get_tools()
        pieces = [call("broken", city="Rome"), lambda: bool(server.received())]
        original, accelerated, fast = await run_both(at, server, tools, pieces, read_only=["mcp:weather"])
        assert accelerated == original
        assert accelerated[0][2][3] == "error"
        assert early_outcomes(fast) == ["claimed"]

    asyncio.run(main())


def test_dying_server_raises_the_error_of_the_original(at: World, server: WeatherServer) -> None:
    async def error_of(graph: Any) -> tuple[type, str]:
        with pytest.raises(Exception) as caught:
            await graph.ainvoke(INPUT)
        return type(caught.value), str(caught.value)

    async def main() -> None:
        plain = agent(at.model, await server.client().get_tools())
        at.writes(call("dying", city="Rome"))
        original = await error_of(plain), server.received_calls()
        at.writes(call("dying", city="Rome"), lambda: bool(server.received()))
        accelerated = await error_of(at.fast(plain, read_only=["mcp:weather"])), server.received_calls()
        assert accelerated == original
        assert original[1] == [("dying", {"city": "Rome"})]

    asyncio.run(main())


def test_cancelled_agent_cancels_the_prefetched_call(at: World, server: WeatherServer) -> None:
    async def main() -> None:
        async with server.client().session("weather") as session:
            at.writes(call("slow", city="Rome"), lambda: bool(server.received()))
            fast = at.fast(agent(at.model, await load_mcp_tools(session)), read_only=[session])
            task = asyncio.create_task(fast.ainvoke(INPUT))
            while not server.received():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
            result = await session.call_tool("weather", {"city": "Oslo"})
            assert result.content[0].text == "sunny in Oslo for 1"
            assert [one["tool"] for one in server.received()] == ["slow", "weather"]

    asyncio.run(main())


def test_unknown_read_only_entries_raise(at: World, server: WeatherServer) -> None:
    tools = asyncio.run(server.client().get_tools())
    plain = agent(at.model, tools)
    with pytest.raises(RegistrationError, match="names none of the app's tools: book, broken"):
        at.fast(plain, read_only=["mcp:wether"])
    with pytest.raises(RegistrationError, match="'MultiServerMCPClient' in read_only= names none"):
        at.fast(plain, read_only=[MultiServerMCPClient({"weather": dict(server.connection)})])
    with pytest.raises(RegistrationError, match="has a int, which is no tool"):
        at.fast(plain, read_only=[7])
    with pytest.raises(RegistrationError, match="is no list"):
        at.fast(plain, read_only="weather")
    with pytest.raises(RegistrationError, match="returned a str"):
        at.fast(plain, read_only=[lambda tool: tool.name])
    assert at.fast(plain, read_only=["mcp:wether"], strict=False).report().calls


# ------------------------------------------------------------ the command line, and served apps


def test_command_line_adds_to_the_tools_that_the_module_names() -> None:
    target = Target(object(), {"read_only": ["weather"]})
    assert accelerate_arguments(target, "", [], None, read_only=["mcp:farm"])["read_only"] == ["weather", "mcp:farm"]
    assert "read_only" not in accelerate_arguments(Target(object()), "", [], None)


def agent_on(pool: Any) -> Any:
    """Create an agent on this pool. The settings of a server name this function."""

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    return agent(ChatTeola(pool=pool), [weather])


@pytest.mark.parametrize(("names", "status"), [(["weather"], Status.PREFETCHED), ([], Status.IN_PLACE)])
def test_served_app_names_read_only_tools(at: World, names: list[str], status: Status) -> None:
    settings = AppSettings(object=f"{__name__}:agent_on", read_only=names)
    assert statuses(app("guide", settings, at.pool).fast)["weather"] is status


@pytest.mark.parametrize("wrap", ["chain", "graph"])
def test_read_only_list_applies_to_agents_inside_other_objects(at: World, wrap: str) -> None:
    calls: list[str] = []

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        calls.append(city)
        return city

    inner = agent(at.model, [weather])
    outer: Any = RunnableLambda(lambda value: value) | inner
    if wrap == "graph":
        builder = StateGraph(MessagesState)
        builder.add_node("inner", inner)
        builder.add_edge(START, "inner")
        outer = builder.compile()
    at.writes(call("weather", city="Rome"), lambda: bool(calls))
    at.fast(outer, read_only=["weather"]).invoke(INPUT)
    assert at.llm.fulfilled_waits == [True]
    assert calls == ["Rome"]


def test_function_in_read_only_list_names_its_tool(at: World) -> None:
    def weather(city: str) -> str:
        """The weather of a city."""
        raise AssertionError("a tool is no predicate")

    fast = at.fast(agent(at.model, [weather]), read_only=[weather])
    assert statuses(fast) == statuses(at.fast(agent(at.model, [weather]), read_only=["weather"]))
    assert statuses(fast)["weather"] is Status.PREFETCHED


def test_read_only_option_raises_for_llamaindex() -> None:
    engine = SummaryIndex([]).as_query_engine(llm=MockLLM())
    with pytest.raises(RegistrationError, match="read_only= is for agents of LangGraph"):
        accelerate(engine, read_only=["weather"])
    assert accelerate(engine, read_only=["weather"], strict=False)
