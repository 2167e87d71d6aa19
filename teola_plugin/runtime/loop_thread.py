"""An event loop on a thread of its own, where a pool's engines and schedulers live."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """Starts with `start`, ends with `stop`; independent of the loops that callers come and go with."""

    def __init__(self, name: str = "teola-pool") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def start(self) -> None:
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the loop soon; from any thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        """Ends the loop and its thread. Idempotent."""
        if self.loop.is_closed():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._finish(), self.loop).result(10)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)
        if not self._thread.is_alive():
            self.loop.close()

    @staticmethod
    async def _finish() -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()


class SameLoop:
    """The caller's own running loop in the role of a `LoopThread`: virtual time, and tests on one loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    @property
    def ident(self) -> int:
        return 0

    def start(self) -> None:
        pass

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        function(*args)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        task = self.loop.create_task(coroutine)
        task.add_done_callback(lambda t: _copy(t, future))
        return future

    def stop(self) -> None:
        pass


def _copy(task: asyncio.Task[Any], future: Future[Any]) -> None:
    if task.cancelled():
        future.cancel()
    elif task.exception() is not None:
        future.set_exception(task.exception())
    else:
        future.set_result(task.result())
