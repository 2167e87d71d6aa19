"""Response synthesizers: their parts, and their code around the calls of their LLM."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, ClassVar

from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.response_synthesizers import (
    Accumulate,
    BaseSynthesizer,
    CompactAndRefine,
    Generation,
    Refine,
    SimpleSummarize,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText

from teola_plugin.shims.llamaindex.copies import clone, without_spans
from teola_plugin.shims.llamaindex.records import (
    Parts,
    attribute,
    default_before,
    derived,
    is_older_than,
    methods_since,
)


@dataclass(frozen=True, slots=True)
class SynthesizerParts(Parts):
    """The parts of every synthesizer."""

    OF: ClassVar[tuple[type, ...]] = (NoText, ContextOnly)

    llm: Any = attribute("_llm")
    output_cls: Any = attribute("_output_cls")
    prompt_helper: Any = attribute("_prompt_helper")
    streaming: bool = attribute("_streaming", bool)
    multimodal: bool = attribute("_multimodal", bool, default=False)


def get_response(
    kind: type[SynthesizerParts], synthesizer: BaseSynthesizer, query: str, texts: Sequence[str], **parts: Any
) -> Any:
    """Run `get_response`, without streaming and events, on a copy with other `parts` (fields of `kind`)."""
    quiet_synthesizer = clone(synthesizer, **kind.as_attributes(**parts, streaming=False))
    return without_spans(quiet_synthesizer, "get_response")(query, list(texts))


def separator(synthesizer: Accumulate) -> str:
    """Return the default separator between a synthesizer's answers."""
    return _separator(type(synthesizer))


@lru_cache(maxsize=64)
def _separator(kind: type[Accumulate]) -> str:
    default: str = inspect.signature(inspect.unwrap(kind.get_response)).parameters["separator"].default
    return default


# ------------------------------------------------------------ one chunk after the other


@dataclass(frozen=True, slots=True)
class RefineParts(SynthesizerParts):
    OF: ClassVar = (Refine,)

    text_qa_template: BasePromptTemplate = attribute("_text_qa_template", BasePromptTemplate)
    refine_template: BasePromptTemplate = attribute("_refine_template", BasePromptTemplate)
    response_padding_size: int | None = attribute(
        "_response_padding_size", int, NoneType, default=default_before("0.14.22", None)
    )
    """Tokens kept free for the answer that is refined. None in versions that pack each chunk for its own prompt."""
    structured_answer_filtering: bool = attribute("_structured_answer_filtering", bool)
    default_program: bool = derived(lambda synth: synth._program_factory == synth._default_program_factory)
    """True if the program that filters answers is LlamaIndex's own."""


@dataclass(frozen=True, slots=True)
class CompactAndRefineParts(RefineParts):
    OF: ClassVar = (CompactAndRefine,)
    METHODS: ClassVar = ("_make_compact_text_chunks",)


def compact_chunks(synthesizer: CompactAndRefine, query: str, texts: Sequence[str], **parts: Any) -> list[str]:
    """Pack the texts into as few prompts as possible, by a copy with other `parts` (fields of its record)."""
    quiet_synthesizer = clone(synthesizer, **CompactAndRefineParts.as_attributes(**parts))
    chunks: list[str] = quiet_synthesizer._make_compact_text_chunks(query, texts)
    return chunks


# ------------------------------------------------------------ each chunk by itself


@dataclass(frozen=True, slots=True)
class AccumulateParts(SynthesizerParts):
    OF: ClassVar = (Accumulate, CompactAndAccumulate)
    METHODS: ClassVar = (*methods_since("0.14.23", "_make_prompt_kwargs"), "_format_response")

    text_qa_template: BasePromptTemplate = attribute("_text_qa_template", BasePromptTemplate)


def copy_accumulate(synthesizer: Accumulate, template: BasePromptTemplate) -> Accumulate:
    """Return a quiet copy with another template."""
    copied: Accumulate = clone(synthesizer, **AccumulateParts.as_attributes(text_qa_template=template))
    return copied


def chunk_arguments(synthesizer: Accumulate, chunk: str) -> dict[str, Any]:
    """Return the variables of the prompt for one chunk.

    llama-index-core has a method for this since 0.14.23.
    """
    if is_older_than("0.14.23"):
        return {"context_str": chunk}
    return synthesizer._make_prompt_kwargs(chunk)


def join_answers(synthesizer: Accumulate, answers: Sequence[str], separator: str) -> str:
    return synthesizer._format_response(list(answers), separator)


@dataclass(frozen=True, slots=True)
class TreeSummarizeParts(SynthesizerParts):
    OF: ClassVar = (TreeSummarize,)

    summary_template: BasePromptTemplate = attribute("_summary_template", BasePromptTemplate)


# ------------------------------------------------------------ one call


@dataclass(frozen=True, slots=True)
class SimpleSummarizeParts(SynthesizerParts):
    OF: ClassVar = (SimpleSummarize,)

    text_qa_template: BasePromptTemplate = attribute("_text_qa_template", BasePromptTemplate)


@dataclass(frozen=True, slots=True)
class GenerationParts(SynthesizerParts):
    OF: ClassVar = (Generation,)

    input_prompt: BasePromptTemplate = attribute("_input_prompt", BasePromptTemplate)
