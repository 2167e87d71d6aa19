"""What the passes, the batcher and the simulator know of an engine: latency by size, limits, device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from teola_plugin.graph.device import normal
from teola_plugin.graph.kinds import PrimitiveKind


class Batching(Enum):
    """How an engine fills its slots."""

    STATIC = "static"
    """A batch runs as one; the next waits for it (embedding, reranking)."""
    CONTINUOUS = "continuous"
    """Slots are freed request by request; a batch is never a barrier (LLMs, databases with a pool)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, measured at `points` (ascending sizes); linear between and beyond them."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, size: float) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        at = bisect_left(points, (size,), 1, len(points) - 1)
        (s0, t0), (s1, t1) = points[at - 1], points[at]
        return max(0.0, t0 + (t1 - t0) * (size - s0) / (s1 - s0))

    @staticmethod
    def linear(fixed: float, per_unit: float) -> Curve:
        return Curve(((0, fixed), (1_000_000, fixed + per_unit * 1_000_000)))

    def scaled(self, factor: float) -> Curve:
        """`factor` times as many seconds at every size."""
        return Curve(tuple((size, seconds * factor) for size, seconds in self.points))


TAKING_TURNS = 0.8
"""Interference from which prefilling beside a decoding gains nothing."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Latency by size, the maximum efficient batch and the limits of one (engine, model, device).

    Sizes are requests, but tokens for prefillings; a decoding's curve is over output tokens.
    """

    curves: Mapping[PrimitiveKind, Curve] = field(default_factory=dict)
    batching: Batching = Batching.STATIC
    max_batch: int = 256
    """Slots in one tick: requests, or prompt tokens for an LLM."""
    max_efficient_batch: int = 128
    """The size beyond which throughput no longer grows."""
    max_requests: int = 256
    """Requests in flight on one instance."""
    max_request_size: int | None = None
    """The largest single request (an LLM's context length, in tokens); None for no limit."""
    device: str = ""
    """By its normal name. Engines that share one (see `graph.device`) do not overlap; empty where nobody knows."""
    dedicated: bool = True
    """True if it may get requests that nobody waits for yet: of predicted items, of arms that are not chosen yet."""
    prefix_caching: bool = False
    """Whether a prefix that was prefilled once makes a later prompt cheaper."""
    cache_tokens: int = 0
    """Tokens that the prefix cache of an instance holds; 0 where nobody says."""
    min_split_tokens: int = 48
    """Below this many tokens a partial prefilling costs more than it saves."""
    warmup_chunk: int = 256
    """Prompt tokens that one step of a partial prefilling may take while the instance decodes."""
    drafts: int = 0
    """Drafted tokens that it verifies at once for one request; 0 where it takes no drafts."""
    verifying: Mapping[int, Curve] = field(default_factory=dict)
    """By requests that decode side by side: seconds of one step by the tokens drafted for each of them. Empty where
    that was not measured."""
    interference: float = 0.0
    """Share by which prefillings and decodings that run side by side slow each other."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", normal(self.device))

    @property
    def takes_turns(self) -> bool:
        """Whether a prefilling beside a decoding gains nothing: interference near 1, as on a CPU."""
        return self.interference >= TAKING_TURNS

    def scaled(self, factor: float) -> EngineProfile:
        """The same engine, `factor` times as slow: 0.25 takes a quarter of the time, 0 none. Limits stay.

        Raises `ValueError` for what is no finite number of 0 or more.
        """
        if not (0 <= factor < float("inf")):
            raise ValueError(f"a profile cannot be scaled by {factor!r}: give a number of 0 or more")
        curves = {kind: curve.scaled(factor) for kind, curve in self.curves.items()}
        return replace(self, curves=curves, verifying={n: curve.scaled(factor) for n, curve in self.verifying.items()})

    def step(self, drafted: float, batch: float) -> float:
        """Seconds of one decoding step of `batch` requests, with so many drafted tokens for each; 0 where nothing was
        measured."""
        if not self.verifying:
            return 0.0
        points = tuple((rows, self.verifying[rows](drafted)) for rows in sorted(self.verifying))
        return Curve(points)(batch)

    def verify(self, drafted: float, batch: float) -> float:
        """Seconds by which verifying so many drafted tokens for each of `batch` requests lengthens a step."""
        return max(0.0, self.step(drafted, batch) - self.step(0, batch))

    def measured(self, kind: PrimitiveKind) -> bool:
        """Whether there is a curve for `kind`."""
        return kind in self.curves or _SAME_AS.get(kind, kind) in self.curves

    def seconds(self, kind: PrimitiveKind, size: float) -> float:
        """Expected seconds of `size` units of `kind` on an idle instance; 0 where nothing was measured."""
        curve = self.curves.get(kind) or self.curves.get(_SAME_AS.get(kind, kind))
        return curve(size) if curve is not None else 0.0


_K = PrimitiveKind
_SAME_AS = {_K.PARTIAL_PREFILLING: _K.PREFILLING, _K.FULL_PREFILLING: _K.PREFILLING, _K.PARTIAL_DECODING: _K.DECODING}

Profiles = Mapping[str, EngineProfile]
"""Profiles by engine name."""
