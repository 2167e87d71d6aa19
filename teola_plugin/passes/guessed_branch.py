"""What the guesses at a prompt have in common: what may be repeated for one, and under which names."""

from __future__ import annotations

from collections.abc import Iterator

from teola_plugin.graph import Fragment, Graph, GraphEdit, InstancePath, Primitive, PrimitiveKind
from teola_plugin.passes.base import PassContext

CODE = frozenset({PrimitiveKind.CALL, PrimitiveKind.AGGREGATE})
"""What may stand between the guessed value and the prompt: code that is known to be pure, and runs at the client."""
MIN_GAP = 0.005
"""Seconds. An answer that could begin less than this before its place is not worth a request."""


def may_begin(p: Primitive, context: PassContext) -> bool:
    """Return True for an engine that is known and declared dedicated, whatever `speculate` says of others."""
    profile, said = context.profile(p.engine), p.attributes
    if profile is None or not profile.dedicated or p.tentative or any(effect.writes for effect in p.effects):
        return False
    return not said.wrapped and not said.provisional and said.lookahead is not False


def cloned(p: Primitive, replaced: dict[str, Primitive], guess: str, graph: Graph) -> Iterator[Primitive]:
    """What is `replaced`, by its id, and `p`: under names of their own, reading one another."""
    names = {name: InstancePath(name).provisional() for name in (*replaced, p.id)}
    for q in (*(replaced[q.id] for q in graph if q.id in replaced), p):
        yield _marked(q, guess).rename(names, {})


def _marked(p: Primitive, guess: str) -> Primitive:
    """`p`, and what it holds, on a guess."""
    held = p.fragment
    if held is not None:
        edit = GraphEdit(held.graph)
        for q in held.graph:
            edit.replace(_marked(q, guess))
        held = Fragment(edit.freeze(), held.output)
    return p.with_(tentative=True, fragment=held, attributes=p.attributes.with_(provisional=guess))
