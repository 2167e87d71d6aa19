"""When values are expected to be ready: a forward pass over the profiles, engines idle."""

from __future__ import annotations

from collections.abc import Iterable

from teola_plugin.graph import (
    ENGINE_KINDS,
    LLM_DECODES,
    LLM_KINDS,
    Fragment,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
)
from teola_plugin.passes.base import PassContext

_K = PrimitiveKind
NOMINAL_SECONDS = 0.01
"""Taken for a primitive of an engine without a measured curve."""
TOOL_SECONDS = 0.1
"""Taken for a tool, and for a retriever or a model of the user's own (OPAQUE that is `slow`)."""
ANSWER_TOKENS = 64
"""Expected output of a decoding, where nothing says more."""
ITEM_TOKENS = 16
"""Expected output of one item of a splittable decoding."""
VARIABLE_TOKENS = 64
"""Expected length of a prompt variable, where nothing says more: a passage, a history, a question."""


def ready_times(graph: Graph, context: PassContext) -> dict[str, float]:
    """Seconds after the query's start at which each primitive's value is expected; order edges count too."""
    ready: dict[str, float] = {}
    for p in graph:
        start = 0.0
        for name in graph.parents(p.id):  # a loop: `max` of a generator takes three times as long
            if ready[name] > start:
                start = ready[name]
        ready[p.id] = start + seconds(p, context)
    return ready


def remaining_times(graph: Graph, context: PassContext) -> dict[str, float]:
    """Seconds from each primitive's beginning to the end of the graph, along the longest way."""
    left: dict[str, float] = {}
    for p in reversed(tuple(graph)):
        left[p.id] = seconds(p, context) + max([left[name] for name in graph.children(p.id)], default=0.0)
    return left


def seconds(p: Primitive, context: PassContext) -> float:
    """Expected seconds of one primitive on an idle engine."""
    if p.fragment is not None:
        arms = [_span(f, context) for f in (p.fragment, p.otherwise) if f is not None]
        rounds = p.size or 1 if p.kind is _K.FOLD else 1
        return rounds * max(arms)
    if p.kind not in ENGINE_KINDS:
        return TOOL_SECONDS if p.kind is _K.TOOL or p.attributes.slow else 0.0
    return _on_engine(p, context) or NOMINAL_SECONDS


def measured(p: Primitive, context: PassContext) -> bool:
    """Whether the engine's profile has a curve for `p`; true for what runs at the client."""
    if p.kind not in ENGINE_KINDS:
        return True
    profile = context.profiles.get(p.engine)
    return profile is not None and profile.measured(p.kind)


def _on_engine(p: Primitive, context: PassContext) -> float:
    """Seconds by the engine's profile; 0 where nothing was measured."""
    profile = context.profiles.get(p.engine)
    return profile.seconds(p.kind, _size(p)) if profile is not None else 0.0


def tokens(parts: Iterable[PromptPart]) -> int:
    """Expected tokens of the parts."""
    return sum([part.tokens or (VARIABLE_TOKENS if part.variable else 0) for part in parts])


def _span(fragment: Fragment, context: PassContext) -> float:
    return max(ready_times(fragment.graph, context).values(), default=0.0)


def _size(p: Primitive) -> int:
    """In the unit of the kind's curve: requests, prompt tokens or output tokens."""
    if p.kind not in LLM_KINDS:
        return p.size or 1
    if p.kind not in LLM_DECODES:
        return max(1, tokens(p.prompt))
    if p.kind is _K.PARTIAL_DECODING:
        return ITEM_TOKENS
    if any(key == "previous" for key, _ in p.inputs):
        return 1
    return ITEM_TOKENS * p.size if p.splittable and p.size else ANSWER_TOKENS
