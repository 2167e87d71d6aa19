"""One engine at this runtime: its scheduler, its instances, its running batches. Lives on the pool's loop.

Of its instances the port knows which take work, which are being started again, and which are given up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from teola_plugin.engines.base import Engine, listen, listens
from teola_plugin.engines.prefix_events import PrefixEvents, PrefixRemoved, PrefixStored
from teola_plugin.errors import EngineError, EngineUnavailable, pool_closed
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.requests.payloads import Generate, Request, Warmup
from teola_plugin.runtime import failures
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.ports import batches
from teola_plugin.runtime.ports.batches import Batches, BatchReports, Callers, OutstandingRequests, Patience
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.runtime.threads import at_most, cancel_tasks
from teola_plugin.scheduling import BatchPolicy, EngineScheduler
from teola_plugin.scheduling.engine_queue import (
    CacheCleared,
    CacheEvent,
    CacheRemoved,
    CacheStored,
    CacheUse,
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Dropped,
    EngineEvent,
    Enqueue,
    InstanceDown,
    InstanceDrained,
    InstanceUp,
    QueuedRequest,
    Reject,
    RunBatch,
)
from teola_plugin.scheduling.events import Instruction

log = logging.getLogger("teola_plugin")
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
"""Pauses between two attempts to start an instance again."""
_PAUSE_AFTER_GIVING_UP_S = 300.0
"""The pause once the instance is given up."""


class Instances:
    """The instances of an engine. Lost ones are started again.

    `on_up` is called with the name of one that takes work again, `on_give_up` with that of one that cannot be started.
    """

    def __init__(
        self,
        name: str,
        engines: Mapping[str, Engine],
        *,
        restarts: int,
        restart_timeout_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_up: Callable[[str], None],
        on_give_up: Callable[[str], None],
    ) -> None:
        """`restarts`: attempts before an instance is given up; `restart_timeout_s`: time for each of them."""
        self.name, self.engines = name, dict(engines)
        self._restarts, self._restart_timeout_s = restarts, restart_timeout_s
        self._spawn, self._on_up, self._on_give_up = spawn, on_up, on_give_up
        self._restarting: set[str] = set()
        self._given_up: dict[str, str] = {}
        """Causes, by instance."""
        self._failures: dict[str, int] = {}
        """Numbers of restarts in a row without any work in between, by instance."""

    @property
    def down_reason(self) -> str:
        """The reason why no instance is left, and none coming; empty while there is one."""
        is_down = bool(self.engines) and self._given_up.keys() >= self.engines.keys()
        return next(reversed(self._given_up.values())) if is_down else ""

    def takes_work(self, instance: str) -> bool:
        """Return True if the instance exists and is not being started again."""
        return instance in self.engines and instance not in self._restarting

    def remove(self, instance: str) -> Engine:
        """Remove an instance and return it."""
        self._restarting.discard(instance)
        self._given_up.pop(instance, None)
        self._failures.pop(instance, None)
        return self.engines.pop(instance)

    def note_work(self, instance: str) -> None:
        """Note that an instance has done a request."""
        if self._failures:
            self._failures.pop(instance, None)

    def revive(self, instance: str) -> None:
        """Start an instance again, with longer and longer pauses; once it is given up, every few minutes."""
        self._restarting.add(instance)
        self._failures[instance] = self._failures.get(instance, 0) + 1
        self._spawn(self._restart(instance, self.engines[instance]))

    async def _restart(self, instance: str, engine: Engine) -> None:
        if (earlier_failures := self._failures[instance] - 1) > 0:
            await asyncio.sleep(_pause_s(earlier_failures))
        for attempt in itertools.count(1):
            try:
                await at_most(self._restart_timeout_s, restart_engine(engine))
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # an engine that calls sys.exit() is broken, and nothing else is
                cause = error
            else:
                break
            if self.engines.get(instance) is not engine:
                return
            if attempt >= self._restarts and instance not in self._given_up:
                self._give_up(instance, cause, attempt)
            await asyncio.sleep(_PAUSE_AFTER_GIVING_UP_S if attempt >= self._restarts else _pause_s(attempt))
        if self.engines.get(instance) is engine:  # not retired meanwhile
            self._restarting.discard(instance)
            if self._given_up.pop(instance, None) is not None:
                log.warning("engine %s: instance %s is there again", self.name, instance)
            self._on_up(instance)

    def _give_up(self, instance: str, cause: BaseException, attempts: int) -> None:
        log.warning(
            "engine %s: instance %s could not be started again in %d attempts: %r. %d of %d instances are left; it is "
            "tried again every %d s. Look at the cause, and at memory, device and files, or start a new pool",
            self.name,
            instance,
            attempts,
            cause,
            len(self.engines) - len(self._given_up) - 1,
            len(self.engines),
            _PAUSE_AFTER_GIVING_UP_S,
        )
        self._given_up[instance] = f"{type(cause).__name__}: {cause}."
        self._on_give_up(instance)


async def restart_engine(engine: Engine) -> None:
    """Restart an engine; one without `restart` is stopped and started."""
    restart = getattr(engine, "restart", None)
    if restart is not None:
        await restart()
    else:
        await engine.stop()
        await engine.start()


def _pause_s(attempt: int) -> float:
    return min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2.0 ** (attempt - 1))


MAX_QUEUED = 100_000
"""Default number of requests that an engine takes before it refuses more."""


class EnginePort:
    """The port of an engine in this process: it carries out the instructions of an `EngineScheduler`.

    A request that failed retryably runs again, up to a limit. Whatever a request, an instance or a listener does, the
    others go on: slots are freed before callers hear of an end, a request that cannot be queued fails alone. An
    instance that is lost or hangs is started again, and its requests run elsewhere.
    """

    def __init__(
        self,
        name: str,
        instances: Mapping[str, Engine],
        listener: PortListener,
        *,
        policy: BatchPolicy | None = None,
        max_attempts: int = 3,
        max_queued: int = MAX_QUEUED,
        restarts: int = 3,
        patience: Patience | None = None,
    ) -> None:
        """`restarts`: attempts before an instance is beyond repair; `patience` with what hangs, `PATIENCE` if None."""
        self.name, self._max_queued = name, max_queued
        self._patience = patience or batches.PATIENCE
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._outstanding = OutstandingRequests()
        self._callers = Callers(name, listener, self._outstanding)
        self._instances = Instances(
            name,
            instances,
            restarts=restarts,
            restart_timeout_s=self._patience.restart,
            spawn=self._spawn,
            on_up=lambda instance: self._handle(InstanceUp(self._now(), instance)),
            on_give_up=self._give_up_instance,
        )
        reports = BatchReports(
            self._handle, self._revive, self.lose, self._instances.note_work, lambda: self._refusal(0) is None
        )
        self._batches = Batches(
            name,
            self._outstanding,
            self._callers,
            reports,
            patience=self._patience,
            max_attempts=max_attempts,
            spawn=self._spawn,
        )
        self.scheduler = EngineScheduler(self.engine.profile, tuple(self.instances), policy)
        for number, engine in self.instances.items():
            self._follow_cache(number, engine)

    @property
    def instances(self) -> dict[str, Engine]:
        return self._instances.engines

    @property
    def engine(self) -> Engine:
        return next(iter(self._instances.engines.values()))

    # ------------------------------------------------------------ requests

    def enqueue(self, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        """Queue the requests of one primitive; `event.requests` is filled in here."""
        refusal = self._refusal(len(entries))
        if refusal is not None:
            refusal.__dict__["unsent"] = isinstance(refusal, EngineUnavailable)
            for entry in entries:
                self._callers.end_unqueued(entry, None, refusal)
            return
        queued_requests = []
        for entry in entries:
            try:
                size, blocks = self._measure(entry.request)
            except Exception as error:  # this request fails, and no other
                error = failures.unqueueable_error(error, entry.request.kind, self.name)
                self._callers.end_unqueued(entry, None, error)
            else:
                queued_requests.append(QueuedRequest(self._outstanding.add(entry).name, size, blocks))
        if queued_requests:
            self._handle(event.with_requests(tuple(queued_requests)))

    def _measure(self, request: Request) -> tuple[float, tuple[int, ...]]:
        """Return the size of a request, and the hashes of its prompt's blocks if the scheduler wants them."""
        size = self.engine.size(request)
        if not 0 <= size < float("inf"):
            raise ValueError(f"its size is {size!r}")
        prompt = request.payload.prompt if isinstance(request.payload, Generate | Warmup) else None
        if prompt is None or not self.scheduler.wants_blocks:
            return size, ()
        return size, block_hashes(prompt.known_prefix(), tenant=request.tenant)

    def _refusal(self, more: int) -> EngineError | None:
        """Return the error for `more` new requests, or None if the port takes them."""
        if self._closed:
            return pool_closed(self.name)
        if cause := self._instances.down_reason:
            return failures.engine_down_error(self.name, cause)
        if len(self._outstanding) + more > self._max_queued:
            return failures.overload_error(self.name, len(self._outstanding), self._max_queued)
        return None

    def holds(self, entry: EngineRequest) -> bool:
        """Return True if the request is queued or running here, and has not ended for its caller."""
        return self._outstanding.of(entry) is not None

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        """Cancel requests. They end for their callers at once, and free their slots once the instance ends them."""
        for entry in entries:
            entry.is_cancelled = True
        names = tuple(outstanding.name for entry in entries if (outstanding := self._outstanding.of(entry)) is not None)
        if names:
            self._handle(CancelRequests(self._now(), names))

    def depths(self, event: DepthChanged) -> None:
        self._handle(event)

    @property
    def listens(self) -> bool:
        return all(map(listens, self.instances.values()))

    def listen(self, entries: Sequence[EngineRequest]) -> None:
        """Have those of the requests that are running streamed from now on, because they have a reader now.

        A request that is still queued is skipped: it is already marked to be streamed when it is sent to an instance.
        Engines that do not support late readers (`engines.base.listens`) stream from the start.
        """
        for entry in entries:
            outstanding = self._outstanding.of(entry)
            running = self.scheduler.running.by_id.get(outstanding.name) if outstanding is not None else None
            if running is not None and (engine := self.instances.get(running.instance)) is not None:
                listen(engine, running.request)

    async def close(self) -> None:
        """Stop what runs. Requests that are left fail as unavailable. Waits a bounded time for instances that hang."""
        self._closed = True
        for outstanding in self._outstanding:
            self._outstanding.remove(outstanding)
            self._callers.end(outstanding, None, self._refusal(0))
        self._batches.stop_watching()
        left = await cancel_tasks(self._patience.closing, self._tasks)
        if left:
            log.warning("engine %s: %d tasks did not end when the pool was closed: it hangs", self.name, len(left))

    # ------------------------------------------------------------ instances

    def tell(self, event: EngineEvent) -> None:
        """Pass an event about an instance to the scheduler (e.g. `CacheUse`)."""
        self._handle(event)

    def _follow_cache(self, instance: str, engine: Engine) -> None:
        """Pass the instance's events about its cache to the scheduler, if it has any (see `engines.prefix_events`)."""
        if not hasattr(engine, "on_prefix_events"):
            return

        def pass_on(prefix_events: PrefixEvents) -> None:
            for event in cache_events(self._now(), instance, prefix_events, engine.load().kv_used):
                self._handle(event)

        engine.on_prefix_events = pass_on

    def add(self, instance: str, engine: Engine) -> None:
        """Add a started instance."""
        self._instances.engines[instance] = engine
        self._follow_cache(instance, engine)
        self._handle(InstanceUp(self._now(), instance))

    async def retire(self, instance: str) -> Engine:
        """Give an instance no more work, wait until its requests have ended, and return it, still started."""
        self._handle(InstanceDrained(self._now(), instance))
        while running := self._batches.tasks(instance):
            await asyncio.wait(running)
        self._handle(InstanceDown(self._now(), instance))
        self._batches.forget(instance)
        return self._instances.remove(instance)

    def lose(self, instance: str, reason: str) -> None:
        """Start an instance again that is dead or hangs. Its requests run elsewhere."""
        if instance not in self.instances or self._closed:
            return
        if self._instances.takes_work(instance):
            log.warning("engine %s: instance %s was lost: %s; it is started again", self.name, instance, reason)
            self._revive(instance)
        self._batches.leave(instance, failures.instance_lost_error(self.name, instance, reason))

    def _revive(self, instance: str) -> None:
        """Give a dead instance no more work until it has been started again."""
        if self._instances.takes_work(instance) and not self._closed:
            self._handle(InstanceDrained(self._now(), instance))
            self._instances.revive(instance)

    def _give_up_instance(self, instance: str) -> None:
        """Leave the requests of an instance that cannot be started again to others; if there are none, fail all."""
        self._batches.leave(
            instance, failures.instance_lost_error(self.name, instance, "it could not be started again")
        )
        if not self._instances.down_reason:
            return
        names = []
        for outstanding in self._outstanding:
            names.append(outstanding.name)
            self._callers.end(outstanding, None, self._refusal(0))
        self._handle(CancelRequests(self._now(), tuple(names)))

    # ------------------------------------------------------------ instructions

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _handle(self, event: EngineEvent) -> None:
        if not self._closed:
            for instruction in self.scheduler.handle(event):
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, RunBatch):
            self._batches.begin(instruction, self.instances[instruction.instance])
        elif isinstance(instruction, CancelRunning):
            self._cancel_running(instruction)
        elif isinstance(instruction, Dropped):
            for request in instruction.requests:
                self._end_queued(request, failures.cancelled_error(self.name))
        elif isinstance(instruction, Reject) and (outstanding := self._outstanding.get(instruction.request)):
            kind = outstanding.entry.request.kind
            error = failures.too_large_error(kind, instruction.size, instruction.limit, self.name)
            self._end_queued(outstanding.name, error)

    def _end_queued(self, request: str, error: EngineError) -> None:
        outstanding = self._outstanding.get(request)
        if outstanding is not None:
            self._outstanding.remove(outstanding)
            self._callers.end(outstanding, None, error)

    def _cancel_running(self, order: CancelRunning) -> None:
        engine = self.instances.get(order.instance)
        for request in order.requests:
            outstanding = self._outstanding.get(request)
            if outstanding is not None and engine is not None:
                self._batches.give_up(outstanding, order.instance, engine, failures.cancelled_error(self.name))


def cache_events(at: float, instance: str, prefix_events: PrefixEvents, used: float) -> Iterator[CacheEvent]:
    """Yield an instance's events about its prefix cache as events of its scheduler.

    `used`: the share of the cache that running requests occupy now.
    """
    for event in prefix_events:
        if isinstance(event, PrefixStored):
            yield CacheStored(at, instance, event.blocks)
        elif isinstance(event, PrefixRemoved):
            yield CacheRemoved(at, instance, event.blocks, event.keeps)
        else:
            yield CacheCleared(at, instance)
    yield CacheUse(at, instance, used)
