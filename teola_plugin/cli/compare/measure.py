"""Runs an object plain and accelerated, in turn, on the same inputs."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.app_frameworks import answer_cache, set_answer_cache
from teola_plugin.adapters.comparison import failure
from teola_plugin.errors import RegistrationError

if TYPE_CHECKING:
    from teola_plugin.adapters.comparison import Entries
    from teola_plugin.cli.compare.given import Given
    from teola_plugin.observe import QueryTrace
    from teola_plugin.pool import EnginePool

SYNC, ASYNC, CONTROL = "plain, sync", "plain, async", "plain again, async"
FAST_SYNC, FAST_ASYNC = "accelerated, sync", "accelerated, async"
PLAIN, FAST = (SYNC, ASYNC, CONTROL), (FAST_SYNC, FAST_ASYNC)
STREAM, FAST_STREAM = "plain, stream", "accelerated, stream"
WAYS = (*PLAIN, *FAST, STREAM, FAST_STREAM)
"""In the order in which they are shown."""
_IN_TURN = (SYNC, FAST_SYNC, FAST_ASYNC, ASYNC, CONTROL, FAST_STREAM, STREAM)
"""In the order in which they run: an accelerated one beside each plain one; not every second one is plain, so that an
object which answers in turn is found out."""


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
    round: int = 0
    """Runs of one input and one round are compared with each other: they ran right behind each other."""


class Session:
    """One object, its accelerated self, and one event loop for all that is asynchronous. A context manager."""

    def __init__(self, plain: Any, fast: Any, pool: EnginePool | None, entries: Entries) -> None:
        self.plain, self.fast, self.entries = plain, fast, entries
        self._pool = pool
        self._runner = asyncio.Runner()
        self._last = ""
        self._answer_cache: Any = None

    def __enter__(self) -> Session:
        if self._pool is not None:
            self._pool.start()
        # Of a parallel step that failed, the framework leaves the siblings' errors to the loop, which would print them.
        self._runner.get_loop().set_exception_handler(lambda loop, context: None)
        self._answer_cache = answer_cache()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._answer_cache is not None:
            set_answer_cache(self._answer_cache)
        self._runner.close()
        if self._pool is not None:
            self._pool.close()

    @property
    def ways(self) -> tuple[str, ...]:
        """Those that the object has."""
        return ways(sync=self.entries.call is not None, streams=self.entries.pieces is not None)

    def run(self, way: str, index: int, value: Any, round_: int = 0) -> Run:
        """One call, plain or accelerated from the same state; the input is a copy."""
        given, chosen = copy.deepcopy(value), self.fast if way.startswith("accelerated") else self.plain
        self._forget(chosen)
        answer, raised, first = None, "", None
        begun = time.perf_counter()
        try:
            if way in (STREAM, FAST_STREAM):
                first = self._runner.run(_first(self.entries, chosen, given, begun))
            else:
                answer = self._called(chosen, way, given)
            seconds = time.perf_counter() - begun
            answer = None if answer is None else self.entries.answer(answer)
        except Exception as error:
            seconds = time.perf_counter() - begun
            answer, raised = failure(error), f"{type(error).__qualname__}: {error}"
        return Run(way, index, seconds, answer, raised, first, self._trace() if way in FAST else None, round_)

    def _forget(self, chosen: Any) -> None:
        """Empty what earlier runs left behind: prefix caches of the pool, the cache of answers, a conversation."""
        if self._pool is not None:
            self._pool.reset()
        if self._answer_cache is not None:
            set_answer_cache()
        self.entries.fresh(chosen)

    def _called(self, chosen: Any, way: str, given: Any) -> Any:
        if way in (SYNC, FAST_SYNC):
            assert self.entries.call is not None
            return self.entries.call(chosen, given)
        return self._runner.run(_awaited(self.entries, chosen, given))

    def _trace(self) -> QueryTrace | None:
        """That of the last call; None where it was not traced."""
        found: QueryTrace | None = self.fast.last_trace()
        if found is None or found.query_id == self._last:
            return None
        self._last = found.query_id
        return found


async def _awaited(entries: Entries, chosen: Any, given: Any) -> Any:
    return await entries.acall(chosen, given)


async def _first(entries: Entries, chosen: Any, given: Any, begun: float) -> float | None:
    """Reads the whole stream; the seconds until its first chunk that holds something."""
    first = None
    assert entries.pieces is not None
    async for chunk in entries.pieces(chosen, given):
        if first is None and getattr(chunk, "content", chunk):
            first = time.perf_counter() - begun
    return first


# ------------------------------------------------------------ which runs, in which order


def ways(*, sync: bool = True, streams: bool) -> tuple[str, ...]:
    """Of an object with these entries, in the order in which they are shown."""
    without = (*(() if sync else (SYNC, FAST_SYNC)), *(() if streams else (STREAM, FAST_STREAM)))
    return tuple(way for way in WAYS if way not in without)


def order(inputs: int, repeats: int, chosen: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(way, index of the input, round). Each round of an input is the one before backwards, so that what drifts hits
    plain and accelerated alike; every second one begins with another way."""
    turns = [way for way in _IN_TURN if way in chosen]
    for round_ in range(repeats):
        for index in range(inputs):
            turn = (index + round_ // 2) % len(turns)
            turned = (*turns[turn:], *turns[:turn])
            yield from ((way, index, round_) for way in (turned if (round_ + index) % 2 == 0 else reversed(turned)))


def warm_up(session: Session, inputs: Sequence[Given], chosen: Sequence[str], done: Callable[[], None]) -> None:
    """Calls that are not counted: every input plain and accelerated, and the first that works in every way.

    Whatever is loaded, compiled, connected, planned or cached on first use, also by servers of the user's own, is so
    for both. Raises `RegistrationError` where the plain object takes no input.
    """
    errors: list[str] = []
    works = None
    for index, given in enumerate(inputs):
        for pair in ((SYNC, FAST_SYNC), (ASYNC, FAST_ASYNC)):
            if pair[0] not in chosen:
                continue
            plain, _ = [session.run(way, index, given.value) for way in pair]
            done()
            if not plain.raised:
                works = index if works is None else works
                break
            errors.append(plain.raised)
    if works is None:
        raise RegistrationError(
            f"the plain object raised on every input; on line {inputs[0].line}: {errors[0]}.",
            hint="inputs must be what its entry takes, one JSON value a line",
        )
    for way in chosen:
        session.run(way, works, inputs[works].value)
        done()
