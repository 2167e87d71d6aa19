"""Phrases for the calls that begin before their place, found by comparing a p-graph and its e-graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teola_plugin.adapters.planned_queries import dropped_waits, forms_matter, has_untold_drafts, left_in_place
from teola_plugin.graph import LLM_KINDS, Graph, InstancePath, Primitive, PrimitiveKind, is_impure
from teola_plugin.passes import Optimised
from teola_plugin.passes.decoding_pipelining import leaf_primitives
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.draft import DERIVED
from teola_plugin.tracer.leaf import RUN_TIME_EFFECTS

if TYPE_CHECKING:
    from teola_plugin.adapters.plan_report import OwnCalls

_K = PrimitiveKind
_NOUNS = (
    (_K.DECODING, "model call", "model calls"),
    (_K.SEARCHING, "search", "searches"),
    (_K.RERANKING, "reranking", "rerankings"),
    (_K.INGESTION, "ingestion", "ingestions"),
    (_K.EMBEDDING, "embedding", "embeddings"),
)
"""The words for a component, singular and plural, by the kind of its last primitive."""
_MAX_LISTED = 3
"""The most names that are written out."""
_ENDING = re.compile(rf"(\.({'|'.join(DERIVED)}))?(\.(partial|grown))?(#\d+)?$")


SPECULATIVE_START = "before it is known whether the original comes there"
"""When a speculative call starts."""


def component_of(id_: str) -> str:
    """Return the component that a primitive belongs to: `found[0]/found.retrieve.embedding` is of `found.retrieve`."""
    name, before = id_.rpartition("/")[2], ""
    while name != before:
        before, name = name, _ENDING.sub("", name)
    return name


def listed(names: Sequence[str], word: str = "and") -> str:
    """Join a few names with commas and `word`; of many, only the first, and how many more there are.

    More than `_MAX_LISTED` names are many. The result is empty for no names.
    """
    if len(names) > _MAX_LISTED:
        return f"{', '.join(names[:_MAX_LISTED])} {word} {len(names) - _MAX_LISTED} more"
    return f" {word} ".join(one for one in (", ".join(names[:-1]), *names[-1:]) if one)


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """Components whose requests differ for whole and for streamed answers, by name."""

    whole_only: frozenset[str] = frozenset()
    """Components that begin early if their answers come whole."""
    unknown: frozenset[str] = frozenset()
    """Components that begin in their place, and all that depend on them."""

    @classmethod
    def of(cls, graph: Graph, pool: EnginePool) -> AnswerForms:
        """Return those of an e-graph. Raises `RegistrationError` for an engine that the pool does not have."""
        names: dict[str, set[str]] = {"whole": set(), "unknown": set()}
        left: set[str] = set()
        for p in graph:
            for one in leaf_primitives(p):
                if one.prefills and forms_matter(one, pool):
                    names[one.attributes.form].add(component_of(one.id))
                    left |= {p.id} if one.attributes.form == "unknown" else set()
        dependents = {component_of(p.id) for p in graph if left & graph.ancestors[p.id]}
        return cls(frozenset(names["whole"]), frozenset(names["unknown"] | dependents))

    def condition(self, names: Iterable[str]) -> str:
        """Return on what it depends whether these components begin early; empty for nothing."""
        return ", if their answers come whole" if self.whole_only.intersection(names) else ""


NO_FORMS = AnswerForms()


def describe_gains(
    plan: Optimised, own_calls: OwnCalls | None = None, forms: AnswerForms = NO_FORMS
) -> tuple[str, ...]:
    """Return a phrase for each gain of a plan, most important first. `own_calls`: calls of the user's own objects."""
    source, graph = plan.source, plan.graph
    if source is None:
        return ()
    return (
        *_side_by_side(source, graph, own_calls, forms),
        *_items(source, graph, own_calls, forms),
        *_phrases_for_arms(graph),
        *_phrases_for_lookaheads(graph, forms),
        *_phrases_for_stages(source, graph),
        *_beginnings(graph),
        *_drafted(graph),
    )


def _drafted(graph: Graph) -> Iterator[str]:
    names = dict.fromkeys(component_of(p.id) for p in graph for one in leaf_primitives(p) if has_untold_drafts(one))
    if names:
        yield f"{listed(list(names))} in fewer steps, with what it may repeat as drafts"


def _phrases_for_arms(graph: Graph) -> Iterator[str]:
    """Yield a phrase for each branch whose requests start before its condition is known."""
    for p in graph:
        arms = {"then": p.fragment, "else": p.otherwise}
        speculative_arms = [arm for which in p.attributes.speculative_arms if (arm := arms[which]) is not None]
        names = dict.fromkeys(component_of(q.id) for arm in speculative_arms for q in arm.graph if q.on_engine)
        if names:
            yield f"{listed(list(names))} before it is known which way {component_of(p.id)} takes"


def _phrases_for_lookaheads(graph: Graph, forms: AnswerForms) -> Iterator[str]:
    """Yield a phrase for calls that start before the original comes to them or chooses them, grouped by when."""
    names_by_start: dict[str, list[str]] = {}
    for name, start in lookahead_starts(graph, forms).items():
        names_by_start.setdefault(start, []).append(name)
    yield from (f"{listed(names)} {start}" for start, names in names_by_start.items())


def lookahead_starts(graph: Graph, forms: AnswerForms = NO_FORMS) -> dict[str, str]:
    """Return when the calls start that wait neither for the original's choice nor for your code, by component."""
    starts: dict[str, str] = {}
    for p in graph:
        certain = p.attributes.lookahead
        starts_sooner = p.on_engine and certain is not None and p.kind is not _K.PARTIAL_PREFILLING
        waits_for_code = any(is_impure(graph[name]) for name in graph.ancestors[p.id])
        if starts_sooner and not waits_for_code and component_of(p.id) not in forms.unknown:
            starts.setdefault(component_of(p.id), "before the original comes there" if certain else SPECULATIVE_START)
    return starts


# ------------------------------------------------------------ calls beside each other


def _side_by_side(source: Graph, graph: Graph, own_calls: OwnCalls | None, forms: AnswerForms) -> Iterator[str]:
    """Yield a phrase for each group of calls that no longer wait for each other or for user code."""
    kinds = _kinds(source)
    for group in _groups(source, graph, own_calls, forms.unknown):
        calls = _at_once(source, [name for name in group if name in kinds], own_calls)
        code = [name for name in group if name not in kinds]
        if len(calls) > 1 or code:
            how = "side by side" if len(calls) > 1 else "ahead of its place"
            past = f", without waiting for your code ({listed(code)})" if code else ""
            yield f"{_counted(calls, kinds)} {how}{past}{forms.condition(calls)}"


def _at_once(source: Graph, names: Sequence[str], own_calls: OwnCalls | None) -> list[str]:
    """Leave out the calls that wait for another one, as both are made on an object that answers one at a time."""
    if own_calls is None:
        return list(names)
    sites = {component_of(p.id): site for p in source for site in _sites(p)}
    shared_objects = {name: own_calls.one_by_one.get(sites.get(name, "")) for name in reversed(names)}
    first = {id(obj): name for name, obj in shared_objects.items() if obj is not None}
    return [name for name in names if shared_objects[name] is None or first[id(shared_objects[name])] == name]


def _groups(
    source: Graph, graph: Graph, own_calls: OwnCalls | None, left: frozenset[str] = frozenset()
) -> list[list[str]]:
    """Return groups of calls that no longer wait for each other or for user code; within a group, none waits."""
    ids_by_name: dict[str, set[str]] = {}
    for p in graph:
        ids_by_name.setdefault(component_of(p.id), set()).add(p.id)
    above = {name: set().union(*(graph.ancestors[id_] for id_ in ids)) for name, ids in ids_by_name.items()}
    groups: list[list[str]] = []
    for name, dropped in _freed(source, graph, own_calls).items():
        if name in left:
            continue

        def apart(other: str, name: str = name) -> bool:
            return not (above[name] & ids_by_name[other] or above[other] & ids_by_name[name])

        group = next((one for one in groups if dropped & {*one} and name not in one and all(map(apart, one))), None)
        if group is not None:
            group.append(name)
        elif not any(name in one and dropped <= {*one} for one in groups):
            groups.append([*[other for other in ids_by_name if other in dropped and apart(other)][:1], name])
    return [one for one in groups if len(one) > 1]


def _freed(source: Graph, graph: Graph, own_calls: OwnCalls | None) -> dict[str, set[str]]:
    """Return, for each component that makes requests, the components that it no longer waits for."""
    sites = None if own_calls is None else own_calls.prefetchable
    dropped_by_name: dict[str, set[str]] = {}
    for p in source:
        if asks(p) and p.id in graph and (sites is None or (sites | {""}) & _sites(p)):
            name = component_of(p.id)
            dropped = {
                component_of(one)
                for one in dropped_waits(p.id, source, graph)
                if asks(source[one]) or runs_user_code(source[one])
            } - {name}
            dropped_by_name.setdefault(name, set()).update(dropped)
    return {name: dropped for name, dropped in dropped_by_name.items() if dropped}


def runs_user_code(p: Primitive) -> bool:
    """Return True for user code that may do anything, so not for what only computes a value at run time."""
    return is_impure(p) and p.effects != RUN_TIME_EFFECTS


def asks(p: Primitive) -> bool:
    """Return True if a primitive, or one of its fragment, makes requests to engines."""
    return any(one.on_engine for one in leaf_primitives(p))


def _sites(p: Primitive) -> set[str]:
    return {one.attributes.wrapped for one in leaf_primitives(p)}


def _kinds(graph: Graph) -> dict[str, set[PrimitiveKind]]:
    """Return the components that make requests to engines, in order, and the kinds of these requests."""
    kinds_by_name: dict[str, set[PrimitiveKind]] = {}
    for p in graph:
        if kinds := {one.kind for one in leaf_primitives(p) if one.on_engine}:
            kinds_by_name.setdefault(component_of(p.id), set()).update(kinds)
    return kinds_by_name


def _counted(names: Sequence[str], kinds: dict[str, set[PrimitiveKind]]) -> str:
    """Return e.g. `2 searches and 1 model call (a, b, c)`."""
    nouns = Counter(_noun(kinds[name]) for name in names)
    counts = [f"{count} {several if count > 1 else one}" for (one, several), count in nouns.items()]
    return f"{' and '.join(counts)} ({listed(names)})"


def _noun(kinds: set[PrimitiveKind]) -> tuple[str, str]:
    return next(((one, several) for kind, one, several in _NOUNS if kind in kinds), ("model call", "model calls"))


# ------------------------------------------------------------ lists, stages, beginnings of prompts


def _items(source: Graph, graph: Graph, own_calls: OwnCalls | None, forms: AnswerForms) -> Iterator[str]:
    """Yield a phrase for the calls for each item of a list: as the item is written, or beside those of other items."""
    kinds = _kinds(source)
    for holder, (how, inside) in _item_starts(graph, own_calls, forms).items():
        yield f"each {_noun(kinds.get(holder, set()))[0]} of {holder} {how}{forms.condition(inside)}"


def _item_starts(graph: Graph, own_calls: OwnCalls | None, forms: AnswerForms) -> dict[str, tuple[str, set[str]]]:
    """Return, for each list whose items' calls begin early: when they do, and the components inside."""
    one_by_one = {} if own_calls is None else own_calls.one_by_one
    starts, inside = dict[str, str](), dict[str, set[str]]()
    for p in graph:
        names = {component_of(one.id) for one in leaf_primitives(p)}
        if names & forms.unknown:
            continue
        holder = InstancePath(p.id).outermost.partition("[")[0]
        inside.setdefault(holder, set()).update(names)
        waits = {one.attributes.wrapped in one_by_one for one in leaf_primitives(p) if one.on_engine}
        if p.speculative and "[" in p.id and asks(p):
            starts.setdefault(holder, "as soon as its item is written")
        elif p.attributes.grow:
            starts.setdefault(p.id, "as soon as its item is written")
        elif p.holds_fragment and p.attributes.is_parallel and asks(p) and waits != {True}:
            starts.setdefault(p.id, "together with those of the other items")
        elif own_calls is not None and p.kind is _K.MAP and (later := _later_calls(p, own_calls.prefetchable)):
            starts.setdefault(p.id, "once the step in front of it has ended for its item")
            inside[holder] = later
    return {holder: (how, inside[holder]) for holder, how in starts.items()}


def _later_calls(p: Primitive, sites: Container[str]) -> set[str]:
    """Return the components in the body of a MAP that call own objects at these sites behind other calls."""
    assert p.fragment is not None
    body = p.fragment.graph
    calls = [(component_of(q.id), q) for q in body if q.attributes.wrapped in sites]
    return {
        name for name, q in calls if any(component_of(one) != name and asks(body[one]) for one in body.ancestors[q.id])
    }


def prefetch_starts(
    plan: Optimised, own_calls: OwnCalls | None = None, forms: AnswerForms = NO_FORMS
) -> dict[str, str]:
    """Return when the calls of a plan start that do not wait for their place, by the names of their components."""
    source, graph = plan.source, plan.graph
    if source is None:
        return {}
    starts: dict[str, str] = {}
    one_by_one = {} if own_calls is None else own_calls.one_by_one
    for how, inside in _item_starts(graph, own_calls, forms).values():
        starts |= dict.fromkeys(inside, how)
    for name in {name for p in graph if p.holds_fragment for name in _limited(p, one_by_one)}:
        starts.pop(name, None)
    sites = {
        component_of(one.id): one.attributes.wrapped for p in source for one in leaf_primitives(p) if one.on_engine
    }
    order = list(dict.fromkeys(component_of(p.id) for p in source))
    inside_lists = {
        component_of(p.id): [component_of(one.id) for one in leaf_primitives(p)] for p in graph if p.holds_fragment
    }
    for name, dropped in _freed(source, graph, own_calls).items():
        target = one_by_one.get(sites.get(name, ""))
        waits = [
            one
            for one in order
            if one in dropped and (target is None or one_by_one.get(sites.get(one, "")) is not target)
        ]
        for one in (name, *inside_lists.get(name, ())) if waits and name not in forms.unknown else ():
            starts.setdefault(one, f"without waiting for {listed(waits)}")
    for holder in map(component_of, left_in_place(graph)):
        for name in (holder, *inside_lists.get(holder, ())):
            starts.pop(name, None)
    for name, tokens in _prompt_beginnings(graph).items():
        starts.setdefault(name, f"the first {tokens} tokens of its prompt, early")
    return starts


def _limited(p: Primitive, one_by_one: Container[str]) -> Iterator[str]:
    """Yield the components in a list that are called one at a time, and the searches that wait for one."""
    for fragment in (one for one in (p.fragment, p.otherwise) if one is not None):
        limited = {q.id for q in fragment.graph if q.on_engine and q.attributes.wrapped in one_by_one}
        for q in fragment.graph:
            if q.id in limited or (q.kind is _K.SEARCHING and limited & fragment.graph.ancestors[q.id]):
                yield component_of(q.id)


def speculative_names(graph: Graph) -> frozenset[str]:
    """Return the components that may start before it is known whether the original comes to them."""
    arms = ((p, which, arm) for p in graph for which, arm in (("then", p.fragment), ("else", p.otherwise)))
    speculative_primitives = [
        q for p, which, arm in arms if arm is not None and which in p.attributes.speculative_arms for q in arm.graph
    ]
    unsure = (one for p in graph for one in leaf_primitives(p) if one.speculative or one.attributes.lookahead is False)
    return frozenset(component_of(p.id) for p in (*speculative_primitives, *unsure))


def _phrases_for_stages(source: Graph, graph: Graph) -> Iterator[str]:
    """Yield a phrase for the requests that stage decomposition cut into stages, if there are any."""
    cut = [p.id.partition("#")[0] for p in graph if p.on_engine and p.kind not in LLM_KINDS and "#" in p.id]
    names = list(dict.fromkeys(component_of(name) for name in cut if name in source))
    if names:
        yield f"{listed(names)} in stages, each while the one before it runs"


def _beginnings(graph: Graph) -> Iterator[str]:
    """Yield a phrase for the longest beginning of each prompt that is prefilled early."""
    if tokens := _prompt_beginnings(graph):
        prompts = [f"of {name} ({count} tokens and more)" for name, count in tokens.items()]
        yield f"the beginning of the prompt {listed(prompts)}"


def _prompt_beginnings(graph: Graph) -> dict[str, int]:
    """Return the most tokens of each prompt that are prefilled before the rest, by the name of its component."""
    tokens: dict[str, int] = {}
    for p in graph:
        if p.kind is _K.PARTIAL_PREFILLING:
            name = component_of(p.id)
            tokens[name] = max(tokens.get(name, 0), sum(part.tokens for part in p.prompt))
    return tokens
