"""Provisional answers: while questions are written and a reranker thinks, the answer begins on what is likely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import (
    LLM_PREFILLS,
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
from teola_plugin.passes.guessed_branch import CODE, MIN_GAP, cloned, may_begin
from teola_plugin.passes.question_hits import question_branch, written_lists
from teola_plugin.passes.stage_decomposition import list_inputs

_K = PrimitiveKind
_HOLDERS = frozenset({_K.MAP, _K.LOOP})
"""Several prompts, or several rounds: the calls of the first round begin."""
IN_ORDER = "in order"
"""The callable of a guess at scores: the order stays as it is."""


@dataclass(frozen=True, slots=True)
class ProvisionalAnswers:
    """A prompt that waits for a reranker gets a second, provisional prefilling: on the order before reranking or, where
    an LLM still writes what is searched for, on what the question itself finds.

    What lies between is repeated for it. Nobody reads what it makes: the same prompt in the end is the same
    work, and is claimed; the text for another prompt is the draft of the real answer. Only at engines declared
    `dedicated`, which are idle meanwhile.
    """

    name: ClassVar[str] = "provisional-answers"
    once: ClassVar[bool] = True

    def run(self, graph: Graph, context: PassContext) -> Graph:
        if context.speculate == "off":
            return graph
        lists, rerankers = written_lists(graph), [p for p in graph if p.kind is _K.RERANKING]
        if not lists and not rerankers:
            return graph
        asked = {p.id: made for p in graph if (made := _asked(p, graph, context))}
        branches = {name: question_branch(graph[name], made, lists, graph, context) for name, made in asked.items()}
        taken = {one.id for branch in branches.values() for one in branch}
        ready = ready_times(graph, context) if asked else {}
        for name in [name for name, branch in branches.items() if not branch]:
            branch = _branch(graph[name], asked[name], rerankers, graph, context, ready)
            if taken.isdisjoint(one.id for one in branch):  # of one reranker, one guess
                branches[name] = branch
        if not any(branches.values()):
            return graph
        edit = GraphEdit(graph)
        for branch in branches.values():
            edit.add(*(one for one in branch if one.id not in edit))
        return edit.freeze()


def _asked(p: Primitive, graph: Graph, context: PassContext) -> list[Primitive]:
    """The generations that `p` begins with, if all of them may begin on a guess, and none has been made."""
    made = list(_asks(p))
    if InstancePath(p.id).provisional() in graph:
        return []
    return made if all(may_begin(one, context) and not one.effects for one in made) else []


def _branch(
    p: Primitive,
    asked: list[Primitive],
    rerankers: list[Primitive],
    graph: Graph,
    context: PassContext,
    ready: dict[str, float],
) -> list[Primitive]:
    """The guess, the code behind it, and `p` on what that makes; nothing where `p` waits for none of the rerankers,
    or cannot begin before."""
    rerankers = [r for r in rerankers if graph.above[p.id] & graph.bits[r.id]]
    guessed = [r for r in rerankers if not any(graph.above[r.id] & graph.bits[o.id] for o in rerankers)]
    if len(guessed) != len(rerankers) or not all(_idle_beside(r, asked, context) for r in guessed):
        return []  # two in a row: the order before the first says little of that behind the second
    between = [q for q in graph if graph.above[p.id] & graph.bits[q.id] and _behind(q, guessed, graph)]
    if not guessed or not all(q.kind in CODE and not q.effects and not q.tentative for q in between):
        return []
    replaced = {r.id: _guess(r) for r in guessed} | {q.id: q for q in between}
    if set(p.after) & set(replaced) or not _gains(p, replaced, guessed, graph, ready):
        return []
    return list(cloned(p, replaced, guessed[0].id, graph))


def _asks(p: Primitive) -> Iterator[Primitive]:
    """The generations that `p` is or, if it holds any, begins with."""
    if p.kind in LLM_PREFILLS:
        yield p
    elif p.kind in _HOLDERS and p.fragment is not None and not p.early and not is_impure(p):
        for q in p.fragment.graph:
            yield from _asks(q)


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
