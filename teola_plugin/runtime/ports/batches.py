"""The batches that run at a port's instances: what engines say of requests, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Piece, Result
from teola_plugin.runtime.ports import engine_failures
from teola_plugin.runtime.ports.callers import Callers
from teola_plugin.runtime.ports.outstanding_requests import Batch, OutstandingRequest, OutstandingRequests
from teola_plugin.runtime.ports.watchdog import Patience, Watchdog
from teola_plugin.runtime.timeouts import abandon
from teola_plugin.scheduling.engine_events import EngineEvent, PrefillEnded, RequestsEnded, Retried, RunBatch

log = logging.getLogger("teola_plugin")


@dataclass(frozen=True, slots=True)
class Reports:
    """Whom a port's batches tell what they see."""

    scheduler: Callable[[EngineEvent], None]
    dead: Callable[[str], None]
    """An instance says of itself that it is."""
    hangs: Callable[[str, str], None]
    """An instance does not react: which one, and how it was noticed."""
    worked: Callable[[str], None]
    """An instance has done a request."""
    may_retry: Callable[[], bool]
    """Whether somebody could do again what failed."""


class Batches:
    """Of one port. A slot is free when its instance has let go of the request, and before anybody is told."""

    def __init__(
        self,
        engine: str,
        outstanding: OutstandingRequests,
        callers: Callers,
        reports: Reports,
        *,
        patience: Patience,
        max_attempts: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._engine, self._outstanding, self._callers, self._reports = engine, outstanding, callers, reports
        self._patience, self._max_attempts, self._spawn = patience, max_attempts, spawn
        self._running: dict[str, set[Batch]] = {}
        self._watches: dict[str, Watchdog] = {}
        self._free_soon: list[str] = []

    def begin(self, order: RunBatch, engine: Engine) -> None:
        batch = Batch(
            order.instance,
            {n: outstanding for n in order.requests if (outstanding := self._outstanding.named(n)) is not None},
        )
        self._running.setdefault(order.instance, set()).add(batch)
        self._watch(order.instance, engine).begun()
        batch.task = self._spawn(self._run(order, engine, batch))

    def tasks(self, instance: str) -> list[asyncio.Task[None]]:
        """Of the batches that run there."""
        return [batch.task for batch in self._running.get(instance, ()) if batch.task is not None]

    def give_up(self, outstanding: OutstandingRequest, instance: str, engine: Engine, error: BaseException) -> None:
        """Its caller is told now; the instance is asked to let go of it, and watched."""
        if not outstanding.told:
            self._watch(instance, engine).asked(outstanding.name)
            self._spawn(self._cancel(engine, outstanding.name))
        self._callers.ended(outstanding, None, error)

    async def _cancel(self, engine: Engine, request: str) -> None:
        try:
            await engine.cancel(request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.warning("engine %s raised while it cancelled a request: %r", self._engine, error)

    def leave(self, instance: str, error: BaseException) -> None:
        """Go on without what runs there: it has failed, and nobody waits for the instance."""
        self.forget(instance)
        for batch in list(self._running.pop(instance, ())):
            self._settle(batch, error)
            if batch.task is not None:
                abandon(batch.task)

    def forget(self, instance: str) -> None:
        if watch := self._watches.pop(instance, None):
            watch.stop()

    def stop_watching(self) -> None:
        for instance in list(self._watches):
            self.forget(instance)

    def _watch(self, instance: str, engine: Engine) -> Watchdog:
        watch = self._watches.get(instance)
        if watch is None:
            patience = self._patience
            if not hasattr(engine, "restart"):
                patience = replace(patience, silence=float("inf"))
            watch = self._watches[instance] = Watchdog(patience, lambda reason: self._reports.hangs(instance, reason))
        return watch

    # ------------------------------------------------------------ one batch

    async def _run(self, order: RunBatch, engine: Engine, batch: Batch) -> None:
        why: BaseException | None = None
        try:
            if requests := self._started(order, batch):
                async for result in engine.execute(requests):
                    self._hear(batch, engine, result)
                    if batch.over:
                        return
            if batch.left:
                why = engine_failures.silent(self._engine)
        except asyncio.CancelledError:
            raise
        except GeneratorExit:  # the loop is gone, and with it everybody who could be told
            batch.over = True
            raise
        except Exception as error:
            log.warning("engine %s instance %s broke in a batch: %r", self._engine, batch.instance, error)
            why = engine_failures.broken(self._engine, error)
        except BaseException as error:  # sys.exit(), an interrupt, a panic below: it must not end the loop
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # the user's own: the loop is on the thread that gets signals
            log.warning("engine %s instance %s raised %r: it is started again", self._engine, batch.instance, error)
            why = engine_failures.lost(self._engine, batch.instance, f"it raised {error!r}")
        finally:
            self._settle(batch, why)

    def _started(self, order: RunBatch, batch: Batch) -> list[Request]:
        """The requests as the engine gets them; those that were cancelled meanwhile leave their slots."""
        requests = []
        for name, number, (depth, objective) in zip(order.requests, order.priorities, order.urgencies, strict=True):
            outstanding = batch.left.get(name)
            if outstanding is None:
                continue
            if outstanding.told:
                self._let_go(batch, outstanding)
                continue
            entry = outstanding.entry
            entry.request = entry.request.admitted(number, depth, objective.value)
            requests.append(entry.request if name == entry.request.id else replace(entry.request, id=name))
            self._callers.started(entry, batch.instance, order.batch)
        return requests

    def _settle(self, batch: Batch, why: BaseException | None) -> None:
        """The batch is over: what has not ended in it fails; without a reason it was cancelled."""
        if batch.over:
            return
        batch.over = True
        running = self._running.get(batch.instance, set())
        if batch in running:
            running.discard(batch)
            if watch := self._watches.get(batch.instance):
                watch.ended()
        for outstanding in list(batch.left.values()):
            self._fail(batch, outstanding, why or engine_failures.cancelled(self._engine))

    # ------------------------------------------------------------ what an engine says

    def _hear(self, batch: Batch, engine: Engine, result: Result) -> None:
        outstanding = batch.left.get(result.request_id)
        if outstanding is None or batch.over:
            return
        if watch := self._watches.get(batch.instance):
            watch.heard()
        try:
            if isinstance(result, Piece):
                self._on_piece(outstanding, result)
            elif isinstance(result, Done):
                self._done(batch, outstanding, result)
            elif isinstance(result, Failed):
                self._fail(batch, outstanding, result.error)
        except Exception as error:  # a retry that says something else, or a result that is none
            bad = engine_failures.broken(self._engine, error)
            if isinstance(result, Piece):
                self.give_up(outstanding, batch.instance, engine, bad)
            else:
                self._let_go(batch, outstanding)
                self._callers.ended(outstanding, None, bad)

    def _on_piece(self, outstanding: OutstandingRequest, piece: Piece) -> None:
        if outstanding.told:
            return
        entry = outstanding.entry
        fresh = entry.new_part(
            piece if outstanding.name == entry.request.id else replace(piece, request_id=entry.request.id)
        )
        if not entry.stream.is_prefilled:
            entry.stream.is_prefilled = True
            self._reports.scheduler(PrefillEnded(_now(), outstanding.name))
        self._callers.piece(entry, fresh)

    def _done(self, batch: Batch, outstanding: OutstandingRequest, done: Done) -> None:
        outstanding.entry.check_result(done.value)
        outstanding.entry.search.version, outstanding.entry.stream.cuts = done.version, done.cuts
        self._let_go(batch, outstanding)
        self._reports.worked(batch.instance)
        self._callers.ended(outstanding, done.value, None)

    def _fail(self, batch: Batch, outstanding: OutstandingRequest, error: BaseException) -> None:
        if isinstance(error, EngineUnavailable):
            self._reports.dead(batch.instance)
        entry = outstanding.entry
        again = isinstance(error, EngineError) and error.retryable and entry.can_be_repeated and not outstanding.told
        if not again or entry.attempts + 1 >= self._max_attempts or not self._reports.may_retry():
            self._let_go(batch, outstanding)
            self._callers.ended(outstanding, None, error)
            return
        batch.left.pop(outstanding.name, None)
        entry.retry()
        log.warning(
            "request %s of %s failed (%s); attempt %d", entry.request.id, entry.primitive, error, entry.attempts + 1
        )
        self._free()
        self._reports.scheduler(Retried(_now(), outstanding.name))

    # ------------------------------------------------------------ slots

    def _let_go(self, batch: Batch, outstanding: OutstandingRequest) -> None:
        """Its slot is free. Slots of a whole batch come free at once: one decision, not one for each of them."""
        batch.left.pop(outstanding.name, None)
        if watch := self._watches.get(batch.instance):
            watch.let_go(outstanding.name)
        self._outstanding.forget(outstanding)
        if not self._free_soon:
            asyncio.get_running_loop().call_soon(self._free)
        self._free_soon.append(outstanding.name)

    def _free(self) -> None:
        names, self._free_soon = tuple(self._free_soon), []
        if names:
            self._reports.scheduler(RequestsEnded(_now(), names))


def _now() -> float:
    return asyncio.get_running_loop().time()
