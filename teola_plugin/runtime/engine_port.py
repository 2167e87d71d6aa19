"""One engine at this runtime: its scheduler, its instances, its running batches. Lives on the pool's loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.engines.base import Done, Engine, Failed, Piece, Request, Result
from teola_plugin.engines.cache_news import CacheNews
from teola_plugin.engines.payloads import Generate, Warmup
from teola_plugin.errors import EngineError, EngineOverloaded, EngineUnavailable
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.runtime import failures, watchdog
from teola_plugin.runtime.bounded import abandon, ended
from teola_plugin.runtime.cache_events import cache_events
from teola_plugin.runtime.held_requests import Batch, Held, HeldRequests
from teola_plugin.runtime.instances import Instances
from teola_plugin.runtime.port import ForwardingPort, Port, PortListener
from teola_plugin.runtime.request_table import RequestEntry
from teola_plugin.runtime.watchdog import Patience, Watchdog
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
    Instruction,
    PrefillEnded,
    QueuedRequest,
    Reject,
    RequestsEnded,
    Retried,
    RunBatch,
)

__all__ = ["EnginePort", "ForwardingPort", "Port", "PortListener"]
log = logging.getLogger("teola_plugin")


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
        max_queued: int = 100_000,
        restarts: int = 3,
        patience: Patience | None = None,
    ) -> None:
        self.name = name
        self._listener = listener
        self._max_attempts, self._max_queued = max_attempts, max_queued
        self._patience = patience or watchdog.PATIENCE
        self._held = HeldRequests()
        self._tasks: set[asyncio.Task[None]] = set()
        self._free_soon: list[str] = []
        self._batches: dict[str, set[Batch]] = {}
        """Running batches by instance."""
        self._watches: dict[str, Watchdog] = {}
        self._closed = False
        self._instances = Instances(
            name,
            instances,
            restarts=restarts,
            seconds=self._patience.restart,
            spawn=self._spawn,
            up=lambda instance: self._handle(InstanceUp(self._now(), instance)),
            hopeless=self._hopeless,
        )
        self.scheduler = EngineScheduler(self.engine.profile, tuple(self.instances), policy)
        for number, engine in self.instances.items():
            self._follow(number, engine)

    @property
    def instances(self) -> dict[str, Engine]:
        return self._instances.engines

    @property
    def engine(self) -> Engine:
        return next(iter(self.instances.values()))

    # ------------------------------------------------------------ requests

    def enqueue(self, entries: Sequence[RequestEntry], event: Enqueue) -> None:
        """Queue the requests of one primitive; `event.requests` is filled in here."""
        refused = self._refusal(len(entries))
        if refused is not None:
            for entry in entries:
                self._tell_end(entry, None, refused)
            return
        asked = [queued for entry in entries if (queued := self._queued(entry)) is not None]
        if asked:
            self._handle(replace(event, requests=tuple(asked)))

    def _queued(self, entry: RequestEntry) -> QueuedRequest | None:
        """None for a request of which not even this much can be said: it has failed, and nobody else."""
        try:
            size, blocks = self._measured(entry.request)
        except Exception as error:
            self._tell_end(entry, None, failures.unfit(error, entry.request.kind, self.name))
            return None
        return QueuedRequest(self._held.add(entry).name, size, blocks)

    def _measured(self, request: Request) -> tuple[float, tuple[int, ...]]:
        size = self.engine.size(request)
        if not 0 <= size < float("inf"):
            raise ValueError(f"its size is {size!r}")
        prompt = request.payload.prompt if isinstance(request.payload, Generate | Warmup) else None
        if prompt is None or not self.scheduler.wants_blocks:
            return size, ()
        return size, block_hashes(prompt.known(), tenant=request.tenant)

    def _refusal(self, more: int) -> EngineError | None:
        if self._closed:
            return EngineUnavailable(
                f"engine {self.name!r} is not there any more: the pool was closed.",
                engine=self.name,
                hint="use the pool inside its `with` block",
            )
        if given_up := self._instances.given_up:
            return EngineUnavailable(
                f"engine {self.name!r} is down and could not be restarted: {given_up}",
                engine=self.name,
                hint="look at the cause; it is tried again now and then, or start a new pool",
            )
        if len(self._held) + more > self._max_queued:
            return EngineOverloaded(
                f"engine {self.name!r} has {len(self._held)} requests queued, its limit is {self._max_queued}.",
                engine=self.name,
                retryable=True,
                hint="send fewer queries at once, or add instances",
            )
        return None

    def holds(self, entry: RequestEntry) -> bool:
        """Whether the request is queued or running here, and has not ended for its caller."""
        return self._held.of(entry) is not None

    def cancel(self, entries: Sequence[RequestEntry]) -> None:
        """They end for their callers at once; a running one keeps its slot until its instance has let go of it."""
        for entry in entries:
            entry.cancelled = True
        names = tuple(held.name for entry in entries if (held := self._held.of(entry)) is not None)
        if names:
            self._handle(CancelRequests(self._now(), names))

    def depths(self, event: DepthChanged) -> None:
        self._handle(event)

    async def close(self) -> None:
        """Stop what runs. Requests that are left fail as unavailable. Waits a bounded time for instances that hang."""
        self._closed = True
        for held in self._held:
            self._end(held, None, self._refusal(0))
        for watch in self._watches.values():
            watch.stop()
        left = await ended(self._patience.closing, self._tasks)
        if left:
            log.warning("engine %s: %d tasks did not end when the pool was closed: it hangs", self.name, len(left))

    # ------------------------------------------------------------ instances

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

    def add(self, instance: str, engine: Engine) -> None:
        """One more started instance."""
        self._instances.add(instance, engine)
        self._follow(instance, engine)
        self._handle(InstanceUp(self._now(), instance))

    async def retire(self, instance: str) -> Engine:
        """Give an instance no more work, wait until what runs there has ended, and hand it back, still started."""
        self._handle(InstanceDrained(self._now(), instance))
        while running := [batch.task for batch in self._batches.get(instance, ())]:
            await asyncio.wait(running)
        self._handle(InstanceDown(self._now(), instance))
        self._batches.pop(instance, None)
        if watch := self._watches.pop(instance, None):
            watch.stop()
        return self._instances.remove(instance)

    def lose(self, instance: str, reason: str) -> None:
        """An instance is known to be dead or to hang: what runs there is done elsewhere, and it is started again."""
        if instance not in self.instances or self._closed:
            return
        if self._instances.works(instance):
            log.warning("engine %s: instance %s was lost: %s; it is started again", self.name, instance, reason)
            self._revive(instance)
        self._leave(instance, reason)

    def _revive(self, instance: str) -> None:
        """A dead instance takes no more work until it has been started again."""
        if self._instances.works(instance) and not self._closed:
            self._handle(InstanceDrained(self._now(), instance))
            self._instances.revive(instance)

    def _leave(self, instance: str, reason: str) -> None:
        """Go on without what runs there: it is done elsewhere, and nobody waits for the instance."""
        if watch := self._watches.pop(instance, None):
            watch.stop()
        for batch in list(self._batches.pop(instance, ())):
            self._settle(batch, self._gone(instance, reason))
            if batch.task is not asyncio.current_task():
                abandon(batch.task)

    def _gone(self, instance: str, reason: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"instance {instance} of engine {self.name!r} was lost: {reason}.",
            engine=self.name,
            instance=instance,
            retryable=True,
            hint="it is started again by itself",
        )

    def _hopeless(self, instance: str) -> None:
        """It could not be started again. Others may do its work; if there are none, nobody waits for ever."""
        self._leave(instance, "it could not be started again")
        refused = self._refusal(0)
        if refused is None or not self._instances.given_up:
            return
        names = []
        for held in self._held:
            names.append(held.name)
            self._tell(held, None, refused)
        self._handle(CancelRequests(self._now(), tuple(names)))

    # ------------------------------------------------------------ instructions

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _handle(self, event: EngineEvent) -> None:
        if not self._closed:
            for instruction in self.scheduler.handle(event):
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, RunBatch):
            self._begin(instruction)
        elif isinstance(instruction, CancelRunning):
            for request in instruction.requests:
                if held := self._held.named(request):
                    self._give_up(held, instruction.instance, self._cancelled())
        elif isinstance(instruction, Dropped):
            for request in instruction.requests:
                if held := self._held.named(request):
                    self._end(held, None, self._cancelled(), scheduled=False)
        elif isinstance(instruction, Reject) and (held := self._held.named(instruction.request)):
            kind = held.entry.request.kind
            error = failures.too_large(kind, instruction.size, instruction.limit, self.name)
            self._end(held, None, error, scheduled=False)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancelled(self) -> EngineError:
        return EngineError(f"the request was cancelled at engine {self.name!r}.", engine=self.name, hint="ask again")

    def _give_up(self, held: Held, instance: str, error: BaseException) -> None:
        """Its caller is told now; the instance is asked to let go of it, and watched."""
        if instance in self.instances and not held.told:
            self._watch(instance).asked(held.name)
            self._spawn(self._cancel_at(self.instances[instance], held.name))
        self._tell(held, None, error)

    async def _cancel_at(self, engine: Engine, request: str) -> None:
        try:
            await engine.cancel(request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.warning("engine %s raised while it cancelled a request: %r", self.name, error)

    def _watch(self, instance: str) -> Watchdog:
        watch = self._watches.get(instance)
        if watch is None:
            patience = self._patience
            if not hasattr(self.instances[instance], "restart"):
                patience = replace(patience, silence=float("inf"))
            watch = self._watches[instance] = Watchdog(patience, lambda reason: self.lose(instance, reason))
        return watch

    # ------------------------------------------------------------ batches

    def _begin(self, order: RunBatch) -> None:
        found = {name: held for name in order.requests if (held := self._held.named(name)) is not None}
        batch = Batch(order.instance, found)
        self._batches.setdefault(order.instance, set()).add(batch)
        self._watch(order.instance).begun()
        batch.task = self._spawn(self._run(order, batch))

    async def _run(self, order: RunBatch, batch: Batch) -> None:
        engine = self.instances[batch.instance]
        broken: BaseException = self._cancelled()
        try:
            requests = self._started(order, batch)
            if requests:
                async for result in engine.execute(requests):
                    self._hear(batch, result)
                    if batch.over:
                        return
            broken = self._silent()
        except asyncio.CancelledError:
            raise
        except GeneratorExit:  # the loop is gone, and with it everybody who could be told
            batch.over = True
            raise
        except Exception as error:
            log.warning("engine %s instance %s broke in a batch: %r", self.name, batch.instance, error)
            broken = self._broken(error)
        except BaseException as error:  # sys.exit(), an interrupt, a panic below: it must not end the loop
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # the user's own: the loop is on the thread that gets signals
            log.warning("engine %s instance %s raised %r: it is started again", self.name, batch.instance, error)
            broken = self._gone(batch.instance, f"it raised {error!r}")
        finally:
            self._settle(batch, broken)

    def _started(self, order: RunBatch, batch: Batch) -> list[Request]:
        """The requests as the engine gets them; those that were cancelled meanwhile leave their slots."""
        requests = []
        for name, number, (depth, objective) in zip(order.requests, order.priorities, order.standings, strict=True):
            held = batch.left.get(name)
            if held is None:
                continue
            if held.told:
                self._let_go(batch, held)
                continue
            entry = held.entry
            entry.request = replace(entry.request, priority=number, depth=depth, objective=objective.value)
            requests.append(entry.request if name == entry.request.id else replace(entry.request, id=name))
            self._call("started", self._listener.started, entry, batch.instance, order.batch)
        return requests

    def _settle(self, batch: Batch, broken: BaseException) -> None:
        """The batch is over: what has not ended in it fails."""
        if batch.over:
            return
        batch.over = True
        running = self._batches.get(batch.instance, set())
        if batch in running:
            running.discard(batch)
            self._watch(batch.instance).ended()
        for held in list(batch.left.values()):
            self._fail(batch, held, broken)

    def _broken(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        made = EngineError(f"engine {self.name!r} broke: {error!r}.", engine=self.name, hint="see the cause")
        made.__cause__ = error
        return made

    def _silent(self) -> EngineError:
        return EngineError(
            f"engine {self.name!r} ended a batch without a result for each of its requests.",
            engine=self.name,
            hint="run the engine through engines.conformance.EngineConformance",
        )

    def _hear(self, batch: Batch, result: Result) -> None:
        held = batch.left.get(result.request_id)
        if held is None or batch.over:
            return
        self._watch(batch.instance).heard()
        try:
            if isinstance(result, Piece):
                self._on_piece(held, result)
            elif isinstance(result, Done):
                held.entry.agree(result.value)
                held.entry.found_version = result.version
                self._let_go(batch, held)
                self._instances.worked(batch.instance)
                self._tell(held, result.value, None)
            elif isinstance(result, Failed):
                self._fail(batch, held, result.error)
        except Exception as error:  # a retry that says something else, or a result that is none
            self._refuse(batch, held, result, self._broken(error))

    def _on_piece(self, held: Held, piece: Piece) -> None:
        if held.told:
            return
        entry = held.entry
        fresh = entry.fresh(piece if held.name == entry.request.id else replace(piece, request_id=entry.request.id))
        if not entry.prefilled:
            entry.prefilled = True
            self._handle(PrefillEnded(self._now(), held.name))
        self._call("piece", self._listener.piece, entry, fresh)

    def _refuse(self, batch: Batch, held: Held, result: Result, error: EngineError) -> None:
        """What the engine says of a request cannot be passed on."""
        if isinstance(result, Piece):
            self._give_up(held, batch.instance, error)
        else:
            self._let_go(batch, held)
            self._tell(held, None, error)

    # ------------------------------------------------------------ ends and retries

    def _let_go(self, batch: Batch, held: Held) -> None:
        """The instance has let go of it: its slot is free. Slots of a whole batch come free at once: one decision."""
        batch.left.pop(held.name, None)
        if watch := self._watches.get(batch.instance):
            watch.let_go(held.name)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self._held.forget(held)
        if not self._free_soon:
            asyncio.get_running_loop().call_soon(self._free)
        self._free_soon.append(held.name)

    def _free(self) -> None:
        names, self._free_soon = tuple(self._free_soon), []
        if names:
            self._handle(RequestsEnded(self._now(), names))

    def _end(self, held: Held, value: Any, error: BaseException | None, *, scheduled: bool = True) -> None:
        """`scheduled`: whether it has a slot, which comes free."""
        if scheduled:
            self._forget(held)
        else:
            self._held.forget(held)
        self._tell(held, value, error)

    def _tell(self, held: Held, value: Any, error: BaseException | None) -> None:
        if self._held.tell(held):
            self._tell_end(held.entry, value, error)

    def _tell_end(self, entry: RequestEntry, value: Any, error: BaseException | None) -> None:
        own = failures.own(error) if error is not None else None
        if not self._call("end", self._listener.ended, entry, value, own):
            entry.resolve(value, own)  # whoever waits for it does not wait for ever

    def _call(self, what: str, listener: Callable[..., None], *args: Any) -> bool:
        """Whether the listener took it. One that raises has a fault of its own: everybody else goes on."""
        try:
            listener(*args)
        except Exception:
            log.exception("engine %s: what listens to the %s of a request raised", self.name, what)
            return False
        return True

    def _fail(self, batch: Batch, held: Held, error: BaseException) -> None:
        if isinstance(error, EngineUnavailable):
            self._revive(batch.instance)
        entry = held.entry
        again = isinstance(error, EngineError) and error.retryable and entry.repeatable and not held.told
        if not again or entry.attempts + 1 >= self._max_attempts or self._refusal(0) is not None:
            self._let_go(batch, held)
            self._tell(held, None, error)
            return
        batch.left.pop(held.name, None)
        entry.again()
        log.warning(
            "request %s of %s failed (%s); attempt %d", entry.request.id, entry.primitive, error, entry.attempts + 1
        )
        self._free()
        self._handle(Retried(self._now(), held.name))
