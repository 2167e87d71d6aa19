"""Tests of reading the parts of a tool that calls an MCP server, as `langchain-mcp-adapters` makes them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from langchain_core.tools import StructuredTool
from langchain_mcp_adapters.callbacks import Callbacks
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import convert_mcp_tool_to_langchain_tool
from mcp.client.session import ClientSession
from mcp.types import Tool, ToolAnnotations

from teola_plugin.shims.mcp import belongs_to_server, ignores_runtime, is_mcp_server, mcp_tool

CONNECTION: Any = {"command": "farm", "args": [], "transport": "stdio"}


def converted(hint: bool | None = True, session: Any = None, connection: Any = CONNECTION, **options: Any) -> Any:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    annotations = None if hint is None else ToolAnnotations(readOnlyHint=hint)
    tool = Tool(name="weather", inputSchema=schema, annotations=annotations)
    return convert_mcp_tool_to_langchain_tool(session, tool, connection=connection, **options)


def session_with(**callbacks: Any) -> ClientSession:
    nothing: Any = None
    return ClientSession(nothing, nothing, **callbacks)


async def on_log(*_: Any) -> None: ...


async def intercept(request: Any, handler: Any) -> Any:
    return await handler(request)


@pytest.mark.parametrize(("hint", "is_hinted"), [(True, True), (False, False), (None, False)])
def test_mcp_tool_returns_server_connection_and_hint(hint: bool | None, is_hinted: bool) -> None:
    parts = mcp_tool(converted(hint, server_name="farm"))
    assert parts is not None
    assert (parts.server_name, parts.session) == ("farm", None)
    assert parts.connection is CONNECTION
    assert parts.read_only_hint is is_hinted
    assert not parts.has_callbacks


def test_mcp_tool_of_another_tool_is_none() -> None:
    def weather(city: str, runtime: Any = None) -> str:
        """The weather."""
        return city

    tool = StructuredTool.from_function(weather)
    assert mcp_tool(tool) is None
    assert not ignores_runtime(tool)


@pytest.mark.parametrize(
    "options",
    [
        {"tool_interceptors": [intercept]},
        {"callbacks": Callbacks(on_progress=on_log)},
        {"session": session_with(logging_callback=on_log)},
        {"session": session_with(message_handler=on_log)},
        {"session": object()},
    ],
)
def test_tool_with_callbacks_does_not_ignore_the_runtime(options: dict[str, Any]) -> None:
    tool = converted(**options)
    parts = mcp_tool(tool)
    assert parts is not None and parts.has_callbacks
    assert not ignores_runtime(tool)


@pytest.mark.parametrize(
    "options", [{}, {"callbacks": Callbacks()}, {"tool_interceptors": []}, {"session": session_with()}]
)
def test_tool_without_callbacks_ignores_the_runtime(options: dict[str, Any]) -> None:
    assert ignores_runtime(converted(**options))


def test_tool_belongs_to_its_client_or_its_session() -> None:
    session, client = session_with(), MultiServerMCPClient({"farm": CONNECTION})
    by_connection, by_session = mcp_tool(converted()), mcp_tool(converted(session=session, connection=None))
    assert by_connection is not None and by_session is not None
    assert belongs_to_server(by_connection, client) and not belongs_to_server(by_connection, session)
    assert belongs_to_server(by_session, session) and not belongs_to_server(by_session, client)
    assert not belongs_to_server(by_session, session_with())
    assert not belongs_to_server(by_session, "farm")


def test_mcp_servers_are_recognized() -> None:
    assert is_mcp_server(session_with())
    assert is_mcp_server(MultiServerMCPClient({}))
    assert not is_mcp_server("farm")


def test_tool_of_another_release_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    def other_call_tool(city: str) -> str:
        """The weather."""
        return city

    other_call_tool.__module__ = "langchain_mcp_adapters.tools"
    other_call_tool.__qualname__ = "convert_mcp_tool_to_langchain_tool.<locals>.call_tool"
    tool = converted().model_copy(update={"coroutine": other_call_tool})
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        assert mcp_tool(tool) is None
