"""E2 (Preble, arXiv 2407.00023): exploit where the prefix is, or explore where work is cheapest.

In this order: the session's home; the instances that hold the prompt's prefix, if they hold more of the prompt than
they lack; the instance that decodes most, if others prefill; the instance where L + M + R is least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.graph.prefix_blocks import BLOCK_TOKENS
from teola_plugin.scheduling.engine_events import CacheCleared, CacheEvent, CacheRemoved, CacheStored, CacheUse
from teola_plugin.scheduling.placement.base import Asked, Fits, Placed, Why
from teola_plugin.scheduling.placement.least_outstanding import SessionAffinity
from teola_plugin.scheduling.placement.load_model import LoadModel, prefill_cost
from teola_plugin.scheduling.placement.options import CAPACITY, PREBLE, E2Options
from teola_plugin.scheduling.placement.prefix_index import NOTHING, Match, PrefixIndex, key_portion
from teola_plugin.scheduling.placement.rebalance import Balancer

LOOKS = 8
"""Instances whose eviction cost is computed for one decision; the cheapest without it come first."""
EXPECTED_TOKENS = 64
"""Tokens of an answer, until some have been seen."""
LONG = 2.0
"""By how much a line has to be the longer way before something is computed twice."""
KEPT_FOR = 1.0
"""Seconds for which a preference of a waiting request is kept."""
MOST_PREFERENCES = 10_000
_ANY_SIZE = 2**62


@dataclass(frozen=True, slots=True)
class Preference:
    """Where a waiting request belongs. It is kept a while: those that wait are looked at with every event."""

    wanted: tuple[tuple[str, int], ...]
    """Instances, each with the units that the request takes there; empty: any will do."""
    least: int
    """Units that it takes anywhere, at the least."""
    elsewhere: float
    """Seconds of prefilling on any other instance, at least."""
    until: float


class E2:
    """Chooses an instance for each request of an engine that caches prefixes. No clock: times come with the calls."""

    def __init__(self, profile: EngineProfile, options: E2Options = PREBLE) -> None:
        self.options = options
        capacity = options.capacity or profile.cache_tokens // BLOCK_TOKENS or CAPACITY
        self.index = PrefixIndex(capacity, options.window / 2)
        self.loads = LoadModel(profile.seconds(PrimitiveKind.DECODING, EXPECTED_TOKENS), window=options.window)
        self.balancer = Balancer(self.loads, options.window, options.interval, options.least_requests)
        self._cost = prefill_cost(profile)
        self._affinity = SessionAffinity()
        self._gangs: dict[str, dict[str, int]] = {}
        self._line: dict[str, float] = {}
        """Seconds of prefilling that wait for an instance, in front of the next request of this round."""
        self._preferences: dict[str, Preference] = {}
        """Of requests that wait."""
        self._too_large = _ANY_SIZE
        """Units from which nothing fits anywhere in this round."""
        self._at = 0.0

    # ------------------------------------------------------------ what happens

    def up(self, instance: str) -> None:
        self.loads.up(instance)

    def forget_instance(self, instance: str) -> None:
        self.loads.forget(instance)
        self.index.forget(instance)
        self._affinity.forget_instance(instance)
        self.balancer.forget(instance)
        self._preferences.clear()
        for members in self._gangs.values():
            members.pop(instance, None)

    def begin(self, at: float) -> None:
        self._at = at
        self._too_large = _ANY_SIZE
        self._line.clear()
        self.loads.expire(at)

    def sent(self, asked: Asked, placed: Placed) -> None:
        self._preferences.pop(asked.id, None)
        path = self.index.hold(placed.instance, asked.blocks, self._at)
        cost = self._cost(placed.units)
        self.loads.sent(
            self._at, asked.id, placed.instance, cost, new=placed.units, tokens=asked.size, key=key_portion(path)
        )
        self._affinity.remember(asked.session, placed.instance)
        if asked.gang:
            members = self._gangs.setdefault(asked.gang, {})
            members[placed.instance] = members.get(placed.instance, 0) + 1
            if len(self._gangs) > self.options.gangs:
                del self._gangs[next(iter(self._gangs))]

    def prefilled(self, at: float, request: str) -> None:
        self.loads.prefilled(at, request)

    def ended(self, at: float, requests: Iterable[str]) -> None:
        for request in requests:
            self.loads.ended(at, request)
        if self.balancer.look(at):
            self._preferences.clear()

    def cached(self, event: CacheEvent) -> None:
        if event.instance not in self.loads:
            return
        if isinstance(event, CacheStored):
            self.index.hold(event.instance, event.blocks, event.at, used=False)
        elif isinstance(event, CacheRemoved):
            self.index.cut(event.instance, event.blocks, event.keeps)
        elif isinstance(event, CacheCleared):
            self.index.forget(event.instance)
        elif isinstance(event, CacheUse):
            self.index.use(event.instance, event.share)

    # ------------------------------------------------------------ the decision

    def place(self, asked: Asked, fits: Fits) -> Placed | None:
        preferred = self._preferences.get(asked.id)
        if preferred is not None and preferred.until > self._at:
            if preferred.least >= self._too_large:
                return None
            if preferred.wanted and not any(fits(name, units) for name, units in preferred.wanted):
                return self._wait(asked, preferred, fits)
        match = self.index.match(asked.blocks) if asked.blocks else NOTHING
        why, wanted = self._wanted(asked, match)
        least = _units(asked, match.depth)
        if not wanted:
            found = self._explore(asked, match, fits)
            if found is None:
                self._remember(asked, Preference((), least, 0.0, self._at + KEPT_FOR))
            return found
        free = [(self.loads.load(name), name, units) for name, units in wanted if fits(name, units)]
        if free:
            _, name, units = min(free)
            placed = Placed(name, units, why)
            return placed if why is Why.SESSION else self._relieved(asked, match, placed, fits)
        elsewhere = self._elsewhere(asked, match, wanted)
        preferred = Preference(tuple(wanted), least, elsewhere, self._at + KEPT_FOR)
        self._remember(asked, preferred)
        return self._wait(asked, preferred, fits)

    def _remember(self, asked: Asked, preferred: Preference) -> None:
        """Those who never come back (they were cancelled) lose theirs when there are many."""
        if len(self._preferences) >= MOST_PREFERENCES:
            self._preferences = {name: kept for name, kept in self._preferences.items() if kept.until > self._at}
        if len(self._preferences) < MOST_PREFERENCES:
            self._preferences[asked.id] = preferred

    def _wanted(self, asked: Asked, match: Match) -> tuple[Why, list[tuple[str, int]]]:
        home = self._affinity.get(asked.session)
        if home is not None:
            units = _units(asked, match.at(home))
            if not asked.blocks or 2 * units < asked.size or not self._crowded(home):
                return Why.SESSION, [(home, units)]
            return Why.EXPLORE, []  # little of it is there: where it is soon done matters more
        least = _units(asked, match.depth)
        if 2 * least >= asked.size:  # exploit only what is more than the rest
            return Why.EXPLORE, []
        moved = self.balancer.redirect(match, self._at)
        if moved is not None and not moved.copy:
            return Why.MOVED, [(moved.target, _units(asked, match.at(moved.target)))]
        found = [(name, units) for name, units in self._holders(asked, match) if units <= 2 * least]
        if moved is not None and all(name != moved.target for name, _ in found):
            found.append((moved.target, _units(asked, match.at(moved.target))))
            return Why.MOVED, found
        return Why.EXPLOIT, found

    def _crowded(self, name: str) -> bool:
        """Whether more runs there than elsewhere."""
        running = {other: load.running for other, load in self.loads}
        return running[name] > min(running.values())

    @staticmethod
    def _holders(asked: Asked, match: Match) -> list[tuple[str, int]]:
        """Those that hold the last run, and those before it that lack little more (`_wanted` looks how much)."""
        found: dict[str, int] = {}
        for run in reversed(match.path):
            units = _units(asked, min(run.end, match.depth))
            for name in run.held:
                found.setdefault(name, units)
            if 2 * units >= asked.size:
                break
        return list(found.items())

    # ------------------------------------------------------------ what it belongs to is full

    def _wait(self, asked: Asked, preferred: Preference, fits: Fits) -> Placed | None:
        """None to wait for a slot and compute the rest there; else an instance with a slot now, to compute more."""
        if not asked.uncontended and not asked.urgent:
            return None
        at, line = self._at, self._line
        waits = [(self.loads.wait(name, at) + line.get(name, 0.0), name, units) for name, units in preferred.wanted]
        seconds, name, units = min(waits)
        seconds += self._cost(units)
        if asked.urgent or seconds >= preferred.elsewhere:
            found = self._explore(asked, self.index.match(asked.blocks), fits)
            if found is not None and (asked.urgent or seconds >= self._price(asked, found, units)):
                return replace(found, why=Why.SPILL)
        line[name] = line.get(name, 0.0) + self._cost(units)
        return None

    def _relieved(self, asked: Asked, match: Match, placed: Placed, fits: Fits) -> Placed:
        """An instance that prefills nothing instead, if standing in line where the prefix is takes `LONG` times as
        long. Rebalancing (`Balancer`) sees such a line after a minute or two only."""
        seconds = self.loads.line(placed.instance, self._at) + self._cost(placed.units)
        idle = self.loads.idle
        if not idle or seconds < LONG * self._cost(asked.size):
            return placed
        found = self._cheapest(asked, match.by_instance(), {}, lambda name, units: name in idle and fits(name, units))
        if found is None or seconds < LONG * self._price(asked, found, placed.units):
            return placed
        return replace(found, why=Why.SPILL)

    def _price(self, asked: Asked, elsewhere: Placed, units: int) -> float:
        """Seconds that it costs to compute elsewhere what is cached at home: its own, those of the others whose
        prefixes it drives out, and those of who comes next there, which is delayed if the instance is a busy one."""
        own = self._cost(elsewhere.units)
        more = max(0.0, own - self._cost(units))
        return own + self._memory(elsewhere, asked) + more * self.loads.busy(elsewhere.instance, self._at)

    def _elsewhere(self, asked: Asked, match: Match, wanted: list[tuple[str, int]]) -> float:
        """Seconds of prefilling on any other instance, at least. A session whose prompt is not known stays at home."""
        if not asked.blocks:
            return math.inf
        homes = {name for name, _ in wanted}
        held = [count for name, count in match.by_instance().items() if name not in homes]
        return self._cost(_units(asked, max(held, default=0)))

    # ------------------------------------------------------------ explore

    def _explore(self, asked: Asked, match: Match, fits: Fits) -> Placed | None:
        if _units(asked, match.depth) >= self._too_large:
            return None
        members = self._gangs.get(asked.gang) if asked.gang else None
        held = match.by_instance()
        found = None if members else self._decoder(asked, held, fits)
        if found is None:
            found = self._cheapest(asked, held, members or {}, fits)
        if found is None and not asked.warm_up:
            self._too_large = min(self._too_large, asked.size)
        return found

    def _decoder(self, asked: Asked, held: dict[str, int], fits: Fits) -> Placed | None:
        """The instance that mostly decodes, most of all: it has computing power to spare. None if all are alike."""
        least = self.options.decoding
        decoders = [(load.hit_ratio, name) for name, load in self.loads if load.hits >= least * load.tokens > 0]
        if len(decoders) == len(self.loads):
            return None
        for _, name in sorted(decoders, reverse=True)[:LOOKS]:
            units = _units(asked, held.get(name, 0))
            if fits(name, units):
                return Placed(name, units, Why.BALANCE)
        return None

    def _cheapest(self, asked: Asked, held: dict[str, int], members: dict[str, int], fits: Fits) -> Placed | None:
        """Least L + M + R among instances with a slot; members of a gang go apart. M is looked at last: it is 0 or
        more, so an instance that is dearer without it cannot win. R is the seconds to prefill what is not cached."""
        decode, whole = self.loads.decode, self._cost(asked.size)
        rest = {name: self._cost(_units(asked, count)) for name, count in held.items()}
        ranked = [
            (members.get(name, 0), load.prefill + load.running * decode + rest.get(name, whole), name)
            for name, load in self.loads
        ]
        heapify(ranked)
        best: tuple[int, float, str, Placed] | None = None
        looks = 0
        while ranked:
            mates, cost, name = heappop(ranked)
            if best is not None and ((mates, cost) >= best[:2] or looks >= LOOKS):
                break
            placed = Placed(name, _units(asked, held.get(name, 0)), Why.EXPLORE)
            if not fits(name, placed.units):
                continue
            looks += 1
            found = (mates, cost + self._memory(placed, asked), name, placed)
            best = found if best is None else min(best, found)
        return best[3] if best is not None else None

    def _memory(self, placed: Placed, asked: Asked) -> float:
        """M: seconds that others will spend on prefilling what this request drives out."""
        lost = self.index.loss(placed.instance, len(asked.blocks) * placed.units // asked.size, self._at)
        return self._cost(lost * BLOCK_TOKENS) if lost else 0.0


def _units(asked: Asked, held: int) -> int:
    """Tokens that an instance computes if it holds so many of the prompt's blocks: one at least."""
    if not held:
        return asked.size
    return max(1, asked.size - asked.size * held // len(asked.blocks))
