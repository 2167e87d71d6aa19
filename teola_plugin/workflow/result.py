"""What a query of a workflow gives: its answer, what that rests on, what came before it, and its trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.observe.spans import QueryTrace
from teola_plugin.runtime.handles import CallHandle, PieceLog
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.workflow.config import Config
from teola_plugin.workflow.values import plain
from teola_plugin.workflow.workflow import Lowered

_SOON = 5.0
"""Seconds in which the trace of a query that is over is complete."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a query."""

    answer: Any
    """The value of the workflow's output."""
    sources: tuple[Any, ...]
    """Passages (`Hit`: id, text, metadata, score) that it rests on; empty where no component finds any."""
    outputs: Mapping[str, Any]
    """Values by component, but for vectors."""
    config: Config
    query_id: str
    trace: QueryTrace | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return str(self.answer)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data, without the trace. Values without a JSON form become text."""
        return {
            "answer": plain(self.answer),
            "sources": plain(self.sources),
            "outputs": plain(self.outputs),
            "config": self.config.to_dict(),
            "query_id": self.query_id,
        }


class Running:
    """A query that is under way. `result()` waits for it, and so does `await`; giving up waiting cancels it."""

    def __init__(self, run: QueryRun, lowered: Lowered, config: Config, owner: int, on_end: Callable[[], None]) -> None:
        self._run, self._lowered, self._config = run, lowered, config
        self._handle = CallHandle(run.output, cancel=run.cancel, owner=owner, on_lost=run.cancel)
        run.output.add_done_callback(lambda _: on_end())

    @property
    def id(self) -> str:
        return self._run.id

    @property
    def output(self) -> str:
        """The name of the component that gives the answer."""
        return self._lowered.output

    @property
    def done(self) -> bool:
        """True if the query has ended, with a result or an error."""
        return self._handle.done

    def result(self, timeout: float | None = None) -> Result:
        """Return the result, or raise the query's error. A TimeoutError cancels the query."""
        try:
            values: Any = self._handle.result(timeout)
        except BaseException:
            if self.done:  # what the query leaves is cleaned up when its trace is there
                self._run.trace.result(_SOON)
            raise
        return self._to_result(values, self._run.trace.result(_SOON))

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        values: Any = await self._handle
        return self._to_result(values, await asyncio.wrap_future(self._run.trace))

    def _to_result(self, values: Mapping[str, Any], trace: QueryTrace | None) -> Result:
        sources = values.get(self._lowered.sources) or ()
        return Result(values[self._lowered.output], tuple(sources), values, self._config, self.id, trace)

    def cancel(self) -> None:
        """Ends it; whoever waits gets `QueryCancelled`."""
        self._run.cancel()


class Stream:
    """The answer's text as it is written: iterate it (also `async for`), then ask for the `result`.

    Pieces joined are the answer's text. An answer that no model writes at the end comes as one piece. Who stops
    reading before the end gives the query up.
    """

    def __init__(self, running: Running, run: QueryRun, log: PieceLog) -> None:
        self.running = running
        self._log = log
        run.output.add_done_callback(lambda _: self._on_end(run))

    def _on_end(self, run: QueryRun) -> None:
        if run.streamed_into is not None or run.output.exception() is not None:
            self._log.close()

    def __iter__(self) -> Iterator[str]:
        some = False
        try:
            for piece in self._log:
                some = True
                yield piece.text
            yield from self._rest(self.running.result(), some)
        except GeneratorExit:
            self.running.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[str]:
        some = False
        try:
            async for piece in self._log:
                some = True
                yield piece.text
            for text in self._rest(await self.running, some):
                yield text
        except (GeneratorExit, asyncio.CancelledError):
            self.running.cancel()
            raise

    @staticmethod
    def _rest(result: Result, some: bool) -> Iterator[str]:
        if not some and result.answer not in (None, ""):
            yield str(result.answer)

    def result(self, timeout: float | None = None) -> Result:
        """The whole result, once it is there."""
        return self.running.result(timeout)

    def __await__(self) -> Generator[Any, None, Result]:
        return self.running.__await__()

    def cancel(self) -> None:
        self.running.cancel()
