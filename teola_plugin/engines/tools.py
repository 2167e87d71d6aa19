"""The engine that runs tools, which are functions: each call in a thread, a limited number at a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.request_tasks import Inbox, RequestTasks
from teola_plugin.errors import EngineError, EngineUnavailable, RegistrationError, unknown_name
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import CallTool, Request, Result


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function, sync or async, with a name.

    With `read_only` its author declares that it changes nothing, so that it may be prefetched, and called again after
    an engine has died.
    """

    name: str
    function: Callable[..., Any]
    read_only: bool = False

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function and return its value. Blocks; an async function runs on a loop of its own.

        Raises what the function raises. Call it on a thread without a running loop.
        """
        value = self.function(**arguments)
        return asyncio.run(_await_value(value)) if inspect.isawaitable(value) else value


async def _await_value(awaitable: Any) -> Any:
    return await awaitable


class ToolRaised(EngineError):
    """The error of a tool that raised. The original error is its `__cause__`, in the process where it ran."""


def to_tools(tools: Iterable[Any], read_only: Iterable[Any]) -> dict[str, ToolFunction]:
    """Return the tools by name.

    Raises:
        RegistrationError: A tool is not a function, two tools have one name, or `read_only` names an unknown tool.
    """
    harmless = [item.name if isinstance(item, ToolFunction) else item for item in read_only]
    by_name: dict[str, ToolFunction] = {}
    for item in tools:
        tool = item if isinstance(item, ToolFunction) else _to_tool(item)
        if tool.name in by_name:
            raise RegistrationError(
                f"two tools are named {tool.name!r}.",
                hint="name one otherwise: teola_plugin.engines.ToolFunction",
            )
        declared = tool.read_only or tool.name in harmless or tool.function in harmless
        by_name[tool.name] = ToolFunction(tool.name, tool.function, declared)
    functions = {tool.function for tool in by_name.values()}
    if unknown := [item for item in harmless if item not in by_name and item not in functions]:
        raise RegistrationError(
            f"read_only names {unknown[0]!r}, which is none of the tools.",
            hint=f"known: {', '.join(by_name) or 'none'}",
        )
    return by_name


def _to_tool(function: Any) -> ToolFunction:
    """Return a function as a tool with its own name. Raise `RegistrationError` for lambdas and other unnamed things."""
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise RegistrationError(
            f"{function!r} is no named function.",
            hint="give functions, or teola_plugin.engines.ToolFunction with a name",
        )
    return ToolFunction(name, function)


_STOP_SECONDS = 10.0


class ToolEngine:
    """Python functions as an engine: `ToolEngine("tools", [weather, send_mail], read_only=[weather])`.

    A function has its own name; `ToolFunction(name, function)` sets another. Functions in `read_only` are declared to
    change nothing: they may be prefetched, and called again. All others are called once, when the original app calls
    them. `max_requests` calls run at a time, in threads of the engine, so that they never hold up the pool. `seconds`
    is the usual duration of a call, for plans. A cancelled call is not waited for, but its function cannot be stopped.
    Raises `RegistrationError` for a tool that is not a function.
    """

    kinds: frozenset[PrimitiveKind] = frozenset({PrimitiveKind.TOOL})

    def __init__(
        self,
        name: str = "tools",
        tools: Iterable[Any] = (),
        *,
        read_only: Iterable[Any] = (),
        max_requests: int = 4,
        seconds: float | None = None,
    ) -> None:
        self.name, self.tools = name, to_tools(tools, read_only)
        curves = {} if seconds is None else {PrimitiveKind.TOOL: Curve(((1, seconds),))}
        self._profile = EngineProfile(
            curves,
            batching=Batching.CONTINUOUS,
            max_batch=max_requests,
            max_efficient_batch=max_requests,
            max_requests=max_requests,
        )
        self._threads: ThreadPoolExecutor | None = None
        self._tasks = RequestTasks(name)

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    # Life cycle

    async def start(self) -> None:
        """Start the threads. Idempotent."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._profile.max_requests, thread_name_prefix=f"teola-{self.name}")

    async def stop(self) -> None:
        """Stop the engine, and wait for running functions for 10 s at most. Idempotent. Calls under way fail."""
        threads, self._threads = self._threads, None
        self._tasks.cancel_all()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
            waiting = asyncio.to_thread(threads.shutdown, True)
            try:
                await asyncio.wait_for(waiting, _STOP_SECONDS)
            except TimeoutError:
                pass

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield the value of each function as it returns; a `ToolRaised` error for one that raises."""
        async with aclosing(self._tasks.serving(batch, self._value)) as results:
            async for result in results:
                yield result

    async def _value(self, request: Request, inbox: Inbox) -> Any:
        return await self._call(self._check_payload(request))

    def _check_payload(self, request: Request) -> CallTool:
        """Return the tool call of a request. Raise `EngineError` if the tool is unknown, or said to be read-only and is
        not."""
        payload = request.payload
        if request.kind not in self.kinds or not isinstance(payload, CallTool):
            got = f"{request.kind.value} of {type(payload).__name__}"
            raise EngineError(f"{self.name}: it does calls of tools (CallTool), not {got}.", engine=self.name)
        if payload.tool not in self.tools:
            unknown = unknown_name("tool", payload.tool, list(self.tools))
            raise EngineError(f"{self.name}: {unknown.message}", engine=self.name, hint=unknown.hint)
        if payload.read_only and not self.tools[payload.tool].read_only:
            raise EngineError(
                f"{self.name}: the tool {payload.tool!r} is asked for as read-only, and is not declared so.",
                engine=self.name,
                hint="name it in read_only= of its engine, if it changes nothing",
            )
        return payload

    async def _call(self, payload: CallTool) -> Any:
        """Call a tool in one of the engine's threads and return its value. Raise `ToolRaised` if the tool raises."""
        if self._threads is None:
            raise EngineUnavailable(f"{self.name} is not started.", engine=self.name, hint="start the pool")
        tool, arguments = self.tools[payload.tool], dict(payload.arguments)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, tool, arguments)
        except Exception as error:
            raise ToolRaised(
                f"{self.name}: the tool {payload.tool!r} raised {type(error).__name__}: {error}", engine=self.name
            ) from error

    async def cancel(self, request_id: str) -> None:
        self._tasks.cancel(request_id)

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._tasks))

    async def reset(self) -> None:
        """Do nothing: there are no caches."""

    def versions(self) -> Mapping[str, str]:
        return {"tools": ", ".join(self.tools) or "none"}
