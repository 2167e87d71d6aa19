"""E2 (Preble, arXiv 2407.00023): exploit where the prefix is, or explore where work is cheapest.

In this order: the session's home; the instances that hold the prompt's prefix, if they hold more of the prompt than
they lack; the instance that decodes most, if others prefill; the instance where L + M + R is least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.scheduling.events import CacheCleared, CacheEvent, CacheRemoved, CacheStored, CacheUse
from teola_plugin.scheduling.placement.base import Asked, Fits, Placed, Why
from teola_plugin.scheduling.placement.least_outstanding import Homes
from teola_plugin.scheduling.placement.load_model import LEAST_FIRST_TOKENS, WINDOW, LoadModel, prefill_cost
from teola_plugin.scheduling.placement.prefix_index import NOTHING, Match, PrefixIndex, key_portion
from teola_plugin.scheduling.placement.rebalance import Move, Portion, rebalance
from teola_plugin.scheduling.prefix_blocks import BLOCK_TOKENS, PrefixBlocks

CAPACITY = 12_288
"""Blocks of an instance's cache where nobody says: 196,608 tokens, a 7B model on 48 GB."""
DECODING = 0.7
"""Share of prompt tokens found in the cache from which an instance mostly decodes."""
SLOWED = 2.0
"""Growth of the time to the first token from which a key portion is copied."""
LOOKS = 8
"""Instances whose eviction cost is computed for one decision; the cheapest without it come first."""
EXPECTED_TOKENS = 64
"""Tokens of an answer, until some have been seen."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """A rebalancing move in force."""

    target: str
    copy: bool
    until: float


@dataclass(frozen=True, slots=True)
class E2Options:
    """Preble's settings. `capacity` in blocks of an instance; times in seconds."""

    capacity: int = CAPACITY
    window: float = WINDOW
    decoding: float = DECODING
    interval: float = 10.0
    """Between two looks at the balance of loads."""
    least_requests: int = 50
    """Per instance and window, below which loads are not balanced."""
    gangs: int = 1000


class E2:
    """Chooses an instance for each request of an engine that caches prefixes. No clock: times come with the calls."""

    def __init__(self, profile: EngineProfile, options: E2Options = E2Options()) -> None:
        self.options = options
        self.index = PrefixIndex(options.capacity, options.window / 2)
        self.loads = LoadModel(profile.seconds(PrimitiveKind.DECODING, EXPECTED_TOKENS), window=options.window)
        self.redirects: dict[int, Redirect] = {}
        self._cost = prefill_cost(profile)
        self._homes = Homes()
        self._gangs: dict[str, dict[str, int]] = {}
        self._line: dict[str, float] = {}
        """Seconds of prefilling that wait for an instance, in front of the next request of this round."""
        self._at = 0.0
        self._next_look = 0.0

    # ------------------------------------------------------------ what happens

    def up(self, instance: str) -> None:
        self.loads.up(instance)

    def forget_instance(self, instance: str) -> None:
        self.loads.forget(instance)
        self.index.forget(instance)
        self._homes.forget_instance(instance)
        self.redirects = {key: r for key, r in self.redirects.items() if r.target != instance}
        for members in self._gangs.values():
            members.pop(instance, None)

    def begin(self, at: float) -> None:
        self._at = at
        self._line.clear()
        self.loads.expire(at)

    def sent(self, asked: Asked, placed: Placed) -> None:
        path = self.index.hold(placed.instance, asked.blocks, self._at)
        cost = self._cost(placed.units)
        self.loads.sent(
            self._at, asked.id, placed.instance, cost, new=placed.units, tokens=asked.size, key=key_portion(path)
        )
        self._homes.remember(asked.session, placed.instance)
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
        if at >= self._next_look:
            self.look(at)

    def cached(self, event: CacheEvent) -> None:
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
        match = self.index.match(asked.blocks) if asked.blocks else NOTHING
        why, wanted = self._wanted(asked, match)
        if not wanted:
            return self._explore(asked, match, fits)
        free = [(self.loads.load(name), name, units) for name, units in wanted if fits(name, units)]
        if free:
            _, name, units = min(free)
            return Placed(name, units, why)
        elsewhere = self._explore(asked, match, fits)
        if asked.urgent:
            return elsewhere
        return self._wait_or_go(wanted, elsewhere)

    def _wanted(self, asked: Asked, match: Match) -> tuple[Why, list[tuple[str, int]]]:
        """The instances that a request belongs to, each with the units that it takes there."""
        home = self._homes.get(asked.session)
        if home is not None:
            return Why.SESSION, [(home, _units(asked, match.at(home)))]
        least = _units(asked, match.depth)
        if 2 * least >= asked.size:  # exploit only what is more than the rest
            return Why.EXPLORE, []
        moved = self._redirect(match)
        if moved is not None and not moved.copy:
            return Why.MOVED, [(moved.target, _units(asked, match.at(moved.target)))]
        found = [(name, units) for name, units in self._holders(asked, match) if units <= 2 * least]
        if moved is not None and all(name != moved.target for name, _ in found):
            found.append((moved.target, _units(asked, match.at(moved.target))))
            return Why.MOVED, found
        return Why.EXPLOIT, found

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

    def _redirect(self, match: Match) -> Redirect | None:
        if not self.redirects:
            return None
        for run in reversed(match.path):
            found = self.redirects.get(run.blocks[0])
            if found is not None and found.until > self._at:
                return found
        return None

    def _wait_or_go(self, wanted: list[tuple[str, int]], elsewhere: Placed | None) -> Placed | None:
        """To wait for a slot and compute the rest there, or to compute all of it where there is a slot now."""
        waits = [(self.loads.wait(name) + self._line.get(name, 0.0), name, units) for name, units in wanted]
        seconds, name, units = min(waits)
        cost = self._cost(units)
        if elsewhere is not None and seconds + cost >= self._cost(elsewhere.units):
            return replace(elsewhere, why=Why.SPILL)
        self._line[name] = self._line.get(name, 0.0) + cost
        return None

    # ------------------------------------------------------------ explore

    def _explore(self, asked: Asked, match: Match, fits: Fits) -> Placed | None:
        members = self._gangs.get(asked.gang) if asked.gang else None
        held = match.by_instance()
        if not members:
            decoder = self._decoder(asked, held, fits)
            if decoder is not None:
                return decoder
        return self._cheapest(asked, held, members or {}, fits)

    def _decoder(self, asked: Asked, held: dict[str, int], fits: Fits) -> Placed | None:
        """The instance that mostly decodes, most of all: it has computing power to spare. None if all are alike."""
        ratios = [(load.hit_ratio, name) for name, load in self.loads]
        least = self.options.decoding
        if not ratios or min(ratios)[0] >= least:
            return None
        for ratio, name in sorted(ratios, reverse=True)[:LOOKS]:
            if ratio < least:
                return None
            units = _units(asked, held.get(name, 0))
            if fits(name, units):
                return Placed(name, units, Why.BALANCE)
        return None

    def _cheapest(self, asked: Asked, held: dict[str, int], members: dict[str, int], fits: Fits) -> Placed | None:
        """Least L + M + R among instances with a slot; members of a gang go apart. M is looked at last: it is 0 or
        more, so an instance that is dearer without it cannot win."""
        decode, new = self.loads.decode, self._cost(asked.size)
        ranked = sorted(
            (
                members.get(name, 0),
                load.prefill + load.running * decode + (new if name not in held else self._run_cost(asked, held[name])),
                name,
            )
            for name, load in self.loads
        )
        best: tuple[int, float, str, int] | None = None
        looks = 0
        for mates, cost, name in ranked:
            if best is not None and ((mates, cost) >= best[:2] or looks >= LOOKS):
                break
            units = _units(asked, held.get(name, 0))
            if not fits(name, units):
                continue
            looks += 1
            found = (mates, cost + self._memory(name, asked.blocks, held.get(name, 0)), name, units)
            best = found if best is None else min(best, found)
        return Placed(best[2], best[3], Why.EXPLORE) if best is not None else None

    def _run_cost(self, asked: Asked, held: int) -> float:
        """R: seconds of prefilling what is not cached there."""
        return self._cost(_units(asked, held))

    def _memory(self, instance: str, blocks: PrefixBlocks, held: int) -> float:
        """M: seconds that others will spend on prefilling what this request drives out."""
        lost = self.index.loss(instance, len(blocks) - held, self._at)
        return self._cost(lost * BLOCK_TOKENS) if lost else 0.0

    # ------------------------------------------------------------ afterwards

    def look(self, at: float) -> list[Move]:
        """Every so often: balance the loads. Returns the moves that are in force from now on."""
        if at < self._next_look:
            return []
        self._next_look = at + self.options.interval
        self.loads.expire(at)
        self.redirects = {key: r for key, r in self.redirects.items() if r.until > at}
        if sum(load.requests for _, load in self.loads) < self.options.least_requests * len(self.loads):
            return []
        moves = rebalance(
            [(name, self.loads.load(name)) for name, _ in self.loads],
            self._portions,
            lambda name: self.loads[name].first_token.grown(at, SLOWED, LEAST_FIRST_TOKENS),
        )
        for move in moves:
            self.redirects[move.key] = Redirect(move.target, move.copy, at + self.options.window)
        return moves

    def _portions(self, instance: str) -> list[Portion]:
        """The instance's load by key portion: its prefillings, and its part of the decodings."""
        load = self.loads[instance]
        decoding = load.running * self.loads.decode / max(1, load.requests)
        return [Portion(key, s.requests, s.cost + s.requests * decoding) for key, s in load.shares.items()]


def _units(asked: Asked, held: int) -> int:
    """Tokens that an instance computes if it holds so many of the prompt's blocks: one at least."""
    if not held:
        return asked.size
    return max(1, asked.size - asked.size * held // len(asked.blocks))
