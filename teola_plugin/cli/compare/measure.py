"""Runs an object plain and accelerated, in turn, on the same inputs."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.langchain.checking.comparison import failure, snapshot

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable

    from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
    from teola_plugin.cli.compare.given import Given
    from teola_plugin.observe import QueryTrace
    from teola_plugin.pool import EnginePool

SYNC, ASYNC, CONTROL = "plain, invoke", "plain, ainvoke", "plain again, ainvoke"
FAST_SYNC, FAST_ASYNC = "accelerated, invoke", "accelerated, ainvoke"
PLAIN, FAST = (SYNC, ASYNC, CONTROL), (FAST_SYNC, FAST_ASYNC)
STREAM, FAST_STREAM = "plain, astream", "accelerated, astream"


@dataclass(frozen=True, slots=True)
class Run:
    """One call. Times in seconds."""

    way: str
    input: int
    """Index among the inputs."""
    seconds: float
    answer: Any
    """A snapshot of the result, or of what was raised; None for a stream that was read to its end."""
    raised: str = ""
    """The error, as text."""
    first: float | None = None
    """When the first chunk with something in it came (streams)."""
    trace: QueryTrace | None = None


class Session:
    """One object, its accelerated self, and one event loop for all that is asynchronous. A context manager."""

    def __init__(self, plain: Runnable[Any, Any], fast: AcceleratedRunnable, pool: EnginePool | None) -> None:
        self.plain, self.fast = plain, fast
        self._pool = pool
        self._runner = asyncio.Runner()
        self._last = ""

    def __enter__(self) -> Session:
        if self._pool is not None:
            self._pool.start()
        # Of a parallel step that failed, the framework leaves the siblings' errors to the loop, which would print them.
        self._runner.get_loop().set_exception_handler(lambda loop, context: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()
        if self._pool is not None:
            self._pool.close()

    def run(self, way: str, index: int, value: Any) -> Run:
        """One call, from empty prefix caches where the engines are ours; the input is a copy."""
        if self._pool is not None:
            self._pool.reset()
        given, chosen = copy.deepcopy(value), self.fast if way.startswith("accelerated") else self.plain
        answer, raised, first = None, "", None
        begun = time.perf_counter()
        try:
            if way.endswith("astream"):
                first = self._runner.run(_first(chosen, given, begun))
            else:
                answer = self._called(chosen, way, given)
            seconds = time.perf_counter() - begun
            answer = snapshot(answer)
        except Exception as error:
            seconds = time.perf_counter() - begun
            answer, raised = failure(error), f"{type(error).__qualname__}: {error}"
        return Run(way, index, seconds, answer, raised, first, self._trace() if way in FAST else None)

    def _called(self, chosen: Runnable[Any, Any], way: str, given: Any) -> Any:
        if way.endswith("ainvoke"):
            return self._runner.run(_awaited(chosen, given))
        return chosen.invoke(given)

    def _trace(self) -> QueryTrace | None:
        """That of the last call; None where it was not traced."""
        found = self.fast.last_trace()
        if found is None or found.query_id == self._last:
            return None
        self._last = found.query_id
        return found


async def _awaited(chosen: Runnable[Any, Any], given: Any) -> Any:
    return await chosen.ainvoke(given)


async def _first(chosen: Runnable[Any, Any], given: Any, begun: float) -> float | None:
    """Reads the whole stream; the seconds until its first chunk that holds something."""
    first = None
    async for chunk in chosen.astream(given):
        if first is None and getattr(chunk, "content", chunk):
            first = time.perf_counter() - begun
    return first


def ways(*, streams: bool) -> tuple[str, ...]:
    return (*PLAIN, *FAST, *((STREAM, FAST_STREAM) if streams else ()))


def order(inputs: Sequence[Given], repeats: int, chosen: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(way, index of the input); who comes first changes from round to round, so that nobody always comes second."""
    for round_ in range(repeats * len(inputs)):
        turn, forward = round_ % len(chosen), round_ // len(chosen) % 2 == 0
        turned = (*chosen[turn:], *chosen[:turn])
        yield from ((way, round_ % len(inputs)) for way in (turned if forward else reversed(turned)))
