"""Provisional answers: while a reranker thinks, the answer begins on what it is likely to say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import (
    LLM_PREFILLS,
    Fragment,
    Graph,
    GraphEdit,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Ref,
    is_impure,
    named,
)
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.estimate import ready_times
from teola_plugin.passes.stage_decomposition import list_inputs

_K = PrimitiveKind
_CODE = frozenset({_K.CALL, _K.AGGREGATE})
"""What may stand between the guessed value and the prompt: code that is known to be pure, and runs at the client."""
_HOLDERS = frozenset({_K.MAP, _K.LOOP})
"""Several prompts, or several rounds: the calls of the first round begin."""
MIN_GAP = 0.005
"""Seconds. An answer that could begin less than this before its place is not worth a request."""
IN_ORDER = "in order"
"""The callable of a guess at scores: the order stays as it is."""


@dataclass(frozen=True, slots=True)
class ProvisionalAnswers:
    """A prompt that waits for a reranker gets a second, provisional prefilling, on the order before reranking.

    The code between the two is repeated for it. Nobody reads what it makes: the same prompt in the end is the same
    work, and is claimed; the text for another prompt is the draft of the real answer. Only at engines declared `own`,
    which the reranker leaves idle.
    """

    name: ClassVar[str] = "provisional-answers"
    once: ClassVar[bool] = True

    def run(self, graph: Graph, context: PassContext) -> Graph:
        if context.speculate == "off" or not any(p.kind is _K.RERANKING for p in graph):
            return graph
        edit: GraphEdit | None = None
        ready = ready_times(graph, context)
        for p in graph:
            branch = _branch(p, graph, context, ready)
            if branch:
                edit = edit or GraphEdit(graph)
                edit.add(*(made for made in branch if made.id not in edit))
        return graph if edit is None else edit.freeze()


def _branch(p: Primitive, graph: Graph, context: PassContext, ready: dict[str, float]) -> list[Primitive]:
    """The guess, the code behind it, and `p` on what that makes; nothing where `p` does not wait for a reranker, or
    cannot begin before."""
    asked = list(_asks(p))
    if not asked or not all(_may_begin(one, context) for one in asked):
        return []
    rerankers = [r for r in graph if r.kind is _K.RERANKING and graph.above[p.id] & graph.bits[r.id]]
    guessed = [r for r in rerankers if not any(graph.above[r.id] & graph.bits[o.id] for o in rerankers)]
    if len(guessed) != len(rerankers) or not all(_idle_beside(r, asked, context) for r in guessed):
        return []  # two in a row: the order before the first says little of that behind the second
    between = [q for q in graph if graph.above[p.id] & graph.bits[q.id] and _behind(q, guessed, graph)]
    if not guessed or not all(q.kind in _CODE and not q.effects and not q.tentative for q in between):
        return []
    replaced = {r.id: _guess(r) for r in guessed} | {q.id: q for q in between}
    if set(p.after) & set(replaced) or not _gains(p, replaced, guessed, graph, ready):
        return []
    if InstancePath(p.id).provisional() in graph:  # this pass was here already
        return []
    return list(_clones(p, replaced, guessed[0].id, graph))


def _asks(p: Primitive) -> Iterator[Primitive]:
    """The generations that `p` is or, if it holds any, begins with."""
    if p.kind in LLM_PREFILLS:
        yield p
    elif p.kind in _HOLDERS and p.fragment is not None and not p.early and not is_impure(p):
        for q in p.fragment.graph:
            yield from _asks(q)


def _may_begin(p: Primitive, context: PassContext) -> bool:
    """At engines that are declared own, and are known, whatever `speculate` says of others."""
    profile, said = context.profile(p.engine), p.attributes
    if profile is None or not profile.own or p.tentative or p.effects:
        return False
    return not said.wrapped and not said.provisional and said.lookahead is not False


def _idle_beside(r: Primitive, asked: list[Primitive], context: PassContext) -> bool:
    return all(context.overlap(r.engine, one.engine) for one in asked)


def _behind(q: Primitive, guessed: list[Primitive], graph: Graph) -> bool:
    return any(graph.above[q.id] & graph.bits[r.id] for r in guessed)


def _gains(
    p: Primitive, replaced: dict[str, Primitive], guessed: list[Primitive], graph: Graph, ready: dict[str, float]
) -> bool:
    """Whether all that the guess needs is there long enough before the real value is."""
    needed = {name for one in (p, *(graph[name] for name in replaced)) for name in graph.parents(one.id)}
    for r in guessed:  # its texts are needed, its question is not
        needed -= {ref.producer for ref in r.refs} - {ref.producer for ref in _texts(r)}
    begin = max((ready[name] for name in needed if name not in replaced), default=0.0)
    place = max((ready[name] for name in graph.parents(p.id)), default=0.0)
    return place - begin >= MIN_GAP


def _texts(r: Primitive) -> list[Ref]:
    names = list_inputs(r)
    return [ref for key, ref in r.inputs if key in names]


def _guess(r: Primitive) -> Primitive:
    """Scores that leave the texts as they are."""
    return Primitive(r.id, _K.CALL, inputs=named(texts=_texts(r)[0]), call=IN_ORDER, scope=r.scope)


def _clones(p: Primitive, replaced: dict[str, Primitive], guess: str, graph: Graph) -> Iterator[Primitive]:
    """Under names of their own, reading one another."""
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
