"""What a synthesizer does between the calls of its model: prompts and packing, by LlamaIndex's own code.

The tracer makes primitives of it; what runs ahead of a plain object asks the user's own model in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.prompt_utils import get_biggest_prompt
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

from teola_plugin.shims.llamaindex.copies import own_helper
from teola_plugin.shims.llamaindex.synthesizers import (
    AccumulateParts,
    CompactAndRefineParts,
    GenerationParts,
    RefineParts,
    SimpleSummarizeParts,
    SynthesizerParts,
    TreeSummarizeParts,
    accumulating,
    chunk_arguments,
    compact_chunks,
    joined_answers,
    separator,
)
from teola_plugin.tracer.llamaindex.classes import changed, own_prompt, rule_for
from teola_plugin.tracer.symbols import NotUnderstood

Rule = TypeVar("Rule")
EMPTY = "Empty Response"
_PARTS: dict[type, type[SynthesizerParts]] = {
    CompactAndRefine: CompactAndRefineParts,
    Refine: RefineParts,
    CompactAndAccumulate: AccumulateParts,
    Accumulate: AccumulateParts,
    TreeSummarize: TreeSummarizeParts,
    SimpleSummarize: SimpleSummarizeParts,
    Generation: GenerationParts,
    NoText: SynthesizerParts,
    ContextOnly: SynthesizerParts,
}


def rule_and_parts(synth: BaseSynthesizer, rules: Mapping[type, Rule]) -> tuple[Rule, type[SynthesizerParts]]:
    """What to do with a synthesizer, by the kind of its parts. Raises `NotUnderstood`."""
    kind = rule_for(synth, _PARTS)
    return rules[kind], kind


def helper_of(parts: SynthesizerParts) -> PromptHelper:
    """What packs its chunks, by its own tokenizer. Raises `NotUnderstood`."""
    helper = parts.prompt_helper
    if changed(helper, PromptHelper):
        raise NotUnderstood(f"a {type(helper).__name__} packs its chunks")
    return own_helper(helper)


@dataclass(frozen=True, slots=True)
class Refining:
    """The first chunk is answered from; every other one refines the answer."""

    synth: Refine
    qa: BasePromptTemplate
    refine: BasePromptTemplate
    helper: PromptHelper
    padding: int | None
    """Tokens kept free in every prompt for the answer; None if each prompt is filled by itself."""

    @classmethod
    def of(cls, synth: Refine, parts: RefineParts, helper: PromptHelper) -> Refining:
        """Raises `NotUnderstood`."""
        if parts.structured_answer_filtering or not parts.default_program:
            raise NotUnderstood("a program decides whether an answer counts")
        qa, refine = own_prompt(parts.text_qa_template), own_prompt(parts.refine_template)
        return cls(synth, qa, refine, helper, parts.response_padding_size)

    def packed(self, query: str, texts: Sequence[str], llm: Any) -> list[str]:
        if isinstance(self.synth, CompactAndRefine):
            own = {"text_qa_template": self.qa, "refine_template": self.refine, "prompt_helper": self.helper}
            texts = compact_chunks(self.synth, query, list(texts), **own)
        if self.padding is None:
            first, *others = texts
            return [*self.helper.repack(self.qa.partial_format(query_str=query), [first], llm=llm), *others]
        largest = get_biggest_prompt([self.qa, self.refine])
        return [part for text in texts for part in self.helper.repack(largest, [text], llm=llm, padding=self.padding)]

    def better(self, query: str, answer: str, chunk: str, llm: Any) -> tuple[BasePromptTemplate, str]:
        """Template and `context_msg` of a refinement. Raises `NotUnderstood` where the plain code does otherwise."""
        if not answer:
            raise NotUnderstood("an empty answer is not refined")
        template = self.refine.partial_format(query_str=query, existing_answer=answer)
        texts = self.helper.repack(template, [chunk], llm=llm)
        if len(texts) != 1:
            raise NotUnderstood("the chunk is too long beside the answer")
        return template, texts[0]


@dataclass(frozen=True, slots=True)
class Accumulating:
    """Every chunk is answered from."""

    qa: BasePromptTemplate
    helper: PromptHelper
    compact: bool
    own: Any
    between: str

    @classmethod
    def of(cls, synth: Accumulate, parts: AccumulateParts, helper: PromptHelper) -> Accumulating:
        """Raises `NotUnderstood`."""
        qa = own_prompt(parts.text_qa_template)
        return cls(qa, helper, isinstance(synth, CompactAndAccumulate), accumulating(synth, qa), separator(synth))

    def asked(self, query: str) -> BasePromptTemplate:
        return self.qa.partial_format(query_str=query)

    def packed(self, template: BasePromptTemplate, texts: Sequence[str], llm: Any) -> list[str]:
        """`template`: as `asked` gives it."""
        texts = self.helper.repack(template, list(texts), llm=llm) if self.compact else texts
        return [part for text in texts for part in self.helper.repack(template, [text], llm=llm)]

    def arguments(self, chunk: str) -> dict[str, Any]:
        return chunk_arguments(self.own, chunk)

    def joined(self, answers: Sequence[str]) -> str:
        return joined_answers(self.own, answers, self.between)
