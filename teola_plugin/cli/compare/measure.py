"""Runs of an object, original and accelerated in turn, on the same inputs.

A *variant* is one way to run the object: the original or the accelerated object, by its sync entry, its async entry or
as a stream.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.app_frameworks import (
    answer_cache,
    observe_models,
    set_answer_cache,
    stop_observing,
    tokens_of,
)
from teola_plugin.adapters.comparison import failure
from teola_plugin.errors import RegistrationError
from teola_plugin.runtime.usage import MeteredCall, QueryUsage

if TYPE_CHECKING:
    from teola_plugin.adapters.comparison import Entries
    from teola_plugin.cli.compare.options import InputLine
    from teola_plugin.observe import Price, QueryTrace
    from teola_plugin.pool import EnginePool

SYNC, ASYNC, CONTROL = "plain, sync", "plain, async", "plain again, async"
FAST_SYNC, FAST_ASYNC = "accelerated, sync", "accelerated, async"
STREAM, FAST_STREAM = "plain, stream", "accelerated, stream"
FAST_CALLS = (FAST_SYNC, FAST_ASYNC)
STREAMS = (STREAM, FAST_STREAM)
VARIANTS = (SYNC, ASYNC, CONTROL, *FAST_CALLS, *STREAMS)
"""All variants, in the order in which they are shown."""
_RUN_ORDER = (SYNC, FAST_SYNC, FAST_ASYNC, ASYNC, CONTROL, FAST_STREAM, STREAM)
"""The order in which variants run. Each accelerated variant stands next to the original's. Original and accelerated do
not alternate strictly, so that an object whose answers alternate is recognised."""


class RunObserver:
    """Counts the calls of models for the run that is under way; see `CallObserver`."""

    def __init__(self) -> None:
        self.usage = new_usage()

    def call_began(self, target: Any, options: Mapping[str, Any], /) -> MeteredCall:
        return self.usage.call_began(target, options)

    def result_came(self, call: MeteredCall, value: Any, /) -> None:
        self.usage.result_came(call, value)


def new_usage(price: Price | None = None) -> QueryUsage:
    """Return a count of calls of models and their tokens, for one run. `price`: of every model."""
    return QueryUsage(lambda model: price, tokens_of)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One call of the object."""

    variant: str
    input_index: int
    seconds: float
    answer: Any
    """A snapshot of the result, or of what was raised; None for a stream that was read to its end."""
    error: str = ""
    """The exception as text; empty if none was raised."""
    first_token_s: float | None = None
    """For a stream: the seconds until the first chunk that holds something."""
    trace: QueryTrace | None = None
    round: int = 0
    """Runs of one input and one round are compared with each other: they ran one directly after the other."""
    usage: QueryUsage | None = None
    """The calls of models that it made: prefetched and wasted calls, and repeats, included. Calls may end after it."""


class CompareSession:
    """An object, its accelerated counterpart and one event loop for all async calls; a context manager."""

    def __init__(
        self, original: Any, fast: Any, pool: EnginePool | None, entries: Entries, price: Price | None = None
    ) -> None:
        """`price`: of every model that the object calls; None if it is not known."""
        self.original, self.fast, self.entries, self._price = original, fast, entries, price
        self._pool = pool
        self._runner = asyncio.Runner()
        self._last_query_id = ""
        self._answer_cache: Any = None
        self._observer = RunObserver()

    def __enter__(self) -> CompareSession:
        """Start the pool, and begin to count the calls of models."""
        if self._pool is not None:
            self._pool.start()
        # When a parallel step fails, the framework leaves its siblings' errors to the loop, which would print them.
        self._runner.get_loop().set_exception_handler(lambda loop, context: None)
        self._answer_cache = answer_cache()
        observe_models(self._observer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the counting, restore the cache of answers, and close the loop and the pool."""
        stop_observing()
        if self._answer_cache is not None:
            set_answer_cache(self._answer_cache)
        self._runner.close()
        if self._pool is not None:
            self._pool.close()

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that the object has."""
        return variants_of(sync=self.entries.call is not None, streams=self.entries.pieces is not None)

    def run(self, variant: str, input_index: int, value: Any, round_: int = 0) -> TimedRun:
        """Call the object once with a copy of the input, after all caches were emptied."""
        value, obj = copy.deepcopy(value), self.fast if variant.startswith("accelerated") else self.original
        self._empty_caches(obj)
        answer, error_text, first_token_s = None, "", None
        usage = self._observer.usage = new_usage(self._price)
        start = time.perf_counter()
        try:
            if variant in STREAMS:
                first_token_s = self._runner.run(_time_first_chunk(self.entries, obj, value, start))
            elif variant in (SYNC, FAST_SYNC):
                assert self.entries.call is not None
                answer = self.entries.call(obj, value)
            else:
                answer = self._runner.run(_await_answer(self.entries, obj, value))
            seconds = time.perf_counter() - start
            answer = None if answer is None else self.entries.answer(answer)
        except Exception as error:
            seconds = time.perf_counter() - start
            answer, error_text = failure(error), f"{type(error).__qualname__}: {error}"
        trace = self._new_trace() if variant in FAST_CALLS else None
        return TimedRun(variant, input_index, seconds, answer, error_text, first_token_s, trace, round_, usage)

    def _empty_caches(self, obj: Any) -> None:
        """Remove what earlier runs left: prefix caches of the pool, the cache of answers, a conversation."""
        if self._pool is not None:
            self._pool.reset()
        if self._answer_cache is not None:
            set_answer_cache()
        self.entries.fresh(obj)

    def _new_trace(self) -> QueryTrace | None:
        """Return the trace of the last call; None if that call was not traced."""
        trace: QueryTrace | None = self.fast.last_trace()
        if trace is None or trace.query_id == self._last_query_id:
            return None
        self._last_query_id = trace.query_id
        return trace


async def _await_answer(entries: Entries, obj: Any, value: Any) -> Any:
    return await entries.acall(obj, value)


async def _time_first_chunk(entries: Entries, obj: Any, value: Any, start: float) -> float | None:
    """Read the whole stream. Return the seconds from `start` to its first chunk that holds something."""
    first_token_s = None
    assert entries.pieces is not None
    async for chunk in entries.pieces(obj, value):
        if first_token_s is None and getattr(chunk, "content", chunk):
            first_token_s = time.perf_counter() - start
    return first_token_s


# ------------------------------------------------------------ the order of the runs


def variants_of(*, sync: bool = True, streams: bool) -> tuple[str, ...]:
    """Return the variants of an object, in the order in which they are shown: `sync` and `streams` say what it has.

    Args:
        sync: False leaves out the variants that call sync methods.
        streams: False leaves out the variants that read a stream.
    """
    without = (*(() if sync else (SYNC, FAST_SYNC)), *(() if streams else STREAMS))
    return tuple(variant for variant in VARIANTS if variant not in without)


def run_schedule(inputs: int, repeats: int, variants: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (variant, index of the input, round) for each run.

    Each round of an input is its previous round backwards, so that slow drift affects original and accelerated alike;
    every second round begins with another variant.
    """
    ordered = [variant for variant in _RUN_ORDER if variant in variants]
    for round_ in range(repeats):
        for index in range(inputs):
            offset = (index + round_ // 2) % len(ordered)
            rotated = (*ordered[offset:], *ordered[:offset])
            is_forwards = (round_ + index) % 2 == 0
            yield from ((variant, index, round_) for variant in (rotated if is_forwards else reversed(rotated)))


def warm_up(
    session: CompareSession, inputs: Sequence[InputLine], variants: Sequence[str], on_progress: Callable[[], None]
) -> None:
    """Run every input on the original and the accelerated object, then the first input that works in every variant.

    These runs are not counted. After them, whatever is loaded, compiled, connected, planned or cached on first use,
    also by servers of the user, is so for both objects. Raise `RegistrationError` if the original accepts no input.
    """
    errors: list[str] = []
    first_valid = None
    for index, entry in enumerate(inputs):
        for pair in ((SYNC, FAST_SYNC), (ASYNC, FAST_ASYNC)):
            if pair[0] not in variants:
                continue
            pair_runs = []
            for variant in pair:
                pair_runs.append(session.run(variant, index, entry.value))
                on_progress()
            if not pair_runs[0].error:
                first_valid = index if first_valid is None else first_valid
                break
            errors.append(pair_runs[0].error)
    if first_valid is None:
        raise RegistrationError(
            f"the original raised on every input; on line {inputs[0].line}: {errors[0]}.",
            hint="inputs must be what its entry takes, one JSON value a line",
        )
    for variant in variants:
        session.run(variant, first_valid, inputs[first_valid].value)
        on_progress()
