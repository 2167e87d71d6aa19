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
from llama_index.core.schema import QueryBundle

from teola_plugin.graph import Ref
from teola_plugin.tracer.llamaindex.known import rule_for
from teola_plugin.tracer.llamaindex.stand_ins import clone, raw
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
    [llm, both] = walk.read(transform, "_llm", "_include_original")
    prompt = walk.template(transform, "_hyde_prompt")

    def invent(llm: Any, given: Given) -> str:
        own = clone(transform, _llm=llm, _hyde_prompt=prompt, _include_original=False)
        return str(raw(own, "_run")(QueryBundle(given["query"]), metadata).custom_embedding_strs[0])

    document = walk.ask(name, pool_llm(llm), invent, {"query": asked.text})
    return Asked(asked.text, (document, *asked.texts) if both else (document,))


def _decompose(walk: Walk, transform: DecomposeQueryTransform, asked: Asked, metadata: Any, name: str) -> Asked:
    [llm] = walk.read(transform, "_llm")
    prompt = walk.template(transform, "_decompose_query_prompt")

    def rewrite(llm: Any, given: Given) -> str:
        own = clone(transform, _llm=llm, _decompose_query_prompt=prompt)
        return str(raw(own, "_run")(QueryBundle(given["query"]), metadata).query_str)

    query = walk.ask(name, pool_llm(llm), rewrite, {"query": asked.text})
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
