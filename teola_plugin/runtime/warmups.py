"""The use of a query's warm-ups: a later prompt found their prefix in the cache because of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.requests.payloads import Generate, Generation, Warmed, Warmup
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest


@dataclass(slots=True)
class WarmedPrefix:
    """A warm-up that has ended, and whether it was of use so far."""

    primitive: str
    """As it is traced."""
    engine: str
    text: str
    """What was prefilled."""
    tokens: int
    cached: int
    """Tokens of it that were in the cache before."""
    used: bool = False


def warmed(entry: EngineRequest, value: Any) -> WarmedPrefix | None:
    """Return what a warm-up that has ended with this value has left in the cache; None for another request."""
    payload = entry.request.payload
    if not isinstance(payload, Warmup) or not isinstance(value, Warmed):
        return None
    return WarmedPrefix(entry.primitive, entry.engine, payload.prompt.known_prefix(), value.tokens, value.cached_tokens)


def note_use(warmups: Sequence[WarmedPrefix], entry: EngineRequest, value: Any, *, tells: bool | None) -> None:
    """Mark the warm-ups that were of use to a generation: it has ended, and found what its prompt begins with cached.

    `tells`: True if its engine says how much it found; if None, that is not known, and then only a number counts. Among
    prefixes that grew, each is of use that added to what was found.
    """
    payload = entry.request.payload
    if not isinstance(payload, Generate) or not isinstance(value, Generation):
        return
    candidates = [warmup for warmup in warmups if warmup.engine == entry.engine]
    if not candidates:
        return
    text = payload.prompt.flat()
    prefixes = sorted((warmup for warmup in candidates if text.startswith(warmup.text)), key=lambda one: one.tokens)
    counts_cached = bool(value.cached_tokens) if tells is None else tells
    longest = 0
    for prefix in prefixes:
        base = max(longest, prefix.cached)
        prefix.used |= (min(value.cached_tokens, prefix.tokens) if counts_cached else prefix.tokens) > base
        longest = max(longest, prefix.tokens)
