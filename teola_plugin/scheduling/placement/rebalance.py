"""Rebalancing after Preble: move prefixes off a hot replica, or copy the one that makes it hot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teola_plugin.scheduling.placement.load_model import LoadModel
from teola_plugin.scheduling.placement.prefix_index import Match


@dataclass(frozen=True, slots=True)
class Portion:
    """A key portion at a replica: its requests of the window, and the seconds of load that they cause."""

    key: int
    requests: int
    cost: float


@dataclass(frozen=True, slots=True)
class Move:
    """Sends requests of this key portion to `target` from now on; to both replicas if it is a `copy`."""

    key: int
    source: str
    target: str
    copy: bool = False


HOT_RATIO = 1.5
"""Ratio of loads from which on a replica counts as hot against the coldest (Preble)."""
MAX_MOVES = 32
SLOWDOWN = 2.0
"""Growth of the time to the first token from which on a key portion is copied (Preble)."""
MIN_FIRST_TOKENS = 10
"""First tokens in each half window below which their growth is unknown."""


def rebalance(
    loads: Sequence[tuple[str, float]],
    portions: Callable[[str], Sequence[Portion]],
    is_slowed: Callable[[str], bool],
    *,
    hot_ratio: float = HOT_RATIO,
    max_moves: int = MAX_MOVES,
) -> list[Move]:
    """Return at most `max_moves` moves of key portions that bring the loads of replicas closer together.

    The hottest replica is paired with the coldest, and so on, while it has `hot_ratio` times the load. Its cheapest
    shared portions move while it stays the hotter; a lone shared one is copied, if first tokens are slower.
    """
    ranked = sorted(loads, key=lambda pair: (pair[1], pair[0]))
    moves: list[Move] = []
    for (cold, light), (hot, heavy) in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
        if heavy <= 0 or heavy < hot_ratio * light:
            break
        shared = sorted((p for p in portions(hot) if p.requests > 1), key=lambda p: (p.cost, p.key))
        if len(shared) == 1:
            moves += [Move(shared[0].key, hot, cold, copy=True)] if is_slowed(hot) else []
            continue
        for portion in shared:
            if heavy - portion.cost < light + portion.cost:
                break
            heavy, light = heavy - portion.cost, light + portion.cost
            moves.append(Move(portion.key, hot, cold))
    return moves[:max_moves]


@dataclass(frozen=True, slots=True)
class Redirect:
    """A move that is in force."""

    target: str
    copy: bool
    until: float


class Balancer:
    """Checks the loads every `interval` seconds, and keeps the moves of the last `window` seconds."""

    def __init__(self, loads: LoadModel, window: float, interval: float, least_requests: int) -> None:
        self.redirects: dict[int, Redirect] = {}
        """Moves in force, by key portion."""
        self._loads = loads
        self._window = window
        self._interval = interval
        self._min_requests = least_requests
        self._next_check = 0.0

    def check(self, at: float) -> list[Move]:
        """Return the moves that are in force from now on; none before the next check is due, or after few requests."""
        if at < self._next_check:
            return []
        self._next_check = at + self._interval
        self._loads.expire(at)
        self.redirects = {key: r for key, r in self.redirects.items() if r.until > at}
        if sum(load.requests for _, load in self._loads) < self._min_requests * len(self._loads):
            return []
        moves = rebalance(
            [(name, self._loads.load(name)) for name, _ in self._loads],
            self._portions,
            lambda name: self._loads[name].first_token.has_grown(at, SLOWDOWN, MIN_FIRST_TOKENS),
        )
        for move in moves:
            self.redirects[move.key] = Redirect(move.target, move.copy, at + self._window)
        return moves

    def redirect(self, match: Match, at: float) -> Redirect | None:
        """Return where requests with this beginning go, if one of its complete runs was moved."""
        if not self.redirects:
            return None
        for run in reversed(match.path):
            redirect = self.redirects.get(run.name) if run.end <= match.depth else None
            if redirect is not None and redirect.until > at:
                return redirect
        return None

    def forget_replica(self, replica: str) -> None:
        self.redirects = {key: r for key, r in self.redirects.items() if r.target != replica}

    def _portions(self, replica: str) -> list[Portion]:
        """Return the replica's load by key portion: its prefillings, and its part of the decodings."""
        load = self._loads[replica]
        decoding = load.running * self._loads.decode / max(1, load.requests)
        return [Portion(key, s.requests, s.cost + s.requests * decoding) for key, s in load.shares.items()]
