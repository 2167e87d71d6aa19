"""`shadow=`: the original makes some calls once more, in the background, and the two answers are compared."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from teola_plugin.adapters.comparison import difference, failure, snapshot
from teola_plugin.errors import QueryError, RegistrationError
from teola_plugin.runtime.query_run import current_run
from teola_plugin.shims.stack_levels import hide_from_stack_levels

SEED, IN_FLIGHT = 20240701, 4
"""The seed makes the same choice of calls in every process. At most `IN_FLIGHT` originals run; others are skipped."""
_log = logging.getLogger("teola_plugin")
_EXPECTED = (Exception, SystemExit)
"""Exceptions of an original that nobody sees."""


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """The results of the calls that were chosen so far."""

    compared: int = 0
    different: int = 0
    """The compared calls with another answer."""
    failed: int = 0
    """The original raised where the accelerated object answered: nothing to compare."""
    skipped: int = 0
    """Too many originals were running, or the event loop ended before the original did."""
    last_difference: str = ""
    """Where and how the last different pair differed, with a piece of both answers; empty before the first."""


Snapshot = Callable[[Any], Any]
"""Plain data that stands for an answer of the framework."""


@dataclass(frozen=True, slots=True)
class OriginalCall:
    """The call to make once more, as it was before the accelerated object got it.

    The caller may change input and result afterwards. No handler may hear of the call.
    """

    make: Callable[[], Any]
    """Makes the call; after an async call, returns a coroutine."""
    context: Context
    """The caller's context variables, without those by which handlers hear of a call."""

    @classmethod
    def of(cls, make: Callable[[], Any], silence: Callable[[], object]) -> OriginalCall:
        """Return a call in a copy of the running context, in which `silence` has run.

        `silence` keeps the user's handlers from hearing of this second call. It belongs to no live query, so its
        requests count for none.
        """
        context = copy_context()
        context.run(current_run.set, None)
        context.run(silence)
        return cls(make, context)


class Shadow:
    """A choice of a share of the calls, after which the original runs, with its counts. One per accelerated object.

    Any thread may use it. A copy, or one that was pickled, starts with counts of its own.
    """

    def __init__(
        self, share: float, snapshot: Snapshot = snapshot, *, seed: int = SEED, in_flight: int = IN_FLIGHT
    ) -> None:
        if not 0.0 <= share <= 1.0:
            raise RegistrationError(f"shadow={share!r} is no share of calls.", hint="give 0.01 for one call in 100")
        self.share = share
        self._arguments = (share, snapshot, seed, in_flight)
        self._snapshot = snapshot
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(in_flight)
        self._report = ShadowReport()
        self._tasks: set[asyncio.Task[None]] = set()

    def __reduce__(self) -> Any:
        share, snapshot, seed, in_flight = self._arguments
        return partial(Shadow, seed=seed, in_flight=in_flight), (share, snapshot)

    @property
    def report(self) -> ShadowReport:
        """The results so far."""
        return self._report

    def choose(self) -> bool:
        """Return True if the next call is one of the share.

        Calls are chosen at random, each on its own. May be called from any thread.
        """
        with self._lock:
            return self._random.random() < self.share

    def call(self, fast: Callable[[], Any], original: OriginalCall) -> Any:
        """Return or raise what `fast` does; `original` follows on a thread."""
        try:
            value = fast()
        except Exception as error:
            self._follow(self._on_thread, original, error=error)
            raise
        self._follow(self._on_thread, original, value)
        return value

    async def acall(self, fast: Callable[[], Awaitable[Any]], original: OriginalCall) -> Any:
        """Return or raise what `fast` does; `original` follows as a task of the running loop."""
        try:
            value = await fast()
        except Exception as error:
            self._follow(self._as_task, original, error=error)
            raise
        self._follow(self._as_task, original, value)
        return value

    # ------------------------------------------------------------ in the background

    def _follow(
        self,
        start: Callable[[OriginalCall, _Outcome], None],
        original: OriginalCall,
        value: Any = None,
        error: Exception | None = None,
    ) -> None:
        """Start the original, without raising or waiting."""
        if isinstance(error, QueryError):  # a deadline or a cancellation, which the original knows nothing of
            return
        if not self._room.acquire(blocking=False):
            self._count(skipped=1)
            return
        try:
            start(original, self._outcome(value, error))
        except Exception:  # a value that cannot be looked into, a thread that cannot be had
            self._room.release()
            self._count(skipped=1)
            _log.info("shadow: no comparison", exc_info=True)

    def _on_thread(self, original: OriginalCall, accelerated: _Outcome) -> None:
        """Make the original's call on a thread of its own, and compare the answers there."""

        def work() -> None:
            try:
                try:
                    outcome = self._outcome(original.make())
                except _EXPECTED as error:
                    outcome = self._outcome(None, error)
                self._compare(accelerated, outcome)
            finally:
                self._room.release()

        threading.Thread(target=original.context.run, args=(work,), name="teola-shadow", daemon=True).start()

    def _as_task(self, original: OriginalCall, accelerated: _Outcome) -> None:
        """Make the original's call as a task of the running loop, and compare the answers there."""

        async def work() -> None:
            try:
                outcome = self._outcome(await original.make())
            except _EXPECTED as error:
                outcome = self._outcome(None, error)
            self._compare(accelerated, outcome)

        task = asyncio.get_running_loop().create_task(work(), name="teola-shadow", context=original.context)
        self._tasks.add(task)  # a loop alone does not keep its tasks alive
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Make room for another comparison when a task has ended, and count it as skipped if it was cancelled.

        asyncio calls it on the task's loop.
        """
        self._tasks.discard(task)
        self._room.release()
        if task.cancelled():
            self._count(skipped=1)

    def _outcome(self, value: Any, error: BaseException | None = None) -> _Outcome:
        return _Outcome(self._snapshot(value), False) if error is None else _Outcome(failure(error), True)

    def _compare(self, accelerated: _Outcome, original: _Outcome) -> None:
        """Count one comparison, and log it if the two answers differ or only the original failed."""
        if original.raised and not accelerated.raised:
            _log.info("shadow: the original failed where the accelerated object answered: %s", original.answer)
            self._count(failed=1)
        elif text := difference(accelerated.answer, original.answer):
            _log.warning("shadow: the accelerated answer (here) is not the original's (there): %s", text)
            self._count(text, compared=1, different=1)
        else:
            self._count(compared=1)

    def _count(self, difference_text: str = "", **more: int) -> None:
        """Add to the report, under the lock: `more` maps names of counters to what is added."""
        with self._lock:
            counts: dict[str, Any] = {name: getattr(self._report, name) + n for name, n in more.items()}
            self._report = replace(
                self._report, **counts, last_difference=difference_text or self._report.last_difference
            )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The snapshot of an answer, or of the exception that was raised."""

    answer: Any
    raised: bool


hide_from_stack_levels(globals())
