"""Synthesizers ahead of the plain object: which prompts their lists of chunks make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.indices.prompt_helper import PromptHelper
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

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan
from teola_plugin.shims.llamaindex.copies import counts_anywhere, own_helper
from teola_plugin.shims.llamaindex.engines import runs_in_loop
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
    response,
    separator,
)
from teola_plugin.tracer.llamaindex.classes import as_made, changed, own_prompt, rule_for
from teola_plugin.tracer.llamaindex.synthesizers import EMPTY
from teola_plugin.tracer.symbols import NotUnderstood

Respond = Callable[[Ahead, str, Sequence[str]], Awaitable[str]]
"""`get_response`: (how, query, chunks) -> the text."""


def responding(plan: Plan, synth: BaseSynthesizer) -> Respond:
    """`get_response` of a synthesizer. Raises `NotUnderstood`."""
    with as_made():
        rule, kind = rule_for(synth, _RULES)
        parts = kind.of(synth)
        if parts.multimodal or parts.streaming:
            raise NotUnderstood("it answers in pieces, or from images")
        made = rule(plan, synth, parts)
    plan.known[id(synth)] = synth
    return made


def _llm(plan: Plan, parts: SynthesizerParts) -> Any:
    if parts.output_cls is not None:
        raise NotUnderstood("its answer has a schema")
    return plan.llm(parts.llm)


def _helper(parts: SynthesizerParts) -> Any:
    helper = parts.prompt_helper
    if changed(helper, PromptHelper):
        raise NotUnderstood(f"a {type(helper).__name__} packs its chunks")
    if not counts_anywhere(helper):
        raise NotUnderstood("its tokenizer takes one call at a time")
    return own_helper(helper)


def _asks(llm: Any, prompt: Any, arguments: dict[str, Any]) -> Callable[[Ahead], Awaitable[str]]:
    return lambda ahead: ahead.said(llm, lambda asked: asked.predict(prompt, **arguments))


def _accumulate(plan: Plan, synth: Accumulate, parts: AccumulateParts) -> Respond:
    """Every chunk is answered from."""
    llm, qa, helper = _llm(plan, parts), own_prompt(parts.text_qa_template), _helper(parts)
    own, between, compact = accumulating(synth, qa), separator(synth), isinstance(synth, CompactAndAccumulate)
    in_loop = runs_in_loop(synth)
    plan.lists(in_loop)

    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        template = qa.partial_format(query_str=query)
        packed = helper.repack(template, list(chunks), llm=llm) if compact else chunks
        parts = [part for chunk in packed for part in helper.repack(template, [chunk], llm=llm)]
        way = ahead.side_by_side() if in_loop else ahead
        answers = await way.all([_asks(llm, template, chunk_arguments(own, part)) for part in parts])
        return joined_answers(own, answers, between)

    return respond


def _tree(plan: Plan, synth: TreeSummarize, parts: TreeSummarizeParts) -> Respond:
    """The texts are packed and summarised, and so are the summaries, until one is left."""
    llm, template, helper = _llm(plan, parts), own_prompt(parts.summary_template), _helper(parts)
    in_loop = runs_in_loop(synth)
    plan.lists(in_loop)

    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        asked = template.partial_format(query_str=query)
        chunks = helper.repack(asked, text_chunks=list(chunks), llm=llm)
        while len(chunks) > 1:
            way = ahead.side_by_side() if in_loop else ahead
            answers = await way.all([_asks(llm, asked, {"context_str": chunk}) for chunk in chunks])
            chunks = helper.repack(asked, text_chunks=answers, llm=llm)
        return await _asks(llm, asked, {"context_str": chunks[0]})(ahead) if ahead.goes_on else ""

    return respond


def _refine(plan: Plan, synth: Refine, parts: RefineParts) -> Respond:
    """The first chunk is answered from; every other one refines the answer."""
    llm = _llm(plan, parts)
    if parts.structured_answer_filtering or not parts.default_program:
        raise NotUnderstood("a program decides whether an answer counts")
    qa, refine, helper = own_prompt(parts.text_qa_template), own_prompt(parts.refine_template), _helper(parts)

    def packed(query: str, texts: Sequence[str]) -> list[str]:
        if isinstance(synth, CompactAndRefine):
            own = {"text_qa_template": qa, "refine_template": refine, "prompt_helper": helper}
            texts = compact_chunks(synth, query, list(texts), **own)
        largest, padding = get_biggest_prompt([qa, refine]), parts.response_padding_size
        return [part for text in texts for part in helper.repack(largest, [text], llm=llm, padding=padding)]

    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        if not ahead.goes_on:
            return ""  # each call needs the one before
        first, *others = packed(query, chunks)
        answer = await _asks(llm, qa.partial_format(query_str=query), {"context_str": first})(ahead)
        for chunk in others:
            if not answer:
                raise NotUnderstood("an empty answer is not refined")
            template = refine.partial_format(query_str=query, existing_answer=answer)
            texts = helper.repack(template, [chunk], llm=llm)
            if len(texts) != 1:
                raise NotUnderstood("the chunk is too long beside the answer")
            answer = await _asks(llm, template, {"context_msg": texts[0]})(ahead) or answer
        return answer or EMPTY

    return respond


def _simple(plan: Plan, synth: SimpleSummarize, parts: SimpleSummarizeParts) -> Respond:
    llm, qa, helper = _llm(plan, parts), own_prompt(parts.text_qa_template), _helper(parts)

    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        if not ahead.goes_on:
            return ""
        own = {"text_qa_template": qa, "prompt_helper": helper}
        return (
            await ahead.said(llm, lambda a: response(SimpleSummarizeParts, synth, query, chunks, llm=a, **own)) or EMPTY
        )

    return respond


def _generation(plan: Plan, synth: Generation, parts: GenerationParts) -> Respond:
    llm, template = _llm(plan, parts), own_prompt(parts.input_prompt)

    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        def run(asked: Any) -> Any:
            return response(GenerationParts, synth, query, [], llm=asked, input_prompt=template)

        return await ahead.said(llm, run) if ahead.goes_on else ""

    return respond


def _context_only(plan: Plan, synth: BaseSynthesizer, parts: SynthesizerParts) -> Respond:
    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        return str(response(SynthesizerParts, synth, query, list(chunks)))

    return respond


_RULES: dict[type, tuple[Callable[..., Respond], type[SynthesizerParts]]] = {
    CompactAndRefine: (_refine, CompactAndRefineParts),
    Refine: (_refine, RefineParts),
    CompactAndAccumulate: (_accumulate, AccumulateParts),
    Accumulate: (_accumulate, AccumulateParts),
    TreeSummarize: (_tree, TreeSummarizeParts),
    SimpleSummarize: (_simple, SimpleSummarizeParts),
    Generation: (_generation, GenerationParts),
    NoText: (_context_only, SynthesizerParts),
    ContextOnly: (_context_only, SynthesizerParts),
}
