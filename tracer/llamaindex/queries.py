"""Lower query transforms, selectors and question generators: what makes queries, or chooses who answers them."""

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
from teola_plugin.tracer.llamaindex.classes import copy_prompt, rule_for
from teola_plugin.tracer.llamaindex.lowering import Lowering, SymbolicQuery, Value
from teola_plugin.tracer.symbols import NotUnderstood

# ------------------------------------------------------------ query transforms


Values = Mapping[str, Any]


def lower_transform(
    lowering: Lowering, transform: BaseQueryTransform, query: SymbolicQuery, metadata: Any, path: str, name: str
) -> SymbolicQuery | None:
    """Lower `transform.run(query)`; report why and return None if it is not understood."""
    transformed: SymbolicQuery | None = None
    with lowering.reporting(path, transform):
        transformed = rule_for(transform, _TRANSFORM_RULES)(lowering, transform, query, metadata or {}, name)
    return transformed


def _lower_hyde(
    lowering: Lowering, transform: HyDEQueryTransform, query: SymbolicQuery, metadata: Any, name: str
) -> SymbolicQuery:
    """Lower a transform that searches with an invented document, and with the query if it is set up so."""
    parts = lowering.read_parts(HyDEQueryTransformParts, transform)
    prompt = copy_prompt(parts.hyde_prompt)

    def invent(llm: Any, values: Values) -> str:
        return hypothetical_document(transform, llm, prompt, values["query"], metadata)

    document = lowering.add_llm_call(
        name, lowering.require_llm(parts.llm), invent, {"query": query.text}, in_sync_code=True
    )
    return SymbolicQuery(query.text, (document, *query.texts) if parts.include_original else (document,))


def _lower_decompose(
    lowering: Lowering, transform: DecomposeQueryTransform, query: SymbolicQuery, metadata: Any, name: str
) -> SymbolicQuery:
    """Lower a transform whose LLM rewrites the query into a simpler one. Raise `NotUnderstood`."""
    parts = lowering.read_parts(DecomposeQueryTransformParts, transform)
    prompt = copy_prompt(parts.decompose_query_prompt)

    def rewrite(llm: Any, values: Values) -> str:
        return decomposed_query(transform, llm, prompt, values["query"], metadata)

    rewritten = lowering.add_llm_call(
        name, lowering.require_llm(parts.llm), rewrite, {"query": query.text}, in_sync_code=True
    )
    return SymbolicQuery(rewritten, (rewritten,))


_TRANSFORM_RULES: dict[type, Callable[..., SymbolicQuery]] = {
    HyDEQueryTransform: _lower_hyde,
    DecomposeQueryTransform: _lower_decompose,
    IdentityQueryTransform: lambda lowering, transform, query, metadata, name: query,
}


# ------------------------------------------------------------ selectors and question generators


def can_choose_several(selector: BaseSelector) -> bool:
    """Return True if a selector may choose more than one."""
    return isinstance(selector, (LLMMultiSelector, PydanticMultiSelector))


def choice_test(index: int, count: int) -> Callable[..., bool]:
    """Return a function that tests if a 1-based number means the choice at `index`; 0 means the last choice."""
    return lambda choice: choice - 1 in (index, index - count)


def lower_selector(lowering: Lowering, selector: BaseSelector, choices: Sequence[Any], query: Ref, path: str) -> Value:
    """Add the call of a selector; return the ref of a list of 1-based numbers. None if it is not understood."""
    numbers: Value = None
    with lowering.reporting(path, selector):
        llm, indices, items = rule_for(selector, _SELECTORS)(lowering, selector, choices)

        def select(llm: Any, values: Values) -> list[int]:
            return [index + 1 for index in indices(llm, values["query"])]

        expected = None if can_choose_several(selector) else 1
        numbers = lowering.add_llm_call("select", llm, select, {"query": query}, items=items, expected=expected)
    return numbers


Indices = Callable[[Any, str], Sequence[int]]
"""(LLM, query) -> 0-based indices of the selected choices."""


def _read_text_selector(lowering: Lowering, selector: BaseSelector, choices: Sequence[Any]) -> tuple[Any, Indices, str]:
    """Return the selector's LLM, the function that makes its call, and the format of numbers in the answer."""
    parts = lowering.read_parts(LLMSelectorParts, selector)
    prompt = copy_prompt(parts.prompt)
    return (
        lowering.require_llm(parts.llm),
        lambda llm, query: selected_indices(selector, llm, prompt, choices, query),
        "choices",
    )


def _read_function_selector(
    lowering: Lowering, selector: BaseSelector, choices: Sequence[Any]
) -> tuple[Any, Indices, str]:
    """Return the same as `_read_text_selector` for a selector whose LLM answers by calling a function."""
    program: Any = lowering.read_parts(PydanticSelectorParts, selector).program
    rule_for(program, {FunctionCallingProgram: None})
    parts = lowering.read_parts(FunctionCallingProgramParts, program)
    if not parts.writes_selections:
        raise NotUnderstood("its program writes something else than a selection")
    llm, prompt = lowering.require_llm(parts.llm), copy_prompt(parts.prompt)
    if not hasattr(type(llm), "__teola_writes_calls__"):
        raise NotUnderstood(f"the calls of a {type(llm).__name__} are known only when all of its answer is written")
    if llm.system_prompt is not None:
        raise NotUnderstood("its async way leaves the LLM's system prompt out")
    return llm, lambda llm, query: called_indices(selector, program, llm, prompt, choices, query), "indices"


def lower_question_generator(lowering: Lowering, generator: Any, tools: Sequence[Any], query: Ref, path: str) -> Value:
    """Add the call of a question generator; return the ref of its questions. None if it is not understood."""
    questions: Value = None
    with lowering.reporting(path, generator):
        rule_for(generator, _GENERATORS)
        parts = lowering.read_parts(LLMQuestionGeneratorParts, generator)
        prompt = copy_prompt(parts.prompt)

        def generate(llm: Any, values: Values) -> list[dict[str, str]]:
            return generated_questions(generator, llm, prompt, tools, values["query"])

        questions = lowering.add_llm_call(
            "questions",
            lowering.require_llm(parts.llm),
            generate,
            {"query": query},
            items="json",
            forms=_QUESTION_FORMS,
        )
    return questions


_QUESTION_FORMS = tuple(DraftText("the form of its list", text=form) for form in forms_of_questions())
_SELECTORS: dict[type, Callable[..., tuple[Any, Indices, str]]] = {
    LLMSingleSelector: _read_text_selector,
    LLMMultiSelector: _read_text_selector,
    PydanticSingleSelector: _read_function_selector,
    PydanticMultiSelector: _read_function_selector,
}
_GENERATORS: dict[type, Callable[..., Any]] = {LLMQuestionGenerator: lower_question_generator}
