"""The batches that run at a port's replicas: results of requests, requests that fail, replicas that hang.

The table of outstanding requests holds those whose callers wait, those whose slots are taken, and the batch in which
each runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.requests.payloads import Done, Failed, Piece, Request, Result
from teola_plugin.runtime import failures
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.failures import copied_error
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.runtime.threads import abandon
from teola_plugin.scheduling.engine_queue import EngineEvent, PrefillEnded, RequestsEnded, Retried, RunBatch


@dataclass(slots=True, eq=False)
class OutstandingRequest:
    """A request at a port, from its queueing until its slot is free."""

    name: str
    """Id at the scheduler and at the engine: that of the request, unless one with that id is still there."""
    entry: EngineRequest
    has_ended: bool = False
    """True once it has ended for its caller. It may still run at the engine."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were given to a replica together."""

    replica: str
    left: dict[str, OutstandingRequest]
    """Requests that have not ended, by name."""
    task: Any = None
    is_over: bool = field(default=False)
    """True once the port goes on without the batch: results that still come are ignored."""


class OutstandingRequests:
    """The requests of one port. Their callers wait for the *pending* ones; *present* ones have yet to free a slot."""

    def __init__(self) -> None:
        self._present: dict[str, OutstandingRequest] = {}
        """By name."""
        self._pending: dict[str, OutstandingRequest] = {}
        """By id of the request."""
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[OutstandingRequest]:
        """Iterate over the requests whose callers wait."""
        return iter(list(self._pending.values()))

    def add(self, entry: EngineRequest) -> OutstandingRequest:
        """Add a request that is queued."""
        name = entry.request.id
        if name in self._present:  # a client that came back sent it again, before the engine has ended the first
            name = f"{name}~{next(self._numbers)}"
        outstanding = OutstandingRequest(name, entry)
        self._present[name] = self._pending[entry.request.id] = outstanding
        return outstanding

    def get(self, name: str) -> OutstandingRequest | None:
        """Return the request with this name that has yet to free its slot."""
        return self._present.get(name)

    def of(self, entry: EngineRequest) -> OutstandingRequest | None:
        """Return the request, if its caller still waits for it."""
        return self._pending.get(entry.request.id)

    def note_end(self, outstanding: OutstandingRequest) -> bool:
        """Note that a request ends for its caller. Return False if it has ended before."""
        if outstanding.has_ended:
            return False
        outstanding.has_ended = True
        if self._pending.get(outstanding.entry.request.id) is outstanding:
            del self._pending[outstanding.entry.request.id]
        return True

    def remove(self, outstanding: OutstandingRequest) -> None:
        """Remove a request that has freed its slot."""
        self._present.pop(outstanding.name, None)


log = logging.getLogger("teola_plugin")


class Callers:
    """The callers of a port's requests, reached through its listener. They hear of each end once.

    A listener that raises disturbs nobody else.
    """

    def __init__(self, engine: str, listener: PortListener, outstanding: OutstandingRequests) -> None:
        self._engine, self._listener, self._outstanding = engine, listener, outstanding

    def started(self, entry: EngineRequest, replica: str, batch: int) -> None:
        self._call("start", self._listener.on_start, entry, replica, batch)

    def piece(self, entry: EngineRequest, piece: Piece) -> None:
        self._call("pieces", self._listener.on_piece, entry, piece)

    def end(self, outstanding: OutstandingRequest, value: Any, error: BaseException | None) -> None:
        """End a request for its caller, unless that was done before: it was cancelled, or the pool was closed."""
        if self._outstanding.note_end(outstanding):
            self.end_unqueued(outstanding.entry, value, error)

    def end_unqueued(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request that the port has not queued. The caller gets a copy of the error."""
        self.end_directly(entry, value, None if error is None else copied_error(error))

    def end_directly(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request that the port has not queued, with an error that nobody changes: no copy is made."""
        if not self._call("end", self._listener.on_end, entry, value, error):
            entry.resolve(value, error)  # so that nobody waits for ever

    def _call(self, event: str, listener: Callable[..., None], *args: Any) -> bool:
        """Call a function of the listener. If it raises, log that and return False, so that other requests go on."""
        try:
            listener(*args)
        except (Exception, SystemExit):
            log.exception("engine %s: what listens to the %s of a request raised", self._engine, event)
            return False
        return True


@dataclass(frozen=True, slots=True)
class Patience:
    """The times, in seconds, after which a replica is given up."""

    cancel: float = 10.0
    """Time between a request's cancellation and its end at the replica."""
    silence: float = 1800.0
    """Time without any result or piece while the replica has work; only for engines that can be restarted."""
    restart: float = 900.0
    """Time for one attempt to start the replica again."""
    closing: float = 5.0
    """Time for tasks that still run when the pool closes."""


PATIENCE = Patience()
"""The patience of pools in one process."""
_MAX_TIMER_DELAY = 0.1
"""Share of the patience by which a timer may be late. If it is later, the machine was asleep: nobody is to blame."""


class Watchdog:
    """A watch on one replica, with one timer. `on_hang` is called, with the reason, once it is silent for too long."""

    def __init__(self, patience: Patience, on_hang: Callable[[str], None]) -> None:
        self._patience, self._on_hang = patience, on_hang
        self._batches = 0
        self._last_result = 0.0
        self._cancellations: dict[str, float] = {}
        """Times at which the replica was asked to cancel requests, by request, oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def note_batch(self) -> None:
        """Note that the replica got a batch."""
        if not self._batches:
            self.note_result()
        self._batches += 1
        if self._timer is None:
            self._set_timer()

    def note_result(self) -> None:
        """Note that the replica gave a result, or a piece of one."""
        self._last_result = _now()

    def note_cancellation(self, request: str) -> None:
        """Note that the replica was asked to cancel a request."""
        self._cancellations.setdefault(request, _now())
        self._set_timer()

    def note_release(self, request: str) -> None:
        """Note that the replica has ended a request, cancelled or not."""
        self._cancellations.pop(request, None)

    def note_batch_end(self) -> None:
        """Note that a batch has ended."""
        self._batches -= 1

    def stop(self) -> None:
        """Stop the watch, because its replica was lost or retired, or the pool closes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._cancellations.clear()

    @property
    def _due(self) -> tuple[float, str]:
        """The time at which the replica counts as hanging, and the reason."""
        silent = self._last_result + self._patience.silence if self._batches else math.inf
        ignored = next(iter(self._cancellations.values()), math.inf) + self._patience.cancel
        if ignored <= silent:
            return ignored, f"it did not react to a cancellation within {self._patience.cancel:g} s"
        return silent, f"it has given nothing for {self._patience.silence:g} s"

    def _set_timer(self) -> None:
        """Set the timer, unless it rings earlier already: then it is set again when it rings."""
        due, _ = self._due
        if due == math.inf or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(
            due, self._check, context=Context()
        )  # not a caller's: it stays

    def _check(self) -> None:
        """Report a hanging replica if one of its times has passed; else set the timer again. This is the timer's
        callback.

        A timer that is late shows that the machine slept: then all times count from now.
        """
        timer, self._timer = self._timer, None
        now, (due, reason) = _now(), self._due
        delay = now - timer.when() if timer is not None else 0.0
        if delay > _MAX_TIMER_DELAY * min(self._patience.cancel, self._patience.silence):
            self._last_result, self._cancellations = now, dict.fromkeys(self._cancellations, now)
        elif due <= now + 1e-6:
            self._on_hang(reason)
            return
        self._set_timer()


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class BatchReports:
    """The callbacks to which a port's batches report."""

    scheduler: Callable[[EngineEvent], None]
    dead: Callable[[str], None]
    """Called with the name of a replica that reports its own death."""
    hangs: Callable[[str, str], None]
    """Called with the name of a replica that does not react, and the reason."""
    worked: Callable[[str], None]
    """Called with the name of a replica that has done a request."""
    may_retry: Callable[[], bool]
    """Returns True if a replica is left for failed requests."""


class Batches:
    """The running batches of one port.

    A slot is free once its replica has ended the request, and before the request's caller hears of the end.
    """

    def __init__(
        self,
        engine: str,
        outstanding: OutstandingRequests,
        callers: Callers,
        reports: BatchReports,
        *,
        patience: Patience,
        max_attempts: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._engine, self._outstanding, self._callers, self._reports = engine, outstanding, callers, reports
        self._patience, self._max_attempts, self._spawn = patience, max_attempts, spawn
        self._running: dict[str, set[Batch]] = {}
        self._watches: dict[str, Watchdog] = {}
        self._free_slots: list[str] = []
        """Names of requests whose slots are free, and have yet to be reported."""

    def begin(self, order: RunBatch, engine: Engine) -> None:
        """Start a batch at a replica."""
        batch = Batch(
            order.replica,
            {n: outstanding for n in order.requests if (outstanding := self._outstanding.get(n)) is not None},
        )
        self._running.setdefault(order.replica, set()).add(batch)
        self._watch(order.replica, engine).note_batch()
        batch.task = self._spawn(self._run(order, engine, batch))

    def tasks(self, replica: str) -> list[asyncio.Task[None]]:
        """Return the tasks of the batches that run at a replica."""
        return [batch.task for batch in self._running.get(replica, ()) if batch.task is not None]

    def give_up(self, outstanding: OutstandingRequest, replica: str, engine: Engine, error: BaseException) -> None:
        """End a request for its caller now. Ask its replica to cancel it, and watch whether it does."""
        if not outstanding.has_ended:
            self._watch(replica, engine).note_cancellation(outstanding.name)
            self._spawn(self._cancel(engine, outstanding.name))
        self._callers.end(outstanding, None, error)

    async def _cancel(self, engine: Engine, request: str) -> None:
        """Ask an engine to cancel a request, and log an error: for its caller, the request has ended."""
        try:
            await engine.cancel(request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.warning("engine %s raised while it cancelled a request: %r", self._engine, error)

    def leave(self, replica: str, error: BaseException) -> None:
        """Fail all requests that run at a replica, without waiting for the replica."""
        self.forget(replica)
        for batch in list(self._running.pop(replica, ())):
            self._end(batch, error)
            if batch.task is not None:
                abandon(batch.task)

    def forget(self, replica: str) -> None:
        """Watch a replica no more."""
        if watch := self._watches.pop(replica, None):
            watch.stop()

    def stop_watching(self) -> None:
        for replica in list(self._watches):
            self.forget(replica)

    def _watch(self, replica: str, engine: Engine) -> Watchdog:
        """Return the watchdog of a replica, a new one if it has none. Silence is no hang if the engine cannot be
        restarted."""
        watch = self._watches.get(replica)
        if watch is None:
            patience = self._patience
            if not hasattr(engine, "restart"):
                patience = replace(patience, silence=float("inf"))
            watch = self._watches[replica] = Watchdog(patience, lambda reason: self._reports.hangs(replica, reason))
        return watch

    # ------------------------------------------------------------ one batch

    async def _run(self, order: RunBatch, engine: Engine, batch: Batch) -> None:
        """Run a batch at an engine, and pass results on as they come. This is the body of the batch's task.

        However it ends, each request of the batch ends, too: those without a result fail.
        """
        failure: BaseException | None = None
        try:
            if requests := self._started(order, batch):
                async for result in engine.execute(requests):
                    self._take_result(batch, engine, result)
                    if batch.is_over:
                        return
            if batch.left:
                failure = failures.missing_result_error(self._engine)
        except asyncio.CancelledError:
            raise
        except GeneratorExit:  # the loop is gone, and with it all callers
            batch.is_over = True
            raise
        except Exception as error:
            log.warning("engine %s replica %s broke in a batch: %r", self._engine, batch.replica, error)
            failure = failures.broken_engine_error(self._engine, error)
        except BaseException as error:  # sys.exit(), an interrupt, a panic below: it must not end the loop
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # the user's own: the loop is on the thread that gets signals
            log.warning("engine %s replica %s raised %r: it is started again", self._engine, batch.replica, error)
            failure = failures.replica_lost_error(self._engine, batch.replica, f"it raised {error!r}")
        finally:
            self._end(batch, failure)

    def _started(self, order: RunBatch, batch: Batch) -> list[Request]:
        """Return the requests as the engine gets them. Free the slots of those that were cancelled meanwhile."""
        requests = []
        for name, number, (depth, objective) in zip(order.requests, order.priorities, order.urgencies, strict=True):
            outstanding = batch.left.get(name)
            if outstanding is None:
                continue
            if outstanding.has_ended:
                self._free_slot(batch, outstanding)
                continue
            entry = outstanding.entry
            entry.request = entry.request.admitted(number, depth, objective.value)
            requests.append(entry.request if name == entry.request.id else replace(entry.request, id=name))
            self._callers.started(entry, batch.replica, order.batch)
        return requests

    def _end(self, batch: Batch, failure: BaseException | None) -> None:
        """End a batch. Requests in it that have not ended fail; if `failure` is None, as cancelled ones."""
        if batch.is_over:
            return
        batch.is_over = True
        running = self._running.get(batch.replica, set())
        if batch in running:
            running.discard(batch)
            if watch := self._watches.get(batch.replica):
                watch.note_batch_end()
        for outstanding in list(batch.left.values()):
            self._fail(batch, outstanding, failure or failures.cancelled_error(self._engine))

    # ------------------------------------------------------------ results of an engine

    def _take_result(self, batch: Batch, engine: Engine, result: Result) -> None:
        """Handle one piece, result or failure that an engine gave for a request. Ignore it if the batch or request is
        over."""
        outstanding = batch.left.get(result.request_id)
        if outstanding is None or batch.is_over:
            return
        if watch := self._watches.get(batch.replica):
            watch.note_result()
        try:
            if isinstance(result, Piece):
                self._on_piece(outstanding, result)
            elif isinstance(result, Done):
                self._done(batch, outstanding, result)
            elif isinstance(result, Failed):
                self._fail(batch, outstanding, result.error)
        except Exception as error:  # a retry with another text, or a result of a wrong type
            failure = failures.broken_engine_error(self._engine, error)
            if isinstance(result, Piece):
                self.give_up(outstanding, batch.replica, engine, failure)
            else:
                self._free_slot(batch, outstanding)
                self._callers.end(outstanding, None, failure)

    def _on_piece(self, outstanding: OutstandingRequest, piece: Piece) -> None:
        """Deliver the part of a piece that is new to the caller. The first piece tells the scheduler that the prompt is
        computed."""
        if outstanding.has_ended:
            return
        entry = outstanding.entry
        new_piece = entry.new_part(
            piece if outstanding.name == entry.request.id else replace(piece, request_id=entry.request.id)
        )
        if not entry.stream.is_prefilled:
            entry.stream.is_prefilled = True
            self._reports.scheduler(PrefillEnded(_now(), outstanding.name))
        self._callers.piece(entry, new_piece)

    def _done(self, batch: Batch, outstanding: OutstandingRequest, done: Done) -> None:
        """End a request that an engine has done: free its slot, and give its caller the value.

        Raise `EngineError` if it is a retry whose text differs from what was delivered.
        """
        outstanding.entry.check_result(done.value)
        outstanding.entry.search.version, outstanding.entry.stream.cuts = done.version, done.cuts
        self._free_slot(batch, outstanding)
        self._reports.worked(batch.replica)
        self._callers.end(outstanding, done.value, None)

    def _fail(self, batch: Batch, outstanding: OutstandingRequest, error: BaseException) -> None:
        """Send a failed request to another attempt if its error allows that and attempts are left; else fail it for its
        caller.

        An error that says that the replica is dead has the replica started again.
        """
        if isinstance(error, EngineUnavailable):
            self._reports.dead(batch.replica)
        entry = outstanding.entry
        is_retryable = isinstance(error, EngineError) and error.retryable and entry.can_be_repeated
        has_attempt_left = not outstanding.has_ended and entry.attempts + 1 < self._max_attempts
        if not (is_retryable and has_attempt_left and self._reports.may_retry()):
            self._free_slot(batch, outstanding)
            self._callers.end(outstanding, None, error)
            return
        batch.left.pop(outstanding.name, None)
        entry.retry()
        log.warning(
            "request %s of %s failed (%s); attempt %d", entry.request.id, entry.primitive, error, entry.attempts + 1
        )
        self._report_free_slots()
        self._reports.scheduler(Retried(_now(), outstanding.name))

    # ------------------------------------------------------------ slots

    def _free_slot(self, batch: Batch, outstanding: OutstandingRequest) -> None:
        """Free the slot of a request. The slots of a whole batch are reported at once, for one decision."""
        batch.left.pop(outstanding.name, None)
        if watch := self._watches.get(batch.replica):
            watch.note_release(outstanding.name)
        self._outstanding.remove(outstanding)
        if not self._free_slots:
            asyncio.get_running_loop().call_soon(self._report_free_slots)
        self._free_slots.append(outstanding.name)

    def _report_free_slots(self) -> None:
        names, self._free_slots = tuple(self._free_slots), []
        if names:
            self._reports.scheduler(RequestsEnded(_now(), names))
