"""Mistral-7B on an A6000, as Preble models it: how long a step lasts, and the profile that calibrating it would find.

What runs on it is `teola_plugin.simulation`: prompts are prefilled one after the other, decodings run beside them, a
prefix cache of 16-token blocks forgets the least recently used. In Preble's model decodings hardly lengthen a step that
has a chunk of a prompt: so they do not slow prefilling here (no interference). Not in the profile: that tokens written
beside such a chunk wait for it, that attending to a long cached prefix takes time, that running requests keep their
blocks. Nor the network, the scheduler's own time, tokenising.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind

CHUNK = 512
"""Prompt tokens in a step (Preble's `chunk_prefill_budget`)."""
CACHE_TOKENS = 198_516
"""Keys and values that fit beside Mistral-7B on an A6000 (Preble)."""


def step_seconds(tokens: int, context: int, chunks: Iterable[tuple[int, int]] = ()) -> float:
    """One step: `tokens` in all, `context` tokens attended to; `chunks` as (tokens, end in its prompt).

    Preble publishes a parabola for 192 to 384 tokens whose rounded coefficients are negative at 384; a straight line
    joins the two neighbours here.
    """
    if tokens >= 384:
        linear = 0.10843 * tokens + 4.21
    else:
        linear = 22.0 + max(0, tokens - 192) / 192 * (0.10843 * 384 + 4.21 - 22.0)
    attention = 0.32 if context <= 1024 else 1.86e-4 * context + 0.159
    for new, end in chunks:
        if new * end > 2**20:
            attention += 1.13e-3 * new + 1.75e-3 * end + 2.19e-6 * new * end
    return (linear + attention) / 0.9 / 1000


def prefill_seconds(tokens: int) -> float:
    """A whole prompt on an idle replica, in chunks."""
    ends = [*range(CHUNK, tokens, CHUNK), tokens]
    return sum(step_seconds(end - at, end, [(end - at, end)]) for at, end in itertools.pairwise([0, *ends]))


def profile(max_batch: int, max_requests: int) -> EngineProfile:
    """What calibrating such a replica would find."""
    sizes = (1, 192, 384, 512, 1024, 2048, 4096, 8192, 16384)
    return EngineProfile(
        {
            PrimitiveKind.PREFILLING: Curve(tuple((size, prefill_seconds(size)) for size in sizes)),
            PrimitiveKind.DECODING: Curve.linear(0.0, step_seconds(1, 2048)),
        },
        batching=Batching.CONTINUOUS,
        max_batch=max_batch,
        max_requests=max_requests,
        prefix_caching=True,
        cache_tokens=CACHE_TOKENS,
    )
