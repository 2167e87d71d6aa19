"""LangChain's tools on an engine of the pool: described here, called there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.tools import Tool as TextTool

from teola_plugin.adapters.calls import check_engine
from teola_plugin.adapters.langchain.current_query import call_context
from teola_plugin.adapters.langchain.read_only import is_read_only
from teola_plugin.engines.tools import Tool, ToolEngine, ToolRaised
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import CallTool
from teola_plugin.runtime.handles import CallHandle


def tool_engine(tools: Iterable[BaseTool], name: str = "tools", **options: Any) -> ToolEngine:
    """The engine that runs the functions of these tools; those declared `read_only` are so there. `options`: of
    `ToolEngine` (`max_requests`, `seconds`). Raises `RegistrationError` for a tool that is no function."""
    return ToolEngine(name, [Tool(tool.name, _function(tool), is_read_only(tool)) for tool in tools], **options)


def on_engine(tools: Iterable[BaseTool], pool: EnginePool, engine: str = "tools") -> list[BaseTool]:
    """Copies of the tools whose functions are called by an engine of the pool that has them under their names: see
    `tool_engine`, or `kind: tools` in a pool's file.

    What models are told of a tool, how its arguments are checked, and what it raises stay its own. Raises
    `RegistrationError` for a tool that is no function, and for one that takes something of its place in a graph.
    """
    check_engine(pool, engine)
    return [_moved(tool, pool, engine) for tool in tools]


def _moved(tool: BaseTool, pool: Any, engine: str) -> BaseTool:
    function = _function(tool)
    signature = inspect.signature(function)

    def call(arguments: Any) -> CallHandle:
        run, terms = call_context(pool)
        request = CallTool(tool.name, arguments, is_read_only(tool))
        handle: CallHandle = pool.call(PrimitiveKind.TOOL, engine, [request], run=run, terms=terms)
        return handle

    def func(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(signature.bind(*args, **kwargs).arguments).result()[0]
        except ToolRaised as error:
            raise _original_error(error) from None

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        try:
            return (await call(signature.bind(*args, **kwargs).arguments))[0]
        except ToolRaised as error:
            raise _original_error(error) from None

    # Not `functools.wraps`: whoever reads functions must not find the one behind it.
    for function_on_engine in (func, coroutine):
        vars(function_on_engine).update(__signature__=signature)
        function_on_engine.__name__ = function.__name__
    has_func = getattr(tool, "func", None) is not None
    return tool.model_copy(update={"func": func if has_func else None, "coroutine": coroutine})


def _original_error(error: ToolRaised) -> BaseException:
    """Return the exception that the function raised, where that is known here."""
    return error.__cause__ or error


def _function(tool: Any) -> Callable[..., Any]:
    """Return the function of a tool. Raises `RegistrationError`."""
    if type(tool) not in (StructuredTool, TextTool):
        raise RegistrationError(
            f"{tool!r} is no function as a tool.", hint="give tools that were made by @tool, Tool or StructuredTool"
        )
    function: Callable[..., Any] = tool.func or tool.coroutine
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    schema = tool.tool_call_schema.model_fields if isinstance(tool, StructuredTool) else None  # type: ignore[union-attr]
    hidden_parameters = {
        name for name in inspect.signature(function).parameters if schema is not None and name not in schema
    }
    if hidden_parameters or inspect.Parameter.VAR_KEYWORD in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
        names = ", ".join(sorted(hidden_parameters)) or "arguments without names"
        raise RegistrationError(
            f"the tool {tool.name!r} takes {names}, which stays in its place.", hint="leave it where it is"
        )
    return function
