"""Estimates of when values are ready, from engine profiles, on the assumption that engines are idle."""

from __future__ import annotations

from collections.abc import Iterable

from teola_plugin.graph import (
    ENGINE_KINDS,
    LLM_DECODES,
    LLM_KINDS,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
)
from teola_plugin.passes.base import PassContext

_K = PrimitiveKind
NOMINAL_SECONDS = 0.01
"""Assumed duration of a primitive on an engine without a measured curve."""
TOOL_SECONDS = 0.1
"""Assumed duration of a tool, and of a retriever or model of the user's own (an OPAQUE primitive marked `slow`)."""
ANSWER_TOKENS = 64
"""Expected output of a decoding, if nothing more is known."""
ITEM_TOKENS = 16
"""Expected output of one item of a splittable decoding."""
VARIABLE_TOKENS = 64
"""Expected length of a prompt variable (a passage, a history, a question), if nothing more is known."""


def ready_times(graph: Graph, context: PassContext) -> dict[str, float]:
    """Return the expected time of each primitive's value, in seconds after the query's start, order edges included."""
    ready: dict[str, float] = {}
    for p in graph:
        start = 0.0
        for name in graph.parents(p.id):  # a loop, because `max` of a generator takes three times as long
            if ready[name] > start:
                start = ready[name]
        ready[p.id] = start + seconds(p, context)
    return ready


def remaining_times(graph: Graph, context: PassContext) -> dict[str, float]:
    """Return the seconds from each primitive's start to the end of the graph, along the longest path.

    The seconds are those expected on idle engines; primitives of unknown duration count with what `seconds` says of
    them. Policies such as `CriticalPath` order requests by them.
    """
    remaining: dict[str, float] = {}
    for p in reversed(tuple(graph)):
        remaining[p.id] = seconds(p, context) + max([remaining[name] for name in graph.children(p.id)], default=0.0)
    return remaining


def seconds(p: Primitive, context: PassContext) -> float:
    """Return the expected duration of a primitive on an idle engine, in seconds."""
    if p.fragment is not None:
        fragments = [f for f in (p.fragment, p.otherwise) if f is not None]
        spans = [max(ready_times(f.graph, context).values(), default=0.0) for f in fragments]
        rounds = p.size or 1 if p.kind is _K.FOLD else 1
        return rounds * max(spans)
    if p.kind not in ENGINE_KINDS:
        return TOOL_SECONDS if p.kind is _K.TOOL or p.attributes.slow else 0.0
    profile = context.profiles.get(p.engine)
    return (profile.seconds(p.kind, _size(p)) if profile is not None else 0.0) or NOMINAL_SECONDS


def has_known_duration(p: Primitive, context: PassContext) -> bool:
    """Return True if the duration of `p` is known: its engine was measured for this kind, or no engine runs it.

    Return False for an engine without a profile.
    """
    if p.kind not in ENGINE_KINDS:
        return True
    profile = context.profiles.get(p.engine)
    return profile is not None and profile.is_measured(p.kind)


def tokens(parts: Iterable[PromptPart]) -> int:
    """Return the expected number of tokens of the parts of a prompt."""
    return sum([part.tokens or (VARIABLE_TOKENS if part.variable else 0) for part in parts])


def _size(p: Primitive) -> int:
    """Return the size of `p` in the unit of its kind's curve: requests, prompt tokens or output tokens."""
    if p.kind not in LLM_KINDS:
        return p.size or 1
    if p.kind not in LLM_DECODES:
        return max(1, tokens(p.prompt))
    if p.kind is _K.PARTIAL_DECODING:
        return ITEM_TOKENS
    if any(key == "previous" for key, _ in p.inputs):
        return 1
    return ITEM_TOKENS * p.size if p.splittable and p.size else ANSWER_TOKENS
