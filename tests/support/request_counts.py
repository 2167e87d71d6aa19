"""Counters of what a pool and its engines are requested to do, and the rows of stores as text."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import (
    Chunk,
    EmbedText,
    Generate,
    IngestRow,
    Request,
    Result,
    ScorePair,
    SearchVector,
    Warmup,
)

POISON = "poison"
"""A request whose content holds this word fails, so the failure depends on the content alone."""


_WRITE, _GENERATION = "ingest ", "generate "


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests, and of side effects of user code. Any thread may write them."""

    original_requests: Counter[str] = field(default_factory=Counter)
    """Requests of the original to engines, and calls of their administration. It made or claimed them."""
    engine_requests: Counter[str] = field(default_factory=Counter)
    """Requests that reached the engines, prefetched ones included."""
    side_effects: Counter[str] = field(default_factory=Counter)
    """Side effects of user code, calls of the user's own models included."""
    poisoned_calls: int = 0
    """Number of calls of models and engines that failed because their content held `POISON`."""

    def clear(self) -> None:
        for counter in (self.original_requests, self.engine_requests, self.side_effects):
            counter.clear()
        self.poisoned_calls = 0

    def copy(self) -> RequestCounts:
        return RequestCounts(
            self.original_requests.copy(), self.engine_requests.copy(), self.side_effects.copy(), self.poisoned_calls
        )

    def missing(self, later: RequestCounts) -> Counter[str]:
        """Return the requests that reached engines here but not in `later`.

        Equal requests count once, because pure work may be shared. Generations count as often as they were made.
        """
        return _merged(self.engine_requests) - _merged(later.engine_requests)

    @property
    def writes(self) -> Counter[str]:
        """Return the rows that reached a store."""
        return Counter({key: n for key, n in self.engine_requests.items() if key.startswith(_WRITE)})

    def note(self, effect: str) -> int:
        """Count a side effect. Return how often it was counted before."""
        self.side_effects[effect] += 1
        return self.side_effects[effect] - 1


def _merged(reached: Counter[str]) -> Counter[str]:
    return Counter({key: n if key.startswith(_GENERATION) else 1 for key, n in reached.items()})


def watch(pool: EnginePool, engines: Sequence[Engine], counts: RequestCounts) -> None:
    """Count in `counts`, from now on, what the original requests of the pool and what reaches the engines."""
    call, admin = pool.call, pool.admin

    def watched_call(kind: PrimitiveKind, engine: str, payloads: Sequence[Any], **more: Any) -> Any:
        counts.original_requests.update(request_text(payload) for payload in payloads)
        counts.poisoned_calls += sum(POISON in str(payload) for payload in payloads)
        return call(kind, engine, payloads, **more)

    def watched_admin(engine: str, method: str, *args: Any) -> Future[Any]:
        counts.original_requests[f"{method} {args}"] += 1
        return admin(engine, method, *args)

    pool.call, pool.admin = watched_call, watched_admin  # type: ignore[method-assign]
    for engine in engines:
        _watch_engine(engine, counts)


def _watch_engine(engine: Engine, counts: RequestCounts) -> None:
    execute = engine.execute

    def watched(batch: Sequence[Request]) -> AsyncIterator[Result]:
        counts.engine_requests.update(
            request_text(request.payload) for request in batch if not isinstance(request.payload, Warmup)
        )
        return execute(batch)

    engine.execute = watched  # type: ignore[method-assign]


def request_text(payload: Any) -> str:
    """Return the content of a request as a short text."""
    match payload:
        case EmbedText():
            return f"embed {payload.role} {payload.text!r}"
        case ScorePair():
            return f"score {payload.query!r} {payload.text!r}"
        case IngestRow():
            return f"{_WRITE}{payload.collection} {row(payload.chunk)}"
        case SearchVector():
            vector = [round(x, 4) for x in payload.vector]
            return f"search {payload.collection} k={payload.k} {payload.filter} {vector}"
        case Generate():
            return f"{_GENERATION}{payload.prompt.flat()!r} {payload.sampling}"
    return repr(payload)


def row(chunk: Chunk) -> str:
    """Return a chunk as text: id, text and metadata."""
    return f"{chunk.id}: {chunk.text!r} {json.dumps(dict(chunk.metadata), sort_keys=True)}"


async def rows_of(store: Any, collections: Sequence[str]) -> list[str]:
    """Return the rows of these collections as texts, ordered by id."""
    return [f"{name} {row(c)}" for name in collections for c in sorted(await store.find(name, ()), key=lambda c: c.id)]


def rows(store: Any) -> list[str]:
    """Return all rows of a fake store as texts."""

    async def everything() -> list[str]:
        return await rows_of(store, await store.collections())

    return asyncio.run(everything())
