"""Tests that code of the client runs off the loop, one function at a time for each query."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from teola_plugin.runtime.driver.client_code import ClientCode


class Scene:
    def __init__(self) -> None:
        self.code = ClientCode(runs_inline=False)
        self.loop = asyncio.get_running_loop()

    def run(self, query: str, function: Any, *, short: bool = False) -> asyncio.Future[tuple[Any, Any]]:
        found: asyncio.Future[tuple[Any, Any]] = self.loop.create_future()
        self.code.run(query, function, lambda value, error: found.set_result((value, error)), is_short=short)
        return found


async def test_client_code_runs_on_another_thread() -> None:
    scene = Scene()
    value, error = await scene.run("q", threading.current_thread)
    assert value is not threading.current_thread() and error is None and value.daemon


async def test_short_client_code_runs_at_once() -> None:
    assert Scene().run("q", threading.current_thread, short=True).result() == (threading.current_thread(), None)


async def test_system_exit_of_client_code_is_returned_as_error() -> None:
    def leaves() -> None:
        raise SystemExit(3)

    value, error = await Scene().run("q", leaves)
    assert value is None and isinstance(error, SystemExit)


async def test_functions_of_one_query_run_in_order_and_singly() -> None:
    scene, began = Scene(), list[int]()
    running = threading.Semaphore(1)

    def one(number: int) -> int:
        assert running.acquire(blocking=False), "two at once"
        began.append(number)
        running.release()
        return number

    found = await asyncio.gather(*(scene.run("q", lambda n=n: one(n)) for n in range(50)))
    assert [value for value, error in found] == began == list(range(50))


async def test_endless_function_blocks_only_its_own_query() -> None:
    scene, over = Scene(), threading.Event()
    stuck = scene.run("stuck", over.wait)
    behind = scene.run("stuck", lambda: "behind it")
    found = await asyncio.wait_for(asyncio.gather(*(scene.run(f"q{n}", lambda n=n: n) for n in range(40))), 20)
    assert [value for value, _ in found] == list(range(40))
    assert not stuck.done() and not behind.done()
    over.set()
    assert (await stuck, await behind) == ((True, None), ("behind it", None))
    scene.code.close()
