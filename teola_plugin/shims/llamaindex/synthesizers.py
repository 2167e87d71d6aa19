"""Response synthesizers: what they are made of, and their own code around the calls of their LLM."""

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

from teola_plugin.shims.llamaindex.copies import clone, unspanned
from teola_plugin.shims.llamaindex.records import Parts, attribute, before, derived, is_older_than, since


@dataclass(frozen=True, slots=True)
class SynthesizerParts(Parts):
    """Of every synthesizer."""

    OF: ClassVar[tuple[type, ...]] = (NoText, ContextOnly)

    llm: Any = attribute("_llm")
    output_cls: Any = attribute("_output_cls")
    prompt_helper: Any = attribute("_prompt_helper")
    streaming: bool = attribute("_streaming", bool)
    multimodal: bool = attribute("_multimodal", bool, default=False)


def response(
    kind: type[SynthesizerParts], synthesizer: BaseSynthesizer, query: str, texts: Sequence[str], **parts: Any
) -> Any:
    """What `get_response` gives, whole and without events, of a copy with other parts (fields of `kind`)."""
    own = clone(synthesizer, **kind.named(**parts, streaming=False))
    return unspanned(own, "get_response")(query, list(texts))


def separator(synthesizer: Accumulate) -> str:
    """What stands between its answers where nothing is said."""
    return _separator(type(synthesizer))


@lru_cache(maxsize=64)
def _separator(kind: type[Accumulate]) -> str:
    found: str = inspect.signature(inspect.unwrap(kind.get_response)).parameters["separator"].default
    return found


# ------------------------------------------------------------ one chunk after the other


@dataclass(frozen=True, slots=True)
class RefineParts(SynthesizerParts):
    OF: ClassVar = (Refine,)

    text_qa_template: BasePromptTemplate = attribute("_text_qa_template", BasePromptTemplate)
    refine_template: BasePromptTemplate = attribute("_refine_template", BasePromptTemplate)
    response_padding_size: int | None = attribute(
        "_response_padding_size", int, NoneType, default=before("0.14.22", None)
    )
    """Tokens kept free for the answer that is refined. None in versions that pack each chunk for its own prompt."""
    structured_answer_filtering: bool = attribute("_structured_answer_filtering", bool)
    default_program: bool = derived(lambda synth: synth._program_factory == synth._default_program_factory)
    """Whether the program that filters answers is LlamaIndex's own."""


@dataclass(frozen=True, slots=True)
class CompactAndRefineParts(RefineParts):
    OF: ClassVar = (CompactAndRefine,)
    METHODS: ClassVar = ("_make_compact_text_chunks",)


def compact_chunks(synthesizer: CompactAndRefine, query: str, texts: Sequence[str], **parts: Any) -> list[str]:
    """The texts packed into as few as fit, by a copy with other parts (fields of its record)."""
    own = clone(synthesizer, **CompactAndRefineParts.named(**parts))
    made: list[str] = own._make_compact_text_chunks(query, texts)
    return made


# ------------------------------------------------------------ each chunk by itself


@dataclass(frozen=True, slots=True)
class AccumulateParts(SynthesizerParts):
    OF: ClassVar = (Accumulate, CompactAndAccumulate)
    METHODS: ClassVar = (*since("0.14.23", "_make_prompt_kwargs"), "_format_response")

    text_qa_template: BasePromptTemplate = attribute("_text_qa_template", BasePromptTemplate)


def accumulating(synthesizer: Accumulate, template: BasePromptTemplate) -> Accumulate:
    """A quiet copy with another template."""
    made: Accumulate = clone(synthesizer, **AccumulateParts.named(text_qa_template=template))
    return made


def chunk_arguments(synthesizer: Accumulate, chunk: str) -> dict[str, Any]:
    """Return the variables of the prompt for one chunk."""
    if is_older_than("0.14.23"):
        return {"context_str": chunk}
    return synthesizer._make_prompt_kwargs(chunk)


def joined_answers(synthesizer: Accumulate, answers: Sequence[str], separator: str) -> str:
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
