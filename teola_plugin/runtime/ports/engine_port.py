"""One engine at this runtime: its scheduler, its instances, its running batches. Lives on the pool's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from teola_plugin.engines.base import Engine, listen, listens
from teola_plugin.engines.prefix_events import PrefixEvents
from teola_plugin.errors import EngineError, EngineUnavailable, pool_closed
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.requests.payloads import Generate, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.runtime import failures
from teola_plugin.runtime.cache_events import cache_events
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.ports import engine_failures, watchdog
from teola_plugin.runtime.ports.batches import Batches, Reports
from teola_plugin.runtime.ports.callers import Callers
from teola_plugin.runtime.ports.instances import Instances
from teola_plugin.runtime.ports.outstanding_requests import OutstandingRequests
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.runtime.ports.watchdog import Patience
from teola_plugin.runtime.timeouts import ended
from teola_plugin.scheduling import BatchPolicy, EngineScheduler
from teola_plugin.scheduling.engine_events import (
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
MAX_QUEUED = 100_000
"""Requests that an engine takes before it refuses more, where nothing else is said."""


class EnginePort:
    """Carries out an `EngineScheduler`'s instructions. A request that failed retryably runs again, up to a limit.

    Whatever a request, an instance or a listener does, the others go on: slots are freed before anybody is told, a
    request that cannot be queued fails alone, an instance that is lost or hangs is started again and its work done
    elsewhere.
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
        self._patience = patience or watchdog.PATIENCE
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._outstanding = OutstandingRequests()
        self._callers = Callers(name, listener, self._outstanding)
        self._instances = Instances(
            name,
            instances,
            restarts=restarts,
            seconds=self._patience.restart,
            spawn=self._spawn,
            up=lambda instance: self._handle(InstanceUp(self._now(), instance)),
            hopeless=self._hopeless,
        )
        reports = Reports(
            self._handle, self._revive, self.lose, self._instances.worked, lambda: self._refusal(0) is None
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
            self._follow(number, engine)

    @property
    def instances(self) -> dict[str, Engine]:
        return self._instances.engines

    @property
    def engine(self) -> Engine:
        return next(iter(self._instances.engines.values()))

    # ------------------------------------------------------------ requests

    def enqueue(self, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        """Queue the requests of one primitive; `event.requests` is filled in here."""
        refused = self._refusal(len(entries))
        if refused is not None:
            refused.__dict__["unsent"] = isinstance(refused, EngineUnavailable)
            for entry in entries:
                self._callers.refused(entry, None, refused)
            return
        asked = [queued for entry in entries if (queued := self._queued(entry)) is not None]
        if asked:
            self._handle(event.with_requests(tuple(asked)))

    def _queued(self, entry: EngineRequest) -> QueuedRequest | None:
        """None for a request of which not even this much can be said: it has failed, and nobody else."""
        try:
            size, blocks = self._measured(entry.request)
        except Exception as error:
            self._callers.refused(entry, None, engine_failures.unfit(error, entry.request.kind, self.name))
            return None
        return QueuedRequest(self._outstanding.add(entry).name, size, blocks)

    def _measured(self, request: Request) -> tuple[float, tuple[int, ...]]:
        size = self.engine.size(request)
        if not 0 <= size < float("inf"):
            raise ValueError(f"its size is {size!r}")
        prompt = request.payload.prompt if isinstance(request.payload, Generate | Warmup) else None
        if prompt is None or not self.scheduler.wants_blocks:
            return size, ()
        return size, block_hashes(prompt.known_prefix(), tenant=request.tenant)

    def _refusal(self, more: int) -> EngineError | None:
        if self._closed:
            return pool_closed(self.name)
        if cause := self._instances.given_up:
            return engine_failures.given_up(self.name, cause)
        if len(self._outstanding) + more > self._max_queued:
            return engine_failures.overloaded(self.name, len(self._outstanding), self._max_queued)
        return None

    def holds(self, entry: EngineRequest) -> bool:
        """Whether the request is queued or running here, and has not ended for its caller."""
        return self._outstanding.of(entry) is not None

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        """They end for their callers at once; a running one keeps its slot until its instance has let go of it."""
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
        """Those that wait go out as their requests are by then."""
        for entry in entries:
            outstanding = self._outstanding.of(entry)
            running = self.scheduler.running.by_id.get(outstanding.name) if outstanding is not None else None
            if running is not None and (engine := self.instances.get(running.instance)) is not None:
                listen(engine, running.request)

    async def close(self) -> None:
        """Stop what runs. Requests that are left fail as unavailable. Waits a bounded time for instances that hang."""
        self._closed = True
        for outstanding in self._outstanding:
            self._outstanding.forget(outstanding)
            self._callers.ended(outstanding, None, self._refusal(0))
        self._batches.stop_watching()
        left = await ended(self._patience.closing, self._tasks)
        if left:
            log.warning("engine %s: %d tasks did not end when the pool was closed: it hangs", self.name, len(left))

    # ------------------------------------------------------------ instances

    def tell(self, event: EngineEvent) -> None:
        """News of an instance, for its scheduler (e.g. `CacheUse`)."""
        self._handle(event)

    def _follow(self, instance: str, engine: Engine) -> None:
        """Pass on what the instance says of its cache, if it does (see `engines.prefix_events`)."""
        if hasattr(engine, "on_prefix_events"):
            engine.on_prefix_events = lambda news: self._prefix_events(instance, engine, news)

    def _prefix_events(self, instance: str, engine: Engine, news: PrefixEvents) -> None:
        for event in cache_events(self._now(), instance, news, engine.load().kv_used):
            self._handle(event)

    def add(self, instance: str, engine: Engine) -> None:
        """One more started instance."""
        self._instances.add(instance, engine)
        self._follow(instance, engine)
        self._handle(InstanceUp(self._now(), instance))

    async def retire(self, instance: str) -> Engine:
        """Give an instance no more work, wait until what runs there has ended, and hand it back, still started."""
        self._handle(InstanceDrained(self._now(), instance))
        while running := self._batches.tasks(instance):
            await asyncio.wait(running)
        self._handle(InstanceDown(self._now(), instance))
        self._batches.forget(instance)
        return self._instances.remove(instance)

    def lose(self, instance: str, reason: str) -> None:
        """An instance is known to be dead or to hang: what runs there is done elsewhere, and it is started again."""
        if instance not in self.instances or self._closed:
            return
        if self._instances.works(instance):
            log.warning("engine %s: instance %s was lost: %s; it is started again", self.name, instance, reason)
            self._revive(instance)
        self._batches.leave(instance, engine_failures.lost(self.name, instance, reason))

    def _revive(self, instance: str) -> None:
        """A dead instance takes no more work until it has been started again."""
        if self._instances.works(instance) and not self._closed:
            self._handle(InstanceDrained(self._now(), instance))
            self._instances.revive(instance)

    def _hopeless(self, instance: str) -> None:
        """It could not be started again. Others may do its work; if there are none, nobody waits for ever."""
        self._batches.leave(instance, engine_failures.lost(self.name, instance, "it could not be started again"))
        if not self._instances.given_up:
            return
        names = []
        for outstanding in self._outstanding:
            names.append(outstanding.name)
            self._callers.ended(outstanding, None, self._refusal(0))
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
                self._end_queued(request, engine_failures.cancelled(self.name))
        elif isinstance(instruction, Reject) and (outstanding := self._outstanding.named(instruction.request)):
            kind = outstanding.entry.request.kind
            error = failures.too_large(kind, instruction.size, instruction.limit, self.name)
            self._end_queued(outstanding.name, error)

    def _end_queued(self, request: str, error: EngineError) -> None:
        outstanding = self._outstanding.named(request)
        if outstanding is not None:
            self._outstanding.forget(outstanding)
            self._callers.ended(outstanding, None, error)

    def _cancel_running(self, order: CancelRunning) -> None:
        engine = self.instances.get(order.instance)
        for request in order.requests:
            outstanding = self._outstanding.named(request)
            if outstanding is not None and engine is not None:
                self._batches.give_up(outstanding, order.instance, engine, engine_failures.cancelled(self.name))
