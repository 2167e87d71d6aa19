"""Retrievers ahead of the plain object: which texts they embed, and which searches their lists of queries make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.postprocessor import (
    FixedRecencyPostprocessor,
    KeywordNodePostprocessor,
    LLMRerank,
    LongContextReorder,
    MetadataReplacementPostProcessor,
    PrevNextNodePostprocessor,
    SimilarityPostprocessor,
)
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan, Question
from teola_plugin.shims.llamaindex.copies import clone
from teola_plugin.shims.llamaindex.engines import runs_in_loop
from teola_plugin.shims.llamaindex.postprocessors import (
    LLMRerankParts,
    PostprocessorParts,
    batch_arguments,
    batches,
    postprocessed,
)
from teola_plugin.shims.llamaindex.retrievers import (
    QueryFusionRetrieverParts,
    VectorIndexRetrieverParts,
    fused,
    nodes_of_result,
    searches_by_vector,
    store_query,
    written_queries,
)
from teola_plugin.tracer.llamaindex.classes import as_made, own_function, own_prompt, rule_for
from teola_plugin.tracer.llamaindex.dry_run import own_nodes
from teola_plugin.tracer.llamaindex.retrievers import settled
from teola_plugin.tracer.symbols import NotUnderstood

Nodes = list[NodeWithScore]
Retrieve = Callable[[Ahead, Question], Awaitable[Nodes]]
"""`retrieve`: (how, query) -> nodes of its own."""
Postprocess = Callable[[Ahead, str, Nodes], Awaitable[Nodes]]


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
    one_model(plan, parts.retrievers)
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


def one_model(plan: Plan, parts: Sequence[Any]) -> None:
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


_RULES: dict[type, Callable[[Plan, Any], Retrieve]] = {VectorIndexRetriever: _vector, QueryFusionRetriever: _fusion}


# ------------------------------------------------------------ what becomes of the nodes


def postprocessing(plan: Plan, steps: Sequence[Any]) -> Postprocess:
    """The nodes after all steps. Raises `NotUnderstood`."""
    with as_made():
        made = [rule_for(step, _STEPS)(plan, step) for step in steps]

    async def postprocess(ahead: Ahead, query: str, nodes: Nodes) -> Nodes:
        for step in made:
            nodes = await step(ahead, query, nodes)
        return nodes

    return postprocess


def _pure(plan: Plan, step: Any) -> Postprocess:
    PostprocessorParts.of(step)
    docstore = getattr(step, "docstore", None)
    if docstore is not None and type(docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(docstore).__name__}, which may be anywhere")

    async def postprocess(ahead: Ahead, query: str, nodes: Nodes) -> Nodes:
        return postprocessed(step, own_nodes(nodes, deep=True), query)

    return postprocess


def _llm_rerank(plan: Plan, step: LLMRerank) -> Postprocess:
    """The LLM chooses in batches, each a call of its own."""
    parts = LLMRerankParts.of(step)
    llm, prompt = plan.llm(parts.llm), own_prompt(parts.choice_select_prompt)
    own = clone(step, **parts.named(choice_select_prompt=prompt))
    if not own_function(parts.format_node_batch_fn) or not own_function(parts.parse_choice_select_answer_fn):
        raise NotUnderstood("a function of the user's formats or parses")
    plan.known[id(step)] = step
    plan.lists()

    async def postprocess(ahead: Ahead, query: str, nodes: Nodes) -> Nodes:
        def chooses(batch: Any) -> Callable[[Ahead], Awaitable[str]]:
            return lambda a: a.said(llm, lambda asked: asked.predict(prompt, **batch_arguments(own, batch, query)))

        answers = iter(await ahead.all([chooses(batch) for batch in batches(own, own_nodes(nodes))]))
        replay = clone(llm, predict=lambda *_, **__: next(answers))
        return postprocessed(clone(own, **parts.named(llm=replay)), own_nodes(nodes, deep=True), query)

    return postprocess


_STEPS: dict[type, Callable[[Plan, Any], Postprocess]] = {
    LLMRerank: _llm_rerank,
    SimilarityPostprocessor: _pure,
    KeywordNodePostprocessor: _pure,
    LongContextReorder: _pure,
    MetadataReplacementPostProcessor: _pure,
    FixedRecencyPostprocessor: _pure,
    PrevNextNodePostprocessor: _pure,
}
