"""Seconds by batch size of the vector store, measured on a scratch collection."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Chunk, IngestRow, SearchVector
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Failed

if TYPE_CHECKING:
    from teola_plugin.engines.pgvector.engine import PgVectorEngine

_K = PrimitiveKind
ESTIMATE = EngineProfile(
    {_K.INGESTION: Curve.linear(0.004, 0.00003), _K.SEARCHING: Curve.linear(0.001, 0.001)},
    batching=Batching.CONTINUOUS,
    max_batch=1024,
    max_efficient_batch=256,
    max_requests=2048,
)
"""Until it was measured."""
_INGESTIONS = (1, 4, 16, 64, 256, 1024)
_SEARCHES = (1, 4, 16, 64)
_DIMENSION = 384
_TEXT = "What a chunk of a document says, in about forty words. " * 5


async def measure(engine: PgVectorEngine, before: EngineProfile, budget: float) -> EngineProfile:
    """`before` with curves for INGESTION and SEARCHING (among about 1,400 rows); aims at `budget` seconds."""
    import numpy as np

    dimension = engine.dimension or _DIMENSION
    vectors = np.random.default_rng(0).standard_normal((max(_INGESTIONS), dimension)).astype(np.float32)
    scratch = f"teola measure {uuid.uuid4()}"
    ends = time.perf_counter() + budget
    try:
        rows = await _points(engine, _INGESTIONS, PrimitiveKind.INGESTION, scratch, vectors, ends - budget / 2)
        searches = await _points(engine, _SEARCHES, PrimitiveKind.SEARCHING, scratch, vectors, ends)
    finally:
        await engine.forget(scratch)
    best = min(seconds / size for size, seconds in rows)
    efficient = next(size for size, seconds in rows if seconds / size <= 1.5 * best)
    curves = {PrimitiveKind.INGESTION: Curve(rows), PrimitiveKind.SEARCHING: Curve(searches)}
    return replace(before, curves=curves, max_efficient_batch=efficient)


async def _points(
    engine: PgVectorEngine, sizes: Sequence[int], kind: PrimitiveKind, scratch: str, vectors: object, ends: float
) -> tuple[tuple[int, float], ...]:
    """The better of two tries per size; the first try of all pays for what starts lazily."""
    await _timed(engine, _batch(kind, scratch, vectors, 1))
    points: list[tuple[int, float]] = []
    for size in sizes:
        if points and time.perf_counter() + points[-1][1] * size / points[-1][0] > ends:
            break
        points.append((size, min([await _timed(engine, _batch(kind, scratch, vectors, size)) for _ in range(2)])))
    return tuple(points)


def _batch(kind: PrimitiveKind, scratch: str, vectors: object, size: int) -> list[Request]:
    mark = uuid.uuid4().hex  # fresh ids: rows that are there already would cost less
    found = []
    for n in range(size):
        vector = vectors[n]  # type: ignore[index]
        payload = (
            IngestRow(scratch, Chunk(f"{mark}-{n}", _TEXT, {"n": n}), vector)
            if kind is PrimitiveKind.INGESTION
            else SearchVector(scratch, vector)
        )
        found.append(Request(f"measure-{mark}-{n}", kind, payload))
    return found


async def _timed(engine: PgVectorEngine, batch: list[Request]) -> float:
    began = time.perf_counter()
    async for result in engine.execute(batch):
        if isinstance(result, Failed):
            raise result.error
    return time.perf_counter() - began
