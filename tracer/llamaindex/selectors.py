"""Selectors and question generators: which engines are asked, and what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector

from teola_plugin.graph import DraftText, Ref
from teola_plugin.requests.draft_texts import forms_of_questions
from teola_plugin.shims.llamaindex.queries import (
    LLMQuestionGeneratorParts,
    LLMSelectorParts,
    generated_questions,
    selected_indices,
)
from teola_plugin.tracer.llamaindex.classes import own_prompt, rule_for
from teola_plugin.tracer.llamaindex.walk import Value, Walk, pool_llm

Given = Mapping[str, Any]


def selected(walk: Walk, selector: BaseSelector, choices: Sequence[Any], query: Ref, path: str) -> Value:
    """Numbers of the chosen engines as the model's JSON has them, from 1: a list."""
    made: Value = None
    with walk.noting(path, selector):
        rule_for(selector, _SELECTORS)
        parts = walk.parts(LLMSelectorParts, selector)
        prompt = own_prompt(parts.prompt)

        def select(llm: Any, given: Given) -> list[int]:
            return [index + 1 for index in selected_indices(selector, llm, prompt, choices, given["query"])]

        expected = 1 if isinstance(selector, LLMSingleSelector) else None
        llm = pool_llm(parts.llm)
        made = walk.ask("select", llm, select, {"query": query}, items="choices", expected=expected)
    return made


def questions(walk: Walk, generator: Any, tools: Sequence[Any], query: Ref, path: str) -> Value:
    """Sub-questions as the model's JSON spells them."""
    made: Value = None
    with walk.noting(path, generator):
        rule_for(generator, _GENERATORS)
        parts = walk.parts(LLMQuestionGeneratorParts, generator)
        prompt = own_prompt(parts.prompt)

        def generate(llm: Any, given: Given) -> list[dict[str, str]]:
            return generated_questions(generator, llm, prompt, tools, given["query"])

        made = walk.ask("questions", pool_llm(parts.llm), generate, {"query": query}, items="json", forms=_FORMS)
    return made


_FORMS = tuple(DraftText("the form of its list", text=form) for form in forms_of_questions())
_SELECTORS: dict[type, Callable[..., Any]] = {LLMSingleSelector: selected, LLMMultiSelector: selected}
_GENERATORS: dict[type, Callable[..., Any]] = {LLMQuestionGenerator: questions}
