"""What makes queries of a query, or chooses whom to ask: transforms, selectors, question generators."""

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

from teola_plugin.shims.llamaindex.copies import clone, silent, unspanned
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
    """The document that the LLM invents for a query."""
    own = clone(transform, **HyDEQueryTransformParts.named(llm=llm, hyde_prompt=prompt, include_original=False))
    return str(unspanned(own, "_run")(QueryBundle(query), metadata).custom_embedding_strs[0])


@dataclass(frozen=True, slots=True)
class DecomposeQueryTransformParts(Parts):
    OF: ClassVar = (DecomposeQueryTransform,)
    METHODS: ClassVar = ("_run",)

    llm: Any = attribute("_llm")
    decompose_query_prompt: BasePromptTemplate = attribute("_decompose_query_prompt", BasePromptTemplate)


def decomposed_query(
    transform: DecomposeQueryTransform, llm: Any, prompt: BasePromptTemplate, query: str, metadata: Mapping[str, Any]
) -> str:
    """The query that the LLM writes for one."""
    own = clone(transform, **DecomposeQueryTransformParts.named(llm=llm, decompose_query_prompt=prompt))
    return str(unspanned(own, "_run")(QueryBundle(query), metadata).query_str)


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
    """Which of the choices the LLM takes, by the selector's own parsing."""
    own = clone(selector, **LLMSelectorParts.named(llm=llm, prompt=prompt))
    return list(unspanned(own, "_select")(choices, QueryBundle(query)).inds)


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
        """Whether a call of its function is a selection of LlamaIndex's own."""
        return self.output_cls in (SingleSelection, MultiSelection) and not self.allow_parallel_tool_calls


def called_indices(
    selector: BaseSelector,
    program: FunctionCallingProgram[Any],
    llm: Any,
    prompt: BasePromptTemplate,
    choices: Sequence[ToolMetadata],
    query: str,
) -> list[int]:
    """Which of the choices the LLM takes by calling a function, by the selector's own parsing."""
    asking = clone(llm, predict_and_call=_one_call(llm))
    called = clone(program, **FunctionCallingProgramParts.named(llm=asking, prompt=prompt))
    own = clone(selector, **PydanticSelectorParts.named(program=unspanned(called, "__call__")))
    return list(unspanned(own, "_select")(choices, QueryBundle(query)).inds)


def _one_call(llm: Any) -> Callable[..., AgentChatResponse]:
    """`predict_and_call` without spans, which its own has inside; raises where that gives an error."""
    quiet = silent(llm, "_prepare_chat_with_tools")

    def predict_and_call(tools: Sequence[FunctionTool], **kwargs: Any) -> AgentChatResponse:
        response = unspanned(quiet, "chat_with_tools")(tools, **kwargs)
        [call] = llm.get_tool_calls_from_response(response, error_on_no_tool_call=True)
        [tool] = tools
        made = tool.real_fn(**call.tool_kwargs)
        told = ToolOutput(
            content=str(made), tool_name=call.tool_name, raw_input=call.tool_kwargs, raw_output=made, is_error=False
        )
        return AgentChatResponse(response=told.content, sources=[told])

    return predict_and_call


@dataclass(frozen=True, slots=True)
class LLMQuestionGeneratorParts(Parts):
    OF: ClassVar = (LLMQuestionGenerator,)

    llm: Any = attribute("_llm")
    prompt: BasePromptTemplate = attribute("_prompt", BasePromptTemplate)


def generated_questions(
    generator: LLMQuestionGenerator,
    llm: Any,
    prompt: BasePromptTemplate,
    tools: Sequence[ToolMetadata],
    query: str,
) -> list[dict[str, str]]:
    """The sub-questions that the LLM writes, by the generator's own parsing; keys as its JSON has them."""
    own = clone(generator, **LLMQuestionGeneratorParts.named(llm=llm, prompt=prompt))
    found = unspanned(own, "generate")(tools, QueryBundle(query))
    return [{"sub_question": one.sub_question, "tool_name": one.tool_name} for one in found]
