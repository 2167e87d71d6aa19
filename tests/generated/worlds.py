"""A fresh pool of fakes with small latencies, and everything that is asked of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from teola_plugin.engines.base import Done, Engine, Request, Result
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, Faults, embed_words
from teola_plugin.engines.payloads import Chunk, EmbedText, Generate, IngestRow, ScorePair, SearchVector, Warmup
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.pool import EnginePool

K = PrimitiveKind
COLLECTIONS = ("notes", "uploads")


@dataclass(frozen=True, slots=True)
class Latency:
    """Of every engine, a few milliseconds each, from a seed; 0 for none at all."""

    seed: int = 0
    scale: float = 1.0
    at_once: tuple[str, ...] = ()
    """Engines that answer at once, as early work does."""

    def profiles(self) -> dict[str, EngineProfile]:
        made = random.Random(self.seed)

        def some(most: float, engine: str, per_unit: float = 0.0) -> Curve:
            scale = 0.0 if engine in self.at_once else self.scale
            return Curve.linear(made.random() * most * scale, made.random() * per_unit * scale)

        return {
            "llm": EngineProfile(
                {K.PREFILLING: some(0.003, "llm"), K.DECODING: some(0.0, "llm", 0.0006)},
                batching=Batching.CONTINUOUS,
                max_batch=4096,
                prefix_caching=made.random() < 0.5,
                min_split_tokens=4,
            ),
            "embedder": EngineProfile(
                {K.EMBEDDING: some(0.004, "embedder")}, max_efficient_batch=made.choice((2, 128))
            ),
            "reranker": EngineProfile({K.RERANKING: some(0.004, "reranker")}),
            "store": EngineProfile(
                {K.INGESTION: some(0.004, "store"), K.SEARCHING: some(0.004, "store")}, batching=Batching.CONTINUOUS
            ),
        }


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

    def note(self, what: str) -> int:
        """How often it was noted before."""
        self.done[what] += 1
        return self.done[what] - 1


@dataclass(frozen=True, slots=True)
class World:
    """A pool, not started yet, and what is known of it."""

    pool: EnginePool
    store: Any
    books: Books
    aside: Aside
    scale: float = 1.0
    """Of the latencies."""


POISON = "poison"
"""A request that holds it fails: a fault that depends on nothing but the content."""


def fakes(latency: Latency, *, poisoned: bool = False) -> list[Engine]:
    profiles = latency.profiles()
    faults = Faults(fail_on=lambda request: POISON in str(request.payload)) if poisoned else Faults()
    kinds = {"llm": FakeLLM, "embedder": FakeEmbedder, "reranker": FakeReranker, "store": FakeStore}
    return [kind(name, profiles[name], faults=faults) for name, kind in kinds.items()]


def world_of(engines: list[Engine], aside: Aside | None = None, *, scale: float = 1.0, virtual: bool = False) -> World:
    """`virtual`: on the running loop, else on a thread of its own. Without `aside`, one is made on the same rows."""
    store: Any = next(engine for engine in engines if engine.name == "store")
    pool = EnginePool.on_this_loop(engines) if virtual else EnginePool.local(engines)
    world = World(pool, store, Books(), aside or FakeAside(store), scale)
    watch(pool, engines, world.books)
    return world


class Aside(Protocol):
    """Work on a store that its pool knows nothing of, as another process would do it."""

    async def put(self, collection: str, id: str, text: str) -> None: ...

    async def delete(self, collection: str, ids: list[str]) -> None: ...


class FakeAside:
    """Another store on the same rows."""

    def __init__(self, store: FakeStore) -> None:
        self._other = FakeStore("aside", store.profile)
        self._other._collections = store._collections

    async def put(self, collection: str, id: str, text: str) -> None:
        await ingested(self._other, collection, id, text, by="another")

    async def delete(self, collection: str, ids: list[str]) -> None:
        await self._other.delete(collection, ids)


_numbers = itertools.count(1)


async def ingested(store: Any, collection: str, id: str, text: str, **metadata: Any) -> None:
    """A row, written past the pool."""
    row = IngestRow(collection, Chunk(id, text, metadata), embed_words(text, "document"))
    batch = [Request(f"outside{next(_numbers)}", K.INGESTION, row)]
    ends = [result async for result in store.execute(batch)]
    assert all(isinstance(end, Done) for end in ends), ends


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
            return f"ingest {payload.collection} {row(payload.chunk)}"
        case SearchVector():
            vector = [round(x, 4) for x in payload.vector]
            return f"search {payload.collection} k={payload.k} {payload.filter} {vector}"
        case Generate():
            return f"generate {payload.prompt.flat()!r} {payload.sampling}"
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
