"""What makes queries of a query, or chooses whom to ask, ahead of the plain object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.indices.query.query_transform.base import DecomposeQueryTransform, HyDEQueryTransform
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan, Question
from teola_plugin.shims.llamaindex.queries import (
    DecomposeQueryTransformParts,
    HyDEQueryTransformParts,
    LLMQuestionGeneratorParts,
    LLMSelectorParts,
    decomposed_query,
    generated_questions,
    hypothetical_document,
    selected_indices,
)
from teola_plugin.tracer.llamaindex.classes import own_prompt, rule_for
from teola_plugin.tracer.symbols import NotUnderstood

Choose = Callable[[Ahead, str], Awaitable[list[int]]]
"""(how, query) -> indices of those that are asked."""


def choosing(plan: Plan, selector: Any, choices: Sequence[Any]) -> Choose:
    """What a selector selects; several of them are asked one after the other. Raises `NotUnderstood`."""
    rule_for(selector, {LLMSingleSelector: None, LLMMultiSelector: None})
    parts = LLMSelectorParts.of(selector)
    llm, prompt = plan.llm(parts.llm), own_prompt(parts.prompt)
    plan.known[id(selector)] = selector
    if takes_several(selector):
        plan.lists()

    async def choose(ahead: Ahead, query: str) -> list[int]:
        chosen = await ahead.ask(llm, lambda a: selected_indices(selector, a, prompt, choices, query))
        if not chosen or not all(0 <= i < len(choices) for i in chosen):
            raise NotUnderstood("it chooses nobody")
        return list(chosen)

    return choose


def takes_several(selector: Any) -> bool:
    return isinstance(selector, LLMMultiSelector)


def writing_questions(plan: Plan, generator: Any, tools: Sequence[Any]) -> Callable[[Ahead, str], Awaitable[Any]]:
    """Sub-questions, as the model's JSON spells them. Raises `NotUnderstood`."""
    rule_for(generator, {LLMQuestionGenerator: None})
    parts = LLMQuestionGeneratorParts.of(generator)
    llm, prompt = plan.llm(parts.llm), own_prompt(parts.prompt)
    plan.known[id(generator)] = generator

    async def write(ahead: Ahead, query: str) -> Any:
        return await ahead.ask(llm, lambda a: generated_questions(generator, a, prompt, tools, query))  # type: ignore[arg-type]

    return write


def changing(plan: Plan, transform: Any, metadata: Any) -> Callable[[Ahead, Question], Awaitable[Question]]:
    """What a transform makes of a query. Raises `NotUnderstood`."""
    kind = rule_for(transform, {HyDEQueryTransform: HyDEQueryTransformParts, DecomposeQueryTransform: None})
    parts: Any = (kind or DecomposeQueryTransformParts).of(transform)
    llm = plan.llm(parts.llm)
    prompt = own_prompt(parts.hyde_prompt if kind else parts.decompose_query_prompt)
    plan.known[id(transform)] = transform
    if kind and parts.include_original:
        plan.lists()

    async def change(ahead: Ahead, asked: Question) -> Question:
        make = hypothetical_document if kind else decomposed_query
        text = await ahead.in_sync_code().ask(llm, lambda a: make(transform, a, prompt, asked.text, metadata))  # type: ignore[arg-type]
        if not kind:
            return Question(text)
        own = asked.texts or (asked.text,)
        return Question(asked.text, (text, *own) if parts.include_original else (text,))

    return change
