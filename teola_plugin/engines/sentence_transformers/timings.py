"""Seconds by size of batch: a model is tried with larger batches until they help no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

_SMALLEST_STAGE = 4
"""A CPU is at its best with one or two long texts; but every stage costs its readers a call of their own."""

Points = list[tuple[int, float]]
"""(size, seconds), ascending."""


def timings(
    compute: Callable[[Sequence[Any]], object], sample: Callable[[int], Any], most: int, budget: float
) -> Points:
    """Doubles the batch up to `most` samples, for about `budget` seconds."""
    ends = time.perf_counter() + budget
    compute([sample(0)])  # the first batch pays for what starts lazily
    points: Points = []
    size = 1
    while size <= most:
        repeats = 3 if not points or 2 * points[-1][1] < budget / 20 else 1
        seconds = min(_timed(compute, [sample(n) for n in range(size)]) for _ in range(repeats))
        points.append((size, seconds))
        if _stalled(points) or time.perf_counter() + 2 * seconds > ends:
            break
        size *= 2
    return points


def efficient_batch(points: Sequence[tuple[int, float]], most: int) -> int:
    """The smallest size with about the best throughput."""
    best = min(points, key=lambda point: point[1] / point[0])
    efficient = next(size for size, seconds in points if seconds / size <= 1.1 * best[1] / best[0])
    return min(max(efficient, _SMALLEST_STAGE), most)


def _stalled(points: Sequence[tuple[int, float]]) -> bool:
    """Return True if the last two doublings together raised throughput by less than a tenth: one may be noise."""
    if len(points) < 3:
        return False
    (few, before), (many, after) = points[-3], points[-1]
    return many / after < 1.1 * few / before


def _timed(compute: Callable[[Sequence[Any]], object], payloads: Sequence[Any]) -> float:
    began = time.perf_counter()
    compute(payloads)
    return time.perf_counter() - began
