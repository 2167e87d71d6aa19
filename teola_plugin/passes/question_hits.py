"""The likeliest context while other questions are still being written: what the question itself finds, reranked.

An answer over several searches waits for an LLM to write what is searched for. The question is known before, and often
what is best for it is among its own hits: `benchmarks.likeliest` counts how often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from teola_plugin.graph import (
    LLM_DECODES,
    Graph,
    GraphEdit,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Ref,
    named,
)
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.estimate import ready_times
from teola_plugin.passes.guessed_branch import CODE, MIN_GAP, cloned, may_begin
from teola_plugin.passes.stage_decomposition import list_inputs

_K = PrimitiveKind
QUESTION = "the question alone"
"""The callable of a guess at a list of questions: the `question` of its inputs, or none without that."""
HITS = 4
"""Of a search that does not say how many."""
_ASKED_EACH = CODE | {_K.EMBEDDING, _K.SEARCHING}
"""What may be done for each of the questions."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A prompt behind searches for what an LLM writes."""

    holder: Primitive
    """The MAP that searches for each of the questions."""
    questions: Primitive
    """What makes their list."""
    writers: tuple[Primitive, ...]
    """The decodings that it comes from."""
    between: tuple[Primitive, ...]
    """From the holder to the prompt, without it."""

    @property
    def rerankers(self) -> list[Primitive]:
        return [q for q in self.between if q.kind is _K.RERANKING]


def written_lists(graph: Graph) -> dict[str, Primitive]:
    """The MAPs over lists that an LLM writes, by id, and what makes those."""
    return {q.id: made for q in graph if (made := _list_of(q, graph)) is not None}


def question_branch(
    p: Primitive, asked: list[Primitive], lists: dict[str, Primitive], graph: Graph, context: PassContext
) -> list[Primitive]:
    """The guess, the searches and the code behind it, and `p` on what they make; nothing where `p` does not wait for
    questions that an LLM writes, or where the guess is of no use.

    Of use it is where a reranker chooses among the hits, or where the question is searched for in any case: without
    either, the context is that of other questions.
    """
    shape = _shape(p, lists, graph)
    if shape is None or not all(_may_repeat(q, shape, asked, context) for q in shape.between):
        return []
    guess = _guess(shape, graph)
    replaced = {shape.questions.id: guess} | {q.id: _unsized(q) for q in shape.between} if guess else {}
    if guess is None or set(p.after) & set(replaced) or shape.questions.id in {ref.producer for ref in p.refs}:
        return []
    *before, answer = cloned(p, replaced, shape.questions.id, graph)
    if not _gains(p, shape, [*before, answer], graph, context):
        return []
    return [*before, *_read(answer, shape, context), _held(answer, shape)]


def _shape(p: Primitive, lists: dict[str, Primitive], graph: Graph) -> _Shape | None:
    held = [name for name in lists if graph.above[p.id] & graph.bits[name]]
    if len(held) != 1:
        return None
    holder, questions = graph[held[0]], lists[held[0]]
    above = [q for q in graph if graph.above[p.id] & graph.bits[q.id]]
    writers = tuple(q for q in above if q.kind in LLM_DECODES and _leads_to(q, questions, graph))
    between = tuple(q for q in above if q is holder or _leads_to(holder, q, graph))
    return _Shape(holder, questions, writers, between) if writers else None


def _list_of(q: Primitive, graph: Graph) -> Primitive | None:
    """What the items of a MAP are made by, if it is all of that."""
    ref = next((ref for key, ref in q.inputs if key == "items"), None)
    if q.kind is not _K.MAP or q.early or ref is None or ref.external or ref.path:
        return None
    found = graph[ref.producer]
    return found if any(w.kind in LLM_DECODES and _leads_to(w, found, graph) for w in graph) else None


def _leads_to(first: Primitive, then: Primitive, graph: Graph) -> bool:
    return first is then or bool(graph.above[then.id] & graph.bits[first.id])


def _may_repeat(q: Primitive, shape: _Shape, asked: list[Primitive], context: PassContext) -> bool:
    """Pure code, searches and rerankings at engines that are idle meanwhile, and whose owner does not mind."""
    if q.tentative or any(effect.writes for effect in q.effects):
        return False
    if q is not shape.holder:
        return q.kind in CODE or (q.kind is _K.RERANKING and _idle(q, shape, asked, context))
    held = () if q.fragment is None else q.fragment.graph
    return all(
        inner.kind in CODE or (inner.kind in _ASKED_EACH and _idle(inner, shape, asked, context)) for inner in held
    )


def _idle(q: Primitive, shape: _Shape, asked: list[Primitive], context: PassContext) -> bool:
    others = {one.engine for one in (*shape.writers, *asked)}
    return may_begin(q, context) and all(context.overlap(q.engine, other) for other in others)


def _guess(shape: _Shape, graph: Graph) -> Primitive | None:
    """The list of the question alone; of none where it is searched for in any case."""
    name, scope = shape.questions.id, shape.questions.scope
    if _searched_anyway(shape, graph):
        return Primitive(name, _K.CALL, call=QUESTION, scope=scope)
    questions = {ref for r in shape.rerankers for ref in _query(r)}
    if len(shape.rerankers) != 1 or len(questions) != 1:
        return None
    [question] = questions
    known = question.external or not _leads_to(shape.holder, graph[question.producer], graph)
    if not known or question.producer == name:
        return None
    return Primitive(name, _K.CALL, inputs=named(question=question), call=QUESTION, scope=scope)


def _query(r: Primitive) -> Iterator[Ref]:
    """What a reranker scores its texts for."""
    lists = list_inputs(r)
    yield from (ref for key, ref in r.inputs if key not in lists)


def _searched_anyway(shape: _Shape, graph: Graph) -> bool:
    """Whether hits of another search are put together with those of the questions."""
    inside = {shape.questions.id, *(q.id for q in shape.between)}
    refs = (ref for q in shape.between for ref in q.refs if not ref.external and ref.producer not in inside)
    outside = [graph[ref.producer] for ref in refs]
    searches = [q for q in graph if q.kind is _K.SEARCHING]
    return any(_leads_to(q, one, graph) for one in outside for q in searches)


def _read(answer: Primitive, shape: _Shape, context: PassContext) -> Iterator[Primitive]:
    """Its prompt is read as soon as it is there, where its engine is not that which writes the questions."""
    profile = context.profile(answer.engine)
    idle = all(context.overlap(w.engine, answer.engine) for w in shape.writers)
    if idle and answer.prefills and profile is not None and profile.prefix_caching:
        yield answer.with_(id=InstancePath(answer.id).partial(0), kind=_K.PARTIAL_PREFILLING, after=(), effects=())


def _held(answer: Primitive, shape: _Shape) -> Primitive:
    """It is written once the questions are: begun before, it would have to be stopped before it is known to be right,
    for it may write a quarter of its query's tokens at most."""
    return answer.with_(after=(*answer.after, shape.questions.id))


def _searches(shape: _Shape, graph: Graph) -> Iterator[Primitive]:
    """Those that a guess may rest on."""
    held = shape.holder.fragment
    yield from (q for q in (*graph, *(held.graph if held is not None else ())) if q.kind is _K.SEARCHING)


def _unsized(q: Primitive) -> Primitive:
    """There are fewer hits than the sizes say."""
    return q.with_(size=None) if q.kind is _K.RERANKING else q


def _gains(p: Primitive, shape: _Shape, made: list[Primitive], graph: Graph, context: PassContext) -> bool:
    """Whether the guess is there long enough before the real prompt, and what it takes is in nobody's way: done before
    the real hits come to the reranker."""
    edit = GraphEdit(graph)
    pairs = max((one.attributes.k or HITS for one in _searches(shape, graph)), default=HITS)
    made = [one.with_(size=pairs) if one.kind is _K.RERANKING else one for one in made]
    edit.add(*(one for one in made if one.id not in edit))
    guessed = edit.freeze()
    ready = ready_times(guessed, context)

    def begins(name: str) -> float:
        return max((ready[parent] for parent in guessed.parents(name)), default=0.0)

    begin = max([begins(InstancePath(p.id).provisional()), ready[shape.questions.id]])
    in_time = all(ready[InstancePath(r.id).provisional()] <= begins(r.id) for r in shape.rerankers)
    return in_time and begins(p.id) - begin >= MIN_GAP
