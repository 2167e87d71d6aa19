"""The two sides of a comparison: original graphs and accelerated graphs, each with a pool of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from differential.graphs.seen import Seen, see
from support.graphs import Case, Kit
from support.graphs.kit import TEXTS, engines
from support.request_counts import RequestCounts, watch

from teola_plugin import accelerate
from teola_plugin.engines.fake.base import FakeEngine
from teola_plugin.pool import EnginePool


@dataclass(frozen=True)
class Side:
    pool: EnginePool
    counts: RequestCounts
    accelerated: bool

    def fast(self, made: Any) -> Any:
        """Return the graph as this side runs it: accelerated or as it is."""
        return accelerate(made, pool=self.pool) if self.accelerated else made

    def kit(self) -> Kit:
        return Kit(self.pool, self.fast)

    def see(self, case: Case, way: str, graphs: Sequence[Any] | None = None, kit: Kit | None = None) -> Seen:
        """Run a graph that is built from a new kit, or `graphs` in turn. Return everything observable."""
        kit = kit or self.kit()
        return see(kit, case, way, self.counts, graphs or [self.fast(case.build(kit))])


@contextmanager
def side(accelerated: bool, made: Sequence[FakeEngine] = ()) -> Iterator[Side]:
    with EnginePool.local(list(made) or engines()) as pool:
        counts = RequestCounts()
        watch(pool, [pool.engine(name) for name in pool.engine_names], counts)
        Kit(pool).documents.add_texts(TEXTS)
        yield Side(pool, counts, accelerated)
