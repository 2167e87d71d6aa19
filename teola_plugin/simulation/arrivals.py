"""Arrivals of queries: when each comes, the app it is for, and its input; drawn from a seed, the same every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BURSTINESS = 0.25
"""Shape of the gamma distribution of bursty gaps: their standard deviation is twice their mean."""
ZIPF = 1.1
"""Exponent of the popularity of inputs (Preble's ablation, arXiv 2407.00023)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One query: seconds after the start, the app, and the app's input."""

    at: float
    app: str
    value: Any
    output_tokens: int = 0
    """Length of each answer of its LLM calls; 0 for the engine's setting."""
    mark: str = ""
    """A word of the input by which an engine recognises its calls; empty if nothing depends on that."""


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Return the arrival times of a Poisson process of `rate` a second, without end. Raises `ValueError`."""
    return _times(_positive(rate), 1.0, random.Random(f"arrivals {seed}"))


def bursty(rate: float, seed: int = 0, burstiness: float = BURSTINESS) -> Iterator[float]:
    """Return arrival times of the same mean rate in bursts: gaps are gamma distributed with shape `burstiness`; 1 is
    Poisson.

    As in `vllm bench serve --burstiness`. Raises `ValueError`.
    """
    return _times(_positive(rate), _positive(burstiness), random.Random(f"arrivals {seed}"))


def _times(rate: float, shape: float, rng: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1.0 / (rate * shape))
        yield at


def _positive(number: float) -> float:
    if not 0 < number < float("inf"):
        raise ValueError(f"{number!r} is no rate: give a number above 0")
    return number


def zipf(items: Sequence[Any], seed: int = 0, exponent: float = ZIPF) -> Callable[[], Any]:
    """Return a function that draws an item, the n-th in proportion to 1 / n ** exponent; with 0, all are alike."""
    rng = random.Random(f"popularity {seed}")
    weights = [(number + 1) ** -exponent for number in range(len(items))]
    return lambda: rng.choices(items, weights)[0]


def arriving(
    times: Iterator[float],
    inputs: Mapping[str, Sequence[Any]],
    queries: int,
    *,
    shares: Mapping[str, float] | None = None,
    popularity: float | None = None,
    seed: int = 0,
) -> list[Arrival]:
    """Return so many queries. `inputs` are those of each app, `shares` how often each app is called (alike by default).

    Inputs are taken in turn, or, with `popularity`, drawn by Zipf's law with that exponent.
    """
    rng = random.Random(f"apps {seed}")
    names = list(inputs)
    weights = [(shares or {}).get(name, 1.0) for name in names]
    draw = {name: _drawing(name, items, popularity, seed) for name, items in inputs.items()}
    arrivals = []
    for _ in range(queries):
        name = names[0] if len(names) == 1 else rng.choices(names, weights)[0]
        arrivals.append(Arrival(next(times), name, draw[name]()))
    return arrivals


def _drawing(name: str, items: Sequence[Any], popularity: float | None, seed: int) -> Callable[[], Any]:
    if not items:
        raise ValueError(f"the app {name!r} has no inputs: give at least one")
    if popularity is not None:
        return zipf(items, seed, popularity)
    turn = iter(range(2**62))
    return lambda: items[next(turn) % len(items)]
