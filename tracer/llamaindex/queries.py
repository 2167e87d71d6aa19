"""Selectors and question generators: which engines are asked, and what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.indices.query.query_transform.base import (
    BaseQueryTransform,
    DecomposeQueryTransform,
    HyDEQueryTransform,
    IdentityQueryTransform,
)
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import (
    LLMMultiSelector,
    LLMSingleSelector,
    PydanticMultiSelector,
    PydanticSingleSelector,
)

from teola_plugin.graph import DraftText, Ref
from teola_plugin.requests.draft_texts import forms_of_questions
from teola_plugin.shims.llamaindex.queries import (
    DecomposeQueryTransformParts,
    FunctionCallingProgramParts,
    HyDEQueryTransformParts,
    LLMQuestionGeneratorParts,
    LLMSelectorParts,
    PydanticSelectorParts,
    called_indices,
    decomposed_query,
    generated_questions,
    hypothetical_document,
    selected_indices,
)
from teola_plugin.tracer.llamaindex.classes import own_prompt, rule_for
from teola_plugin.tracer.llamaindex.lowering import SymbolicQuery, Value, Walk, pool_llm
from teola_plugin.tracer.symbols import NotUnderstood

# ------------------------------------------------------------ query transforms


Given = Mapping[str, Any]


def transformed(
    walk: Walk, transform: BaseQueryTransform, asked: SymbolicQuery, metadata: Any, path: str, name: str
) -> SymbolicQuery | None:
    """`transform.run(query)`."""
    made: SymbolicQuery | None = None
    with walk.noting(path, transform):
        made = rule_for(transform, _TRANSFORM_RULES)(walk, transform, asked, metadata or {}, name)
    return made


def _hyde(walk: Walk, transform: HyDEQueryTransform, asked: SymbolicQuery, metadata: Any, name: str) -> SymbolicQuery:
    """An invented document is searched with, and the query beside it."""
    parts = walk.parts(HyDEQueryTransformParts, transform)
    prompt = own_prompt(parts.hyde_prompt)

    def invent(llm: Any, given: Given) -> str:
        return hypothetical_document(transform, llm, prompt, given["query"], metadata)

    document = walk.ask(name, walk.llm(parts.llm), invent, {"query": asked.text}, in_sync_code=True)
    return SymbolicQuery(asked.text, (document, *asked.texts) if parts.include_original else (document,))


def _decompose(
    walk: Walk, transform: DecomposeQueryTransform, asked: SymbolicQuery, metadata: Any, name: str
) -> SymbolicQuery:
    parts = walk.parts(DecomposeQueryTransformParts, transform)
    prompt = own_prompt(parts.decompose_query_prompt)

    def rewrite(llm: Any, given: Given) -> str:
        return decomposed_query(transform, llm, prompt, given["query"], metadata)

    query = walk.ask(name, walk.llm(parts.llm), rewrite, {"query": asked.text}, in_sync_code=True)
    return SymbolicQuery(query, (query,))


def _identity(walk: Walk, transform: Any, asked: SymbolicQuery, metadata: Any, name: str) -> SymbolicQuery:
    return asked


_TRANSFORM_RULES: dict[type, Callable[..., SymbolicQuery]] = {
    HyDEQueryTransform: _hyde,
    DecomposeQueryTransform: _decompose,
    IdentityQueryTransform: _identity,
}


def query_of(ref: Ref) -> SymbolicQuery:
    """A plain query."""
    return SymbolicQuery(ref, (ref,))


# ------------------------------------------------------------ selectors and question generators


def takes_several(selector: BaseSelector) -> bool:
    """Whether it may choose more than one."""
    return isinstance(selector, (LLMMultiSelector, PydanticMultiSelector))


def numbered(index: int, count: int) -> Callable[..., bool]:
    """Whether a number, from 1, is that choice's; 0 is the last one's, as Python counts."""
    return lambda choice: choice - 1 in (index, index - count)


def selected(walk: Walk, selector: BaseSelector, choices: Sequence[Any], query: Ref, path: str) -> Value:
    """Numbers of the chosen engines as the model's JSON has them, from 1: a list."""
    made: Value = None
    with walk.noting(path, selector):
        llm, indices, items = rule_for(selector, _SELECTORS)(walk, selector, choices)

        def select(llm: Any, given: Given) -> list[int]:
            return [index + 1 for index in indices(llm, given["query"])]

        expected = None if takes_several(selector) else 1
        made = walk.ask("select", llm, select, {"query": query}, items=items, expected=expected)
    return made


Indices = Callable[[Any, str], Sequence[int]]
"""(LLM, query) -> the choices that are taken, from 0."""


def _by_text(walk: Walk, selector: BaseSelector, choices: Sequence[Any]) -> tuple[Any, Indices, str]:
    """Its LLM, what it asks that for, and how numbers are spelled in the answer."""
    parts = walk.parts(LLMSelectorParts, selector)
    prompt = own_prompt(parts.prompt)
    return walk.llm(parts.llm), lambda llm, query: selected_indices(selector, llm, prompt, choices, query), "choices"


def _by_call(walk: Walk, selector: BaseSelector, choices: Sequence[Any]) -> tuple[Any, Indices, str]:
    """As `_by_text`, where the LLM is told to call a function."""
    program: Any = walk.parts(PydanticSelectorParts, selector).program
    rule_for(program, {FunctionCallingProgram: None})
    parts = walk.parts(FunctionCallingProgramParts, program)
    if not parts.writes_selections:
        raise NotUnderstood("its program writes something else than a selection")
    llm, prompt = pool_llm(parts.llm), own_prompt(parts.prompt)
    if not hasattr(type(llm), "__teola_writes_calls__"):
        raise NotUnderstood(f"what a {type(llm).__name__} calls is not known before all of it is written")
    if llm.system_prompt is not None:
        raise NotUnderstood("its async way leaves the LLM's system prompt out")
    return llm, lambda llm, query: called_indices(selector, program, llm, prompt, choices, query), "indices"


def questions(walk: Walk, generator: Any, tools: Sequence[Any], query: Ref, path: str) -> Value:
    """Sub-questions as the model's JSON spells them."""
    made: Value = None
    with walk.noting(path, generator):
        rule_for(generator, _GENERATORS)
        parts = walk.parts(LLMQuestionGeneratorParts, generator)
        prompt = own_prompt(parts.prompt)

        def generate(llm: Any, given: Given) -> list[dict[str, str]]:
            return generated_questions(generator, llm, prompt, tools, given["query"])

        made = walk.ask("questions", walk.llm(parts.llm), generate, {"query": query}, items="json", forms=_FORMS)
    return made


_FORMS = tuple(DraftText("the form of its list", text=form) for form in forms_of_questions())
_SELECTORS: dict[type, Callable[..., tuple[Any, Indices, str]]] = {
    LLMSingleSelector: _by_text,
    LLMMultiSelector: _by_text,
    PydanticSingleSelector: _by_call,
    PydanticMultiSelector: _by_call,
}
_GENERATORS: dict[type, Callable[..., Any]] = {LLMQuestionGenerator: questions}
