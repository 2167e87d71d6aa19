"""Selectors and question generators: which engines are asked, and what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.schema import QueryBundle
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector

from teola_plugin.graph import Ref
from teola_plugin.tracer.llamaindex.known import rule_for
from teola_plugin.tracer.llamaindex.stand_ins import clone, raw
from teola_plugin.tracer.llamaindex.walk import Value, Walk, pool_llm

Given = Mapping[str, Any]


def selected(walk: Walk, selector: BaseSelector, choices: Sequence[Any], query: Ref, path: str) -> Value:
    """Indices of the chosen engines, a list."""
    made: Value = None
    with walk.noting(path, selector):
        rule_for(selector, _SELECTORS)
        [llm] = walk.read(selector, "_llm")
        prompt = walk.template(selector, "_prompt")

        def select(llm: Any, given: Given) -> list[int]:
            own = clone(selector, _llm=llm, _prompt=prompt)
            return list(raw(own, "_select")(choices, QueryBundle(given["query"])).inds)

        made = walk.ask("select", pool_llm(llm), select, {"query": query})
    return made


def questions(walk: Walk, generator: Any, tools: Sequence[Any], query: Ref, path: str) -> Value:
    """Sub-questions as the model's JSON spells them."""
    made: Value = None
    with walk.noting(path, generator):
        rule_for(generator, _GENERATORS)
        [llm] = walk.read(generator, "_llm")
        prompt = walk.template(generator, "_prompt")

        def generate(llm: Any, given: Given) -> list[dict[str, str]]:
            own = clone(generator, _llm=llm, _prompt=prompt)
            found = raw(own, "generate")(tools, QueryBundle(given["query"]))
            return [{"sub_question": one.sub_question, "tool_name": one.tool_name} for one in found]

        made = walk.ask("questions", pool_llm(llm), generate, {"query": query}, items="json")
    return made


_SELECTORS: dict[type, Callable[..., Any]] = {LLMSingleSelector: selected, LLMMultiSelector: selected}
_GENERATORS: dict[type, Callable[..., Any]] = {LLMQuestionGenerator: questions}
