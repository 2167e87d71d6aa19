"""The engine of the user's own models and retrievers: it executes nothing itself, it asks the query's place."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.adapters.ahead import freed, takes_time
from teola_plugin.adapters.langchain.own_models.places import open_places
from teola_plugin.engines.base import EngineLoad
from teola_plugin.errors import EngineError
from teola_plugin.graph import Batching, EngineProfile, Graph, Primitive, PrimitiveKind
from teola_plugin.passes import Optimised
from teola_plugin.passes.decoding_pipelining import held
from teola_plugin.pool import EnginePool
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Result
from teola_plugin.runtime.local import LocalRuntime

WRAPPED = "wrapped"
"""Name of the engine."""


@dataclass(frozen=True, slots=True, eq=False)
class CallLeaf:
    """Payload: call the leaf that stands at `site` with this input of the framework. Value: what the leaf returns."""

    site: str
    input: Any


class WrappedEngine:
    """Calls the user's own objects through `places`: on the caller's loop, or on a thread beside the caller's.

    It has no latencies to know and no limit of its own; passes leave its primitives where they are, but for the order
    edges that nothing asks for. What a call raises is the plain object's to show: here the request just failed.
    """

    name = WRAPPED
    kinds = frozenset({PrimitiveKind.PREFILLING, PrimitiveKind.DECODING, PrimitiveKind.SEARCHING})
    profile = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1 << 30, max_requests=1 << 30)

    def __init__(self) -> None:
        self._stopped: dict[str, asyncio.Future[None]] = {}

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for ended in asyncio.as_completed([self._one(request) for request in batch]):
            yield await ended

    async def _one(self, request: Request) -> Result:
        place = open_places.get(request.query)
        if place is None:
            return self._failed(request, "its query is over")
        stopped = self._stopped[request.id] = asyncio.get_running_loop().create_future()
        try:
            outcome = asyncio.wrap_future(place.ahead(request.payload.site, request.payload.input))
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


class WrappedPool(EnginePool):
    """Nothing but the user's own objects. One serves all chains of the process that have no pool."""

    @property
    def profiles(self) -> Mapping[str, EngineProfile]:
        """None: what is not known is left alone."""
        return {}


_shared: list[WrappedPool] = []
_lock = threading.Lock()


def shared_pool() -> WrappedPool:
    """The process's pool of wrapped objects; its loop runs from the first query on, until the process ends."""
    with _lock:
        if not _shared:
            engine = WrappedEngine()
            _shared.append(WrappedPool(LocalRuntime({WRAPPED: [engine]}), {WRAPPED: [engine]}, ("prune-dependencies",)))
        return _shared[0]


def started(pool: EnginePool) -> None:
    """Make sure that the pool's runtime has the engine of wrapped objects. Raises `EngineUnavailable`."""
    if isinstance(pool, WrappedPool):
        with _lock:
            if not pool._started:
                pool.start()
                atexit.register(pool.close)
    else:
        pool.runtime.attach(WrappedEngine())


_CALLS = (PrimitiveKind.PREFILLING, PrimitiveKind.SEARCHING)
_WRITING = (PrimitiveKind.DECODING, PrimitiveKind.PARTIAL_DECODING)


def gained(
    optimised: Optimised, alike: Callable[[str, str], bool], sure: Callable[[Primitive, frozenset[str]], bool]
) -> frozenset[str]:
    """Sites of wrapped leaves that no longer stand behind something they do not need, and that takes time.

    `alike`: whether the leaves at two sites take as long. `sure`: whether the plain object comes to a call whatever
    the given primitives, which it stands behind, make of it.
    """
    source, graph = optimised.source, optimised.graph
    if source is None or source is graph:
        return frozenset()
    calls = [p for p in graph if p.engine == WRAPPED and p.kind in _CALLS and p.id in source]
    return frozenset(
        _site(p)
        for p in calls
        if any(takes_time(source[name]) for name in freed(p.id, source, graph))
        and sure(p, freed(p.id, source, graph))
        and not any(alike(_site(p), _site(q)) and _lasts_longer(q, p, source, graph) for q in calls)
    )


def asked_before(optimised: Optimised) -> dict[str, frozenset[str]]:
    """Of each site, those that it no longer stands behind, and whose input is known at once: making it may fail."""
    source, graph = optimised.source, optimised.graph
    if source is None:
        return {}
    calls = {p.id: _site(p) for p in graph if p.engine == WRAPPED and p.kind in _CALLS and p.id in source}
    at_once = {name for name in calls if not any(takes_time(graph[one]) for one in graph.ancestors[name])}
    return {site: frozenset(calls[q] for q in at_once & freed(name, source, graph)) for name, site in calls.items()}


def predicted(graph: Graph) -> frozenset[str]:
    """Sites of wrapped leaves that are called for the items of a list while an engine is still writing it."""
    writing = [d for d in graph if d.kind in _WRITING and d.engine != WRAPPED]
    grown = {name for d in writing for name in d.attributes.stream_items}
    cut = [p for p in graph if p.tentative and any(d.id in graph.ancestors[p.id] for d in writing)]
    mapped = [q for p in graph if p.id in grown for q in held(p)]
    return frozenset(_site(q) for q in (*cut, *mapped) if q.engine == WRAPPED and q.kind in _CALLS)


def _site(p: Primitive) -> str:
    return p.attributes.wrapped


def _lasts_longer(q: Primitive, p: Primitive, source: Graph, graph: Graph) -> bool:
    """Whether nobody has `p` sooner for its early start: a search that runs beside it in the plain object still waits
    for all that `p` waited for, and whoever needs `p` needs both."""
    if {p.kind, q.kind} != {PrimitiveKind.SEARCHING} or p is q:
        return False
    beside = p.id not in source.ancestors[q.id] and q.id not in source.ancestors[p.id]
    users = [r for r in graph if takes_time(r) and p.id in graph.ancestors[r.id]]
    needed = all(q.id in graph.ancestors[r.id] for r in users)
    return beside and needed and freed(p.id, source, graph) <= graph.ancestors[q.id]
