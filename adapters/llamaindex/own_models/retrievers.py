"""Retrievers ahead of the plain object: which texts they embed, and which searches their lists of queries make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.list.retrievers import SummaryIndexRetriever
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever, TransformRetriever
from llama_index.core.schema import NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan, Question
from teola_plugin.adapters.llamaindex.own_models.choosing import changing, choosing
from teola_plugin.shims.llamaindex.engines import runs_in_loop
from teola_plugin.shims.llamaindex.retrievers import (
    QueryFusionRetrieverParts,
    RouterRetrieverParts,
    SummaryIndexRetrieverParts,
    TransformRetrieverParts,
    VectorIndexRetrieverParts,
    all_nodes,
    fused,
    nodes_of_result,
    searches_by_vector,
    store_query,
    written_queries,
)
from teola_plugin.tracer.llamaindex.classes import as_made, rule_for
from teola_plugin.tracer.llamaindex.retrievers import settled
from teola_plugin.tracer.symbols import NotUnderstood

Nodes = list[NodeWithScore]
Retrieve = Callable[[Ahead, Question], Awaitable[Nodes]]
"""`retrieve`: (how, query) -> nodes of its own."""


def retrieving(plan: Plan, retriever: BaseRetriever) -> Retrieve:
    """`retrieve` of a retriever. Raises `NotUnderstood`."""
    with as_made():
        retrieve: Retrieve = rule_for(retriever, _RULES)(plan, retriever)
    plan.known[id(retriever)] = retriever

    async def settle(ahead: Ahead, asked: Question) -> Nodes:
        return settled(retriever, asked.text, await retrieve(ahead, asked))

    return settle


def _vector(plan: Plan, r: VectorIndexRetriever) -> Retrieve:
    parts = VectorIndexRetrieverParts.of(r)
    if type(parts.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(parts.docstore).__name__}, which may be anywhere")
    store, by_vector = plan.leaf(parts.vector_store), searches_by_vector(r)
    model = plan.leaf(parts.embed_model) if by_vector else None

    async def retrieve(ahead: Ahead, asked: Question) -> Nodes:
        vector = await asked.embedded(ahead, model) if by_vector else None
        query = store_query(r, asked.text, vector)
        result = await ahead.searched(store, query, dict(parts.vector_store_kwargs))
        return nodes_of_result(r, asked.text, result)

    return retrieve


def _fusion(plan: Plan, r: QueryFusionRetriever) -> Retrieve:
    """The query itself needs no LLM; each written one is searched with once it is known."""
    parts = QueryFusionRetrieverParts.of(r)
    in_loop, several = runs_in_loop(r), parts.num_queries > 1
    llm = plan.llm(parts.llm) if several else None
    inner = [retrieving(plan, one) for one in parts.retrievers]
    one_model(parts.retrievers)
    if several or len(inner) > 1:
        plan.lists(in_loop)

    async def retrieve(ahead: Ahead, asked: Question) -> Nodes:
        way = ahead.side_by_side() if in_loop else ahead

        async def write(ahead: Ahead) -> list[Any]:
            return list(await ahead.ask(llm, lambda a: written_queries(r, a, asked.text))) if several else []

        async def search(ahead: Ahead, queries: Sequence[Question]) -> list[Any]:
            pairs = [(query, i) for query in queries for i in range(len(inner))]
            found = await ahead.all([lambda a, q=query, i=i: inner[i](a, q) for query, i in pairs])  # type: ignore[misc]
            return [((query.text, i), nodes) for (query, i), nodes in zip(pairs, found, strict=True)]

        if not several:
            return fused(r, asked.text, dict(await search(way, [asked])))
        queries, own = await ahead.all([write, lambda _: search(way if way.is_async else way.leading(), [asked])])
        written = await search(way if way.is_async else way.leading(), [Question(text) for text in queries])
        return fused(r, asked.text, dict([*own, *written]))

    return retrieve


def one_model(parts: Sequence[Any]) -> None:
    """Parts that are asked with one query share its vector, whoever makes it. Raises `NotUnderstood`."""
    models = {id(model) for part in parts for model in models_of(part)}
    if len(models) > 1:
        raise NotUnderstood("its parts embed one query with several models")


def models_of(part: Any) -> list[Any]:
    """Embedding models of the retrievers in it that are known."""
    if isinstance(part, VectorIndexRetriever):
        return [VectorIndexRetrieverParts.of(part).embed_model]
    held = vars(part).values() if type(part).__module__.startswith("llama_index.core.") else ()
    flat = [one for value in held for one in (value if isinstance(value, (list, tuple)) else [value])]
    return [model for one in flat if isinstance(one, BaseRetriever) for model in models_of(one)]


def _listed(plan: Plan, r: SummaryIndexRetriever) -> Retrieve:
    """All nodes of an index in memory, as they are then."""
    index = SummaryIndexRetrieverParts.of(r).index
    if type(index.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(index.docstore).__name__}, which may be anywhere")

    async def retrieve(ahead: Ahead, asked: Question) -> Nodes:
        return all_nodes(r, asked.text)

    return retrieve


def _transform(plan: Plan, r: TransformRetriever) -> Retrieve:
    parts = TransformRetrieverParts.of(r)
    change = changing(plan, parts.query_transform, parts.transform_metadata or {})
    then = retrieving(plan, parts.retriever)

    async def retrieve(ahead: Ahead, asked: Question) -> Nodes:
        return await then(ahead, await change(ahead, asked))

    return retrieve


def _router(plan: Plan, r: RouterRetriever) -> Retrieve:
    """The chosen retrievers are asked one after the other; each node is taken once."""
    parts = RouterRetrieverParts.of(r)
    choose = choosing(plan, parts.selector, parts.metadatas)
    inner = [retrieving(plan, one) for one in parts.retrievers]
    one_model(parts.retrievers)

    async def retrieve(ahead: Ahead, asked: Question) -> Nodes:
        chosen = await choose(ahead, asked.text)
        found = await ahead.all([lambda a, i=i: inner[i](a, asked) for i in chosen])  # type: ignore[misc]
        return list({node.node.node_id: node for nodes in found for node in nodes}.values())

    return retrieve


_RULES: dict[type, Callable[[Plan, Any], Retrieve]] = {
    VectorIndexRetriever: _vector,
    SummaryIndexRetriever: _listed,
    QueryFusionRetriever: _fusion,
    TransformRetriever: _transform,
    RouterRetriever: _router,
}
