"""One engine at this runtime: its scheduler, its instances, its running batches. Lives on the pool's loop."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from teola_plugin.engines.base import Done, Engine, Failed, Piece, Result
from teola_plugin.engines.cache_news import CacheNews
from teola_plugin.engines.payloads import Generate, Warmup
from teola_plugin.errors import EngineError, EngineOverloaded, EngineUnavailable
from teola_plugin.graph import Primitive, PrimitiveKind
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.runtime.cache_events import cache_events
from teola_plugin.runtime.failures import too_large
from teola_plugin.runtime.request_table import RequestEntry
from teola_plugin.scheduling import BatchPolicy, EngineScheduler
from teola_plugin.scheduling.events import (
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Dropped,
    EngineEvent,
    Enqueue,
    InstanceDown,
    InstanceDrained,
    InstanceUp,
    PrefillEnded,
    QueuedRequest,
    Reject,
    RequestsEnded,
    RunBatch,
)

if TYPE_CHECKING:
    from teola_plugin.runtime.prescheduling import Follow

log = logging.getLogger("teola_plugin")
_LONGEST_BACK_OFF = 30.0
"""Seconds between two attempts to start an instance again."""


@dataclass(frozen=True, slots=True)
class PortListener:
    """Whom a port tells what happened to requests. Called on the pool's loop."""

    started: Callable[[RequestEntry, str, int], None]
    """(entry, instance, batch)"""
    piece: Callable[[RequestEntry, Piece], None]
    ended: Callable[[RequestEntry, Any, BaseException | None], None]
    """(entry, value, error)"""


class Port(Protocol):
    """An engine as the runtime uses it, wherever its scheduler and its instances are."""

    name: str

    @property
    def engine(self) -> Any:
        """What there is to know of the engine: name, kinds, profile, versions."""
        ...

    def enqueue(self, entries: Sequence[RequestEntry], event: Enqueue) -> None:
        """Queue the requests of one primitive; `event.requests` need not be filled in."""
        ...

    def holds(self, entry: RequestEntry) -> bool:
        """Whether the request is queued or running here."""
        ...

    def cancel(self, entries: Sequence[RequestEntry]) -> None: ...

    def depths(self, event: DepthChanged) -> None: ...

    async def close(self) -> None:
        """Stop what runs. Requests that are left fail as unavailable."""
        ...


class ForwardingPort(Port, ABC):
    """A `Port` of an engine elsewhere: what follows a primitive can be sent along with it (see `prescheduling`)."""

    @abstractmethod
    def enqueue(
        self,
        entries: Sequence[RequestEntry],
        event: Enqueue,
        primitive: Primitive | None = None,
        then: tuple[Follow, ...] = (),
    ) -> None:
        """Send the requests of one primitive, and what follows it."""

    @abstractmethod
    def expect(self, name: str) -> None:
        """A follower of that name is announced."""

    @abstractmethod
    def adopt(self, name: str, entries: Sequence[RequestEntry], event: Enqueue) -> None:
        """The graph has dispatched the follower: its requests are these entries, in order."""

    @abstractmethod
    def disown(self, name: str, count: int = 0) -> None:
        """The follower is not wanted, or its `count` requests are made otherwise."""


class EnginePort:
    """Carries out an `EngineScheduler`'s instructions. A request that failed retryably runs again, up to a limit."""

    def __init__(
        self,
        name: str,
        instances: Mapping[str, Engine],
        listener: PortListener,
        *,
        policy: BatchPolicy | None = None,
        max_attempts: int = 3,
        max_queued: int = 100_000,
        restarts: int = 3,
    ) -> None:
        self.name = name
        self.instances = dict(instances)
        self._listener = listener
        self._max_attempts = max_attempts
        self._max_queued = max_queued
        self._entries: dict[str, RequestEntry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: list[str] = []
        self._restarting: set[str] = set()
        self._restarts = restarts
        self._batches: dict[str, set[asyncio.Task[None]]] = {}
        """Running batches by instance."""
        self._lost: dict[str, str] = {}
        """Instances given up before their batches ended, and why."""
        self._given_up = ""
        first = next(iter(self.instances.values()))
        self.scheduler = EngineScheduler(first.profile, tuple(self.instances), policy)
        for number, engine in self.instances.items():
            self._follow(number, engine)

    @property
    def engine(self) -> Engine:
        return next(iter(self.instances.values()))

    def enqueue(self, entries: Sequence[RequestEntry], event: Enqueue) -> None:
        """Queue the requests of one primitive; `event.requests` is filled in here."""
        refused = self._refusal(len(entries))
        if refused is not None:
            refused.__dict__["unsent"] = isinstance(refused, EngineUnavailable)
            for entry in entries:
                self._listener.ended(entry, None, refused)
            return
        for entry in entries:
            self._entries[entry.request.id] = entry
        self._handle(replace(event, requests=tuple(self._queued(entry) for entry in entries)))

    def _queued(self, entry: RequestEntry) -> QueuedRequest:
        request = entry.request
        prompt = request.payload.prompt if isinstance(request.payload, Generate | Warmup) else None
        wanted = prompt is not None and self.scheduler.wants_blocks
        blocks = block_hashes(prompt.known(), tenant=request.tenant) if prompt is not None and wanted else ()
        return QueuedRequest(request.id, self.engine.size(request), blocks)

    def tell(self, event: EngineEvent) -> None:
        """News of an instance, for its scheduler (e.g. `CacheUse`)."""
        self._handle(event)

    def _follow(self, instance: str, engine: Engine) -> None:
        """Pass on what the instance says of its cache, if it does (see `engines.cache_news`)."""
        if hasattr(engine, "on_cache_news"):
            engine.on_cache_news = lambda news: self._cache_news(instance, engine, news)

    def _cache_news(self, instance: str, engine: Engine, news: CacheNews) -> None:
        for event in cache_events(self._now(), instance, news, engine.load().kv_used):
            self._handle(event)

    def _refusal(self, more: int) -> EngineError | None:
        if self._given_up:
            return EngineUnavailable(
                f"engine {self.name!r} is down and could not be restarted: {self._given_up}",
                engine=self.name,
                hint="look at the cause, then start a new pool",
            )
        if len(self._entries) + more > self._max_queued:
            return EngineOverloaded(
                f"engine {self.name!r} has {len(self._entries)} requests queued, its limit is {self._max_queued}.",
                engine=self.name,
                retryable=True,
                hint="send fewer queries at once, or add instances",
            )
        return None

    def holds(self, entry: RequestEntry) -> bool:
        """Whether the request is queued or running here."""
        return entry.request.id in self._entries

    def cancel(self, entries: Sequence[RequestEntry]) -> None:
        for entry in entries:
            entry.cancelled = True
        self._handle(CancelRequests(self._now(), tuple(e.request.id for e in entries)))

    def depths(self, event: DepthChanged) -> None:
        self._handle(event)

    def lose(self, instance: str, reason: str) -> None:
        """An instance is known to be dead or to hang: what runs there is done elsewhere, and it is started again."""
        if instance not in self.instances or instance in self._restarting:
            return
        self._lost[instance] = reason
        self._revive(instance)
        for task in list(self._batches.get(instance, ())):
            task.cancel()

    def add(self, instance: str, engine: Engine) -> None:
        """One more started instance."""
        self.instances[instance] = engine
        self._follow(instance, engine)
        self._handle(InstanceUp(self._now(), instance))

    async def retire(self, instance: str) -> Engine:
        """Give an instance no more work, wait until what runs there has ended, and hand it back, still started."""
        self._handle(InstanceDrained(self._now(), instance))
        while running := list(self._batches.get(instance, ())):
            await asyncio.wait(running)
        self._handle(InstanceDown(self._now(), instance))
        self._batches.pop(instance, None)
        return self.instances.pop(instance)

    def _gone(self, instance: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"instance {instance} of engine {self.name!r} was lost: {self._lost[instance]}.",
            engine=self.name,
            instance=instance,
            retryable=True,
            hint="it is started again by itself",
        )

    async def close(self) -> None:
        """Stop what runs. Requests that are left fail as unavailable."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._given_up = "the pool was closed."
        for entry in list(self._entries.values()):
            self._end(entry, None, self._refusal(0))

    # ------------------------------------------------------------ instructions

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _handle(self, event: EngineEvent) -> None:
        for instruction in self.scheduler.handle(event):
            if isinstance(instruction, RunBatch):
                running = self._batches.setdefault(instruction.instance, set())
                task = self._spawn(self._run(instruction))
                running.add(task)
                task.add_done_callback(running.discard)
            elif isinstance(instruction, CancelRunning):
                for request in instruction.requests:
                    self._spawn(self.instances[instruction.instance].cancel(request))
            elif isinstance(instruction, Dropped):
                for request in instruction.requests:
                    if entry := self._entries.get(request):
                        self._end(entry, None, self._cancelled(), scheduled=False)
            elif isinstance(instruction, Reject):
                self._reject(instruction)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancelled(self) -> EngineError:
        return EngineError(f"the request was cancelled at engine {self.name!r}.", engine=self.name)

    def _reject(self, reject: Reject) -> None:
        entry = self._entries[reject.request]
        error = too_large(entry.request.kind, reject.size, reject.limit, self.name)
        self._end(entry, None, error, scheduled=False)

    async def _run(self, batch: RunBatch) -> None:
        engine = self.instances[batch.instance]
        entries = {r: self._entries[r] for r in batch.requests if r in self._entries}
        requests = []
        for name, number, (depth, objective) in zip(batch.requests, batch.priorities, batch.standings, strict=True):
            if name in entries:
                entries[name].request = replace(
                    entries[name].request, priority=number, depth=depth, objective=objective.value
                )
                requests.append(entries[name].request)
                self._listener.started(entries[name], batch.instance, batch.batch)
        broken: BaseException | None = None
        try:
            async for result in engine.execute(requests):
                self._on_result(entries, result, batch.instance)
        except asyncio.CancelledError:
            if batch.instance not in self._lost:
                broken = self._cancelled()
                raise
            broken = self._gone(batch.instance)
        except Exception as error:
            log.warning("engine %s instance %s broke in a batch: %r", self.name, batch.instance, error)
            broken = self._broken(error)
        finally:
            for entry in list(entries.values()):
                self._fail(entry, broken or self._silent(entry), batch.instance)

    def _broken(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        made = EngineError(f"engine {self.name!r} broke: {error!r}.", engine=self.name, hint="see the cause")
        made.__cause__ = error
        return made

    def _silent(self, entry: RequestEntry) -> EngineError:
        return EngineError(
            f"engine {self.name!r} ended a batch without a result for {entry.request.id}.",
            engine=self.name,
            hint="run the engine through engines.conformance.EngineConformance",
        )

    def _on_result(self, entries: dict[str, RequestEntry], result: Result, instance: str) -> None:
        entry = entries.get(result.request_id)
        if entry is None:
            return
        if isinstance(result, Piece):
            self._on_piece(entry, result)
        elif isinstance(result, Done):
            del entries[entry.request.id]
            self._end(entry, result.value, None)
        elif isinstance(result, Failed):
            del entries[entry.request.id]
            self._fail(entry, result.error, instance)

    def _on_piece(self, entry: RequestEntry, piece: Piece) -> None:
        if not entry.prefilled:
            entry.prefilled = True
            self._handle(PrefillEnded(self._now(), entry.request.id))
        self._listener.piece(entry, entry.fresh(piece))

    # ------------------------------------------------------------ ends and retries

    def _end(self, entry: RequestEntry, value: Any, error: BaseException | None, *, scheduled: bool = True) -> None:
        self._entries.pop(entry.request.id, None)
        self._listener.ended(entry, value, error)
        if scheduled:
            if not self._ended:
                asyncio.get_running_loop().call_soon(self._free)
            self._ended.append(entry.request.id)

    def _free(self) -> None:
        """Slots of a whole batch come free at once: one decision, not one for each of its requests."""
        ended, self._ended = tuple(self._ended), []
        if ended:
            self._handle(RequestsEnded(self._now(), ended))

    def _fail(self, entry: RequestEntry, error: BaseException, instance: str) -> None:
        if isinstance(error, EngineUnavailable):
            self._revive(instance)
        retryable = isinstance(error, EngineError) and error.retryable and entry.repeatable
        if not retryable or entry.attempts + 1 >= self._max_attempts or self._given_up:
            self._end(entry, None, error)
            return
        entry.attempts += 1
        entry.prefilled, entry.repeated = False, len(entry.text)
        log.warning(
            "request %s of %s failed (%s); attempt %d", entry.request.id, entry.primitive, error, entry.attempts + 1
        )
        self._ended.append(entry.request.id)
        self._free()
        kind: PrimitiveKind = entry.request.kind
        self._handle(Enqueue(self._now(), entry.request.query, entry.primitive, kind, (self._queued(entry),)))

    def _revive(self, instance: str) -> None:
        """A dead instance takes no more work until it has been started again."""
        if instance in self._restarting or self._given_up:
            return
        self._restarting.add(instance)
        self._handle(InstanceDown(self._now(), instance))
        self._spawn(self._restart(instance))

    async def _restart(self, instance: str) -> None:
        engine = self.instances[instance]
        restart = getattr(engine, "restart", None)
        cause: BaseException | None = None
        for attempt in range(self._restarts if restart is not None else 0):
            try:
                await restart()  # type: ignore[misc]
            except Exception as error:
                cause = error
                await asyncio.sleep(min(_LONGEST_BACK_OFF, 0.2 * 2**attempt))
            else:
                self._restarting.discard(instance)
                self._lost.pop(instance, None)
                self._handle(InstanceUp(self._now(), instance))
                return
        if len(self._restarting) == len(self.instances):
            self._given_up = f"{cause or 'it cannot be restarted'}."
            for entry in list(self._entries.values()):
                self._end(entry, None, self._refusal(0))
