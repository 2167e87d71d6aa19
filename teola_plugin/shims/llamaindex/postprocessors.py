"""Node postprocessors, judges of answers, and what LlamaIndex takes where nothing is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

from llama_index.core import Settings
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

from teola_plugin.shims.llamaindex.copies import unspanned
from teola_plugin.shims.llamaindex.records import Parts, attribute, is_older_than, since


@dataclass(frozen=True, slots=True)
class PostprocessorParts(Parts):
    """Of every postprocessor."""

    METHODS: ClassVar[tuple[str, ...]] = ("_postprocess_nodes",)


def postprocessed(step: BaseNodePostprocessor, nodes: Sequence[NodeWithScore], query: str) -> list[NodeWithScore]:
    """What a step makes of nodes, without events. It may write into them."""
    made: list[NodeWithScore] = unspanned(step, "_postprocess_nodes")(list(nodes), QueryBundle(query))
    return made


@dataclass(frozen=True, slots=True)
class LLMRerankParts(PostprocessorParts):
    OF: ClassVar = (LLMRerank,)
    METHODS: ClassVar = (
        *PostprocessorParts.METHODS,
        *since("0.14.24", "_get_node_batches", "_get_predict_kwargs"),
    )

    llm: Any = attribute("llm")
    choice_select_prompt: BasePromptTemplate = attribute("choice_select_prompt", BasePromptTemplate)
    format_node_batch_fn: Callable[..., Any] = attribute("_format_node_batch_fn")
    parse_choice_select_answer_fn: Callable[..., Any] = attribute("_parse_choice_select_answer_fn")


def batches(step: LLMRerank, nodes: Sequence[NodeWithScore]) -> list[list[BaseNode]]:
    """Return the nodes in groups, from each of which the LLM chooses with one call."""
    if is_older_than("0.14.24"):
        inner, size = [node.node for node in nodes], step.choice_batch_size
        return [inner[start : start + size] for start in range(0, len(inner), size)]
    return step._get_node_batches(list(nodes))


def batch_arguments(step: LLMRerank, batch: Sequence[BaseNode], query: str) -> dict[str, Any]:
    """Return the variables of the prompt for one group of nodes."""
    if is_older_than("0.14.24"):
        return {"context_str": step._format_node_batch_fn(list(batch)), "query_str": query}
    return step._get_predict_kwargs(list(batch), query)


# ------------------------------------------------------------ judges


@dataclass(frozen=True, slots=True)
class RelevancyEvaluatorParts(Parts):
    OF: ClassVar = (RelevancyEvaluator,)

    llm: Any = attribute("_llm")
    eval_template: BasePromptTemplate = attribute("_eval_template", BasePromptTemplate)
    refine_template: BasePromptTemplate = attribute("_refine_template", BasePromptTemplate)
    raise_error: bool | None = attribute("_raise_error", bool, NoneType)


# ------------------------------------------------------------ defaults


@dataclass(frozen=True, slots=True)
class SettingsParts(Parts):
    """As they are set. To ask `Settings` itself would make what is not set, and change what is."""

    OF: ClassVar = (type(Settings),)

    llm: Any = attribute("_llm")
    node_parser: Any = attribute("_node_parser")
    transformations: Sequence[Any] | None = attribute("_transformations", list, tuple, NoneType)
