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
from teola_plugin.tracer.llamaindex.known import own_prompt, rule_for
from teola_plugin.tracer.llamaindex.walk import Asked, Walk, pool_llm

Given = Mapping[str, Any]


def transformed(
    walk: Walk, transform: BaseQueryTransform, asked: Asked, metadata: Any, path: str, name: str
) -> Asked | None:
    """`transform.run(query)`."""
    made: Asked | None = None
    with walk.noting(path, transform):
        made = rule_for(transform, _RULES)(walk, transform, asked, metadata or {}, name)
    return made


def _hyde(walk: Walk, transform: HyDEQueryTransform, asked: Asked, metadata: Any, name: str) -> Asked:
    """An invented document is searched with, and the query beside it."""
    parts = walk.parts(HyDEQueryTransformParts, transform)
    prompt = own_prompt(parts.hyde_prompt)

    def invent(llm: Any, given: Given) -> str:
        return hypothetical_document(transform, llm, prompt, given["query"], metadata)

    document = walk.ask(name, pool_llm(parts.llm), invent, {"query": asked.text})
    return Asked(asked.text, (document, *asked.texts) if parts.include_original else (document,))


def _decompose(walk: Walk, transform: DecomposeQueryTransform, asked: Asked, metadata: Any, name: str) -> Asked:
    parts = walk.parts(DecomposeQueryTransformParts, transform)
    prompt = own_prompt(parts.decompose_query_prompt)

    def rewrite(llm: Any, given: Given) -> str:
        return decomposed_query(transform, llm, prompt, given["query"], metadata)

    query = walk.ask(name, pool_llm(parts.llm), rewrite, {"query": asked.text})
    return Asked(query, (query,))


def _identity(walk: Walk, transform: Any, asked: Asked, metadata: Any, name: str) -> Asked:
    return asked


_RULES: dict[type, Callable[..., Asked]] = {
    HyDEQueryTransform: _hyde,
    DecomposeQueryTransform: _decompose,
    IdentityQueryTransform: _identity,
}


def query_of(ref: Ref) -> Asked:
    """A plain query."""
    return Asked(ref, (ref,))
