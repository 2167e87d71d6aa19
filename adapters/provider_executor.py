"""The engine that makes provider calls, and the pool of objects that have no other engine.

An adapter registers who prefetches for each live query in `prefetchers`; the engine asks there for a call's result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from teola_plugin.adapters.own_calls import Outcome
from teola_plugin.adapters.own_pool import OwnPool
from teola_plugin.engines.base import EngineLoad
from teola_plugin.errors import EngineError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Result
from teola_plugin.runtime.forks import ForkedLock, in_child
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.provider_calls import PROVIDER


class Prefetcher(Protocol):
    """Makes the provider calls that the graph of one query asks for."""

    def prefetch(self, key: str, input: Any, request_id: str) -> Future[Outcome]:
        """Return what the object at a call site gives for an input: from a prefetch, or from the original's call."""
        ...


prefetchers: dict[str, Prefetcher] = {}
"""By the ids of live queries."""
in_child(prefetchers.clear)  # prefetches are under way in the parent process alone


@dataclass(frozen=True, slots=True, eq=False)
class ProviderRequest:
    """Payload: call the object at `site` with this input of its framework. Value: what it returns."""

    site: str
    input: Any


class ProviderExecutor:
    """Calls the user's own objects by the query's `Prefetcher`: on the caller's loop, or a thread beside the caller's.

    It has no latencies to know and no limit of its own; passes leave its primitives where they are, but for the order
    edges that nothing asks for. What a call raises is the plain object's to show: here the request just failed.
    """

    name = PROVIDER
    kinds = frozenset({PrimitiveKind.PREFILLING, PrimitiveKind.DECODING, PrimitiveKind.SEARCHING})
    profile = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1 << 30, max_requests=1 << 30)

    def __init__(self) -> None:
        self._stopped: dict[str, asyncio.Future[None]] = {}

    async def start(self) -> None:
        self._stopped.clear()

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for ended in asyncio.as_completed([self._one(request) for request in batch]):
            yield await ended

    async def _one(self, request: Request) -> Result:
        prefetcher = prefetchers.get(request.query)
        if prefetcher is None:
            return self._failed(request, "its query is over")
        stopped = self._stopped[request.id] = asyncio.get_running_loop().create_future()
        try:
            outcome = asyncio.wrap_future(prefetcher.prefetch(request.payload.site, request.payload.input, request.id))
            await asyncio.wait([outcome, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._stopped[request.id]
        if not outcome.done():
            return self._failed(request, "it was cancelled")
        if outcome.result().error is not None:
            return self._failed(request, f"it raised {type(outcome.result().error).__name__}")
        return Done(request.id, outcome.result().value)

    def _failed(self, request: Request, why: str) -> Failed:
        return Failed(request.id, EngineError(f"the call ahead of its place gave nothing: {why}.", engine=self.name))

    async def cancel(self, request_id: str) -> None:
        stopped = self._stopped.get(request_id)
        if stopped is not None and not stopped.done():
            stopped.set_result(None)

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._stopped))

    def versions(self) -> Mapping[str, str]:
        return {}


class ProviderPool(OwnPool):
    """One serves all objects of the process that have no pool."""


_shared: list[ProviderPool] = []
_lock = ForkedLock()


def shared_pool() -> ProviderPool:
    """Return the process's pool for objects without one. Its loop runs from the first query until the process ends."""
    with _lock.here:
        if not _shared:
            engine = ProviderExecutor()
            _shared.append(
                ProviderPool(LocalRuntime({PROVIDER: [engine]}), {PROVIDER: [engine]}, ("prune-dependencies",))
            )
        return _shared[0]


def ensure_engine(pool: EnginePool) -> None:
    """Make sure that the pool's runtime has a `ProviderExecutor`. Raises `EngineUnavailable`."""
    if isinstance(pool, ProviderPool):
        pool.running_now()
    else:
        pool.runtime.attach(ProviderExecutor())
