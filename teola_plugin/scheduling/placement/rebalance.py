"""What Preble does after requests are placed: move prefixes off a hot instance, or copy the one that makes it hot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teola_plugin.scheduling.placement.load_model import LoadModel
from teola_plugin.scheduling.placement.prefix_index import Match


@dataclass(frozen=True, slots=True)
class Portion:
    """A key portion at an instance: requests of the window, and seconds of load that come with it."""

    key: int
    requests: int
    cost: float


@dataclass(frozen=True, slots=True)
class Move:
    """Requests of this key portion go to `target` from now on; to both instances when it is a `copy`."""

    key: int
    source: str
    target: str
    copy: bool = False


HOT = 1.5
"""Times the load of the coldest instance from which an instance is hot (Preble)."""
MOST_MOVES = 32
SLOWED = 2.0
"""Growth of the time to the first token from which a key portion is copied (Preble)."""
LEAST_FIRST_TOKENS = 10
"""First tokens in each half window, below which nothing is said of their growth."""


def rebalance(
    loads: Sequence[tuple[str, float]],
    portions: Callable[[str], Sequence[Portion]],
    slowed: Callable[[str], bool],
    *,
    hot: float = HOT,
    most: int = MOST_MOVES,
) -> list[Move]:
    """Moves that bring the loads closer together, `most` of them at the most.

    The hottest instance is paired with the coldest, the second with the second, and so on, while the first of a pair
    is `hot` times the other. The cheapest shared portions move first, as long as the pair does not change places.
    An instance with one shared portion only would move its heat: that one is copied, if first tokens are `slowed`.
    """
    ranked = sorted(loads, key=lambda pair: (pair[1], pair[0]))
    moves: list[Move] = []
    for (cold, light), (warm, heavy) in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
        if heavy <= 0 or heavy < hot * light:
            break
        shared = sorted((p for p in portions(warm) if p.requests > 1), key=lambda p: (p.cost, p.key))
        if len(shared) == 1:
            moves += [Move(shared[0].key, warm, cold, copy=True)] if slowed(warm) else []
            continue
        for portion in shared:
            if heavy - portion.cost < light + portion.cost:
                break
            heavy, light = heavy - portion.cost, light + portion.cost
            moves.append(Move(portion.key, warm, cold))
    return moves[:most]


@dataclass(frozen=True, slots=True)
class Redirect:
    """A move in force."""

    target: str
    copy: bool
    until: float


class Balancer:
    """Looks at the loads every `interval` seconds, and keeps the moves of the last `window` seconds."""

    def __init__(self, loads: LoadModel, window: float, interval: float, least_requests: int) -> None:
        self.redirects: dict[int, Redirect] = {}
        """By key portion."""
        self._loads = loads
        self._window = window
        self._interval = interval
        self._least = least_requests
        self._next = 0.0

    def look(self, at: float) -> list[Move]:
        """The moves that are in force from now on; none before the next look is due, or after few requests."""
        if at < self._next:
            return []
        self._next = at + self._interval
        self._loads.expire(at)
        self.redirects = {key: r for key, r in self.redirects.items() if r.until > at}
        if sum(load.requests for _, load in self._loads) < self._least * len(self._loads):
            return []
        moves = rebalance(
            [(name, self._loads.load(name)) for name, _ in self._loads],
            self._portions,
            lambda name: self._loads[name].first_token.grown(at, SLOWED, LEAST_FIRST_TOKENS),
        )
        for move in moves:
            self.redirects[move.key] = Redirect(move.target, move.copy, at + self._window)
        return moves

    def redirect(self, match: Match, at: float) -> Redirect | None:
        """Where requests with this beginning go, if one of its runs was moved. A run that it has in part is not its."""
        if not self.redirects:
            return None
        for run in reversed(match.path):
            found = self.redirects.get(run.name) if run.end <= match.depth else None
            if found is not None and found.until > at:
                return found
        return None

    def forget(self, instance: str) -> None:
        self.redirects = {key: r for key, r in self.redirects.items() if r.target != instance}

    def _portions(self, instance: str) -> list[Portion]:
        """The instance's load by key portion: its prefillings, and its part of the decodings."""
        load = self._loads[instance]
        decoding = load.running * self._loads.decode / max(1, load.requests)
        return [Portion(key, s.requests, s.cost + s.requests * decoding) for key, s in load.shares.items()]
