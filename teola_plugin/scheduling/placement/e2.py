"""E2 (Preble, arXiv 2407.00023): exploit where the prefix is, or explore where work is cheapest.

In this order: the session's home; the replicas that hold the prompt's prefix, if they hold more of the prompt than
they lack; the replica that decodes most, if others prefill; the replica where L + M + R is least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.graph.prefix_blocks import BLOCK_TOKENS
from teola_plugin.scheduling.engine_queue import CacheCleared, CacheEvent, CacheRemoved, CacheStored, CacheUse
from teola_plugin.scheduling.placement.base import (
    Fits,
    PlacementChoice,
    PlacementRequest,
    PlacementRule,
    SessionAffinity,
)
from teola_plugin.scheduling.placement.load_model import WINDOW, LoadModel, prefill_cost
from teola_plugin.scheduling.placement.prefix_index import NO_MATCH, Match, PrefixIndex, key_portion
from teola_plugin.scheduling.placement.rebalance import Balancer

CAPACITY = 12_288
"""Blocks of a replica's cache where the profile has none: 196,608 tokens, a 7B model on 48 GB."""
DECODING_SHARE = 0.7
"""Share of prompt tokens found in the cache from which a replica mostly decodes."""


@dataclass(frozen=True, slots=True)
class E2Options:
    """Preble's settings; times in seconds."""

    capacity: int | None = None
    """Blocks of a replica's cache; by default what the engine's profile says, else `CAPACITY`."""
    window: float = WINDOW
    decoding: float = DECODING_SHARE
    interval: float = 10.0
    """Seconds between two checks of the balance of loads."""
    least_requests: int = 50
    """Requests per replica and window below which loads are not balanced."""
    gangs: int = 1000


PREBLE = E2Options()

MAX_COST_CHECKS = 8
"""Replicas whose eviction cost is computed for one decision; those that are cheapest without it come first."""
EXPECTED_TOKENS = 64
"""Expected length of an answer in tokens, until some were seen."""
MIN_QUEUE_RATIO = 2.0
"""How many times longer a queue must take than computing a prefix a second time before that is done."""
PREFERENCE_LIFETIME_S = 1.0
"""Seconds for which the preference of a waiting request is kept."""
MAX_PREFERENCES = 10_000
_ANY_SIZE = 2**62


@dataclass(frozen=True, slots=True)
class Preference:
    """The replicas where a waiting request belongs. Kept for a while, because waiting requests are checked at every
    event."""

    replicas: tuple[tuple[str, int], ...]
    """Replicas, each with the units that the request takes there; empty if any will do."""
    min_units: int
    """Units that it takes on any replica, at least."""
    min_seconds_elsewhere: float
    """Seconds of prefilling on any other replica, at least."""
    until: float


class E2:
    """Chooses a replica for each request of an engine that caches prefixes. Reads no clock: times are passed in."""

    def __init__(self, profile: EngineProfile, options: E2Options = PREBLE) -> None:
        self.options = options
        capacity = options.capacity or profile.cache_tokens // BLOCK_TOKENS or CAPACITY
        self.index = PrefixIndex(capacity, options.window / 2)
        self.loads = LoadModel(profile.seconds(PrimitiveKind.DECODING, EXPECTED_TOKENS), window=options.window)
        self.balancer = Balancer(self.loads, options.window, options.interval, options.least_requests)
        self._cost = prefill_cost(profile)
        self._affinity = SessionAffinity()
        self._gangs: dict[str, dict[str, int]] = {}
        self._round_queues: dict[str, float] = {}
        """Seconds of prefilling by replica that wait there in front of the next request of this round."""
        self._preferences: dict[str, Preference] = {}
        """Preferences of waiting requests, by request."""
        self._min_refused_units = _ANY_SIZE
        """Units from which on nothing fits anywhere in this round."""
        self._now = 0.0

    # ------------------------------------------------------------ events

    def add_replica(self, replica: str) -> None:
        self.loads.add_replica(replica)

    def forget_replica(self, replica: str) -> None:
        """Forget a replica that takes no more requests: its load, its cached prefixes and its sessions."""
        self.loads.forget_replica(replica)
        self.index.forget_replica(replica)
        self._affinity.forget_replica(replica)
        self.balancer.forget_replica(replica)
        self._preferences.clear()
        for members in self._gangs.values():
            members.pop(replica, None)

    def begin_round(self, at: float) -> None:
        """Begin a round of decisions at this time, in seconds, and let loads that are too old expire."""
        self._now = at
        self._min_refused_units = _ANY_SIZE
        self._round_queues.clear()
        self.loads.expire(at)

    def record_sent(self, request: PlacementRequest, choice: PlacementChoice) -> None:
        """Count a request as sent to a replica: in its load, its cache, its session and its gang."""
        self._preferences.pop(request.id, None)
        path = self.index.hold(choice.replica, request.blocks, self._now)
        cost = self._cost(choice.units)
        self.loads.record_sent(
            self._now, request.id, choice.replica, cost, new=choice.units, tokens=request.size, key=key_portion(path)
        )
        self._affinity.remember(request.session, choice.replica)
        if request.gang:
            members = self._gangs.setdefault(request.gang, {})
            members[choice.replica] = members.get(choice.replica, 0) + 1
            if len(self._gangs) > self.options.gangs:
                del self._gangs[next(iter(self._gangs))]

    def record_prefilled(self, at: float, request: str) -> None:
        self.loads.record_prefilled(at, request)

    def record_ended(self, at: float, requests: Iterable[str]) -> None:
        """Take requests that have ended out of the loads, and balance the loads if it is time for that."""
        for request in requests:
            self.loads.record_ended(at, request)
        if self.balancer.check(at):
            self._preferences.clear()

    def record_cache_event(self, event: CacheEvent) -> None:
        """Update the index of prefixes by what an engine reports about the cache of a replica."""
        if event.replica not in self.loads:
            return
        if isinstance(event, CacheStored):
            self.index.hold(event.replica, event.blocks, event.at, used=False)
        elif isinstance(event, CacheRemoved):
            self.index.cut(event.replica, event.blocks, event.keeps)
        elif isinstance(event, CacheCleared):
            self.index.forget_replica(event.replica)
        elif isinstance(event, CacheUse):
            self.index.use(event.replica, event.share)

    # ------------------------------------------------------------ the decision

    def choose_replica(self, request: PlacementRequest, fits: Fits) -> PlacementChoice | None:
        """Return the replica for a request: where its prefix or session is, else where work is cheapest.

        None if it is to wait for a slot. `fits` says which replicas have a slot. A waiting request's preference is kept
        for a while.
        """
        preferred = self._preferences.get(request.id)
        if preferred is not None and preferred.until > self._now:
            if preferred.min_units >= self._min_refused_units:
                return None
            if preferred.replicas and not any(fits(name, units) for name, units in preferred.replicas):
                return self._wait_or_overflow(request, preferred, fits)
        match = self.index.match(request.blocks) if request.blocks else NO_MATCH
        rule, replicas = self._preferred_replicas(request, match)
        min_units = _missing_tokens(request, match.depth)
        if not replicas:
            choice = self._explore(request, match, fits)
            if choice is None:
                self._remember_preference(request, Preference((), min_units, 0.0, self._now + PREFERENCE_LIFETIME_S))
            return choice
        free = [(self.loads.load(name), name, units) for name, units in replicas if fits(name, units)]
        if free:
            _, name, units = min(free)
            choice = PlacementChoice(name, units, rule)
            return choice if rule is PlacementRule.SESSION else self._avoid_long_queue(request, match, choice, fits)
        min_seconds_elsewhere = self._min_seconds_elsewhere(request, match, replicas)
        preferred = Preference(tuple(replicas), min_units, min_seconds_elsewhere, self._now + PREFERENCE_LIFETIME_S)
        self._remember_preference(request, preferred)
        return self._wait_or_overflow(request, preferred, fits)

    def _remember_preference(self, request: PlacementRequest, preference: Preference) -> None:
        """Keep a waiting request's preference. When there are many, expired ones go: cancelled requests never come
        back."""
        if len(self._preferences) >= MAX_PREFERENCES:
            self._preferences = {name: other for name, other in self._preferences.items() if other.until > self._now}
        if len(self._preferences) < MAX_PREFERENCES:
            self._preferences[request.id] = preference

    def _preferred_replicas(
        self, request: PlacementRequest, match: Match
    ) -> tuple[PlacementRule, list[tuple[str, int]]]:
        """Return the replicas where a request belongs, each with the units that it takes there, and the rule; none if
        any will do."""
        home = self._affinity.get(request.session)
        if home is not None:
            units = _missing_tokens(request, match.at(home))
            is_mostly_cached = not request.blocks or 2 * units < request.size
            if is_mostly_cached or self.loads[home].running == min(load.running for _, load in self.loads):
                return PlacementRule.SESSION, [(home, units)]
            return PlacementRule.EXPLORE, []  # more runs there than elsewhere: what ends soonest counts more
        min_units = _missing_tokens(request, match.depth)
        if 2 * min_units >= request.size:  # exploit a prefix only if it is the larger part
            return PlacementRule.EXPLORE, []
        moved = self.balancer.redirect(match, self._now)
        if moved is not None and not moved.copy:
            return PlacementRule.MOVED, [(moved.target, _missing_tokens(request, match.at(moved.target)))]
        holders = [(name, units) for name, units in self._holders(request, match) if units <= 2 * min_units]
        if moved is not None and all(name != moved.target for name, _ in holders):
            holders.append((moved.target, _missing_tokens(request, match.at(moved.target))))
            return PlacementRule.MOVED, holders
        return PlacementRule.EXPLOIT, holders

    @staticmethod
    def _holders(request: PlacementRequest, match: Match) -> list[tuple[str, int]]:
        """Return the replicas that hold the last run, and those of earlier runs that lack little more, with the units
        there."""
        units_by_replica: dict[str, int] = {}
        for run in reversed(match.path):
            units = _missing_tokens(request, min(run.end, match.depth))
            for name in run.holders:
                units_by_replica.setdefault(name, units)
            if 2 * units >= request.size:
                break
        return list(units_by_replica.items())

    # ------------------------------------------------------------ full replicas

    def _wait_or_overflow(
        self, request: PlacementRequest, preference: Preference, fits: Fits
    ) -> PlacementChoice | None:
        """Return None if the request is to wait for a slot where it belongs, else a replica with a slot now, to
        compute more."""
        if not request.uncontended and not request.urgent:
            return None
        at, queues = self._now, self._round_queues
        waits = [
            (self.loads.wait_s(name, at) + queues.get(name, 0.0), name, units) for name, units in preference.replicas
        ]
        seconds, name, units = min(waits)
        seconds += self._cost(units)
        if request.urgent or seconds >= preference.min_seconds_elsewhere:
            choice = self._explore(request, self.index.match(request.blocks), fits)
            if choice is not None and (request.urgent or seconds >= self._cost_elsewhere(request, choice, units)):
                return replace(choice, rule=PlacementRule.SPILL)
        queues[name] = queues.get(name, 0.0) + self._cost(units)
        return None

    def _avoid_long_queue(
        self, request: PlacementRequest, match: Match, choice: PlacementChoice, fits: Fits
    ) -> PlacementChoice:
        """Return an idle replica instead if the queue where the prefix is takes `MIN_QUEUE_RATIO` times as long.

        Rebalancing (`Balancer`) notices such a queue only after a minute or two.
        """
        seconds = self.loads.queue_s(choice.replica, self._now) + self._cost(choice.units)
        idle = self.loads.idle
        if not idle or seconds < MIN_QUEUE_RATIO * self._cost(request.size):
            return choice
        idle_choice = self._cheapest(
            request, match.by_replica(), {}, lambda name, units: name in idle and fits(name, units)
        )
        if idle_choice is None or seconds < MIN_QUEUE_RATIO * self._cost_elsewhere(request, idle_choice, choice.units):
            return choice
        return replace(idle_choice, rule=PlacementRule.SPILL)

    def _cost_elsewhere(self, request: PlacementRequest, choice: PlacementChoice, units: int) -> float:
        """Return the seconds that it costs to compute elsewhere what is cached at home.

        They are its own, those of others whose prefixes it drives out, and those of later requests that it delays if
        the replica is a busy one.
        """
        prefill_s = self._cost(choice.units)
        more = max(0.0, prefill_s - self._cost(units))
        return (
            prefill_s
            + self._eviction_cost(choice, request)
            + more * self.loads.prefill_share(choice.replica, self._now)
        )

    def _min_seconds_elsewhere(self, request: PlacementRequest, match: Match, replicas: list[tuple[str, int]]) -> float:
        """Return the least seconds of prefilling on any other replica. A session whose prompt is unknown stays at
        home."""
        if not request.blocks:
            return math.inf
        homes = {name for name, _ in replicas}
        block_counts = [count for name, count in match.by_replica().items() if name not in homes]
        return self._cost(_missing_tokens(request, max(block_counts, default=0)))

    # ------------------------------------------------------------ explore

    def _explore(self, request: PlacementRequest, match: Match, fits: Fits) -> PlacementChoice | None:
        """Return the replica where the request costs least, wherever its prefix is; None if no replica has a slot."""
        if _missing_tokens(request, match.depth) >= self._min_refused_units:
            return None
        members = self._gangs.get(request.gang) if request.gang else None
        cached_blocks = match.by_replica()
        choice = None if members else self._decoder(request, cached_blocks, fits)
        if choice is None:
            choice = self._cheapest(request, cached_blocks, members or {}, fits)
        if choice is None and not request.warm_up:
            self._min_refused_units = min(self._min_refused_units, request.size)
        return choice

    def _decoder(self, request: PlacementRequest, cached_blocks: dict[str, int], fits: Fits) -> PlacementChoice | None:
        """Return the replica that decodes most, since it has computing power to spare; None if all mostly decode."""
        min_share = self.options.decoding
        decoders = [(load.hit_ratio, name) for name, load in self.loads if load.hits >= min_share * load.tokens > 0]
        if len(decoders) == len(self.loads):
            return None
        for _, name in sorted(decoders, reverse=True)[:MAX_COST_CHECKS]:
            units = _missing_tokens(request, cached_blocks.get(name, 0))
            if fits(name, units):
                return PlacementChoice(name, units, PlacementRule.BALANCE)
        return None

    def _cheapest(
        self, request: PlacementRequest, cached_blocks: dict[str, int], members: dict[str, int], fits: Fits
    ) -> PlacementChoice | None:
        """Return the replica with a slot where L + M + R is least; members of a gang go apart.

        R is the seconds to prefill what is not cached. M is computed last: it is never negative, so a replica that is
        dearer without it cannot win.
        """
        decode, full_prefill_s = self.loads.decode, self._cost(request.size)
        rest = {name: self._cost(_missing_tokens(request, count)) for name, count in cached_blocks.items()}
        ranked = [
            (members.get(name, 0), load.prefill + load.running * decode + rest.get(name, full_prefill_s), name)
            for name, load in self.loads
        ]
        heapify(ranked)
        best: tuple[int, float, str, PlacementChoice] | None = None
        checked = 0
        while ranked:
            mates, cost, name = heappop(ranked)
            if best is not None and ((mates, cost) >= best[:2] or checked >= MAX_COST_CHECKS):
                break
            choice = PlacementChoice(name, _missing_tokens(request, cached_blocks.get(name, 0)), PlacementRule.EXPLORE)
            if not fits(name, choice.units):
                continue
            checked += 1
            candidate = (mates, cost + self._eviction_cost(choice, request), name, choice)
            best = candidate if best is None else min(best, candidate)
        return best[3] if best is not None else None

    def _eviction_cost(self, choice: PlacementChoice, request: PlacementRequest) -> float:
        """Return M: the seconds that others will spend on prefilling the prefixes that this request drives out.

        M is a term of Preble's cost of a placement (arXiv 2407.00023). 0.0 if it drives out nothing that others use.
        """
        lost_blocks = self.index.loss(choice.replica, len(request.blocks) * choice.units // request.size, self._now)
        return self._cost(lost_blocks * BLOCK_TOKENS) if lost_blocks else 0.0


def _missing_tokens(request: PlacementRequest, cached_blocks: int) -> int:
    """Return the tokens that a replica computes if it holds so many of the prompt's blocks: at least one."""
    if not cached_blocks:
        return request.size
    return max(1, request.size - request.size * cached_blocks // len(request.blocks))
