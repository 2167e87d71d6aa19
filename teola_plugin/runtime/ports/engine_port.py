"""One engine at this runtime: its scheduler, its replicas, its running batches. Lives on the pool's loop.

Of its replicas the port knows which take work, which are being started again, and which are given up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from teola_plugin.engines.base import Engine, announce_reader, takes_late_readers
from teola_plugin.errors import EngineError, EngineUnavailable, pool_closed
from teola_plugin.graph.prefix_blocks import PrefixEvents, PrefixRemoved, PrefixStored, block_hashes
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
    QueuedRequest,
    Reject,
    ReplicaDown,
    ReplicaDrained,
    ReplicaUp,
    RunBatch,
)
from teola_plugin.scheduling.events import Instruction

log = logging.getLogger("teola_plugin")
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
"""Pauses between two attempts to start a replica again."""
_PAUSE_AFTER_GIVING_UP_S = 300.0
"""The pause once the replica is given up."""


class Replicas:
    """The replicas of an engine. Lost ones are started again.

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
        """`restarts`: attempts before a replica is given up; `restart_timeout_s`: time for each of them."""
        self.name, self.engines = name, dict(engines)
        self._restarts, self._restart_timeout_s = restarts, restart_timeout_s
        self._spawn, self._on_up, self._on_give_up = spawn, on_up, on_give_up
        self._restarting: set[str] = set()
        self._given_up: dict[str, str] = {}
        """Causes, by replica."""
        self._failures: dict[str, int] = {}
        """Numbers of restarts in a row without any work in between, by replica."""

    @property
    def down_reason(self) -> str:
        """The reason why no replica is left, and none coming; empty while there is one."""
        is_down = bool(self.engines) and self._given_up.keys() >= self.engines.keys()
        return next(reversed(self._given_up.values())) if is_down else ""

    def is_in_use(self, replica: str) -> bool:
        """Return True if the replica exists and is not being started again."""
        return replica in self.engines and replica not in self._restarting

    def remove(self, replica: str) -> Engine:
        """Remove a replica and return it."""
        self._restarting.discard(replica)
        self._given_up.pop(replica, None)
        self._failures.pop(replica, None)
        return self.engines.pop(replica)

    def note_work(self, replica: str) -> None:
        """Note that a replica has done a request."""
        if self._failures:
            self._failures.pop(replica, None)

    def revive(self, replica: str) -> None:
        """Start a replica again, with longer and longer pauses; once it is given up, every few minutes."""
        self._restarting.add(replica)
        self._failures[replica] = self._failures.get(replica, 0) + 1
        self._spawn(self._restart(replica, self.engines[replica]))

    async def _restart(self, replica: str, engine: Engine) -> None:
        """Start a replica until that succeeds or it is removed, with pauses in between. This is the body of a task.

        After `restarts` failed attempts it counts as given up, and attempts go on at long intervals.
        """
        if (earlier_failures := self._failures[replica] - 1) > 0:
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
            if self.engines.get(replica) is not engine:
                return
            if attempt >= self._restarts and replica not in self._given_up:
                self._give_up(replica, cause, attempt)
            await asyncio.sleep(_PAUSE_AFTER_GIVING_UP_S if attempt >= self._restarts else _pause_s(attempt))
        if self.engines.get(replica) is engine:  # not retired meanwhile
            self._restarting.discard(replica)
            if self._given_up.pop(replica, None) is not None:
                log.warning("engine %s: replica %s is there again", self.name, replica)
            self._on_up(replica)

    def _give_up(self, replica: str, cause: BaseException, attempts: int) -> None:
        """Log that a replica could not be started, and report it as given up. Attempts to start it go on."""
        log.warning(
            "engine %s: replica %s could not be started again in %d attempts: %r. %d of %d replicas are left; it is "
            "tried again every %d s. Look at the cause, and at memory, device and files, or start a new pool",
            self.name,
            replica,
            attempts,
            cause,
            len(self.engines) - len(self._given_up) - 1,
            len(self.engines),
            _PAUSE_AFTER_GIVING_UP_S,
        )
        self._given_up[replica] = f"{type(cause).__name__}: {cause}."
        self._on_give_up(replica)


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

    A request that failed retryably runs again, up to a limit. Whatever a request, a replica or a listener does, the
    others go on: slots are freed before callers hear of an end, a request that cannot be queued fails alone. An
    replica that is lost or hangs is started again, and its requests run elsewhere.
    """

    def __init__(
        self,
        name: str,
        replicas: Mapping[str, Engine],
        listener: PortListener,
        *,
        policy: BatchPolicy | None = None,
        max_attempts: int = 3,
        max_queued: int = MAX_QUEUED,
        restarts: int = 3,
        patience: Patience | None = None,
    ) -> None:
        """`restarts`: attempts before a replica is beyond repair; `patience` with what hangs, `PATIENCE` if None."""
        self.name, self._max_queued = name, max_queued
        self._patience = patience or batches.PATIENCE
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._outstanding = OutstandingRequests()
        self._callers = Callers(name, listener, self._outstanding)
        self._replicas = Replicas(
            name,
            replicas,
            restarts=restarts,
            restart_timeout_s=self._patience.restart,
            spawn=self._spawn,
            on_up=lambda replica: self._handle(ReplicaUp(self._now(), replica)),
            on_give_up=self._give_up_replica,
        )
        reports = BatchReports(
            self._handle, self._revive, self.lose, self._replicas.note_work, lambda: self._refusal(0) is None
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
        self.scheduler = EngineScheduler(self.engine.profile, tuple(self.replicas), policy)
        for number, engine in self.replicas.items():
            self._follow_cache(number, engine)

    @property
    def replicas(self) -> dict[str, Engine]:
        return self._replicas.engines

    @property
    def engine(self) -> Engine:
        return next(iter(self._replicas.engines.values()))

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
        if cause := self._replicas.down_reason:
            return failures.engine_down_error(self.name, cause)
        if len(self._outstanding) + more > self._max_queued:
            return failures.overload_error(self.name, len(self._outstanding), self._max_queued)
        return None

    def holds(self, entry: EngineRequest) -> bool:
        """Return True if the request is queued or running here, and has not ended for its caller."""
        return self._outstanding.of(entry) is not None

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        """Cancel requests. They end for their callers at once, and free their slots once the replica ends them."""
        for entry in entries:
            entry.is_cancelled = True
        names = tuple(outstanding.name for entry in entries if (outstanding := self._outstanding.of(entry)) is not None)
        if names:
            self._handle(CancelRequests(self._now(), names))

    def depths(self, event: DepthChanged) -> None:
        self._handle(event)

    @property
    def takes_late_readers(self) -> bool:
        """Return True if all replicas can stream a request from a later moment on.

        It is read when a request is made, to decide whether it goes without `stream` at first.
        """
        return all(map(takes_late_readers, self.replicas.values()))

    def announce_reader(self, entries: Sequence[EngineRequest]) -> None:
        """Have those of the requests that are running streamed from now on, because they have a reader now.

        A request that is still queued is skipped: it is already marked to be streamed when it is sent to a replica.
        Engines that do not support late readers (`engines.base.takes_late_readers`) stream from the start.
        """
        for entry in entries:
            outstanding = self._outstanding.of(entry)
            running = self.scheduler.running.by_id.get(outstanding.name) if outstanding is not None else None
            if running is not None and (engine := self.replicas.get(running.replica)) is not None:
                announce_reader(engine, running.request)

    async def close(self) -> None:
        """Stop what runs. Requests that are left fail as unavailable. Waits a bounded time for replicas that hang."""
        self._closed = True
        for outstanding in self._outstanding:
            self._outstanding.remove(outstanding)
            self._callers.end(outstanding, None, self._refusal(0))
        self._batches.stop_watching()
        left = await cancel_tasks(self._patience.closing, self._tasks)
        if left:
            log.warning("engine %s: %d tasks did not end when the pool was closed: it hangs", self.name, len(left))

    # ------------------------------------------------------------ replicas

    def tell(self, event: EngineEvent) -> None:
        """Pass an event about a replica to the scheduler (e.g. `CacheUse`)."""
        self._handle(event)

    def _follow_cache(self, replica: str, engine: Engine) -> None:
        """Pass the replica's events about its cache to the scheduler, if it has any (see `graph.prefix_blocks`)."""
        if not hasattr(engine, "on_prefix_events"):
            return

        def pass_on(prefix_events: PrefixEvents) -> None:
            for event in cache_events(self._now(), replica, prefix_events, engine.load().kv_used):
                self._handle(event)

        engine.on_prefix_events = pass_on

    def add(self, replica: str, engine: Engine) -> None:
        """Add a started replica."""
        self._replicas.engines[replica] = engine
        self._follow_cache(replica, engine)
        self._handle(ReplicaUp(self._now(), replica))

    async def retire(self, replica: str) -> Engine:
        """Give a replica no more work, wait until its requests have ended, and return it, still started."""
        self._handle(ReplicaDrained(self._now(), replica))
        while running := self._batches.tasks(replica):
            await asyncio.wait(running)
        self._handle(ReplicaDown(self._now(), replica))
        self._batches.forget(replica)
        return self._replicas.remove(replica)

    def lose(self, replica: str, reason: str) -> None:
        """Start a replica again that is dead or hangs. Its requests run elsewhere."""
        if replica not in self.replicas or self._closed:
            return
        if self._replicas.is_in_use(replica):
            log.warning("engine %s: replica %s was lost: %s; it is started again", self.name, replica, reason)
            self._revive(replica)
        self._batches.leave(replica, failures.replica_lost_error(self.name, replica, reason))

    def _revive(self, replica: str) -> None:
        """Give a dead replica no more work until it has been started again."""
        if self._replicas.is_in_use(replica) and not self._closed:
            self._handle(ReplicaDrained(self._now(), replica))
            self._replicas.revive(replica)

    def _give_up_replica(self, replica: str) -> None:
        """Leave the requests of a replica that cannot be started again to others; if there are none, fail all."""
        self._batches.leave(replica, failures.replica_lost_error(self.name, replica, "it could not be started again"))
        if not self._replicas.down_reason:
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
        """Start a task that `close` cancels if it still runs then."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _handle(self, event: EngineEvent) -> None:
        if not self._closed:
            for instruction in self.scheduler.handle(event):
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        """Carry out an instruction of the engine scheduler: run a batch, or end requests that are cancelled or too
        large."""
        if isinstance(instruction, RunBatch):
            self._batches.begin(instruction, self.replicas[instruction.replica])
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
        """End a request that no replica has with an error, if its caller still waits."""
        outstanding = self._outstanding.get(request)
        if outstanding is not None:
            self._outstanding.remove(outstanding)
            self._callers.end(outstanding, None, error)

    def _cancel_running(self, order: CancelRunning) -> None:
        """End running requests for their callers now, and ask their replica to stop them."""
        engine = self.replicas.get(order.replica)
        for request in order.requests:
            outstanding = self._outstanding.get(request)
            if outstanding is not None and engine is not None:
                self._batches.give_up(outstanding, order.replica, engine, failures.cancelled_error(self.name))


def cache_events(at: float, replica: str, prefix_events: PrefixEvents, used: float) -> Iterator[CacheEvent]:
    """Yield a replica's events about its prefix cache as events of its scheduler.

    `used`: the share of the cache that running requests occupy now.
    """
    for event in prefix_events:
        if isinstance(event, PrefixStored):
            yield CacheStored(at, replica, event.blocks)
        elif isinstance(event, PrefixRemoved):
            yield CacheRemoved(at, replica, event.blocks, event.keeps)
        else:
            yield CacheCleared(at, replica)
    yield CacheUse(at, replica, used)
