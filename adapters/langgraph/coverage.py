"""What plans ask engines for: whether all of it is asked for by another one, whether any of it is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import lru_cache

from teola_plugin.graph import LLM_PREFILLS, Graph, Primitive, PrimitiveKind

_Prompt = tuple[str, ...]
"""The text of each part, empty for variables; those that follow one another are one, for lists have many."""


@lru_cache(maxsize=256)
def covers(one: Graph, other: Graph) -> bool:
    """Whether for each request of the second the first has one of its own that looks alike: of the same engine, with
    the same prompt but for what fills its variables. Whether the values are the same, only the run shows."""
    if _asked(other) - _asked(one):
        return False
    begun = [(p.engine, _prompt(p)) for p in _alive(one) if p.prompt]
    return all(_begins(begun, p) for p in _alive(other) if p.kind is PrimitiveKind.PARTIAL_PREFILLING)


@lru_cache(maxsize=256)
def only_warms_up(graph: Graph) -> bool:
    """Whether it asks engines for nothing but what makes prompts begin warm."""
    asked = [p for p in _alive(graph) if p.holds_fragment or p.on_engine]
    return all(p.kind is PrimitiveKind.PARTIAL_PREFILLING for p in asked)


def _alive(graph: Graph) -> list[Primitive]:
    return [p for p in graph if p.id not in graph.behind_code]


def _asked(graph: Graph) -> Counter[Hashable]:
    """Requests, and what makes many of them, without warm-ups."""
    kept = (p for p in _alive(graph) if p.holds_fragment or (p.on_engine and not p.decodes))
    kept = (p for p in kept if not p.attributes.provisional)
    return Counter(_looks(p) for p in kept if p.kind is not PrimitiveKind.PARTIAL_PREFILLING)


def _looks(p: Primitive) -> Hashable:
    said = p.attributes
    kind = PrimitiveKind.PREFILLING if p.kind in LLM_PREFILLS else p.kind
    held = tuple(None if f is None else frozenset(_asked(f.graph).items()) for f in (p.fragment, p.otherwise))
    return kind, p.engine, _prompt(p), said.role, said.collection, said.k, said.filter, said.wrapped, held


def _prompt(p: Primitive) -> _Prompt:
    texts = ["" if part.variable else part.text for part in p.prompt]
    return tuple(text for text, before in zip(texts, [" ", *texts], strict=False) if text or before)


def _begins(begun: list[tuple[str, _Prompt]], warmup: Primitive) -> bool:
    """Whether its prefix is that of something."""
    prefix = _prompt(warmup)
    return any(engine == warmup.engine and prompt[: len(prefix)] == prefix for engine, prompt in begun)
