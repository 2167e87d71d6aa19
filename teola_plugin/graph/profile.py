"""Engine profiles: the latency by size, the limits and the device that passes, batcher and simulator use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from teola_plugin.graph.device import normalize
from teola_plugin.graph.primitive import PrimitiveKind


class Batching(Enum):
    """A way in which an engine fills its slots."""

    STATIC = "static"
    """A batch runs as one; the next waits for it (embedding, reranking)."""
    CONTINUOUS = "continuous"
    """Slots are freed request by request; a batch is never a barrier (LLMs, databases with a pool)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, measured at `points` (ascending sizes), with linear interpolation and extrapolation."""

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
        """Return the curve with `factor` times as many seconds at every size."""
        return Curve(tuple((size, seconds * factor) for size, seconds in self.points))


TAKING_TURNS = 0.8
"""Interference from which prefilling during a decoding gains nothing."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The latency, maximum efficient batch and limits of an engine with its model and device.

    Sizes are requests; for prefillings prompt tokens, for decodings output tokens.
    """

    curves: Mapping[PrimitiveKind, Curve] = field(default_factory=dict)
    batching: Batching = Batching.STATIC
    max_batch: int = 256
    """Number of slots in one tick: requests, or prompt tokens for an LLM."""
    max_efficient_batch: int = 128
    """Size beyond which throughput no longer grows."""
    max_requests: int = 256
    """Maximum number of requests in flight on one replica."""
    max_request_size: int | None = None
    """Largest single request (an LLM's context length, in tokens); None for no limit."""
    device: str = ""
    """Canonical name. Engines that share a device (see `graph.device`) do not overlap; empty if unknown."""
    dedicated: bool = True
    """True if it may get speculative requests: for predicted items, for arms that may not be chosen."""
    prefix_caching: bool = False
    """True if a prefix that was prefilled once makes later prompts with it cheaper."""
    cache_tokens: int = 0
    """Size of a replica's prefix cache, in tokens; 0 if unknown."""
    min_split_tokens: int = 48
    """Number of tokens below which a partial prefilling costs more than it saves."""
    warmup_chunk: int = 256
    """Maximum prompt tokens of one step of a partial prefilling while the replica decodes."""
    drafts: int = 0
    """Number of drafted tokens that it verifies at once for one request; 0 if it accepts no drafts."""
    verifying: Mapping[int, Curve] = field(default_factory=dict)
    """Seconds of one decoding step by the number of drafted tokens per request, for each measured batch size. Empty if
    not measured."""
    interference: float = 0.0
    """Share by which prefillings and decodings slow each other when they run at the same time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", normalize(self.device))

    @property
    def takes_turns(self) -> bool:
        """True if a prefilling during a decoding gains nothing: interference is near 1, as on a CPU."""
        return self.interference >= TAKING_TURNS

    def scaled(self, factor: float) -> EngineProfile:
        """Return the profile of an engine that takes `factor` times as long. Limits stay.

        Raises:
            ValueError: `factor` is negative or not finite.
        """
        if not (0 <= factor < float("inf")):
            raise ValueError(f"a profile cannot be scaled by {factor!r}: give a number of 0 or more")
        curves = {kind: curve.scaled(factor) for kind, curve in self.curves.items()}
        return replace(self, curves=curves, verifying={n: curve.scaled(factor) for n, curve in self.verifying.items()})

    def step(self, drafted: float, batch: float) -> float:
        """Return the seconds of a decoding step of `batch` requests with `drafted` tokens each; 0 if not measured."""
        if not self.verifying:
            return 0.0
        points = tuple((rows, self.verifying[rows](drafted)) for rows in sorted(self.verifying))
        return Curve(points)(batch)

    def verify(self, drafted: float, batch: float) -> float:
        """Return the seconds by which verifying `drafted` tokens for each of `batch` requests lengthens a step."""
        return max(0.0, self.step(drafted, batch) - self.step(0, batch))

    def measured(self, kind: PrimitiveKind) -> bool:
        """Return True if there is a curve for `kind`."""
        return kind in self.curves or _SAME_AS.get(kind, kind) in self.curves

    def seconds(self, kind: PrimitiveKind, size: float) -> float:
        """Return the expected seconds of `size` units of `kind` on an idle replica; 0 if not measured."""
        curve = self.curves.get(kind) or self.curves.get(_SAME_AS.get(kind, kind))
        return curve(size) if curve is not None else 0.0


_K = PrimitiveKind
_SAME_AS = {_K.PARTIAL_PREFILLING: _K.PREFILLING, _K.FULL_PREFILLING: _K.PREFILLING, _K.PARTIAL_DECODING: _K.DECODING}

Profiles = Mapping[str, EngineProfile]
"""Profiles by engine name."""
