"""Concurrent requests of an engine, each in a task of its own: for engines that wait for something elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from teola_plugin.errors import EngineError
from teola_plugin.requests.payloads import Done, Failed, Piece, Request, Result

Inbox = asyncio.Queue[Result]
Serve = Callable[[Request, Inbox], Awaitable[Done | Failed]]
"""Serves a request: puts pieces into the inbox and returns the end. It must not raise."""
Value = Callable[[Request, Inbox], Awaitable[Any]]
"""Returns the value of a request, and puts pieces into the inbox. Raises `EngineError`."""


class RequestTasks:
    """The tasks of the engine named `engine`, by request. One owner: the engine, on its loop."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def results(self, batch: Sequence[Request], serve: Serve) -> AsyncGenerator[Result, None]:
        """Yield the results of all requests as they come. A caller that stops reading cancels the others."""
        inbox: Inbox = asyncio.Queue()
        tasks = {request.id: self._create_task(request, serve, inbox) for request in batch}
        self._tasks.update(tasks)
        try:
            left = set(tasks)
            while left:
                result = await inbox.get()
                if not isinstance(result, Piece):
                    left.discard(result.request_id)
                    self._forget(result.request_id, tasks)
                yield result
        finally:
            for request_id, task in tasks.items():
                task.cancel()
                self._forget(request_id, tasks)
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def serving(self, batch: Sequence[Request], value: Value) -> AsyncGenerator[Result, None]:
        """Yield the results of requests with the values of `value`: `Done` with the seconds, or `Failed`."""

        async def serve(request: Request, inbox: Inbox) -> Done | Failed:
            """Return the end of a request, with its value and seconds or with the `EngineError` that was raised."""
            start = time.perf_counter()
            try:
                result_value = await value(request, inbox)
            except EngineError as error:
                return Failed(request.id, error)
            return Done(request.id, result_value, {"seconds": time.perf_counter() - start})

        async with aclosing(self.results(batch, serve)) as results:
            async for result in results:
                yield result

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Idempotent; unknown ids are ignored."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def cancel_all(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    def _forget(self, request_id: str, tasks: Mapping[str, asyncio.Task[None]]) -> None:
        if self._tasks.get(request_id) is tasks[request_id]:
            del self._tasks[request_id]

    def _create_task(self, request: Request, serve: Serve, inbox: Inbox) -> asyncio.Task[None]:
        """Start the task of a request, which puts the end into the inbox; one that is cancelled ends as failed."""

        async def run() -> None:
            inbox.put_nowait(await serve(request, inbox))

        def report_cancellation(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # maybe before it began
                error = EngineError(f"{request.id} was cancelled.", engine=self._engine)
                inbox.put_nowait(Failed(request.id, error))

        task = asyncio.create_task(run())
        task.add_done_callback(report_cancellation)
        return task
