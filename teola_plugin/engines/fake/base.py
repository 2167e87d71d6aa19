"""The base of all fake engines: batches that last as long as a profile says, faults, cancelling, dying.

Everything happens in timers of the running loop at absolute times: nothing drifts, and in a `VirtualTimeLoop` the
fakes run in virtual time. No thread, no file, no task is left behind.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Request, Result, advice


def split_tokens(text: str) -> list[str]:
    """Split a text into the fake LLM's tokens: up to four characters, with the space before them.

    Joined, they are the text again. The tokens of a prefix are a prefix of the tokens, except for its last one.
    """
    return re.findall(r"\s*\S{1,4}|\s+", text)


Predicate = Callable[[Request], bool]


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of a fake engine, to test that an app survives them."""

    fail_on: Predicate | None = None
    """These requests fail alone, half-way."""
    raise_on: Predicate | None = None
    """`execute` raises half-way through the batch that holds one of these: all its unfinished requests fail."""
    die_after: int | None = None
    """After so many batches the engine dies, once, in the middle of the next; `restart()` revives it for good."""
    hang_on: Predicate | None = None
    """These requests never end until they are cancelled; others beside them do."""
    raises: type[BaseException] = RuntimeError
    """The exception of `raise_on`; SystemExit for an engine that ends its own process."""
    deaf: bool = False
    """True if it ignores cancellations."""
    slow: float = 1.0
    """Factor by which everything takes longer."""
    retryable: bool = True
    """True if the errors of `fail_on` may be retried."""
    no_version: bool = False
    """The store cannot tell the versions of its collections."""

    def hits(self, predicate: Predicate | None, request: Request) -> bool:
        """Return True if a fault with this condition concerns the request."""
        return predicate is not None and predicate(request)


NO_FAULTS = Faults()


class FakeBatch:
    """One `execute` call: its unfinished requests and the results on their way to the caller."""

    def __init__(self, batch: Sequence[Request], *, deadly: bool) -> None:
        self.pending = {request.id: request for request in batch}
        self.ids = tuple(self.pending)
        self.deadly = deadly
        self.timers: list[asyncio.Handle] = []
        self._results: deque[Result] = deque()
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def put(self, result: Result) -> None:
        """Add a result for the caller. The first end of a request removes it from `pending`; later ends are dropped."""
        if self._error is not None:
            return  # nothing comes from a broken batch
        if not isinstance(result, Done | Failed) or self.pending.pop(result.request_id, None) is not None:
            self._results.append(result)
            self._news.set()

    def fail(self, request_id: str, error: EngineError) -> None:
        self.put(Failed(request_id, error))

    def raise_(self, error: BaseException) -> None:
        self._error = error
        self._news.set()

    async def results(self) -> AsyncIterator[Result]:
        """Yield the results as they come until all requests have ended. Raise the error with which the batch broke, if
        any."""
        if not self.pending:
            await asyncio.sleep(0)  # an engine without latency still lets others have their turn
        while True:
            while self._results:
                yield self._results.popleft()
            if self._error is not None:
                raise self._error
            if not self.pending:
                return
            self._news.clear()
            await self._news.wait()


class FakeEngine(ABC):
    """Base of the fakes: a subclass says when the requests of a batch end (`_work`), the protocol is here."""

    kinds: frozenset[PrimitiveKind]

    def __init__(self, name: str, profile: EngineProfile, faults: Faults = NO_FAULTS) -> None:
        self.name = name
        self.faults = faults
        self._profile = profile
        self._active: dict[str, FakeBatch] = {}
        self._batches = 0
        self._down = ""

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    @property
    def batches(self) -> int:
        """Batches taken so far."""
        return self._batches

    async def start(self) -> None:
        if self._down == "stopped":
            self._down = ""

    async def stop(self) -> None:
        self.die("stopped")

    async def restart(self) -> None:
        """Bring a stopped or dead engine back, empty."""
        await self.stop()
        self._down = ""
        await self.reset()

    def die(self, reason: str = "died") -> None:
        """Fail everything unfinished with `EngineUnavailable`, now and from now on until `restart()`."""
        self._down = reason if self._down != "died" else self._down
        for request_id, run in list(self._active.items()):
            self._drop(request_id, self._unavailable(), run)

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield the results of a batch, at the times that the profile says.

        What the caller leaves unread is dropped, so that the requests no longer count as load.
        """
        run = FakeBatch(batch, deadly=self._batches == self.faults.die_after)
        self._batches += 1
        self._active.update(dict.fromkeys(run.pending, run))
        try:
            self._admit(run)
            if run.pending:
                self._work(run)
            async for result in run.results():
                yield result
        finally:
            self._drop_unfinished(run)

    def _admit(self, run: FakeBatch) -> None:
        """Fail the requests that this engine cannot take: all while it is down, and those of other kinds."""
        for request in list(run.pending.values()):
            if self._down:
                run.fail(request.id, self._unavailable())
            elif request.kind not in self.kinds:
                kinds = ", ".join(sorted(kind.name for kind in self.kinds))
                run.fail(request.id, self._error(f"cannot do {request.kind.name}; it does: {kinds}"))

    def _drop_unfinished(self, run: FakeBatch) -> None:
        """Drop the unfinished requests of a run whose caller has stopped reading."""
        for request_id in list(run.pending):
            self._drop(request_id, self._error("was left by its caller"), run)
        for request_id in run.ids:
            self._active.pop(request_id, None)

    @abstractmethod
    def _work(self, run: FakeBatch) -> None:
        """Start on the run's pending requests; put their results when their time has come."""

    def _drop(self, request_id: str, error: EngineError, run: FakeBatch) -> None:
        """End one unfinished request with an error."""
        run.fail(request_id, error)

    async def cancel(self, request_id: str) -> None:
        """End a request with an error at once. Do nothing for an unknown one, or with the fault `deaf`.

        A deaf engine stands for one that ignores cancellations.
        """
        run = self._active.get(request_id)
        if run is not None and not self.faults.deaf:
            self._drop(request_id, self._error(f"request {request_id} was cancelled"), run)

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(requests=self._unfinished())

    def _unfinished(self) -> int:
        return sum(request_id in run.pending for request_id, run in self._active.items())

    async def reset(self) -> None:
        return None

    def versions(self) -> Mapping[str, str]:
        return {"engine": type(self).__name__}

    def _error(self, complaint: str, *, retryable: bool = False, hint: str = "") -> EngineError:
        return EngineError(f"engine {self.name!r}: {complaint}.", engine=self.name, retryable=retryable, hint=hint)

    def _bad(self, request: Request, error: Exception) -> EngineError:
        """Return the error for a payload that this engine does not accept."""
        return self._error(f"bad request {request.id}: {error!r}", hint=advice(error))

    def _unavailable(self) -> EngineUnavailable:
        """Return the error of an engine that has died or is stopped."""
        return EngineUnavailable(
            f"engine {self.name!r} has {self._down}." if self._down == "died" else f"engine {self.name!r} is stopped.",
            engine=self.name,
            retryable=True,
            hint="a pool that runs starts it again by itself",
        )

    def _inject_fault(self, request: Request, run: FakeBatch) -> None:
        """Let the fault of one request happen, half-way through its batch."""
        if run.deadly:
            self.die()
        elif self.faults.hits(self.faults.raise_on, request):
            run.raise_(self.faults.raises(f"engine {self.name!r} broke on request {request.id}"))
        elif self.faults.hits(self.faults.fail_on, request):
            run.fail(request.id, self._error(f"request {request.id} failed", retryable=self.faults.retryable))

    def _has_fault(self, request: Request, run: FakeBatch) -> bool:
        """Return True if something is to go wrong half-way through a request, other than hanging."""
        return (
            run.deadly
            or self.faults.hits(self.faults.raise_on, request)
            or self.faults.hits(self.faults.fail_on, request)
        )


class BatchedFake(FakeEngine):
    """A batch lasts as long as the profile says for its size; a STATIC engine serves one batch at a time."""

    def __init__(self, name: str, profile: EngineProfile, faults: Faults = NO_FAULTS) -> None:
        super().__init__(name, profile, faults)
        self._queue: deque[FakeBatch] = deque()
        self._serving = 0

    @abstractmethod
    def _value(self, request: Request) -> Any:
        """Return the request's value. Called when the batch starts, so that it adds no latency to the profile's."""

    def _commit(self, request: Request, value: Any) -> Any:
        """Perform the side effects of a request when its batch ends. Return its value."""
        return value

    def _seconds(self, requests: Sequence[Request]) -> float:
        """Return the seconds that a batch takes by the profile: the sum over its kinds of requests."""
        by_kind: dict[PrimitiveKind, int] = {}
        for request in requests:
            by_kind[request.kind] = by_kind.get(request.kind, 0) + 1
        return self.faults.slow * sum(self._profile.seconds(kind, n) for kind, n in by_kind.items())

    def _work(self, run: FakeBatch) -> None:
        self._queue.append(run)
        self._next()

    def _next(self) -> None:
        """Begin with waiting batches as long as there is a free slot."""
        slots = 1 if self._profile.batching is Batching.STATIC else self._profile.max_requests
        while self._queue and self._serving < slots:
            run = self._queue.popleft()
            if run.pending:
                self._serving += 1
                self._serve(run)

    def _serve(self, run: FakeBatch) -> None:
        """Compute the values of a batch now, and set timers to deliver them when its time is over, and faults at half
        of it."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        requests = list(run.pending.values())
        seconds = self._seconds(requests)
        values = {request.id: value for request in requests if (value := self._try(request, run)) is not None}
        if seconds:
            if self.faults is not NO_FAULTS:
                run.timers.append(loop.call_at(start + seconds / 2, self._halfway, run))
            run.timers.append(loop.call_at(start + seconds, self._finish, run, values))
        elif self.faults is not NO_FAULTS:  # timers of one instant have no order
            run.timers += [loop.call_soon(self._halfway, run), loop.call_soon(self._finish, run, values)]
        else:
            self._finish(run, values)

    def _try(self, request: Request, run: FakeBatch) -> Any:
        """Return the value of a request. If its payload is bad, fail the request and return None."""
        try:
            return self._value(request)
        except Exception as error:
            run.fail(request.id, self._bad(request, error))
            return None

    def _halfway(self, run: FakeBatch) -> None:
        for request in list(run.pending.values()):
            self._inject_fault(request, run)

    def _finish(self, run: FakeBatch, values: Mapping[str, Any]) -> None:
        """Deliver the values of a batch, except for requests that are to hang, and perform their side effects."""
        self._end_service(run)
        for request in list(run.pending.values()):
            if self.faults.hits(self.faults.hang_on, request):
                continue
            try:
                run.put(self._done(request, self._commit(request, values[request.id])))
            except Exception as error:
                run.fail(request.id, self._bad(request, error))

    def _done(self, request: Request, value: Any) -> Done:
        """Return the result of a request whose value was committed."""
        return Done(request.id, value)

    def _end_service(self, run: FakeBatch) -> None:
        """Free the slot of a batch that has ended or that nobody waits for, and begin with the next one."""
        for timer in run.timers:
            timer.cancel()
        run.timers.clear()
        self._serving -= 1
        self._next()

    def _drop(self, request_id: str, error: EngineError, run: FakeBatch) -> None:
        super()._drop(request_id, error, run)
        if not run.pending and run.timers:  # nobody is left in the batch: the engine is free at once
            self._end_service(run)
