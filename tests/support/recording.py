"""Records the requests of an engine or a pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Request, Result
from teola_plugin.scheduling.engine_queue import Enqueue


def record(engine: Engine) -> list[Request]:
    """Return a list that gets every request which reaches the engine from now on."""
    seen: list[Request] = []
    execute = engine.execute

    def spy(batch: Sequence[Request]) -> AsyncIterator[Result]:
        seen.extend(batch)
        return execute(batch)

    engine.execute = spy  # type: ignore[method-assign]
    return seen


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it reached its engine's queue."""

    engine: str
    tenant: str
    app: str
    weight: float


def arrivals(pool: EnginePool) -> list[Arrival]:
    """Return a list that gets every request which is queued at an engine of the pool from now on."""
    seen: list[Arrival] = []
    for name in pool.engine_names:
        port: Any = pool.runtime.port(name)
        enqueue = port.enqueue

        def spy(entries: Sequence[Any], event: Enqueue, *more: Any, name: str = name, enqueue: Any = enqueue) -> None:
            seen.extend(Arrival(name, entry.request.tenant, event.app, event.weight) for entry in entries)
            enqueue(entries, event, *more)

        port.enqueue = spy
    return seen
