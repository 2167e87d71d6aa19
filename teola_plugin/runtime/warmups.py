"""Which warm-ups of a query were of use: those whose prefix a later prompt found in the cache because of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.requests.payloads import Generate, Generation, Warmed, Warmup
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest


@dataclass(slots=True)
class WarmedPrefix:
    """One warm-up that has ended, and whether it was of use so far."""

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
    """What a warm-up that has ended with this value has left in the cache."""
    payload = entry.request.payload
    if not isinstance(payload, Warmup) or not isinstance(value, Warmed):
        return None
    return WarmedPrefix(entry.primitive, entry.engine, payload.prompt.known(), value.tokens, value.cached_tokens)


def note_use(warmups: Sequence[WarmedPrefix], entry: EngineRequest, value: Any, *, tells: bool | None) -> None:
    """A generation has ended with this value: warm-ups of what its prompt began with were of use, if it found
    them cached.

    `tells`: whether its engine says how much it found; None where that is not known, and then only a number counts. Of
    prefixes that grew, each is of use that added to what was found.
    """
    payload = entry.request.payload
    if not isinstance(payload, Generate) or not isinstance(value, Generation):
        return
    mine = [one for one in warmups if one.engine == entry.engine]
    if not mine:
        return
    text = payload.prompt.flat()
    known = sorted((one for one in mine if text.startswith(one.text)), key=lambda one: one.tokens)
    told = bool(value.cached_tokens) if tells is None else tells
    before = 0
    for one in known:
        base = max(before, one.cached)
        one.used |= (min(value.cached_tokens, one.tokens) if told else one.tokens) > base
        before = max(before, one.tokens)
