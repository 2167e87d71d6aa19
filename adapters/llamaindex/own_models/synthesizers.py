"""Synthesizers ahead of the plain object: which prompts their lists of chunks make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.response_synthesizers import (
    Accumulate,
    BaseSynthesizer,
    Generation,
    Refine,
    SimpleSummarize,
    TreeSummarize,
)

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan
from teola_plugin.shims.llamaindex.copies import counts_anywhere, remembering
from teola_plugin.shims.llamaindex.engines import runs_in_loop
from teola_plugin.shims.llamaindex.synthesizers import (
    AccumulateParts,
    CompactAndRefineParts,
    GenerationParts,
    RefineParts,
    SimpleSummarizeParts,
    SynthesizerParts,
    TreeSummarizeParts,
    response,
)
from teola_plugin.tracer.llamaindex.classes import as_made, own_prompt
from teola_plugin.tracer.llamaindex.synthesis import EMPTY, Accumulating, Refining, helper_of, rule_and_parts
from teola_plugin.tracer.symbols import NotUnderstood

Respond = Callable[[Ahead, str, Sequence[str]], Awaitable[str]]
"""`get_response`: (how, query, chunks) -> the text."""


def responding(plan: Plan, synth: BaseSynthesizer) -> Respond:
    """`get_response` of a synthesizer. Raises `NotUnderstood`."""
    with as_made():
        rule, kind = rule_and_parts(synth, _RULES)
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


def _helper(plan: Plan, parts: SynthesizerParts) -> Any:
    """It counts tokens beside the plain object, and for it."""
    made = helper_of(parts)
    if not counts_anywhere(parts.prompt_helper):
        raise NotUnderstood("its tokenizer takes one call at a time")
    if (counted := remembering(parts.prompt_helper, made)) is not None:
        plan.counted[id(parts.prompt_helper)] = counted
    return made


def _asks(llm: Any, prompt: Any, arguments: dict[str, Any]) -> Callable[[Ahead], Awaitable[str]]:
    return lambda ahead: ahead.said(llm, lambda asked: asked.predict(prompt, **arguments))


def _accumulate(plan: Plan, synth: Accumulate, parts: AccumulateParts) -> Respond:
    """Every chunk is answered from."""
    llm = _llm(plan, parts)
    made = Accumulating.of(synth, parts, _helper(plan, parts))
    in_loop = runs_in_loop(synth)
    plan.lists(in_loop)

    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        way = (ahead.side_by_side() if in_loop else ahead).beginning()
        asked = made.asked(query)
        packed = made.packed(asked, chunks, llm)
        answers = await way.all([_asks(llm, asked, made.arguments(chunk)) for chunk in packed])
        return made.joined(answers) if ahead.needed else ""

    return respond


def _tree(plan: Plan, synth: TreeSummarize, parts: TreeSummarizeParts) -> Respond:
    """The texts are packed and summarised, and so are the summaries, until one is left."""
    llm, template, helper = _llm(plan, parts), own_prompt(parts.summary_template), _helper(plan, parts)
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
    made = Refining.of(synth, parts, _helper(plan, parts))

    async def respond(ahead: Ahead, query: str, chunks: Sequence[str]) -> str:
        if not ahead.goes_on:
            return ""  # each call needs the one before
        first, *others = made.packed(query, chunks, llm)
        answer = await _asks(llm, made.qa.partial_format(query_str=query), {"context_str": first})(ahead)
        for chunk in others:
            template, text = made.better(query, answer, chunk, llm)
            answer = await _asks(llm, template, {"context_msg": text})(ahead) or answer
        return answer or EMPTY

    return respond


def _simple(plan: Plan, synth: SimpleSummarize, parts: SimpleSummarizeParts) -> Respond:
    llm, qa, helper = _llm(plan, parts), own_prompt(parts.text_qa_template), _helper(plan, parts)

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


_RULES: dict[type[SynthesizerParts], Callable[..., Respond]] = {
    CompactAndRefineParts: _refine,
    RefineParts: _refine,
    AccumulateParts: _accumulate,
    TreeSummarizeParts: _tree,
    SimpleSummarizeParts: _simple,
    GenerationParts: _generation,
    SynthesizerParts: _context_only,
}
