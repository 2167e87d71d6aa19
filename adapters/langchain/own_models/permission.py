"""Which calls of the user's own objects may be made ahead: those that the plain object is sure to come to.

What may end its run before: user code that raises (a check, above all), a parser that refuses a text, a key that is
not there. No call of the user's own passes such a step (unless `speculate="all"`): it waits until the step has
succeeded, or it is made in its place. Other calls of models and retrievers are passed; one that fails there leaves the
later call made for nothing, the one documented exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from teola_plugin.adapters.early_work import freed, takes_time
from teola_plugin.adapters.langchain.own_models.wrapped import WRAPPED
from teola_plugin.graph import INPUT, Effect, Graph, Path, Primitive, PrimitiveKind, Ref, is_impure
from teola_plugin.passes import Optimised
from teola_plugin.passes.decoding_pipelining import held
from teola_plugin.tracer.draft import Traced, raises

PERMISSION = Effect("permission")
"""Read by calls of the user's own models: user code, which may touch anything, grants it by not raising."""


class AlwaysReached:
    """Whether the plain object comes to a call, whatever becomes of the steps that the call no longer waits for."""

    def __init__(self, planned: Optimised, traced: Traced) -> None:
        assert planned.source is not None
        self._source, self._graph = planned.source, planned.graph
        self._calls = traced.calls
        self._looked_up = {ref for ref in traced.looked_up if not ref.external}

    def __call__(self, p: Primitive, passed: frozenset[str]) -> bool:
        waited = [p, *(self._graph[name] for name in self._graph.ancestors[p.id])]
        known = {ref for one in waited for ref in one.refs}
        steps = [self._source[name] for name in passed]
        return self._looked_up <= known and not any(self._may_end(step, known) for step in steps)

    def _may_end(self, step: Primitive, known: set[Ref]) -> bool:
        if is_impure(step) or any(raises(self._calls.get(one.call)) for one in (step, *held(step))):
            return True
        if step.holds_fragment and any(ref.external and ref.path for one in held(step) for ref in one.refs):
            return True  # keys of an item
        return any(self._may_lack(step, ref) for ref in step.refs if not ref.external and ref not in known)

    def _may_lack(self, step: Primitive, ref: Ref) -> bool:
        """Whether the step reads a key that may not be there, or fills a prompt with what user code made."""
        made = self._source[ref.producer]
        users = is_impure(made) or raises(self._calls.get(made.call))
        return bool(ref.path) or (users and step.kind is PrimitiveKind.PREFILLING)


@dataclass(frozen=True, slots=True)
class Reads:
    """What a chain reads of its input by key."""

    keys: tuple[Path, ...] = ()
    variables: tuple[Path, ...] = ()
    """Read only of a dictionary."""

    @staticmethod
    def of(traced: Traced) -> Reads:
        refs = [ref for component in traced.template.components for _, ref in component.inputs]
        return Reads(_of_input((*refs, *traced.looked_up)), _of_input(traced.filled_in))

    def are_in(self, value: Any) -> bool:
        """Whether all of it is there. Runs no user code: what is no dictionary or list has no keys."""
        return all(_leads(value, path) for path in self.keys) and all(
            _leads(value, path) for path in self.variables if _leads(value, path[:-1], dict)
        )


def _of_input(refs: Iterable[Ref]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(ref.path for ref in refs if ref.producer == INPUT and ref.path))


def _leads(value: Any, path: Path, to: type[Any] = object) -> bool:
    """Whether the path leads to something, of that type."""
    for key in path:
        if type(value) is dict:
            there = key in value
        else:
            there = type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value)
        if not there:
            return False
        value = value[key]
    return isinstance(value, to)


# ------------------------------------------------------------ what starts sooner

_CALLS = (PrimitiveKind.PREFILLING, PrimitiveKind.SEARCHING)
_WRITING = (PrimitiveKind.DECODING, PrimitiveKind.PARTIAL_DECODING)


def gained(
    optimised: Optimised, alike: Callable[[str, str], bool], reached: Callable[[Primitive, frozenset[str]], bool]
) -> frozenset[str]:
    """Sites of wrapped leaves that no longer stand behind something they do not need, and that takes time.

    `alike`: whether the leaves at two sites take as long. `reached`: whether the plain object comes to a call whatever
    the given primitives, which it stands behind, make of it.
    """
    source, graph = optimised.source, optimised.graph
    if source is None or source is graph:
        return frozenset()
    calls = [p for p in graph if p.engine == WRAPPED and p.kind in _CALLS and p.id in source]
    return frozenset(
        _site(p)
        for p in calls
        if any(takes_time(source[name]) for name in freed(p.id, source, graph))
        and reached(p, freed(p.id, source, graph))
        and not any(alike(_site(p), _site(q)) and _lasts_longer(q, p, source, graph) for q in calls)
    )


def asked_before(optimised: Optimised) -> dict[str, frozenset[str]]:
    """Of each site, those that it no longer stands behind, and whose input is known at once: making it may fail."""
    source, graph = optimised.source, optimised.graph
    if source is None:
        return {}
    calls = {p.id: _site(p) for p in graph if p.engine == WRAPPED and p.kind in _CALLS and p.id in source}
    at_once = {name for name in calls if not any(takes_time(graph[one]) for one in graph.ancestors[name])}
    return {site: frozenset(calls[q] for q in at_once & freed(name, source, graph)) for name, site in calls.items()}


def predicted(graph: Graph) -> frozenset[str]:
    """Sites of wrapped leaves that are called for the items of a list while an engine is still writing it."""
    writing = [d for d in graph if d.kind in _WRITING and d.engine != WRAPPED]
    grown = {name for d in writing for name in d.attributes.stream_items}
    cut = [p for p in graph if p.tentative and any(d.id in graph.ancestors[p.id] for d in writing)]
    mapped = [q for p in graph if p.id in grown for q in held(p)]
    return frozenset(_site(q) for q in (*cut, *mapped) if q.engine == WRAPPED and q.kind in _CALLS)


def _site(p: Primitive) -> str:
    return p.attributes.wrapped


def _lasts_longer(q: Primitive, p: Primitive, source: Graph, graph: Graph) -> bool:
    """Whether nobody has `p` sooner for its early start: a search that runs beside it in the plain object still waits
    for all that `p` waited for, and whoever needs `p` needs both."""
    if {p.kind, q.kind} != {PrimitiveKind.SEARCHING} or p is q:
        return False
    beside = p.id not in source.ancestors[q.id] and q.id not in source.ancestors[p.id]
    users = [r for r in graph if takes_time(r) and p.id in graph.ancestors[r.id]]
    needed = all(q.id in graph.ancestors[r.id] for r in users)
    return beside and needed and freed(p.id, source, graph) <= graph.ancestors[q.id]
