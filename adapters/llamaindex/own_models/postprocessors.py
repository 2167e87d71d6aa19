"""Postprocessors ahead of the plain object: an LLM that chooses in batches, and what changes nodes by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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
from llama_index.core.schema import NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan
from teola_plugin.shims.llamaindex.copies import clone
from teola_plugin.shims.llamaindex.postprocessors import (
    LLMRerankParts,
    PostprocessorParts,
    batch_arguments,
    batches,
    postprocessed,
)
from teola_plugin.tracer.llamaindex.classes import as_made, own_function, own_prompt, rule_for
from teola_plugin.tracer.llamaindex.dry_run import own_nodes
from teola_plugin.tracer.symbols import NotUnderstood

Nodes = list[NodeWithScore]
Postprocess = Callable[[Ahead, str, Nodes], Awaitable[Nodes]]
"""(how, query, nodes) -> nodes of its own."""


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
