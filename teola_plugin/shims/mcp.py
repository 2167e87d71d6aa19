"""Tools that `langchain-mcp-adapters` makes of an MCP server's: which server they call, and what it says of them.

Private: the variables of the closure of `call_tool` in `convert_mcp_tool_to_langchain_tool`, as of
langchain-mcp-adapters 0.3.2; the callbacks of `mcp.client.session.ClientSession`, as of mcp 1.30. Where they are called
otherwise, the tools run in their places. Neither package is imported here.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from teola_plugin.shims import report_missing

_ADAPTER = "langchain_mcp_adapters.tools"
_FUNCTION = "convert_mcp_tool_to_langchain_tool.<locals>.call_tool"
_VARIABLES = ("session", "connection", "server_name", "callbacks", "tool_interceptors")
_SESSION_CALLBACKS = (
    "_sampling_callback",
    "_elicitation_callback",
    "_list_roots_callback",
    "_logging_callback",
    "_message_handler",
)
"""What a session calls while the server works on a tool. The defaults are functions of its own module."""


class McpTool(NamedTuple):
    """The parts of a LangChain tool that calls a tool of an MCP server."""

    server_name: str
    """The name under which the client knows the server; empty if the tools were loaded without one."""
    session: Any
    """The session that all calls share; None if each call opens one by `connection`."""
    connection: Any
    read_only_hint: bool
    """True if the server says `readOnlyHint: true` of the tool. It is the server's word, and no proof."""
    has_callbacks: bool
    """True if code of the user's own stands around a call or hears of it: interceptors, callbacks of the client or the
    session. Without any, the tool makes no use of the `runtime` that LangGraph gives it."""


def mcp_tool(tool: Any) -> McpTool | None:
    """Return the parts of a tool that `langchain-mcp-adapters` made; None for any other tool."""
    function: Any = getattr(tool, "coroutine", None)
    if (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) != (_ADAPTER, _FUNCTION):
        return None
    try:
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        closure = dict(zip(function.__code__.co_freevars, cells, strict=True))
        session, connection, server_name, callbacks, interceptors = (closure[name] for name in _VARIABLES)
    except (AttributeError, KeyError, ValueError):
        report_missing("langchain-mcp-adapters", f"call_tool({', '.join(_VARIABLES)})", "no MCP tool starts early")
        return None
    metadata = getattr(tool, "metadata", None) or {}
    is_hinted = isinstance(metadata, dict) and metadata.get("readOnlyHint") is True
    client_callbacks = () if callbacks is None else vars(callbacks).values()
    has_callbacks = bool(interceptors) or any(one is not None for one in client_callbacks) or _hears_calls(session)
    return McpTool(server_name or "", session, connection, is_hinted, has_callbacks)


def ignores_runtime(tool: Any) -> bool:
    """Return True for a tool that takes LangGraph's `runtime` and makes no use of it.

    Return False for a tool that is not of langchain-mcp-adapters, and for one with interceptors or callbacks, which may
    read it.
    """
    parts = mcp_tool(tool)
    return parts is not None and not parts.has_callbacks


def _hears_calls(session: Any) -> bool:
    """Return True if a session has callbacks of the user's own, or cannot be looked into."""
    callbacks = [getattr(session, name, None) for name in _SESSION_CALLBACKS]
    homes = {getattr(callback, "__module__", "") for callback in callbacks}
    return session is not None and homes != {"mcp.client.session"}


def is_mcp_server(obj: Any) -> bool:
    """Return True for what stands for MCP servers: a `MultiServerMCPClient` or a `ClientSession`."""
    return _is_a(obj, "langchain_mcp_adapters.client", "MultiServerMCPClient") or _is_a(
        obj, "mcp.client.session", "ClientSession"
    )


def belongs_to_server(tool: McpTool, server: Any) -> bool:
    """Return True if a tool calls a server of this client, or calls its server by this session."""
    if not is_mcp_server(server):
        return False
    connections = getattr(server, "connections", None)
    if not isinstance(connections, dict):
        return tool.session is server
    return tool.session is None and any(tool.connection is connection for connection in connections.values())


def _is_a(obj: Any, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(obj, cls)
