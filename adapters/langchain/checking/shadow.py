"""Some calls are made once more, by the original, and the two answers are compared. In the background, unseen."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.runnables.history import RunnableWithMessageHistory

from teola_plugin.adapters.langchain.checking.comparison import difference, failure, snapshot
from teola_plugin.adapters.langchain.own_models.composites import parts
from teola_plugin.adapters.langchain.own_models.concurrency import inside_early
from teola_plugin.adapters.langchain.own_models.replay import untraced
from teola_plugin.errors import QueryError, RegistrationError
from teola_plugin.graph import WorkflowTemplate
from teola_plugin.runtime.context import current_run
from teola_plugin.shims import langchain as shims

SEED, IN_FLIGHT = 20240701, 4
"""Which calls are chosen is the same in every process; so many originals run at once, further ones are left out."""
_log = logging.getLogger("teola_plugin")
_EXPECTED = (Exception, SystemExit)
"""What an original may raise without anybody seeing it."""


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """What came of the calls that were chosen so far."""

    compared: int = 0
    different: int = 0
    """Of those compared."""
    failed: int = 0
    """The original raised where the accelerated object answered: nothing to compare."""
    skipped: int = 0
    """Too many originals were running, or the event loop ended before the original did."""
    last_difference: str = ""
    """Where and how the last different pair differed, with a piece of both answers; empty before the first."""


class Shadow:
    """Chooses a share of the calls, runs the original after them, and keeps count. One per accelerated object.

    Any thread may use it. A copy, or one that was pickled, starts with counts of its own.
    """

    def __init__(self, share: float, *, seed: int = SEED, in_flight: int = IN_FLIGHT) -> None:
        if not 0.0 <= share <= 1.0:
            raise RegistrationError(f"shadow={share!r} is no share of calls.", hint="give 0.01 for one call in 100")
        self.share = share
        self._given = (share, seed, in_flight)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(in_flight)
        self._report = ShadowReport()
        self._tasks: set[asyncio.Task[None]] = set()

    def __reduce__(self) -> Any:
        return _remade, self._given

    @property
    def report(self) -> ShadowReport:
        """The counts up to now."""
        return self._report

    def chosen(self) -> bool:
        """Whether the next call is one of the share."""
        with self._lock:
            return self._random.random() < self.share

    def invoke(self, fast: Callable[..., Any], original: Runnable[Any, Any], input: Any, *given: Any) -> Any:
        """`fast`'s own outcome; `original` follows on a thread. `given`: config, keyword arguments."""
        call = _Call(original, input, *given)
        try:
            value = fast(input, call.config, **call.kwargs)
        except Exception as error:
            self._follow(self._on_thread, call, error=error)
            raise
        self._follow(self._on_thread, call, value)
        return value

    async def ainvoke(
        self, fast: Callable[..., Awaitable[Any]], original: Runnable[Any, Any], input: Any, *given: Any
    ) -> Any:
        """`fast`'s own outcome; `original` follows as a task of the running loop."""
        call = _Call(original, input, *given)
        try:
            value = await fast(input, call.config, **call.kwargs)
        except Exception as error:
            self._follow(self._as_task, call, error=error)
            raise
        self._follow(self._as_task, call, value)
        return value

    # ------------------------------------------------------------ in the background

    def _follow(
        self, start: Callable[[_Call, _Outcome], None], call: _Call, value: Any = None, error: Exception | None = None
    ) -> None:
        """Never raises, never waits."""
        if isinstance(error, QueryError):  # a deadline or a cancellation, which the original knows nothing of
            return
        if not self._room.acquire(blocking=False):
            self._count(skipped=1)
            return
        try:
            start(call, _Outcome.of(value, error))
        except Exception:  # a value that cannot be looked into, a thread that cannot be had
            self._room.release()
            self._count(skipped=1)
            _log.info("shadow: no comparison", exc_info=True)

    def _on_thread(self, call: _Call, accelerated: _Outcome) -> None:
        def work() -> None:
            try:
                with untraced():
                    self._compare(accelerated, call.outcome())
            finally:
                self._room.release()

        threading.Thread(target=call.context.run, args=(work,), name="teola-shadow", daemon=True).start()

    def _as_task(self, call: _Call, accelerated: _Outcome) -> None:
        async def work() -> None:
            with untraced():
                self._compare(accelerated, await call.aoutcome())

        task = asyncio.get_running_loop().create_task(work(), name="teola-shadow", context=call.context)
        self._tasks.add(task)  # a loop alone does not keep its tasks alive
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()
        if task.cancelled():
            self._count(skipped=1)

    def _compare(self, accelerated: _Outcome, original: _Outcome) -> None:
        if original.raised and not accelerated.raised:
            _log.info("shadow: the original failed where the accelerated object answered: %s", original.answer)
            self._count(failed=1)
        elif found := difference(accelerated.answer, original.answer):
            _log.warning("shadow: the accelerated answer (here) is not the original's (there): %s", found)
            self._count(found, compared=1, different=1)
        else:
            self._count(compared=1)

    def _count(self, found: str = "", **more: int) -> None:
        with self._lock:
            counts: dict[str, Any] = {name: getattr(self._report, name) + n for name, n in more.items()}
            self._report = replace(self._report, **counts, last_difference=found or self._report.last_difference)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a call ended, as a snapshot."""

    answer: Any
    raised: bool

    @classmethod
    def of(cls, value: Any, error: BaseException | None = None) -> _Outcome:
        return cls(snapshot(value), False) if error is None else cls(failure(error), True)


class _Call:
    """A call as it was before the accelerated object got it: the caller may change its input and result afterwards."""

    def __init__(
        self,
        original: Runnable[Any, Any],
        input: Any,
        config: RunnableConfig | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        self.config, self.kwargs = config, kwargs
        self._original, self._input = original, _kept(input)
        full = ensure_config(config)
        self._quiet: RunnableConfig = {k: v for k, v in full.items() if k not in ("callbacks", "run_id")}  # type: ignore[assignment]
        self.context = _quiet_context()

    def outcome(self) -> _Outcome:
        try:
            return _Outcome.of(self._original.invoke(self._input, self._quiet, **self.kwargs))
        except _EXPECTED as error:
            return _Outcome.of(None, error)

    async def aoutcome(self) -> _Outcome:
        try:
            return _Outcome.of(await self._original.ainvoke(self._input, self._quiet, **self.kwargs))
        except _EXPECTED as error:
            return _Outcome.of(None, error)


def _kept(value: Any, depth: int = 20) -> Any:
    """A copy of the containers; what they hold is shared."""
    if type(value) is dict and depth:
        return {key: _kept(inner, depth - 1) for key, inner in value.items()}
    return [_kept(inner, depth - 1) for inner in value] if type(value) is list and depth else value


def _quiet_context() -> Context:
    """The caller's context variables, without those by which handlers hear of a call."""

    def silence() -> None:
        current_run.set(None)
        inside_early.set(False)
        var_child_runnable_config.set(None)
        shims.silence()

    context = copy_context()
    context.run(silence)
    return context


def _remade(share: float, seed: int, in_flight: int) -> Shadow:
    return Shadow(share, seed=seed, in_flight=in_flight)


# ------------------------------------------------------------ where it must not be


def check_repeatable(chain: Runnable[Any, Any], template: WorkflowTemplate) -> None:
    """Raises `RegistrationError` for a chain that is known to write: running it twice would write twice.

    Also where a second run could not be kept from the user's handlers.
    """
    if not shims.listeners_are_known():
        raise shims.unknown_listeners("shadow=")
    written = next(itertools.chain(_writes(template), _histories(chain)), None)
    if written is not None:
        raise RegistrationError(
            f"shadow= would run the chain a second time, and it writes: {written}.",
            hint="use shadow= only for chains without side effects",
        )


def _writes(template: WorkflowTemplate) -> Iterator[str]:
    for component in template.components:
        yield from (f"{component.name} to {effect.resource}" for effect in component.effects if effect.writes)
        for inner in (component.body, component.otherwise):
            if inner is not None:
                yield from _writes(inner)


def _histories(node: Runnable[Any, Any]) -> Iterator[str]:
    if isinstance(node, RunnableWithMessageHistory):
        yield "it keeps a message history"
    elif isinstance(node, RunnableBindingBase):
        yield from _histories(node.bound)
    else:
        for _, part in parts(node):
            yield from _histories(part)
