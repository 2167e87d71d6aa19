"""The engine that makes provider calls, and the pool of objects that have no other engine.

An adapter registers who prefetches for each live query in `prefetchers`; the engine asks there for a call's result.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

from teola_plugin.adapters.automatic_engines import OwnPool
from teola_plugin.engines.base import EngineLoad
from teola_plugin.errors import EngineError, pool_closed
from teola_plugin.graph import INPUT, Batching, EngineProfile, Graph, PrimitiveKind, Ref
from teola_plugin.observe.steps import PROVIDER
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Request, Result
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.ports.batches import Callers, OutstandingRequests
from teola_plugin.runtime.ports.port import DirectPort, Port, PortListener
from teola_plugin.runtime.threads import ForkedLock, in_child
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a provider call, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None


class Prefetcher(Protocol):
    """Makes the provider calls that the graph of one query asks for."""

    def prefetch(self, request: ProviderRequest, request_id: str, part: str) -> Future[Outcome] | None:
        """Return what the object at a call site gives for an input: from a prefetch, or from the original's call.

        Return None if nothing in the graph reads it: the request ends with its query. `part`: the name of the part of
        the query whose graph asks; empty for the query's own graph.
        """
        ...


prefetchers: dict[str, Prefetcher] = {}
"""By the ids of live queries."""
in_child(prefetchers.clear)  # prefetches are under way in the parent process alone


@dataclass(frozen=True, slots=True, eq=False)
class ProviderRequest:
    """Payload: call the object at `site` with this input of its framework. Value: what it returns."""

    site: str
    input: Any
    ends: tuple[str, ...] = ()
    """Names of user code that has ended once the original makes this call; the call is not prefetched then."""


class ProviderExecutor:
    """The engine of the user's own objects, for plans: it has no latencies to know and no limit of its own.

    Passes leave its primitives where they are, but for the order edges that nothing asks for. Its requests never wait
    for a batch or a slot: `ProviderPort` hands them to their query's `Prefetcher`.
    """

    name = PROVIDER
    kinds = frozenset({PrimitiveKind.PREFILLING, PrimitiveKind.DECODING, PrimitiveKind.SEARCHING})
    profile = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1 << 30, max_requests=1 << 30)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Raise `EngineError`: only the port makes provider calls."""
        raise EngineError("provider calls are made by their query, not in batches.", engine=self.name)

    async def cancel(self, request_id: str) -> None: ...

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    def versions(self) -> Mapping[str, str]:
        return {}

    def make_port(self, listener: PortListener) -> Port:
        """Return the port by which a runtime sends requests to this engine."""
        return ProviderPort(self, listener)


class ProviderPort(DirectPort):
    """Has requests answered by their query's `Prefetcher`, on the caller's loop or a thread beside the caller's.

    What a call raises is the original's to show: here the request just failed. Lives on the pool's loop.
    """

    takes_late_readers = False

    def __init__(self, engine: ProviderExecutor, listener: PortListener) -> None:
        self.name, self._engine = engine.name, engine
        self._listeners = Callers(engine.name, listener, OutstandingRequests())
        self._cancelled = self._failure("it was cancelled")
        self._waiting: dict[str, EngineRequest] = {}
        """Requests whose callers wait for the outcome, by id."""
        self._new: list[EngineRequest] = []
        self._batches = 0
        self._outcomes: list[tuple[EngineRequest, Future[Outcome]]] = []
        """Arrived on any thread, and not yet handed on."""
        self._is_delivering = False
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def engine(self) -> ProviderExecutor:
        return self._engine

    def enqueue(self, entries: Sequence[EngineRequest], event: Enqueue | None = None) -> None:
        """Start the requests in the loop's next round.

        Must be called on the pool's loop. All requests that are enqueued in one round start together.
        """
        if not self._new:
            asyncio.get_running_loop().call_soon(self._start)
        self._new += entries
        self._waiting.update({entry.request.id: entry for entry in entries})

    def _start(self) -> None:
        """Hand the requests that came since the last round to the `Prefetcher` of their query. Runs on the pool's loop.

        A request fails if its query is over. The others end when their outcome arrives, on whatever thread.
        """
        new, self._new = self._new, []
        self._batches += 1
        for entry in new:
            if not self.holds(entry):
                continue
            self._listeners.started(entry, "0", self._batches)
            request = entry.request
            calls = prefetchers.get(request.query)
            if self._is_closed or calls is None:
                self._end(entry, error=self._failure("its query is over"))
                continue
            part = next(iter(entry.claims.graphs), "")
            outcome = calls.prefetch(request.payload, request.id, part)
            if outcome is not None:
                outcome.add_done_callback(partial(self._arrived, asyncio.get_running_loop(), entry))

    def _arrived(self, loop: asyncio.AbstractEventLoop, entry: EngineRequest, outcome: Future[Outcome]) -> None:
        """Wake the pool's loop, once for all outcomes that arrive until it looks. Called on any thread."""
        with self._lock:
            self._outcomes.append((entry, outcome))
            if self._is_delivering:
                return
            self._is_delivering = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """End the requests whose outcomes have arrived. Runs on the pool's loop.

        The error of a call is not passed on: the original raises it where it makes or claims that call.
        """
        with self._lock:
            arrived, self._outcomes = self._outcomes, []
            self._is_delivering = False
        for entry, future in arrived:
            outcome = future.result()
            if outcome.error is None:
                self._end(entry, outcome.value)
            else:
                self._end(entry, error=self._failure(f"it raised {type(outcome.error).__name__}"))

    def _end(self, entry: EngineRequest, value: Any = None, error: EngineError | None = None) -> None:
        """Report the end of a request, with its value or its error, unless it has ended before.

        Called on the pool's loop. A request that was cancelled is no longer held, so its late result is dropped here.
        """
        if self.holds(entry):
            del self._waiting[entry.request.id]
            self._listeners.end_directly(entry, value, error)

    def _failure(self, reason: str) -> EngineError:
        error = EngineError(f"the call ahead of its place gave nothing: {reason}.", engine=self.name)
        error.__dict__["primitive"] = ""  # only the planner sees it, so that no request needs a copy of its own
        return error

    def holds(self, entry: EngineRequest) -> bool:
        return self._waiting.get(entry.request.id) is entry

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        """End the requests for whoever waits for them. Their calls go on for the original until the query ends.

        A provider call that was sent cannot be taken back, and the original may still make the same call and take its
        result.
        """
        for entry in entries:
            entry.is_cancelled = True
            self._end(entry, error=self._cancelled)

    def depths(self, event: DepthChanged) -> None: ...

    def announce_reader(self, entries: Sequence[EngineRequest]) -> None: ...

    async def close(self) -> None:
        """End all waiting requests with an error that says that the pool is closed.

        Calls that have been sent to providers are not ended here.
        """
        self._is_closed = True
        for entry in list(self._waiting.values()):
            self._end(entry, error=pool_closed(self.name))


class ProviderPool(OwnPool):
    """The pool of all objects of the process that have no other one."""


_shared: list[ProviderPool] = []
_lock = ForkedLock()


def shared_pool() -> ProviderPool:
    """Return the process's pool for objects without one. Its loop runs from the first query until the process ends."""
    with _lock.lock:
        if not _shared:
            engine = ProviderExecutor()
            _shared.append(
                ProviderPool(LocalRuntime({PROVIDER: [engine]}), {PROVIDER: [engine]}, ("prune-dependencies",))
            )
        return _shared[0]


def ensure_engine(pool: EnginePool) -> None:
    """Make sure that the pool's runtime has a `ProviderExecutor`. Raises `EngineUnavailable`.

    The executor makes prefetched calls of the user's own models. A pool that is there for such calls alone has one, and
    is started if it does not run yet; any other pool gets one here.
    """
    if isinstance(pool, ProviderPool):
        pool.running_now()
    else:
        pool.runtime.attach(ProviderExecutor())


@lru_cache(maxsize=256)
def without_tail(graph: Graph) -> Graph:
    """Return a graph without the primitives that no request depends on: the original computes their values itself."""
    requests = [p for p in graph if p.on_engine or p.holds_fragment]
    kept_ids = {p.id for p in requests}.union(*(graph.ancestors[p.id] for p in requests))
    return graph if len(kept_ids) == len(graph) else Graph(tuple(p for p in graph if p.id in kept_ids), Ref(INPUT))
