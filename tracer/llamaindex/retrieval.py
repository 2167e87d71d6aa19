"""Retrievers: embeddings and searches as primitives; fusion, fetching and de-duplication by their own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import mean_agg
from llama_index.core.indices.list.retrievers import SummaryIndexRetriever
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
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever, TransformRetriever
from llama_index.core.schema import IndexNode, NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore

from teola_plugin.errors import TeolaError
from teola_plugin.graph import ITEM, Attributes, Component, Effect, Ref, Role, named
from teola_plugin.shims.llamaindex.copies import clone
from teola_plugin.shims.llamaindex.models import is_paced
from teola_plugin.shims.llamaindex.retrieval import (
    LLMRerankParts,
    PostprocessorParts,
    QueryFusionRetrieverParts,
    RouterRetrieverParts,
    SummaryIndexRetrieverParts,
    TransformRetrieverParts,
    VectorIndexRetrieverParts,
    all_nodes,
    batch_arguments,
    batches,
    distinct,
    fused,
    nodes_of_result,
    postprocessed,
    searches_by_vector,
    store_query,
    written_queries,
)
from teola_plugin.shims.llamaindex.silent_calls import replay
from teola_plugin.tracer.draft import DERIVED
from teola_plugin.tracer.llamaindex.classes import as_made, level, own_function, own_prompt, rule_for
from teola_plugin.tracer.llamaindex.lowering import SymbolicQuery, Value, Walk, is_pool_llm
from teola_plugin.tracer.llamaindex.model_calls import (
    ask_own_llm,
    captured,
    own_nodes,
    replayed,
    require_one_model,
    retrieve_by_own_models,
)
from teola_plugin.tracer.llamaindex.queries import numbered, selected, takes_several, transformed
from teola_plugin.tracer.llamaindex.synthesizers import QUERY
from teola_plugin.tracer.symbols import NotUnderstood

Given = Mapping[str, Any]
Nodes = Sequence[NodeWithScore]


def retrieve(walk: Walk, retriever: BaseRetriever, asked: SymbolicQuery, path: str, name: str) -> Value:
    """`retriever.retrieve(query)`."""
    made: Value = None
    try:
        with as_made(), walk.owning(retriever):
            found = rule_for(retriever, _RETRIEVER_RULES)(walk, retriever, asked, path, name)
    except NotUnderstood as why:
        walk.note(path, retriever, level(retriever), reason=str(why))
        return None
    if found is not None:
        walk.lowered.add(id(retriever))
        made = walk.call(
            f"{name}.unique", lambda query, nodes: settled(retriever, query, nodes), query=asked.text, nodes=found
        )
    return made


def settled(retriever: BaseRetriever, query: str, nodes: Nodes) -> list[NodeWithScore]:
    """What the public `retrieve` makes of what `_retrieve` gave: every node once."""
    if any(isinstance(n.node, IndexNode) and (n.node.obj or n.node.index_id in retriever.object_map) for n in nodes):
        raise NotUnderstood("a node stands for an object, which is asked in its place")
    return distinct(retriever, query, nodes)


# ------------------------------------------------------------ an index


def _vector(walk: Walk, r: VectorIndexRetriever, asked: SymbolicQuery, path: str, name: str) -> Value:
    made: Value = None
    with walk.noting(path, r) as reasons:
        parts = walk.parts(VectorIndexRetrieverParts, r)
        if not hasattr(parts.embed_model, "vector_of"):
            return retrieve_by_own_models(walk, r, asked, name)
        model = _model(walk, r, parts, asked)
        try:
            hits = _searched(walk, r, parts, asked, name)
        except NotUnderstood as why:
            reasons.append(f"only its embedding: {why}")
            for text in asked.texts:
                _embedded(walk, model, text, f"{name}.embedding")
        else:

            def nodes(query: str, hits: Sequence[Any]) -> list[NodeWithScore]:
                return nodes_of_result(r, query, parts.vector_store.result_of(hits))

            made = walk.call(f"{name}.nodes", nodes, query=asked.text, hits=hits)
    return made


def _model(walk: Walk, r: VectorIndexRetriever, parts: VectorIndexRetrieverParts, asked: SymbolicQuery) -> Any:
    """What embeds the query. Raises `NotUnderstood` where that cannot be done ahead."""
    model = parts.embed_model
    _fixed(walk, model)
    if is_paced(model):
        raise NotUnderstood("its embedding model has a cache or a rate limiter")
    walk.read(parts.vector_store, "is_embedding_query")
    if not searches_by_vector(r) or not asked.texts:
        raise NotUnderstood("it does not search by a vector")
    return model


def _searched(
    walk: Walk, r: VectorIndexRetriever, parts: VectorIndexRetrieverParts, asked: SymbolicQuery, name: str
) -> Ref:
    """Hits of the store for the query's mean vector. Raises `NotUnderstood` before anything is added."""
    model, store = parts.embed_model, parts.vector_store
    _fixed(walk, store)
    if not hasattr(store, "search_payload"):
        raise NotUnderstood(f"its store, a {type(store).__name__}, is not on the pool")
    if type(parts.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(parts.docstore).__name__}, which is not known to be local")
    sample = _sample(r, parts)
    effect = Effect(f"collection:{store.engine}/{sample.collection}", validated=True)
    said = Attributes(collection=sample.collection, k=sample.k, filter=sample.filter)
    name = walk.name(name, *DERIVED, "mean")
    if len(asked.texts) == 1:
        query = named(query=asked.texts[0])
        component = Component(
            name,
            Role.RETRIEVAL,
            query,
            store.engine,
            model.engine,
            effects=(effect,),
            scope=walk.scope,
            attributes=said,
        )
        return walk.draft.add(component)
    vectors = {f"vector{i}": _embedded(walk, model, text, f"{name}.embedding") for i, text in enumerate(asked.texts)}
    mean = walk.call(f"{name}.mean", lambda **given: mean_agg([model.vector_of(v) for v in given.values()]), **vectors)
    search = Component(
        name,
        Role.SEARCHING,
        named(vectors=mean),
        store.engine,
        effects=(effect,),
        scope=walk.scope,
        attributes=said,
    )
    return walk.draft.add(search)


def _sample(r: VectorIndexRetriever, parts: VectorIndexRetrieverParts) -> Any:
    """What it asks the store for, but for the vector."""
    try:
        made = parts.vector_store.search_payload(store_query(r))
    except TeolaError as error:
        raise NotUnderstood(str(error)) from None
    if made is None or parts.vector_store_kwargs:
        raise NotUnderstood("its filters may take more than one search")
    return made


def _embedded(walk: Walk, model: Any, text: Ref, name: str) -> Ref:
    said = Attributes(role="query")
    component = Component(
        walk.name(name), Role.EMBEDDING, named(texts=text), model.engine, scope=walk.scope, attributes=said, expected=1
    )
    return walk.draft.add(component)


def _fixed(walk: Walk, *leaves: Any) -> None:
    for leaf in leaves:
        walk.read(leaf, *(name for name in ("engine", "collection") if hasattr(leaf, name)))


def _listed(walk: Walk, r: SummaryIndexRetriever, asked: SymbolicQuery, path: str, name: str) -> Value:
    """All nodes of an index in memory, as they are then."""
    made: Value = None
    with walk.noting(path, r):
        index = walk.parts(SummaryIndexRetrieverParts, r).index
        if type(index.docstore) is not SimpleDocumentStore:
            raise NotUnderstood(f"its documents are in a {type(index.docstore).__name__}, which may be anywhere")
        made = walk.call(f"{name}.nodes", lambda query: all_nodes(r, query), query=asked.text)
    return made


# ------------------------------------------------------------ fusion


def _fusion(walk: Walk, r: QueryFusionRetriever, asked: SymbolicQuery, path: str, name: str) -> Value:
    """The query itself needs no LLM, so its searches start at once; each written query is searched as it closes."""
    parts = walk.parts(QueryFusionRetrieverParts, r)
    inner, where = parts.retrievers, parts.path(path, "retrievers")
    require_one_model(walk, inner)
    queries: Value = None
    with walk.step() as writing:
        if parts.num_queries > 1:
            queries = _written(walk, r, parts, asked, path, f"{name}.queries")
    before = tuple(writing)
    own: list[Value] = []
    for i, one in enumerate(inner):
        with walk.step(before) as names, walk.in_loop_of(r):
            own.append(retrieve(walk, one, asked, f"{where}[{i}]", f"{name}.own{i}" if i else f"{name}.own"))
        before = tuple(names) or before
    with walk.in_loop_of(r):
        found = _each(walk, parts, queries, where, name) if queries is not None else None
    if any(ref is None for ref in own) or (parts.num_queries > 1 and found is None):
        return None
    known = {f"own{i}": ref for i, ref in enumerate(own) if ref is not None}
    more = {"queries": queries, "found": found} if queries is not None and found is not None else {}

    def fuse(query: str, queries: Sequence[str] = (), found: Sequence[Any] = (), **own: Nodes) -> list[NodeWithScore]:
        lists = {(query, i): own_nodes(own[f"own{i}"]) for i in range(len(inner))}
        for text, several in zip(queries, found, strict=True):
            lists |= {(text, i): own_nodes(nodes) for i, nodes in enumerate(several)}
        return fused(r, query, lists)

    return walk.call(f"{name}.fused", fuse, query=asked.text, **known, **more)  # type: ignore[arg-type]


def _written(
    walk: Walk, r: QueryFusionRetriever, parts: QueryFusionRetrieverParts, asked: SymbolicQuery, path: str, name: str
) -> Value:
    made: Value = None
    with walk.noting(path, r):

        def write(llm: Any, given: Given) -> list[str]:
            return written_queries(r, llm, given["query"])

        inputs = {"query": asked.text}
        made = walk.ask(name, walk.llm(parts.llm), write, inputs, items="lines", expected=parts.num_queries - 1)
    if made is None:
        walk.user_code(name, query=asked.text)
    return made


def _each(walk: Walk, parts: QueryFusionRetrieverParts, queries: Ref, where: str, name: str) -> Value:
    """For each query, what each retriever gives."""
    body = walk.body()
    item = SymbolicQuery(Ref(ITEM), (Ref(ITEM),))
    lists = [retrieve(body, one, item, f"{where}[{i}]", f"{name}.found{i}") for i, one in enumerate(parts.retrievers)]
    body.draft.nodes.clear()  # the report has them already
    if not body.draft.components:
        return None
    refs = {f"list{i}": one for i, one in enumerate(lists) if one is not None}
    whole = len(refs) == len(lists)
    if whole:
        output = body.call(f"{name}.lists", lambda **lists: list(lists.values()), **refs)
    else:  # what can be done for each of them is done as it closes
        output = Ref(next(reversed(body.draft.components)))
    found = walk.hold(f"{name}.found", Role.MAP, named(items=queries), body, output, expected=parts.num_queries - 1)
    return found if whole else None


# ------------------------------------------------------------ chosen at run time


def _router(walk: Walk, r: RouterRetriever, asked: SymbolicQuery, path: str, name: str) -> Value:
    """Each chosen retriever searches from when its number is written."""
    parts = walk.parts(RouterRetrieverParts, r)
    choices = selected(walk, parts.selector, parts.metadatas, asked.text, parts.path(path, "selector"))
    if choices is None or asked.texts != (asked.text,):
        return None
    body, inner, where = walk.body(), parts.retrievers, parts.path(path, "retrievers")
    require_one_model(walk, inner)
    found: dict[str, Ref] = {}
    for i, one in enumerate(inner):
        chosen = body.call(f"chosen{i}", numbered(i, len(inner)), choice=Ref(ITEM))
        nodes = _arm(body, one, chosen, f"{where}[{i}]", f"retriever{i}")
        if nodes is not None:
            found[f"retriever{i}"] = nodes
    if not found:
        walk.draft.nodes += body.draft.nodes
        return None
    output = body.call("searched", lambda **found: next(filter(None, found.values()), None), **found)
    beside = Attributes(beside=takes_several(parts.selector))
    each = named(items=choices, query=asked.text)
    lists = walk.hold(f"{name}.found", Role.MAP, each, body, output, attributes=beside)
    return walk.call(f"{name}.routed", _each_once, lists=lists) if len(found) == len(inner) else None


def _arm(walk: Walk, retriever: BaseRetriever, chosen: Ref, path: str, name: str) -> Value:
    """What it finds, `{"nodes"}`, where it is chosen; a false value otherwise."""
    body, before, query = walk.body(), set(walk.lowered), Ref("$query")
    nodes = retrieve(body, retriever, SymbolicQuery(query, (query,)), path, "retrieve")
    if nodes is None:
        walk.draft.nodes += body.draft.nodes
        walk.forget(before)
        return None
    output = body.call("nodes", lambda nodes: {"nodes": nodes}, nodes=nodes)
    return walk.hold(name, Role.BRANCH, named(condition=chosen, query=query), body, output)


def _each_once(lists: Sequence[Mapping[str, Any]]) -> list[NodeWithScore]:
    return list({n.node.node_id: n for one in lists for n in one["nodes"]}.values())


# ------------------------------------------------------------ another query


def _transform(walk: Walk, r: TransformRetriever, asked: SymbolicQuery, path: str, name: str) -> Value:
    parts = walk.parts(TransformRetrieverParts, r)
    with walk.step() as names:
        where = parts.path(path, "query_transform")
        other = transformed(walk, parts.query_transform, asked, parts.transform_metadata, where, f"{name}.query")
    if other is None:
        return None
    with walk.step(tuple(names)):
        return retrieve(walk, parts.retriever, other, parts.path(path, "retriever"), f"{name}.inner")


_RETRIEVER_RULES: dict[type, Callable[..., Value]] = {
    VectorIndexRetriever: _vector,
    SummaryIndexRetriever: _listed,
    QueryFusionRetriever: _fusion,
    TransformRetriever: _transform,
    RouterRetriever: _router,
}


# ------------------------------------------------------------ node postprocessors


def postprocess(walk: Walk, steps: Sequence[BaseNodePostprocessor], query: Ref, nodes: Value, path: str) -> Value:
    """The nodes after all steps."""
    for i, step in enumerate(steps):
        here, nodes_now, nodes = f"{path}[{i}]", nodes, None
        with walk.noting(here, step):
            if nodes_now is None:
                raise NotUnderstood("what it reads is not known ahead")
            lower = (
                _pool_rerank
                if hasattr(type(step), "select") and hasattr(step, "pool")
                else rule_for(step, _POSTPROCESSOR_RULES)
            )
            nodes = lower(walk, step, query, nodes_now)
    return nodes


def _pool_rerank(walk: Walk, step: Any, query: Ref, nodes: Ref) -> Ref:
    name = walk.name("rerank", "texts", "select")
    pairs = walk.draft.call(
        f"{name}.texts",
        lambda query, nodes: [pair.text for pair in step.payloads(query, nodes)],
        walk.scope,
        query=query,
        nodes=nodes,
    )
    component = Component(
        name, Role.RERANKING, named(texts=pairs, query=query), step.engine, batchable=True, scope=walk.scope
    )
    scores = walk.draft.add(component)
    return walk.draft.call(
        f"{name}.select",
        lambda nodes, scores: step.select(own_nodes(nodes, deep=step.keep_retrieval_score), scores),
        walk.scope,
        nodes=nodes,
        scores=scores,
    )


def _llm_rerank(walk: Walk, step: LLMRerank, query: Ref, nodes: Ref) -> Ref:
    """The LLM chooses in batches, each a call of its own."""
    parts = walk.parts(LLMRerankParts, step)
    prompt = own_prompt(parts.choice_select_prompt)
    own = clone(step, **parts.named(choice_select_prompt=prompt))
    if not own_function(parts.format_node_batch_fn) or not own_function(parts.parse_choice_select_answer_fn):
        raise NotUnderstood("a function of the user's formats or parses")

    model = walk.llm(parts.llm)

    def choose(llm: Any, given: Given) -> str:
        return str(llm.predict(prompt, **batch_arguments(own, given["batch"], given["query"])))

    def select(query: str, nodes: Nodes, generations: Sequence[Any]) -> Any:
        def run(llm: Any, given: Given) -> Any:
            return postprocessed(clone(own, **parts.named(llm=llm)), own_nodes(nodes), query)

        if is_pool_llm(model):
            return replayed(model, run, {}, generations)
        return replay(model, lambda llm: run(llm, {}), list(generations))

    name = walk.name("rerank", "batches", "chosen", "select")
    groups = walk.draft.call(f"{name}.batches", lambda nodes: batches(own, nodes), walk.scope, nodes=nodes)
    body = walk.body()
    inputs = {"query": QUERY, "batch": Ref(ITEM)}
    if is_pool_llm(model):
        choice = Component(
            body.name(f"{name}.choice", *DERIVED),
            Role.GENERATION,
            tuple(inputs.items()),
            model.engine,
            scope=walk.scope,
        )
        one = body.draft.add(choice, lambda given: captured(model, choose, given, {}, ()))
    else:
        one = ask_own_llm(body, f"{name}.choice", model, choose, inputs, lambda text, _: text)
    chosen = walk.hold(f"{name}.chosen", Role.MAP, named(items=groups, query=query), body, one)
    return walk.call(f"{name}.select", select, query=query, nodes=nodes, generations=chosen)


def _lower_pure(walk: Walk, step: BaseNodePostprocessor, query: Ref, nodes: Ref) -> Ref:
    def select(query: str, nodes: Nodes) -> Any:
        return postprocessed(step, own_nodes(nodes, deep=deep), query)

    walk.parts(PostprocessorParts, step)
    deep = not isinstance(step, (SimilarityPostprocessor, LongContextReorder, KeywordNodePostprocessor))
    return walk.call(_component_name(step), select, query=query, nodes=nodes)


def _neighbours(walk: Walk, step: PrevNextNodePostprocessor, query: Ref, nodes: Ref) -> Ref:
    if type(step.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(step.docstore).__name__}, which is not known to be local")
    return _lower_pure(walk, step, query, nodes)


def _component_name(step: BaseNodePostprocessor) -> str:
    return type(step).__name__.lower().replace("node", "").replace("postprocessor", "")


_POSTPROCESSOR_RULES: dict[type, Callable[..., Ref]] = {
    LLMRerank: _llm_rerank,
    SimilarityPostprocessor: _lower_pure,
    KeywordNodePostprocessor: _lower_pure,
    LongContextReorder: _lower_pure,
    MetadataReplacementPostProcessor: _lower_pure,
    FixedRecencyPostprocessor: _lower_pure,
    PrevNextNodePostprocessor: _neighbours,
}
