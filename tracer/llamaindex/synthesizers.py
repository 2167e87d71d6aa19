"""Lower response synthesizers: LLM calls become primitives; packing and prompts run by the framework's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from llama_index.core.schema import MetadataMode, NodeWithScore

from teola_plugin.graph import CARRY, ITEM, Ref, Role, Slice, named
from teola_plugin.shims.llamaindex.copies import copy_prompt_helper, has_thread_safe_tokenizer
from teola_plugin.shims.llamaindex.synthesizers import (
    AccumulateParts,
    CompactAndRefineParts,
    GenerationParts,
    RefineParts,
    SimpleSummarizeParts,
    SynthesizerParts,
    TreeSummarizeParts,
    chunk_arguments,
    compact_chunks,
    copy_accumulate,
    get_response,
    join_answers,
    separator,
)
from teola_plugin.tracer.llamaindex.classes import copy_prompt, find_override, rule_for
from teola_plugin.tracer.llamaindex.lowering import Lowering, Value
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
    """Return the rule for a synthesizer and the class of its parts. Raises `NotUnderstood`."""
    kind = rule_for(synth, _PARTS)
    return rules[kind], kind


def copy_helper_of(parts: SynthesizerParts) -> PromptHelper:
    """Return a copy of the helper that packs chunks into prompts. Raises `NotUnderstood`."""
    helper = parts.prompt_helper
    if find_override(helper, PromptHelper):
        raise NotUnderstood(f"a {type(helper).__name__} packs its chunks")
    return copy_prompt_helper(helper)


@dataclass(frozen=True, slots=True)
class RefineSteps:
    """The steps of a `Refine`: an answer from the first chunk, which every other chunk refines."""

    synth: Refine
    qa: BasePromptTemplate
    refine: BasePromptTemplate
    helper: PromptHelper
    padding: int | None
    """Tokens kept free in every prompt for the answer; None if each prompt is filled by itself."""

    @classmethod
    def of(cls, synth: Refine, parts: RefineParts, helper: PromptHelper) -> RefineSteps:
        """Read the steps of a synthesizer. Raises `NotUnderstood`."""
        if parts.structured_answer_filtering or not parts.default_program:
            raise NotUnderstood("a program decides whether an answer counts")
        qa, refine = copy_prompt(parts.text_qa_template), copy_prompt(parts.refine_template)
        return cls(synth, qa, refine, helper, parts.response_padding_size)

    def pack(self, query: str, texts: Sequence[str], llm: Any) -> list[str]:
        """Return the chunks that the original asks about, in order: texts packed into prompts, and split to fit."""
        if isinstance(self.synth, CompactAndRefine):
            replaced = {"text_qa_template": self.qa, "refine_template": self.refine, "prompt_helper": self.helper}
            texts = compact_chunks(self.synth, query, list(texts), **replaced)
        if self.padding is None:
            first, *rest = texts
            return [*self.helper.repack(self.qa.partial_format(query_str=query), [first], llm=llm), *rest]
        largest = get_biggest_prompt([self.qa, self.refine])
        return [part for text in texts for part in self.helper.repack(largest, [text], llm=llm, padding=self.padding)]

    def refinement_prompt(self, query: str, answer: str, chunk: str, llm: Any) -> tuple[BasePromptTemplate, str]:
        """Return the template and `context_msg` of a refinement.

        Raises `NotUnderstood` if the original would do something else.
        """
        if not answer:
            raise NotUnderstood("an empty answer is not refined")
        template = self.refine.partial_format(query_str=query, existing_answer=answer)
        texts = self.helper.repack(template, [chunk], llm=llm)
        if len(texts) != 1:
            raise NotUnderstood("the chunk is too long beside the answer")
        return template, texts[0]


@dataclass(frozen=True, slots=True)
class AccumulateSteps:
    """The steps of an `Accumulate`: one answer from every chunk."""

    qa: BasePromptTemplate
    helper: PromptHelper
    compact: bool
    synthesizer: Any
    separator: str

    @classmethod
    def of(cls, synth: Accumulate, parts: AccumulateParts, helper: PromptHelper) -> AccumulateSteps:
        """Read the steps of a synthesizer. Raises `NotUnderstood`."""
        qa = copy_prompt(parts.text_qa_template)
        return cls(qa, helper, isinstance(synth, CompactAndAccumulate), copy_accumulate(synth, qa), separator(synth))

    def query_prompt(self, query: str) -> BasePromptTemplate:
        return self.qa.partial_format(query_str=query)

    def pack(self, template: BasePromptTemplate, texts: Sequence[str], llm: Any) -> list[str]:
        """Pack texts for a template that `query_prompt` returned."""
        texts = self.helper.repack(template, list(texts), llm=llm) if self.compact else texts
        return [part for text in texts for part in self.helper.repack(template, [text], llm=llm)]

    def arguments(self, chunk: str) -> dict[str, Any]:
        return chunk_arguments(self.synthesizer, chunk)

    def join(self, answers: Sequence[str]) -> str:
        return join_answers(self.synthesizer, answers, self.separator)


# ------------------------------------------------------------ lowering


Values = Mapping[str, Any]
QUERY = Ref("$query")
"""The query's text inside the body of a branch or loop."""


def lower_synthesizer(
    lowering: Lowering, synth: BaseSynthesizer, query: Ref, nodes: Value, path: str, name: str
) -> Value:
    """Lower `str(synth.synthesize(query, nodes))`; report why and return None if it is not understood."""
    text: Value = None
    with lowering.reporting(path, synth):
        lower, kind = rule_and_parts(synth, _RULES)
        parts = lowering.read_parts(kind, synth)
        if parts.multimodal:
            raise NotUnderstood("answers from images, too")
        if nodes is None and lower is not _lower_generation:
            raise NotUnderstood("its input is known only at run time")
        with lowering.streaming(parts.streaming):
            text = lower(lowering, synth, parts, query, nodes, name)
        lowering.lowered.add(id(synth))
    return text


def texts_of(nodes: Sequence[NodeWithScore]) -> list[str]:
    """Return the texts that `synthesize` passes to the LLM. Raises `NotUnderstood` without nodes: nothing is called."""
    if not nodes:
        raise NotUnderstood("without nodes, nobody is asked")
    return [n.node.get_content(metadata_mode=MetadataMode.LLM) for n in nodes]


def lower_tree_summary(lowering: Lowering, parts: TreeSummarizeParts, query: Ref, texts: Ref, name: str) -> Ref:
    """Lower a tree summary: pack and summarise the texts, then the summaries, until one is left."""
    llm, template, helper = _require_llm(lowering, parts), copy_prompt(parts.summary_template), copy_helper_of(parts)

    def pack(query: str, texts: Sequence[str]) -> list[str]:
        packed: list[str] = helper.repack(template.partial_format(query_str=query), text_chunks=texts, llm=llm)
        return packed

    def summarise(llm: Any, values: Values) -> str:
        return str(llm.predict(template.partial_format(query_str=values["query"]), context_str=values["chunk"]))

    level_body = lowering.new_body()
    chunks = level_body.add_call(f"{name}.chunks", pack, query=QUERY, texts=Ref(CARRY))
    chunk_body = level_body.new_body()
    summary = chunk_body.add_llm_call(
        f"{name}.summary", llm, summarise, {"query": QUERY, "chunk": Ref(ITEM)}, value=_whole_text
    )
    summaries = level_body.add_holder(
        f"{name}.summaries", Role.MAP, named(items=chunks, query=QUERY), chunk_body, summary
    )
    next_level = level_body.add_call(
        f"{name}.level",
        lambda chunks, summaries: {"carry": summaries, "again": len(chunks) > 1},
        chunks=chunks,
        summaries=summaries,
    )
    last = lowering.add_holder(f"{name}.tree", Role.LOOP, named(init=texts, query=query), level_body, next_level)
    return lowering.add_call(name, lambda texts: texts[0], texts=last)


def _whole_text(text: str, _: Values) -> str:
    """Return the text unchanged, as the synthesizer does with the result of `predict`."""
    return text


def _require_llm(lowering: Lowering, parts: SynthesizerParts) -> Any:
    """Return the synthesizer's LLM if its calls may be in the graph; see `Lowering.require_llm`.

    Raise `NotUnderstood` for an answer with a schema and, with models of the user's own, for one that streams.
    """
    if parts.output_cls is not None:
        raise NotUnderstood("its answer has a schema")
    llm = lowering.require_llm(parts.llm)
    if lowering.own_models is not None:
        if parts.streaming:
            raise NotUnderstood("it answers in pieces")
        if not has_thread_safe_tokenizer(parts.prompt_helper):
            raise NotUnderstood("its tokenizer takes one call at a time")
    return llm


def _lower_tree(
    lowering: Lowering, synth: TreeSummarize, parts: TreeSummarizeParts, query: Ref, nodes: Ref, name: str
) -> Ref:
    """Lower a synthesizer that summarises the nodes' texts, then the summaries, until one is left."""
    _require_llm(lowering, parts)
    texts = lowering.add_call(f"{name}.texts", texts_of, nodes=nodes)
    with lowering.in_loop_of(synth):
        return lower_tree_summary(lowering, parts, query, texts, name)


def _lower_refine(lowering: Lowering, synth: Refine, parts: RefineParts, query: Ref, nodes: Ref, name: str) -> Ref:
    """Lower an answer from the first chunk and its refinement by every other chunk."""
    llm = _require_llm(lowering, parts)
    steps = RefineSteps.of(synth, parts, copy_helper_of(parts))

    def pack(query: str, texts: Sequence[str]) -> list[str]:
        return steps.pack(query, texts, llm)

    def answer(llm: Any, values: Values) -> str:
        return str(llm.predict(steps.qa.partial_format(query_str=values["query"]), context_str=values["chunk"]))

    def better(llm: Any, values: Values) -> Any:
        template, chunk = steps.refinement_prompt(values["query"], values["answer"], values["chunk"], llm)
        return llm.predict(template, context_msg=chunk)

    texts = lowering.add_call(f"{name}.texts", texts_of, nodes=nodes)
    chunks = lowering.add_call(f"{name}.chunks", pack, query=query, texts=texts)
    first = lowering.add_llm_call(
        f"{name}.answer", llm, answer, {"query": query, "chunk": chunks.at(0)}, value=_whole_text
    )
    body = lowering.new_body()
    inputs = {"query": QUERY, "answer": Ref(CARRY), "chunk": Ref(ITEM)}
    refined = body.add_llm_call(
        f"{name}.refined", llm, better, inputs, value=lambda text, values: text or values["answer"]
    )
    rest = named(items=chunks.at(Slice(1, None)), init=first, query=query)
    last = lowering.add_holder(f"{name}.refine", Role.FOLD, rest, body, refined)
    return lowering.add_call(name, lambda answer: answer or EMPTY, answer=last)


def _lower_accumulate(
    lowering: Lowering, synth: Accumulate, parts: AccumulateParts, query: Ref, nodes: Ref, name: str
) -> Ref:
    """Lower one answer from every chunk."""
    llm = _require_llm(lowering, parts)
    if parts.streaming:
        raise NotUnderstood("it cannot stream, and says so")
    steps = AccumulateSteps.of(synth, parts, copy_helper_of(parts))

    def pack(query: str, texts: Sequence[str]) -> list[str]:
        return steps.pack(steps.query_prompt(query), texts, llm)

    def answer(llm: Any, values: Values) -> str:
        return str(llm.predict(steps.query_prompt(values["query"]), **steps.arguments(values["chunk"])))

    texts = lowering.add_call(f"{name}.texts", texts_of, nodes=nodes)
    chunks = lowering.add_call(f"{name}.chunks", pack, query=query, texts=texts)
    with lowering.in_loop_of(synth):
        body = lowering.new_body()
        one = body.add_llm_call(f"{name}.answer", llm, answer, {"query": QUERY, "chunk": Ref(ITEM)}, value=_whole_text)
        answers = lowering.add_holder(f"{name}.answers", Role.MAP, named(items=chunks, query=query), body, one)
    return lowering.add_call(name, steps.join, answers=answers)


def _lower_simple(
    lowering: Lowering, synth: SimpleSummarize, parts: SimpleSummarizeParts, query: Ref, nodes: Ref, name: str
) -> Ref:
    """Lower an answer from all texts in one prompt, which the framework's code cuts to fit."""
    llm, qa, helper = _require_llm(lowering, parts), copy_prompt(parts.text_qa_template), copy_helper_of(parts)

    def answer(llm: Any, values: Values) -> Any:
        changes = {"llm": llm, "text_qa_template": qa, "prompt_helper": helper}
        return get_response(SimpleSummarizeParts, synth, values["query"], values["texts"], **changes)

    texts = lowering.add_call(f"{name}.texts", texts_of, nodes=nodes)
    return lowering.add_llm_call(
        name,
        llm,
        answer,
        {"texts": texts, "query": query},
        value=lambda text, _: text or EMPTY,
        blanks={"texts": lambda text: [text]},
    )


def _lower_generation(
    lowering: Lowering, synth: Generation, parts: GenerationParts, query: Ref, nodes: Value, name: str
) -> Ref:
    """Lower an answer without context; it does not wait for the nodes."""
    llm, template = _require_llm(lowering, parts), copy_prompt(parts.input_prompt)

    def answer(llm: Any, values: Values) -> Any:
        return get_response(GenerationParts, synth, values["query"], [], llm=llm, input_prompt=template)

    return lowering.add_llm_call(name, llm, answer, {"query": query}, value=_whole_text)


def _lower_context_only(
    lowering: Lowering, synth: BaseSynthesizer, parts: SynthesizerParts, query: Ref, nodes: Ref, name: str
) -> Ref:
    """Lower a synthesizer that returns the nodes' texts and calls no LLM."""

    def answer(query: str, nodes: Sequence[NodeWithScore]) -> str:
        return str(get_response(SynthesizerParts, synth, query, texts_of(nodes)))

    return lowering.add_call(name, answer, query=query, nodes=nodes)


_RULES: dict[type[SynthesizerParts], Callable[..., Ref]] = {
    CompactAndRefineParts: _lower_refine,
    RefineParts: _lower_refine,
    AccumulateParts: _lower_accumulate,
    TreeSummarizeParts: _lower_tree,
    SimpleSummarizeParts: _lower_simple,
    GenerationParts: _lower_generation,
    SynthesizerParts: _lower_context_only,
}
