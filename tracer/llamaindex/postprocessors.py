"""Node postprocessors: rerankers as primitives, pure ones by their own code on copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from llama_index.core.schema import NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore

from teola_plugin.graph import ITEM, Component, Ref, Role, named
from teola_plugin.shims.llamaindex.copies import clone
from teola_plugin.shims.llamaindex.postprocessors import (
    LLMRerankParts,
    PostprocessorParts,
    batch_arguments,
    batches,
    postprocessed,
)
from teola_plugin.shims.llamaindex.silent_calls import replay
from teola_plugin.tracer.draft import DERIVED
from teola_plugin.tracer.llamaindex.classes import own_function, own_prompt, rule_for
from teola_plugin.tracer.llamaindex.dry_run import captured, own_nodes, replayed
from teola_plugin.tracer.llamaindex.own_models import ask_own_llm
from teola_plugin.tracer.llamaindex.synthesizers import QUERY
from teola_plugin.tracer.llamaindex.walk import Value, Walk, is_pool_llm
from teola_plugin.tracer.symbols import NotUnderstood

Given = Mapping[str, Any]
Nodes = Sequence[NodeWithScore]


def postprocess(walk: Walk, steps: Sequence[BaseNodePostprocessor], query: Ref, nodes: Value, path: str) -> Value:
    """The nodes after all steps."""
    for i, step in enumerate(steps):
        here, nodes_now, nodes = f"{path}[{i}]", nodes, None
        with walk.noting(here, step):
            if nodes_now is None:
                raise NotUnderstood("what it reads is not known ahead")
            lower = _pool_rerank if hasattr(type(step), "select") and hasattr(step, "pool") else rule_for(step, _RULES)
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


def _pure(walk: Walk, step: BaseNodePostprocessor, query: Ref, nodes: Ref) -> Ref:
    def select(query: str, nodes: Nodes) -> Any:
        return postprocessed(step, own_nodes(nodes, deep=deep), query)

    walk.parts(PostprocessorParts, step)
    deep = not isinstance(step, (SimilarityPostprocessor, LongContextReorder, KeywordNodePostprocessor))
    return walk.call(_word(step), select, query=query, nodes=nodes)


def _neighbours(walk: Walk, step: PrevNextNodePostprocessor, query: Ref, nodes: Ref) -> Ref:
    if type(step.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(step.docstore).__name__}, which is not known to be local")
    return _pure(walk, step, query, nodes)


def _word(step: BaseNodePostprocessor) -> str:
    return type(step).__name__.lower().replace("node", "").replace("postprocessor", "")


_RULES: dict[type, Callable[..., Ref]] = {
    LLMRerank: _llm_rerank,
    SimilarityPostprocessor: _pure,
    KeywordNodePostprocessor: _pure,
    LongContextReorder: _pure,
    MetadataReplacementPostProcessor: _pure,
    FixedRecencyPostprocessor: _pure,
    PrevNextNodePostprocessor: _neighbours,
}
