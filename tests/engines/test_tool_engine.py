"""Tests of the engine for tools: a limit on parallel calls, threads, single execution unless read-only, and errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from teola_plugin.engines.base import Engine
from teola_plugin.engines.conformance import EngineConformance, collect, ends
from teola_plugin.engines.tools import ToolEngine, ToolFunction, ToolRaised
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import CallTool, Done, Failed, Request

K = PrimitiveKind


def add(a: int, b: int) -> int:
    return a + b


async def later(a: int) -> int:
    await asyncio.sleep(0.01)
    return a


def broken() -> None:
    raise KeyError("out of oats")


class TestConformance(EngineConformance):
    async def make(self) -> Engine:
        return ToolEngine("tools", [add, later], read_only=[add], seconds=0.01)

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        return [CallTool("add", {"a": 1, "b": 2}, True), CallTool("later", {"a": 7})]


async def ask(engine: ToolEngine, *payloads: CallTool) -> list[Done | Failed]:
    batch = [Request(f"t{n}", K.TOOL, payload) for n, payload in enumerate(payloads)]
    await engine.start()
    try:
        found = ends(await collect(engine, batch), batch)
    finally:
        await engine.stop()
    return [found[request.id] for request in batch]


async def test_error_of_the_function_is_the_cause() -> None:
    [end] = await ask(ToolEngine("tools", [broken]), CallTool("broken"))
    assert isinstance(end, Failed) and isinstance(end.error, ToolRaised) and not end.error.retryable
    assert isinstance(end.error.__cause__, KeyError) and "out of oats" in end.error.message


async def test_at_most_max_requests_tools_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def slow() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1

    found = await ask(ToolEngine("tools", [slow], max_requests=2), *[CallTool("slow")] * 6)
    assert all(isinstance(end, Done) for end in found) and most == 2


async def test_unknown_and_wrong_tool_calls_fail_with_a_hint() -> None:
    engine = ToolEngine("tools", [add])
    unknown, undeclared, wrong = await ask(
        engine, CallTool("ad"), CallTool("add", {"a": 1, "b": 1}, read_only=True), CallTool("add", {"c": 1})
    )
    assert isinstance(unknown, Failed) and "did you mean 'add'" in unknown.error.hint
    assert isinstance(undeclared, Failed) and "read_only" in undeclared.error.hint
    assert isinstance(wrong, Failed) and isinstance(wrong.error.__cause__, TypeError)


@pytest.mark.parametrize(
    ("tools", "read_only", "why"),
    [
        ([add, add], [], "two tools"),
        ([lambda: 1], [], "no named function"),
        ([add], ["sub"], "none of the tools"),
    ],
)
def test_bad_tools_are_refused(tools: list[Any], read_only: list[Any], why: str) -> None:
    with pytest.raises(RegistrationError, match=why):
        ToolEngine("tools", tools, read_only=read_only)


def test_read_only_is_declared_by_name_function_or_tool() -> None:
    engine = ToolEngine("tools", [add, ToolFunction("then", later, True), broken], read_only=[add, "broken"])
    assert [tool.read_only for tool in engine.tools.values()] == [True, True, True]


async def test_cancelled_function_is_not_awaited() -> None:
    go = threading.Event()

    def stuck() -> None:
        go.wait(60)

    engine = ToolEngine("tools", [stuck])
    await engine.start()
    request = Request("stuck", K.TOOL, CallTool("stuck"))
    work = asyncio.create_task(collect(engine, [request]))
    await asyncio.sleep(0.05)
    await engine.cancel("stuck")
    [end] = await asyncio.wait_for(work, 30)
    assert isinstance(end, Failed) and isinstance(end.error, EngineError) and not end.error.retryable
    go.set()
    await engine.stop()
