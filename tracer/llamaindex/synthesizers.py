"""Response synthesizers: packing and prompts by their own code, the calls as primitives."""

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
from teola_plugin.shims.llamaindex.copies import counts_anywhere, own_helper
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
from teola_plugin.tracer.llamaindex.classes import changed, own_prompt, rule_for
from teola_plugin.tracer.llamaindex.lowering import Value, Walk, is_pool_llm
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


# ------------------------------------------------------------ lowering


Given = Mapping[str, Any]
QUERY = Ref("$query")
"""The query's text inside the body of a holder."""


def synthesize(walk: Walk, synth: BaseSynthesizer, query: Ref, nodes: Value, path: str, name: str) -> Value:
    """`str(response)` for a query and its nodes."""
    made: Value = None
    with walk.noting(path, synth):
        lower, kind = rule_and_parts(synth, _RULES)
        parts = walk.parts(kind, synth)
        if parts.multimodal:
            raise NotUnderstood("answers from images, too")
        if nodes is None and lower is not _generation:
            raise NotUnderstood("what it reads is not known ahead")
        with walk.streaming(parts.streaming):
            made = lower(walk, synth, parts, query, nodes, name)
        walk.lowered.add(id(synth))
    return made


def texts_of(nodes: Sequence[NodeWithScore]) -> list[str]:
    """What `synthesize` makes of nodes."""
    if not nodes:
        raise NotUnderstood("without nodes, nobody is asked")
    return [n.node.get_content(metadata_mode=MetadataMode.LLM) for n in nodes]


def tree(walk: Walk, parts: TreeSummarizeParts, query: Ref, texts: Ref, name: str) -> Ref:
    """`get_response`: the texts are packed and summarised, and so are the summaries, until one is left."""
    llm, template, helper = _llm(walk, parts), own_prompt(parts.summary_template), helper_of(parts)

    def pack(query: str, texts: Sequence[str]) -> list[str]:
        packed: list[str] = helper.repack(template.partial_format(query_str=query), text_chunks=texts, llm=llm)
        return packed

    def summarise(llm: Any, given: Given) -> str:
        return str(llm.predict(template.partial_format(query_str=given["query"]), context_str=given["chunk"]))

    level = walk.body()
    chunks = level.call(f"{name}.chunks", pack, query=QUERY, texts=Ref(CARRY))
    each = level.body()
    summary = each.ask(f"{name}.summary", llm, summarise, {"query": QUERY, "chunk": Ref(ITEM)}, value=_text)
    summaries = level.hold(f"{name}.summaries", Role.MAP, named(items=chunks, query=QUERY), each, summary)
    again = level.call(
        f"{name}.level",
        lambda chunks, summaries: {"carry": summaries, "again": len(chunks) > 1},
        chunks=chunks,
        summaries=summaries,
    )
    last = walk.hold(f"{name}.tree", Role.LOOP, named(init=texts, query=query), level, again)
    return walk.call(name, lambda texts: texts[0], texts=last)


def _text(text: str, _: Given) -> str:
    """What `predict` returns is all."""
    return text


def _llm(walk: Walk, parts: SynthesizerParts) -> Any:
    if parts.output_cls is not None:
        raise NotUnderstood("its answer has a schema")
    llm = walk.llm(parts.llm)
    if not is_pool_llm(llm):
        if parts.streaming:
            raise NotUnderstood("it answers in pieces")
        if not counts_anywhere(parts.prompt_helper):
            raise NotUnderstood("its tokenizer takes one call at a time")
    return llm


def _tree(walk: Walk, synth: TreeSummarize, parts: TreeSummarizeParts, query: Ref, nodes: Ref, name: str) -> Ref:
    _llm(walk, parts)
    texts = walk.call(f"{name}.texts", texts_of, nodes=nodes)
    with walk.in_loop_of(synth):
        return tree(walk, parts, query, texts, name)


def _refine(walk: Walk, synth: Refine, parts: RefineParts, query: Ref, nodes: Ref, name: str) -> Ref:
    """The first chunk is answered from; every other one refines the answer."""
    llm = _llm(walk, parts)
    made = Refining.of(synth, parts, helper_of(parts))

    def pack(query: str, texts: Sequence[str]) -> list[str]:
        return made.packed(query, texts, llm)

    def answer(llm: Any, given: Given) -> str:
        return str(llm.predict(made.qa.partial_format(query_str=given["query"]), context_str=given["chunk"]))

    def better(llm: Any, given: Given) -> Any:
        template, chunk = made.better(given["query"], given["answer"], given["chunk"], llm)
        return llm.predict(template, context_msg=chunk)

    texts = walk.call(f"{name}.texts", texts_of, nodes=nodes)
    chunks = walk.call(f"{name}.chunks", pack, query=query, texts=texts)
    first = walk.ask(f"{name}.answer", llm, answer, {"query": query, "chunk": chunks.at(0)}, value=_text)
    body = walk.body()
    inputs = {"query": QUERY, "answer": Ref(CARRY), "chunk": Ref(ITEM)}
    refined = body.ask(f"{name}.refined", llm, better, inputs, value=lambda text, given: text or given["answer"])
    rest = named(items=chunks.at(Slice(1, None)), init=first, query=query)
    last = walk.hold(f"{name}.refine", Role.FOLD, rest, body, refined)
    return walk.call(name, lambda answer: answer or EMPTY, answer=last)


def _accumulate(walk: Walk, synth: Accumulate, parts: AccumulateParts, query: Ref, nodes: Ref, name: str) -> Ref:
    """Every chunk is answered from."""
    llm = _llm(walk, parts)
    if parts.streaming:
        raise NotUnderstood("it cannot stream, and says so")
    made = Accumulating.of(synth, parts, helper_of(parts))

    def pack(query: str, texts: Sequence[str]) -> list[str]:
        return made.packed(made.asked(query), texts, llm)

    def answer(llm: Any, given: Given) -> str:
        return str(llm.predict(made.asked(given["query"]), **made.arguments(given["chunk"])))

    texts = walk.call(f"{name}.texts", texts_of, nodes=nodes)
    chunks = walk.call(f"{name}.chunks", pack, query=query, texts=texts)
    with walk.in_loop_of(synth):
        body = walk.body()
        one = body.ask(f"{name}.answer", llm, answer, {"query": QUERY, "chunk": Ref(ITEM)}, value=_text)
        answers = walk.hold(f"{name}.answers", Role.MAP, named(items=chunks, query=query), body, one)
    return walk.call(name, made.joined, answers=answers)


def _simple(walk: Walk, synth: SimpleSummarize, parts: SimpleSummarizeParts, query: Ref, nodes: Ref, name: str) -> Ref:
    llm, qa, helper = _llm(walk, parts), own_prompt(parts.text_qa_template), helper_of(parts)

    def answer(llm: Any, given: Given) -> Any:
        own = {"llm": llm, "text_qa_template": qa, "prompt_helper": helper}
        return response(SimpleSummarizeParts, synth, given["query"], given["texts"], **own)

    texts = walk.call(f"{name}.texts", texts_of, nodes=nodes)
    return walk.ask(
        name,
        llm,
        answer,
        {"texts": texts, "query": query},
        value=lambda text, _: text or EMPTY,
        blanks={"texts": lambda text: [text]},
    )


def _generation(walk: Walk, synth: Generation, parts: GenerationParts, query: Ref, nodes: Value, name: str) -> Ref:
    """The nodes are not read: it need not wait for them."""
    llm, template = _llm(walk, parts), own_prompt(parts.input_prompt)

    def answer(llm: Any, given: Given) -> Any:
        return response(GenerationParts, synth, given["query"], [], llm=llm, input_prompt=template)

    return walk.ask(name, llm, answer, {"query": query}, value=_text)


def _context_only(
    walk: Walk, synth: BaseSynthesizer, parts: SynthesizerParts, query: Ref, nodes: Ref, name: str
) -> Ref:
    def answer(query: str, nodes: Sequence[NodeWithScore]) -> str:
        return str(response(SynthesizerParts, synth, query, texts_of(nodes)))

    return walk.call(name, answer, query=query, nodes=nodes)


_RULES: dict[type[SynthesizerParts], Callable[..., Ref]] = {
    CompactAndRefineParts: _refine,
    RefineParts: _refine,
    AccumulateParts: _accumulate,
    TreeSummarizeParts: _tree,
    SimpleSummarizeParts: _simple,
    GenerationParts: _generation,
    SynthesizerParts: _context_only,
}
