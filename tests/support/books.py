"""What a pool was asked, by whom, what reached its engines, and what its store holds."""

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
"""A request that holds it fails: a fault that depends on nothing but the content."""


_WRITE, _GENERATION = "ingest ", "generate "


@dataclass(slots=True)
class Books:
    """What was asked, by whom, and what user code did; written from any thread."""

    asked: Counter[str] = field(default_factory=Counter)
    """By the plain object, of engines and of their administration: claimed or made."""
    reached: Counter[str] = field(default_factory=Counter)
    """What the engines got, early work included."""
    done: Counter[str] = field(default_factory=Counter)
    """What user code did, the calls of the user's own models among it."""
    struck: int = 0
    """Calls of models and engines that failed because of what they were asked."""

    def clear(self) -> None:
        for book in (self.asked, self.reached, self.done):
            book.clear()
        self.struck = 0

    def copy(self) -> Books:
        return Books(self.asked.copy(), self.reached.copy(), self.done.copy(), self.struck)

    def missing(self, later: Books) -> Counter[str]:
        """What reached engines here and not there: equal work that is pure may be done once, a generation may not."""
        return _merged(self.reached) - _merged(later.reached)

    @property
    def writes(self) -> Counter[str]:
        """Rows that reached a store."""
        return Counter({key: n for key, n in self.reached.items() if key.startswith(_WRITE)})

    def note(self, what: str) -> int:
        """How often it was noted before."""
        self.done[what] += 1
        return self.done[what] - 1


def _merged(reached: Counter[str]) -> Counter[str]:
    return Counter({key: n if key.startswith(_GENERATION) else 1 for key, n in reached.items()})


def watch(pool: EnginePool, engines: Sequence[Engine], books: Books) -> None:
    """From now on, the books have what the plain object asks the pool for, and what reaches the engines."""
    call, admin = pool.call, pool.admin

    def watched_call(kind: PrimitiveKind, engine: str, payloads: Sequence[Any], **more: Any) -> Any:
        books.asked.update(shown(payload) for payload in payloads)
        books.struck += sum(POISON in str(payload) for payload in payloads)
        return call(kind, engine, payloads, **more)

    def watched_admin(engine: str, method: str, *args: Any) -> Future[Any]:
        books.asked[f"{method} {args}"] += 1
        return admin(engine, method, *args)

    pool.call, pool.admin = watched_call, watched_admin  # type: ignore[method-assign]
    for engine in engines:
        _watch_engine(engine, books)


def _watch_engine(engine: Engine, books: Books) -> None:
    execute = engine.execute

    def watched(batch: Sequence[Request]) -> AsyncIterator[Result]:
        books.reached.update(shown(request.payload) for request in batch if not isinstance(request.payload, Warmup))
        return execute(batch)

    engine.execute = watched  # type: ignore[method-assign]


def shown(payload: Any) -> str:
    """A request's content, short enough to be read."""
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
    return f"{chunk.id}: {chunk.text!r} {json.dumps(dict(chunk.metadata), sort_keys=True)}"


async def rows_of(store: Any, collections: Sequence[str]) -> list[str]:
    """What is in these collections, in the order of the ids."""
    return [f"{name} {row(c)}" for name in collections for c in sorted(await store.find(name, ()), key=lambda c: c.id)]


def rows(store: Any) -> list[str]:
    """All that is in a fake store."""

    async def everything() -> list[str]:
        return await rows_of(store, await store.collections())

    return asyncio.run(everything())
