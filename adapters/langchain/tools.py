"""Tools of LangChain: bound to a `ChatTeola`, run on an engine of the pool, declared read-only.

`adapters.sampling.tool_text` makes the text that the engine gets, `adapters.tool_calls` reads calls from its answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from langchain_core.messages import AIMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.tools import Tool as TextTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from teola_plugin.adapters.calls import check_engine
from teola_plugin.adapters.langchain.listening import call_context
from teola_plugin.adapters.sampling import (
    ARGUMENTS,
    ToolText,
    check_parameters,
    parse_tool_choice,
    tool_names,
    tool_text,
)
from teola_plugin.adapters.tool_calls import new_id
from teola_plugin.engines.tools import ToolEngine, ToolFunction, ToolRaised
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import CallTool
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.shims.mcp import belongs_to_server, is_mcp_server, mcp_tool

ToolDefinition = dict[str, Any] | type | Callable[..., Any] | BaseTool


class Tools(ToolText):
    """The tools that a call may use."""

    __slots__ = ()

    def message(self, plain: AIMessage) -> AIMessage:
        """The answer, with the calls that it holds, each with an id of its own."""
        rest, calls = self.read(plain.text)
        if not calls:
            return plain
        tool_calls = [tool_call(name=call.name, args=call.args, id=new_id()) for call in calls]
        return plain.model_copy(update={"content": rest, "tool_calls": tool_calls})


def described(tools: Sequence[ToolDefinition], choice: Any) -> dict[str, Any]:
    """Return the arguments to bind. Raise `RegistrationError` for malformed tools, and a choice that cannot be met."""
    definitions = [convert_to_openai_tool(tool) for tool in tools]
    tool_choice = parse_tool_choice(choice or None, tool_names(definitions))
    if tool_choice not in ("", "none"):
        check_parameters(definitions)
    return {"tools": definitions, **({"tool_choice": tool_choice} if tool_choice else {})}


def without_tools(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Tools | None]:
    """Return the arguments of a call without those of tools, and the tools, if there are any that may be called.

    Raise `RegistrationError` for malformed tools, and a choice that cannot be met.
    """
    rest = {key: value for key, value in kwargs.items() if key not in ARGUMENTS}
    tools = kwargs.get("tools")
    if not tools:
        parse_tool_choice(kwargs.get("tool_choice") or None, ())
        return rest, None
    bound = described(tools, kwargs.get("tool_choice"))
    text = tool_text(bound["tools"], bound.get("tool_choice", ""))
    return rest, None if text is None else Tools(text.definitions, text.names, text.schema)


_MARK = "teola_read_only"

T = TypeVar("T", bound=BaseTool)


def read_only(tool: T) -> T:
    """A copy of a tool, declared to change nothing and to be of no harm when nobody asks for it in the end.

    ::

        @read_only
        @tool
        def weather(city: str) -> str: ...

    In an accelerated agent its function may run as soon as the model has written the call, while the rest of the answer
    is still being written; it runs once, and the agent gets that value, or that exception. Tools with functions do so
    (`@tool`, `StructuredTool`, `Tool`); those of classes of one's own, and those that need something of their place in
    the graph (state, store, config, the call's id, `interrupt`), run there. A function that calls others while their
    events are streamed, too. `metadata` of the copy says `{"teola_read_only": True}`. Raises `RegistrationError` for
    what is no tool.
    """
    if not isinstance(tool, BaseTool):
        raise RegistrationError(
            f"read_only was given a {type(tool).__qualname__}, which is no tool of LangChain.",
            hint="write @read_only above @tool",
        )
    return tool.model_copy(update={"metadata": {**(tool.metadata or {}), _MARK: True}})


def is_read_only(tool: Any) -> bool:
    """Return True if the author of a tool has declared it read-only."""
    metadata = getattr(tool, "metadata", None)
    return isinstance(metadata, dict) and metadata.get(_MARK) is True


_MCP = "mcp:"
"""Before the name of an MCP server. No name of a tool that a model may call has a colon."""


@dataclass(frozen=True, slots=True)
class ReadOnlyTools:
    """The tools that the user declares read-only: by `@read_only`, or in `accelerate(..., read_only=[...])`.

    An entry of that list is a tool, or the function that a tool was made of; a tool's name; a predicate, which takes a
    tool and returns a bool; or an MCP server: `"mcp:NAME"`, a `MultiServerMCPClient` or a `ClientSession`. Of a server
    those tools count whose `readOnlyHint` is true.
    """

    entries: tuple[Any, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Any], tools: Collection[BaseTool], *, strict: bool) -> ReadOnlyTools:
        """Check the list, and replace functions that tools were made of by those tools.

        `tools`: all of the app. Raises `RegistrationError` for an entry that is none of the above and, if `strict`, for
        one that names none of `tools`, predicates aside.
        """
        checked = []
        for entry in entries:
            made_of_it = next((tool for tool in tools if not isinstance(entry, str) and _is_made_of(tool, entry)), None)
            is_predicate = made_of_it is None and callable(entry) and not isinstance(entry, BaseTool)
            if not (isinstance(entry, str | BaseTool) or is_mcp_server(entry) or callable(entry)):
                raise RegistrationError(
                    f"read_only has a {type(entry).__qualname__}, which is no tool.",
                    hint='name tools, their names, a predicate, or an MCP server: read_only=["search", "mcp:weather"]',
                )
            checked.append(entry if made_of_it is None else made_of_it)
            if strict and not is_predicate and not any(_is_named(tool, checked[-1]) for tool in tools):
                entry_name = entry if isinstance(entry, str) else type(entry).__qualname__
                names = ", ".join(sorted(tool.name for tool in tools)) or "it has none"
                raise RegistrationError(
                    f"{entry_name!r} in read_only= names none of the app's tools: {names}.",
                    hint="name tools of the graph; pass strict=False for tools of agents that its functions call",
                )
        return cls(tuple(checked))

    def declares(self, tool: BaseTool) -> bool:
        """Return True if a tool is declared read-only.

        Raises `RegistrationError` for a predicate that returns no bool, and what a predicate raises.
        """
        return is_read_only(tool) or any(self._entry_declares(entry, tool) for entry in self.entries)

    def _entry_declares(self, entry: Any, tool: BaseTool) -> bool:
        """Return True if one entry of `read_only=` declares a tool read-only.

        Tools of a named MCP server count only if their `readOnlyHint` is true. Raise `RegistrationError` for a
        predicate that returns no bool.
        """
        if entry is tool or entry == tool.name:
            return True
        if isinstance(entry, str) or is_mcp_server(entry):
            parts = mcp_tool(tool)
            return parts is not None and parts.read_only_hint and _is_named(tool, entry)
        if isinstance(entry, BaseTool):
            return False
        answer = entry(tool)
        if not isinstance(answer, bool):
            raise RegistrationError(
                f"a predicate in read_only= returned a {type(answer).__qualname__} for the tool {tool.name!r}.",
                hint="return True or False; name a function that is a tool of another agent by the tool's name",
            )
        return answer


NOTHING_DECLARED = ReadOnlyTools()
"""Without `read_only=`: only what `@read_only` says."""


def _is_made_of(tool: BaseTool, function: Any) -> bool:
    functions = (getattr(tool, "func", None), getattr(tool, "coroutine", None))
    return callable(function) and any(one is function for one in functions)


def _is_named(tool: BaseTool, entry: Any) -> bool:
    """Return True if an entry that is no predicate names a tool, or the MCP server that the tool calls."""
    if entry is tool or entry == tool.name:
        return True
    parts = mcp_tool(tool)
    if parts is None:
        return False
    return (bool(parts.server_name) and entry == _MCP + parts.server_name) or belongs_to_server(parts, entry)


def tool_engine(tools: Iterable[BaseTool], name: str = "tools", **options: Any) -> ToolEngine:
    """The engine that runs the functions of these tools; those declared `read_only` are so there. `options`: of
    `ToolEngine` (`max_requests`, `seconds`). Raises `RegistrationError` for a tool that is no function."""
    return ToolEngine(name, [ToolFunction(tool.name, _function(tool), is_read_only(tool)) for tool in tools], **options)


def on_engine(tools: Iterable[BaseTool], pool: EnginePool, engine: str = "tools") -> list[BaseTool]:
    """Copies of the tools whose functions are called by an engine of the pool that has them under their names: see
    `tool_engine`, or `kind: tools` in a pool's file.

    What models are told of a tool, how its arguments are checked, and what it raises stay its own. Raises
    `RegistrationError` for a tool that is no function, and for one that takes something of its place in a graph.
    """
    check_engine(pool, engine)
    return [_copy_on_engine(tool, pool, engine) for tool in tools]


def _copy_on_engine(tool: BaseTool, pool: Any, engine: str) -> BaseTool:
    """Return a copy of a tool whose function runs on an engine of the pool.

    The copy's functions send the arguments as a request and return its value. Errors of the function are raised as the
    function raised them, where that is known.
    """
    function = _function(tool)
    signature = inspect.signature(function)

    def call(arguments: Any) -> CallHandle:
        """Start a call of the tool on its engine, in the query that the caller belongs to, if any.

        The request says if the tool was declared read-only.
        """
        run, request_context = call_context(pool)
        request = CallTool(tool.name, arguments, is_read_only(tool))
        handle: CallHandle = pool.call(PrimitiveKind.TOOL, engine, [request], run=run, request_context=request_context)
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
            f"the tool {tool.name!r} takes {names}, which an engine cannot give it.", hint="leave it where it is"
        )
    return function
