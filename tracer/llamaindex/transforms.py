"""Query transforms: another query, or other texts to search with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.indices.query.query_transform.base import (
    BaseQueryTransform,
    DecomposeQueryTransform,
    HyDEQueryTransform,
    IdentityQueryTransform,
)

from teola_plugin.graph import Ref
from teola_plugin.shims.llamaindex.queries import (
    DecomposeQueryTransformParts,
    HyDEQueryTransformParts,
    decomposed_query,
    hypothetical_document,
)
from teola_plugin.tracer.llamaindex.classes import own_prompt, rule_for
from teola_plugin.tracer.llamaindex.walk import SymbolicQuery, Walk

Given = Mapping[str, Any]


def transformed(
    walk: Walk, transform: BaseQueryTransform, asked: SymbolicQuery, metadata: Any, path: str, name: str
) -> SymbolicQuery | None:
    """`transform.run(query)`."""
    made: SymbolicQuery | None = None
    with walk.noting(path, transform):
        made = rule_for(transform, _RULES)(walk, transform, asked, metadata or {}, name)
    return made


def _hyde(walk: Walk, transform: HyDEQueryTransform, asked: SymbolicQuery, metadata: Any, name: str) -> SymbolicQuery:
    """An invented document is searched with, and the query beside it."""
    parts = walk.parts(HyDEQueryTransformParts, transform)
    prompt = own_prompt(parts.hyde_prompt)

    def invent(llm: Any, given: Given) -> str:
        return hypothetical_document(transform, llm, prompt, given["query"], metadata)

    document = walk.ask(name, walk.llm(parts.llm), invent, {"query": asked.text}, in_sync_code=True)
    return SymbolicQuery(asked.text, (document, *asked.texts) if parts.include_original else (document,))


def _decompose(
    walk: Walk, transform: DecomposeQueryTransform, asked: SymbolicQuery, metadata: Any, name: str
) -> SymbolicQuery:
    parts = walk.parts(DecomposeQueryTransformParts, transform)
    prompt = own_prompt(parts.decompose_query_prompt)

    def rewrite(llm: Any, given: Given) -> str:
        return decomposed_query(transform, llm, prompt, given["query"], metadata)

    query = walk.ask(name, walk.llm(parts.llm), rewrite, {"query": asked.text}, in_sync_code=True)
    return SymbolicQuery(query, (query,))


def _identity(walk: Walk, transform: Any, asked: SymbolicQuery, metadata: Any, name: str) -> SymbolicQuery:
    return asked


_RULES: dict[type, Callable[..., SymbolicQuery]] = {
    HyDEQueryTransform: _hyde,
    DecomposeQueryTransform: _decompose,
    IdentityQueryTransform: _identity,
}


def query_of(ref: Ref) -> SymbolicQuery:
    """A plain query."""
    return SymbolicQuery(ref, (ref,))
