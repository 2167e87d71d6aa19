"""What a call of the plain object may repeat where it comes before its graph's own: as the graph says of its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from teola_plugin.graph import Graph, Primitive
from teola_plugin.requests.payloads import Generate
from teola_plugin.runtime.primitive_requests import drafts
from teola_plugin.runtime.query_run import QueryRun

_LEAST = 16
"""Characters of a prompt by which it is known."""


def drafts_of_call(run: QueryRun, engine: str, payload: Any) -> tuple[str, ...]:
    """Of the first prefilling on this engine that makes such a prompt, as far as its literals tell: they are drafts,
    so that another one's cost a few verified tokens."""
    if not isinstance(payload, Generate) or not payload.sampling.greedy:
        return ()
    asked = ""
    for p in _prefillings(run):
        if p.engine == engine and p.attributes.drafts:
            asked = asked or payload.prompt.flat()
            if _makes(p, asked):
                return drafts(p, _known(run, p))
    return ()


def _prefillings(run: QueryRun) -> Iterator[Primitive]:
    for graph in (run.graph, *(one.part.graph for one in run.parts.values())):
        if graph is not None:
            yield from _in(graph)


def _in(graph: Graph) -> Iterator[Primitive]:
    for p in graph:
        if p.prefills:
            yield p
        for held in (p.fragment, p.otherwise):
            if held is not None:
                yield from _in(held.graph)


def _makes(p: Primitive, text: str) -> bool:
    """Whether its literals stand in the text, one behind the other."""
    at = known = 0
    for part in p.prompt:
        literal = part.text.strip()
        at = text.find(literal, at)
        if at < 0:
            return False
        at, known = at + len(literal), known + len(literal)
    return known >= _LEAST


def _known(run: QueryRun, p: Primitive) -> dict[str, Any]:
    """Its inputs that are there already."""
    found: dict[str, Any] = {}
    for key, ref in p.inputs:
        try:
            found[key] = run.store.read(ref)
        except (KeyError, IndexError, TypeError):
            continue
    return found
