"""Lower retrievers and node postprocessors.

Embeddings, searches and reranking become primitives; fusion, fetching and de-duplication run by the framework's code.
"""

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
from teola_plugin.graph import ITEM, Attributes, Effect, Ref, Role, named
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
    deduplicate_nodes,
    fuse_results,
    generate_queries,
    nodes_of_result,
    postprocess,
    searches_by_vector,
    store_query,
)
from teola_plugin.shims.llamaindex.silent_calls import replay
from teola_plugin.tracer.draft import DERIVED
from teola_plugin.tracer.llamaindex.classes import (
    copy_prompt,
    is_framework_function,
    refuse_unknown_attributes,
    report_level,
    rule_for,
)
from teola_plugin.tracer.llamaindex.lowering import Lowering, SymbolicQuery, Value, import_own_code
from teola_plugin.tracer.llamaindex.model_calls import (
    add_own_llm_call,
    capture_payload,
    copy_nodes,
    lower_retriever_of_own_models,
    replay_generations,
    require_one_model,
)
from teola_plugin.tracer.llamaindex.queries import can_choose_several, choice_test, lower_selector, lower_transform
from teola_plugin.tracer.llamaindex.synthesizers import QUERY
from teola_plugin.tracer.symbols import NotUnderstood

Values = Mapping[str, Any]
Nodes = Sequence[NodeWithScore]


def lower_retriever(lowering: Lowering, retriever: BaseRetriever, query: SymbolicQuery, path: str, name: str) -> Value:
    """Lower `retriever.retrieve(query)`; report why and return None if it is not understood."""
    unique: Value = None
    try:
        with refuse_unknown_attributes(), lowering.marking_lowered(retriever):
            if (method := lowering.written_method(retriever)) is not None:
                nodes = import_own_code().lower_own_retriever(lowering, retriever, method, query, path)
            else:
                nodes = rule_for(retriever, _RETRIEVER_RULES)(lowering, retriever, query, path, name)
    except NotUnderstood as error:
        lowering.add_report_row(path, retriever, report_level(retriever), reason=str(error))
        return None
    if nodes is not None:
        lowering.lowered.add(id(retriever))
        unique = lowering.add_call(
            f"{name}.unique", lambda query, nodes: unique_nodes(retriever, query, nodes), query=query.text, nodes=nodes
        )
    return unique


def unique_nodes(retriever: BaseRetriever, query: str, nodes: Nodes) -> list[NodeWithScore]:
    """Return each node once, as `retrieve` does with the result of `_retrieve`.

    Raises `NotUnderstood` if a node stands for another retriever or engine.
    """
    if any(isinstance(n.node, IndexNode) and (n.node.obj or n.node.index_id in retriever.object_map) for n in nodes):
        raise NotUnderstood("a node stands for an object, which is asked instead")
    return deduplicate_nodes(retriever, query, nodes)


# ------------------------------------------------------------ an index


def _lower_vector_retriever(
    lowering: Lowering, retriever: VectorIndexRetriever, query: SymbolicQuery, path: str, name: str
) -> Value:
    """Lower the retriever of a vector index: embed the query, search the store, and read the nodes.

    If the store is not understood, only the embedding is prefetched, and the report says so.
    """
    nodes: Value = None
    with lowering.reporting(path, retriever) as reasons:
        parts = lowering.read_parts(VectorIndexRetrieverParts, retriever)
        model = None if lowering.own_models is not None else lowering.pool_backed(parts.embed_model)
        if not hasattr(model, "vector_of"):
            return lower_retriever_of_own_models(lowering, retriever, query, name)
        _require_vector_search(lowering, retriever, parts, query)
        try:
            hits = _add_search(lowering, retriever, parts, model, query, name)
        except NotUnderstood as error:
            reasons.append(f"only its embedding: {error}")
            for text in query.texts:
                _add_embedding(lowering, model, text, f"{name}.embedding")
        else:

            def read_nodes(query: str, hits: Sequence[Any]) -> list[NodeWithScore]:
                return nodes_of_result(retriever, query, parts.vector_store.result_of(hits))

            nodes = lowering.add_call(f"{name}.nodes", read_nodes, query=query.text, hits=hits)
    return nodes


def _require_vector_search(
    lowering: Lowering, retriever: VectorIndexRetriever, parts: VectorIndexRetrieverParts, query: SymbolicQuery
) -> None:
    """Raise `NotUnderstood` if the call that embeds the query cannot be prefetched."""
    _guard_engines(lowering, parts.embed_model)
    if is_paced(parts.embed_model):
        raise NotUnderstood("its embedding model has a cache or a rate limiter")
    lowering.guard_attributes(parts.vector_store, "is_embedding_query")
    if not searches_by_vector(retriever) or not query.texts:
        raise NotUnderstood("it does not search by a vector")


def _add_search(
    lowering: Lowering,
    retriever: VectorIndexRetriever,
    parts: VectorIndexRetrieverParts,
    model: Any,
    query: SymbolicQuery,
    name: str,
) -> Ref:
    """Add the search of the store for the query's mean vector; `model` embeds it.

    Raises `NotUnderstood`, before anything is added.
    """
    store = parts.vector_store
    _guard_engines(lowering, store)
    if not hasattr(store, "search_payload"):
        raise NotUnderstood(f"its store, a {type(store).__name__}, is not on the pool")
    if type(parts.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(parts.docstore).__name__}, which is not known to be local")
    sample = _sample_search(retriever, parts)
    effect = Effect(f"collection:{store.engine}/{sample.collection}", validated=True)
    attributes = Attributes(collection=sample.collection, k=sample.k, filter=sample.filter)
    name = lowering.unique_name(name, *DERIVED, "mean")
    fields: dict[str, Any] = {"effects": (effect,), "attributes": attributes}
    if len(query.texts) == 1:
        inputs = named(query=query.texts[0])
        return lowering.add_component(name, Role.RETRIEVAL, inputs, store.engine, embedder=model.engine, **fields)
    vectors = {
        f"vector{i}": _add_embedding(lowering, model, text, f"{name}.embedding") for i, text in enumerate(query.texts)
    }
    mean = lowering.add_call(
        f"{name}.mean", lambda **values: mean_agg([model.vector_of(v) for v in values.values()]), **vectors
    )
    return lowering.add_component(name, Role.SEARCHING, named(vectors=mean), store.engine, **fields)


def _sample_search(retriever: VectorIndexRetriever, parts: VectorIndexRetrieverParts) -> Any:
    """Return the payload of the retriever's search, with a meaningless vector. Raises `NotUnderstood`."""
    try:
        payload = parts.vector_store.search_payload(store_query(retriever))
    except TeolaError as error:
        raise NotUnderstood(str(error)) from None
    if payload is None or parts.vector_store_kwargs:
        raise NotUnderstood("its filters may take more than one search")
    return payload


def _add_embedding(lowering: Lowering, model: Any, text: Ref, name: str) -> Ref:
    attributes, inputs = Attributes(role="query"), named(texts=text)
    name = lowering.unique_name(name)
    return lowering.add_component(name, Role.EMBEDDING, inputs, model.engine, attributes=attributes, expected=1)


def _guard_engines(lowering: Lowering, *targets: Any) -> None:
    for target in targets:
        lowering.guard_attributes(target, *(name for name in ("engine", "collection") if hasattr(target, name)))


def _lower_summary_index(
    lowering: Lowering, retriever: SummaryIndexRetriever, query: SymbolicQuery, path: str, name: str
) -> Value:
    """Lower a retriever that returns all nodes of an index in memory, as they are when the query runs."""
    nodes: Value = None
    with lowering.reporting(path, retriever):
        index = lowering.read_parts(SummaryIndexRetrieverParts, retriever).index
        if type(index.docstore) is not SimpleDocumentStore:
            raise NotUnderstood(f"its documents are in a {type(index.docstore).__name__}, which may be anywhere")
        nodes = lowering.add_call(f"{name}.nodes", lambda query: all_nodes(retriever, query), query=query.text)
    return nodes


# ------------------------------------------------------------ fusion


def _lower_fusion(
    lowering: Lowering, fusion: QueryFusionRetriever, query: SymbolicQuery, path: str, name: str
) -> Value:
    """Lower a fusion: searches for the original query start at once, the others as soon as their query is written."""
    parts = lowering.read_parts(QueryFusionRetrieverParts, fusion)
    retrievers, where = parts.retrievers, parts.path(path, "retrievers")
    require_one_model(lowering, retrievers)
    queries: Value = None
    with lowering.in_order_after() as writing:
        if parts.num_queries > 1:
            queries = _add_query_generation(lowering, fusion, parts, query, path, f"{name}.queries")
    earlier = tuple(writing)
    original_nodes: list[Value] = []
    for i, retriever in enumerate(retrievers):
        with lowering.in_order_after(earlier) as names, lowering.in_loop_of(fusion):
            original_nodes.append(
                lower_retriever(lowering, retriever, query, f"{where}[{i}]", f"{name}.own{i}" if i else f"{name}.own")
            )
        earlier = tuple(names) or earlier
    with lowering.in_loop_of(fusion):
        generated_nodes = _lower_for_each_query(lowering, parts, queries, where, name) if queries is not None else None
    if any(ref is None for ref in original_nodes) or (parts.num_queries > 1 and generated_nodes is None):
        return None
    inputs = {f"own{i}": ref for i, ref in enumerate(original_nodes) if ref is not None}
    generated_inputs = (
        {"queries": queries, "generated_nodes": generated_nodes}
        if queries is not None and generated_nodes is not None
        else {}
    )

    def fuse(
        query: str, queries: Sequence[str] = (), generated_nodes: Sequence[Any] = (), **original_nodes: Nodes
    ) -> list[NodeWithScore]:
        """Return the fused nodes of the original query and the generated ones, by the framework's own code."""
        lists = {(query, i): copy_nodes(original_nodes[f"own{i}"]) for i in range(len(retrievers))}
        for text, several in zip(queries, generated_nodes, strict=True):
            lists |= {(text, i): copy_nodes(nodes) for i, nodes in enumerate(several)}
        return fuse_results(fusion, query, lists)

    return lowering.add_call(f"{name}.fused", fuse, query=query.text, **inputs, **generated_inputs)  # type: ignore[arg-type]


def _add_query_generation(
    lowering: Lowering,
    fusion: QueryFusionRetriever,
    parts: QueryFusionRetrieverParts,
    query: SymbolicQuery,
    path: str,
    name: str,
) -> Value:
    """Add the LLM call that writes further queries. Return their ref; None if it is not understood.

    In that case an opaque call stands for it.
    """
    queries: Value = None
    with lowering.reporting(path, fusion):

        def write(llm: Any, values: Values) -> list[str]:
            return generate_queries(fusion, llm, values["query"])

        inputs = {"query": query.text}
        queries = lowering.add_llm_call(
            name, lowering.require_llm(parts.llm), write, inputs, items="lines", expected=parts.num_queries - 1
        )
    if queries is None:
        lowering.add_user_call(name, query=query.text)
    return queries


def _lower_for_each_query(
    lowering: Lowering, parts: QueryFusionRetrieverParts, queries: Ref, where: str, name: str
) -> Value:
    """Add a map over the generated queries: the lists of nodes of all retrievers.

    Returns None if some retriever is not understood; what is understood still starts with each query.
    """
    body = lowering.new_body()
    item = SymbolicQuery(Ref(ITEM), (Ref(ITEM),))
    lists = [
        lower_retriever(body, retriever, item, f"{where}[{i}]", f"{name}.found{i}")
        for i, retriever in enumerate(parts.retrievers)
    ]
    body.draft.nodes.clear()  # the report has rows of these retrievers already
    if not body.draft.components:
        return None
    refs = {f"list{i}": nodes for i, nodes in enumerate(lists) if nodes is not None}
    is_complete = len(refs) == len(lists)
    if is_complete:
        output = body.add_call(f"{name}.lists", lambda **lists: list(lists.values()), **refs)
    else:  # the map still starts what it can as soon as each query is written
        output = Ref(next(reversed(body.draft.components)))
    node_lists = lowering.add_holder(
        f"{name}.found", Role.MAP, named(items=queries), body, output, expected=parts.num_queries - 1
    )
    return node_lists if is_complete else None


# ------------------------------------------------------------ chosen at run time


def _lower_router(lowering: Lowering, router: RouterRetriever, query: SymbolicQuery, path: str, name: str) -> Value:
    """Lower a router: each chosen retriever starts when the selector has written its number."""
    parts = lowering.read_parts(RouterRetrieverParts, router)
    choices = lower_selector(lowering, parts.selector, parts.metadatas, query.text, parts.path(path, "selector"))
    if choices is None or query.texts != (query.text,):
        return None
    body, retrievers, where = lowering.new_body(), parts.retrievers, parts.path(path, "retrievers")
    require_one_model(lowering, retrievers)
    branches: dict[str, Ref] = {}
    for i, retriever in enumerate(retrievers):
        is_chosen = body.add_call(f"chosen{i}", choice_test(i, len(retrievers)), choice=Ref(ITEM))
        nodes = _add_branch(body, retriever, is_chosen, f"{where}[{i}]", f"retriever{i}")
        if nodes is not None:
            branches[f"retriever{i}"] = nodes
    if not branches:
        lowering.draft.nodes += body.draft.nodes
        return None
    output = body.add_call("searched", lambda **branches: next(filter(None, branches.values()), None), **branches)
    attributes = Attributes(is_parallel=can_choose_several(parts.selector))
    inputs = named(items=choices, query=query.text)
    lists = lowering.add_holder(f"{name}.found", Role.MAP, inputs, body, output, attributes=attributes)
    return (
        lowering.add_call(f"{name}.routed", _merge_node_lists, lists=lists)
        if len(branches) == len(retrievers)
        else None
    )


def _add_branch(lowering: Lowering, retriever: BaseRetriever, is_chosen: Ref, path: str, name: str) -> Value:
    """Add a branch that gives `{"nodes"}` if the retriever is chosen, and a false value otherwise.

    Returns None if the retriever is not understood.
    """
    body, lowered_before, query = lowering.new_body(), set(lowering.lowered), Ref("$query")
    nodes = lower_retriever(body, retriever, SymbolicQuery(query, (query,)), path, "retrieve")
    if nodes is None:
        lowering.draft.nodes += body.draft.nodes
        lowering.restore_lowered(lowered_before)
        return None
    output = body.add_call("nodes", lambda nodes: {"nodes": nodes}, nodes=nodes)
    return lowering.add_holder(name, Role.BRANCH, named(condition=is_chosen, query=query), body, output)


def _merge_node_lists(lists: Sequence[Mapping[str, Any]]) -> list[NodeWithScore]:
    return list({n.node.node_id: n for one in lists for n in one["nodes"]}.values())


# ------------------------------------------------------------ another query


def _lower_transform_retriever(
    lowering: Lowering, retriever: TransformRetriever, query: SymbolicQuery, path: str, name: str
) -> Value:
    """Lower a retriever that changes the query and then calls another one. Return None if either is not understood."""
    parts = lowering.read_parts(TransformRetrieverParts, retriever)
    with lowering.in_order_after() as names:
        where = parts.path(path, "query_transform")
        new_query = lower_transform(
            lowering, parts.query_transform, query, parts.transform_metadata, where, f"{name}.query"
        )
    if new_query is None:
        return None
    with lowering.in_order_after(tuple(names)):
        return lower_retriever(lowering, parts.retriever, new_query, parts.path(path, "retriever"), f"{name}.inner")


_RETRIEVER_RULES: dict[type, Callable[..., Value]] = {
    VectorIndexRetriever: _lower_vector_retriever,
    SummaryIndexRetriever: _lower_summary_index,
    QueryFusionRetriever: _lower_fusion,
    TransformRetriever: _lower_transform_retriever,
    RouterRetriever: _lower_router,
}


# ------------------------------------------------------------ node postprocessors


def lower_postprocessors(
    lowering: Lowering, steps: Sequence[BaseNodePostprocessor], query: Ref, nodes: Value, path: str
) -> Value:
    """Lower postprocessors in order; return the ref of the final nodes. None from the first that is not understood."""
    for i, step in enumerate(steps):
        step_path, input_nodes, nodes = f"{path}[{i}]", nodes, None
        with lowering.reporting(step_path, step):
            if input_nodes is None:
                raise NotUnderstood("its input is known only at run time")
            reranker = lowering.pool_backed(step)
            if reranker is not None and lowering.own_models is not None:
                raise NotUnderstood("its reranker is on the pool")
            if reranker is not None:
                nodes = _lower_pool_rerank(lowering, reranker, query, input_nodes)
            else:
                nodes = rule_for(step, _POSTPROCESSOR_RULES)(lowering, step, query, input_nodes)
    return nodes


def _lower_pool_rerank(lowering: Lowering, step: Any, query: Ref, nodes: Ref) -> Ref:
    """Add the scoring of nodes by a reranker of the pool, and its choice by the scores, on copies of the nodes."""
    name = lowering.unique_name("rerank", "texts", "select")
    pairs = lowering.draft.call(
        f"{name}.texts",
        lambda query, nodes: [pair.text for pair in step.payloads(query, nodes)],
        lowering.scope,
        query=query,
        nodes=nodes,
    )
    inputs = named(texts=pairs, query=query)
    scores = lowering.add_component(name, Role.RERANKING, inputs, step.engine, batchable=True)
    return lowering.draft.call(
        f"{name}.select",
        lambda nodes, scores: step.select(copy_nodes(nodes, deep=step.keep_retrieval_score), scores),
        lowering.scope,
        nodes=nodes,
        scores=scores,
    )


def _lower_llm_rerank(lowering: Lowering, step: LLMRerank, query: Ref, nodes: Ref) -> Ref:
    """Lower a reranker whose LLM chooses from batches of nodes, one call for each batch."""
    parts = lowering.read_parts(LLMRerankParts, step)
    prompt = copy_prompt(parts.choice_select_prompt)
    reranker = clone(step, **parts.as_attributes(choice_select_prompt=prompt))
    if not is_framework_function(parts.format_node_batch_fn) or not is_framework_function(
        parts.parse_choice_select_answer_fn
    ):
        raise NotUnderstood("a function of the user's formats or parses")

    model = lowering.require_llm(parts.llm)

    def choose(llm: Any, values: Values) -> str:
        return str(llm.predict(prompt, **batch_arguments(reranker, values["batch"], values["query"])))

    def select(query: str, nodes: Nodes, generations: Sequence[Any]) -> Any:
        """Return the nodes that the original reranker keeps when its LLM gives these answers."""

        def run(llm: Any, values: Values) -> Any:
            return postprocess(clone(reranker, **parts.as_attributes(llm=llm)), copy_nodes(nodes), query)

        if lowering.own_models is None:
            return replay_generations(model, run, {}, generations)
        return replay(model, lambda llm: run(llm, {}), list(generations))

    name = lowering.unique_name("rerank", "batches", "chosen", "select")
    groups = lowering.draft.call(f"{name}.batches", lambda nodes: batches(reranker, nodes), lowering.scope, nodes=nodes)
    body = lowering.new_body()
    inputs = {"query": QUERY, "batch": Ref(ITEM)}
    if lowering.own_models is None:
        choice_name = body.unique_name(f"{name}.choice", *DERIVED)
        choice = body.add_component(
            choice_name,
            Role.GENERATION,
            tuple(inputs.items()),
            model.engine,
            lambda values: capture_payload(model, choose, values, {}, ()),
        )
    else:
        choice = add_own_llm_call(body, f"{name}.choice", model, choose, inputs, lambda text, _: text)
    choices = lowering.add_holder(f"{name}.chosen", Role.MAP, named(items=groups, query=query), body, choice)
    return lowering.add_call(f"{name}.select", select, query=query, nodes=nodes, generations=choices)


def _lower_pure(lowering: Lowering, step: BaseNodePostprocessor, query: Ref, nodes: Ref) -> Ref:
    """Add a CALL of a postprocessor that calls no model, on copies of the nodes."""

    def select(query: str, nodes: Nodes) -> Any:
        return postprocess(step, copy_nodes(nodes, deep=deep), query)

    lowering.read_parts(PostprocessorParts, step)
    deep = not isinstance(step, (SimilarityPostprocessor, LongContextReorder, KeywordNodePostprocessor))
    name = type(step).__name__.lower().replace("node", "").replace("postprocessor", "")
    return lowering.add_call(name, select, query=query, nodes=nodes)


def _lower_neighbours(lowering: Lowering, step: PrevNextNodePostprocessor, query: Ref, nodes: Ref) -> Ref:
    """Lower the step that adds the previous and next nodes of each node, which it reads from a document store.

    Raise `NotUnderstood` unless the store is LlamaIndex's own in memory: reading another one may be a request.
    """
    if type(step.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(step.docstore).__name__}, which is not known to be local")
    return _lower_pure(lowering, step, query, nodes)


_POSTPROCESSOR_RULES: dict[type, Callable[..., Ref]] = {
    LLMRerank: _lower_llm_rerank,
    SimilarityPostprocessor: _lower_pure,
    KeywordNodePostprocessor: _lower_pure,
    LongContextReorder: _lower_pure,
    MetadataReplacementPostProcessor: _lower_pure,
    FixedRecencyPostprocessor: _lower_pure,
    PrevNextNodePostprocessor: _lower_neighbours,
}
