"""Query transforms, selectors and question generators: their parts, and their code run on copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llama_index.core.base.base_selector import BaseSelector, MultiSelection, SingleSelection
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.indices.query.query_transform.base import DecomposeQueryTransform, HyDEQueryTransform
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.schema import QueryBundle
from llama_index.core.selectors import (
    LLMMultiSelector,
    LLMSingleSelector,
    PydanticMultiSelector,
    PydanticSingleSelector,
)
from llama_index.core.tools import FunctionTool, ToolOutput
from llama_index.core.tools.types import ToolMetadata
from llama_index.core.types import BasePydanticProgram

from teola_plugin.shims.llamaindex.copies import clone, with_silent_methods, without_spans
from teola_plugin.shims.llamaindex.records import Parts, attribute

# ------------------------------------------------------------ another query


@dataclass(frozen=True, slots=True)
class HyDEQueryTransformParts(Parts):
    OF: ClassVar = (HyDEQueryTransform,)
    METHODS: ClassVar = ("_run",)

    llm: Any = attribute("_llm")
    hyde_prompt: BasePromptTemplate = attribute("_hyde_prompt", BasePromptTemplate)
    include_original: bool = attribute("_include_original", bool)


def hypothetical_document(
    transform: HyDEQueryTransform, llm: Any, prompt: BasePromptTemplate, query: str, metadata: Mapping[str, Any]
) -> str:
    """Return the document that the LLM invents for a query."""
    quiet_transform = clone(
        transform, **HyDEQueryTransformParts.as_attributes(llm=llm, hyde_prompt=prompt, include_original=False)
    )
    return str(without_spans(quiet_transform, "_run")(QueryBundle(query), metadata).custom_embedding_strs[0])


@dataclass(frozen=True, slots=True)
class DecomposeQueryTransformParts(Parts):
    OF: ClassVar = (DecomposeQueryTransform,)
    METHODS: ClassVar = ("_run",)

    llm: Any = attribute("_llm")
    decompose_query_prompt: BasePromptTemplate = attribute("_decompose_query_prompt", BasePromptTemplate)


def decomposed_query(
    transform: DecomposeQueryTransform, llm: Any, prompt: BasePromptTemplate, query: str, metadata: Mapping[str, Any]
) -> str:
    """Return the query that the LLM writes in place of a query."""
    quiet_transform = clone(
        transform, **DecomposeQueryTransformParts.as_attributes(llm=llm, decompose_query_prompt=prompt)
    )
    return str(without_spans(quiet_transform, "_run")(QueryBundle(query), metadata).query_str)


# ------------------------------------------------------------ whom to ask


@dataclass(frozen=True, slots=True)
class LLMSelectorParts(Parts):
    OF: ClassVar = (LLMSingleSelector, LLMMultiSelector)
    METHODS: ClassVar = ("_select",)

    llm: Any = attribute("_llm")
    prompt: BasePromptTemplate = attribute("_prompt", BasePromptTemplate)


def selected_indices(
    selector: BaseSelector, llm: Any, prompt: BasePromptTemplate, choices: Sequence[ToolMetadata], query: str
) -> list[int]:
    """Return the indices that the LLM chooses, by the selector's own parsing."""
    quiet_selector = clone(selector, **LLMSelectorParts.as_attributes(llm=llm, prompt=prompt))
    return list(without_spans(quiet_selector, "_select")(choices, QueryBundle(query)).inds)


@dataclass(frozen=True, slots=True)
class PydanticSelectorParts(Parts):
    OF: ClassVar = (PydanticSingleSelector, PydanticMultiSelector)
    METHODS: ClassVar = ("_select",)

    program: BasePydanticProgram[Any] = attribute("_selector_program", BasePydanticProgram)


@dataclass(frozen=True, slots=True)
class FunctionCallingProgramParts(Parts):
    OF: ClassVar = (FunctionCallingProgram,)
    METHODS: ClassVar = ("__call__",)

    llm: Any = attribute("_llm")
    prompt: BasePromptTemplate = attribute("_prompt", BasePromptTemplate)
    output_cls: type = attribute("_output_cls", type)
    tool_choice: Any = attribute("_tool_choice")
    allow_parallel_tool_calls: bool = attribute("_allow_parallel_tool_calls", bool)

    @property
    def writes_selections(self) -> bool:
        """True if the program's function makes one selection of LlamaIndex's own classes."""
        return self.output_cls in (SingleSelection, MultiSelection) and not self.allow_parallel_tool_calls


def called_indices(
    selector: BaseSelector,
    program: FunctionCallingProgram[Any],
    llm: Any,
    prompt: BasePromptTemplate,
    choices: Sequence[ToolMetadata],
    query: str,
) -> list[int]:
    """Return the indices that the LLM chooses by calling a function, by the selector's own parsing."""
    calling_llm = clone(llm, predict_and_call=_call_one_tool(llm))
    quiet_program = clone(program, **FunctionCallingProgramParts.as_attributes(llm=calling_llm, prompt=prompt))
    quiet_selector = clone(
        selector, **PydanticSelectorParts.as_attributes(program=without_spans(quiet_program, "__call__"))
    )
    return list(without_spans(quiet_selector, "_select")(choices, QueryBundle(query)).inds)


def _call_one_tool(llm: Any) -> Callable[..., AgentChatResponse]:
    """Return a `predict_and_call` without the spans inside it, which raises where the original returns an error."""
    quiet = with_silent_methods(llm, "_prepare_chat_with_tools")

    def predict_and_call(tools: Sequence[FunctionTool], **kwargs: Any) -> AgentChatResponse:
        """Have the LLM call the only tool, and return its output. Raise ValueError for another number of calls."""
        response = without_spans(quiet, "chat_with_tools")(tools, **kwargs)
        [call] = llm.get_tool_calls_from_response(response, error_on_no_tool_call=True)
        [tool] = tools
        output = tool.real_fn(**call.tool_kwargs)
        tool_output = ToolOutput(
            content=str(output), tool_name=call.tool_name, raw_input=call.tool_kwargs, raw_output=output, is_error=False
        )
        return AgentChatResponse(response=tool_output.content, sources=[tool_output])

    return predict_and_call


@dataclass(frozen=True, slots=True)
class LLMQuestionGeneratorParts(Parts):
    OF: ClassVar = (LLMQuestionGenerator,)

    llm: Any = attribute("_llm")
    prompt: BasePromptTemplate = attribute("_prompt", BasePromptTemplate)


def generated_questions(
    generator: LLMQuestionGenerator, llm: Any, prompt: BasePromptTemplate, tools: Sequence[ToolMetadata], query: str
) -> list[dict[str, str]]:
    """Return the sub-questions that the LLM writes, by the generator's own parsing, with the keys of its JSON."""
    quiet_generator = clone(generator, **LLMQuestionGeneratorParts.as_attributes(llm=llm, prompt=prompt))
    questions = without_spans(quiet_generator, "generate")(tools, QueryBundle(query))
    return [{"sub_question": question.sub_question, "tool_name": question.tool_name} for question in questions]
