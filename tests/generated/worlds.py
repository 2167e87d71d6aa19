"""A new pool of fake engines with small latencies, and counters of all its requests."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, Protocol

from support.request_counts import POISON, RequestCounts, watch

from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, Faults, embed_words
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Chunk, Done, IngestRow, Request

K = PrimitiveKind
COLLECTIONS = ("notes", "uploads")


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of every engine, a few milliseconds from a seed. 0 means none."""

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


@dataclass(frozen=True, slots=True)
class World:
    """A pool, not started yet, and what is known of it."""

    pool: EnginePool
    store: Any
    counts: RequestCounts
    aside: Aside
    scale: float = 1.0
    """Of the latencies."""


def fakes(latency: Latency, *, poisoned: bool = False) -> list[Engine]:
    profiles = latency.profiles()
    faults = Faults(fail_on=lambda request: POISON in str(request.payload)) if poisoned else Faults()
    kinds = {"llm": FakeLLM, "embedder": FakeEmbedder, "reranker": FakeReranker, "store": FakeStore}
    return [kind(name, profiles[name], faults=faults) for name, kind in kinds.items()]


def world_of(engines: list[Engine], aside: Aside | None = None, *, scale: float = 1.0, virtual: bool = False) -> World:
    """Create a world on these engines.

    With `virtual`, the pool runs on the running loop, otherwise on a thread of its own. Without `aside`, another
    connection to the same rows is created.
    """
    store: Any = next(engine for engine in engines if engine.name == "store")
    pool = EnginePool.on_this_loop(engines) if virtual else EnginePool.local(engines)
    world = World(pool, store, RequestCounts(), aside or FakeAside(store), scale)
    watch(pool, engines, world.counts)
    return world


class Aside(Protocol):
    """Work on a store that its pool knows nothing of, as another process would do it."""

    async def put(self, collection: str, id: str, text: str) -> None: ...

    async def delete(self, collection: str, ids: list[str]) -> None: ...


class FakeAside:
    """Another connection to the rows of a fake store."""

    def __init__(self, store: FakeStore) -> None:
        self._other = FakeStore("aside", store.profile)
        shared = {name: value for name, value in vars(store).items() if name in ("_collections", "_orders")}
        vars(self._other).update(shared)

    async def put(self, collection: str, id: str, text: str) -> None:
        await ingested(self._other, collection, id, text, by="another")

    async def delete(self, collection: str, ids: list[str]) -> None:
        await self._other.delete(collection, ids)


_numbers = itertools.count(1)


async def ingested(store: Any, collection: str, id: str, text: str, **metadata: Any) -> None:
    """Write a row without the pool."""
    row = IngestRow(collection, Chunk(id, text, metadata), embed_words(text, "document"))
    batch = [Request(f"outside{next(_numbers)}", K.INGESTION, row)]
    ends = [result async for result in store.execute(batch)]
    assert all(isinstance(end, Done) for end in ends), ends
