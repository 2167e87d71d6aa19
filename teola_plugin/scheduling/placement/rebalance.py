"""What Preble does after requests are placed: move prefixes off a hot instance, or copy the one that makes it hot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
