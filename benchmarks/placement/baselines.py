"""How others route, as placements for the same `EngineScheduler`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

from teola_plugin.scheduling.engine_queue import CacheEvent
from teola_plugin.scheduling.placement import Fits, PlacementChoice, PlacementRequest, PlacementRule, PrefixIndex

TREE = 2**24 // 64
"""Blocks that the prefix tree of a router may hold for a replica (SGLang and its descendants: 2**24 characters)."""


class Router:
    """Chooses one of all replicas when a request comes, whatever runs there."""

    def __init__(self) -> None:
        self.outstanding: dict[str, int] = {}
        self._where: dict[str, str] = {}

    def choose(self, asked: PlacementRequest) -> str:
        raise NotImplementedError

    def least(self) -> str:
        return min(self.outstanding, key=lambda name: (self.outstanding[name], name))

    def choose_replica(self, asked: PlacementRequest, fits: Fits) -> PlacementChoice | None:
        return PlacementChoice(self.choose(asked), asked.size, PlacementRule.EXPLORE)

    def record_sent(self, asked: PlacementRequest, placed: PlacementChoice) -> None:
        self.outstanding[placed.replica] += 1
        self._where[asked.id] = placed.replica

    def record_ended(self, at: float, requests: Iterable[str]) -> None:
        for request in requests:
            self.outstanding[self._where.pop(request)] -= 1

    def add_replica(self, replica: str) -> None:
        self.outstanding.setdefault(replica, 0)

    def begin_round(self, at: float) -> None: ...

    def record_prefilled(self, at: float, request: str) -> None: ...

    def record_cache_event(self, event: CacheEvent) -> None: ...

    def forget_replica(self, replica: str) -> None:
        self.outstanding.pop(replica, None)


class RoundRobin(Router):
    def __init__(self) -> None:
        super().__init__()
        self._next = itertools.count()

    def choose(self, asked: PlacementRequest) -> str:
        names = sorted(self.outstanding)
        return names[next(self._next) % len(names)]


class LeastLoaded(Router):
    """Fewest outstanding requests."""

    def choose(self, asked: PlacementRequest) -> str:
        return self.least()


class ByPrefix(Router):
    """A prefix tree from routing history; a long enough match sticks, unless loads are far apart."""

    match = 0.0
    """Share of the prompt that has to match."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixIndex(TREE)

    def unbalanced(self, most: int, least: int) -> bool:
        raise NotImplementedError

    def relief(self) -> str:
        """Where a request goes when loads are far apart."""
        return self.least()

    def choose(self, asked: PlacementRequest) -> str:
        if self.unbalanced(max(self.outstanding.values()), min(self.outstanding.values())):
            return self.relief()
        found = self.tree.match(asked.blocks)
        holders = [name for name, depth in found.by_replica().items() if depth == found.depth]
        if holders and found.depth >= self.match * len(asked.blocks):
            return min(holders, key=lambda name: (self.outstanding[name], name))
        return min(self.outstanding, key=lambda name: (self.tree.blocks_on(name), name))

    def record_sent(self, asked: PlacementRequest, placed: PlacementChoice) -> None:
        super().record_sent(asked, placed)
        self.tree.hold(placed.replica, asked.blocks, 0.0)


class VllmRouter(ByPrefix):
    """`cache_aware` of vLLM's router, which is SGLang's: threshold 0.3, unbalanced from 64 requests and 1.5 times."""

    match = 0.3

    def unbalanced(self, most: int, least: int) -> bool:
        return most - least > 64 and most > 1.5 * least


class RayServe(ByPrefix):
    """`PrefixCacheAffinityRouter` of Ray Serve: threshold 0.1, unbalanced from 10 requests, then the better of two."""

    match = 0.1

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(0)

    def unbalanced(self, most: int, least: int) -> bool:
        return most - least > 10

    def relief(self) -> str:
        two = self._rng.sample(sorted(self.outstanding), min(2, len(self.outstanding)))
        return min(two, key=self.outstanding.__getitem__)
