"""Query engines: what they retrieve, choose and answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.core.schema import NodeWithScore
from llama_index.core.selectors import LLMMultiSelector

from teola_plugin.graph import ITEM, Attributes, Ref, Role, named
from teola_plugin.graph.refs import Inputs
from teola_plugin.tracer.llamaindex.known import as_made, level, rule_for
from teola_plugin.tracer.llamaindex.postprocessors import postprocess
from teola_plugin.tracer.llamaindex.retries import judge_answer
from teola_plugin.tracer.llamaindex.retrievers import retrieve
from teola_plugin.tracer.llamaindex.selectors import questions, selected
from teola_plugin.tracer.llamaindex.stand_ins import clone, own_nodes, own_splitter
from teola_plugin.tracer.llamaindex.synthesizers import QUERY, synthesize, tree
from teola_plugin.tracer.llamaindex.transforms import transformed
from teola_plugin.tracer.llamaindex.walk import Answer, Asked, Value, Walk
from teola_plugin.tracer.symbols import NotUnderstood

Nodes = Sequence[NodeWithScore]
ENTRIES = ("query", "retrieve", "synthesize")


def query(walk: Walk, engine: BaseQueryEngine, asked: Asked, path: str) -> Answer:
    """`engine.query(asked)`, as far as it is understood."""
    try:
        with as_made():
            return answer(walk, engine, asked, path)
    except NotUnderstood as why:
        walk.note(path, engine, level(engine), reason=str(why))
        return Answer()


def answer(walk: Walk, engine: BaseQueryEngine, asked: Asked, path: str) -> Answer:
    """`query` of an engine that is known. Raises `NotUnderstood` for others."""
    with walk.owning(engine):
        made = rule_for(engine, _RULES)(walk, engine, asked, path)
    if made.text is not None:
        walk.lowered.add(id(engine))
    return made


def found(walk: Walk, engine: BaseQueryEngine, asked: Asked, path: str) -> Value:
    """`engine.retrieve(asked)`."""
    if isinstance(engine, TransformQueryEngine):
        rule_for(engine, _RULES)
        then: Value = _transformed(
            walk, engine, asked, path, lambda other: found(walk, engine._query_engine, other, f"{path}._query_engine")
        )
        return then
    if not isinstance(engine, (RetrieverQueryEngine, CitationQueryEngine)):
        raise NotUnderstood(f"{type(engine).__name__} does not retrieve")
    rule_for(engine, _RULES)
    return _nodes(walk, engine, asked, path)


def _nodes(walk: Walk, engine: Any, asked: Asked, path: str) -> Value:
    """Retrieved, and postprocessed one step after the other."""
    [retriever, steps] = walk.read(engine, "_retriever", "_node_postprocessors")
    nodes = retrieve(walk, retriever, asked, f"{path}._retriever", "retrieve")
    return postprocess(walk, steps, asked.text, nodes, f"{path}._node_postprocessors")


def _answer(walk: Walk, engine: Any, asked: Asked, nodes: Value, path: str) -> Answer:
    [synth] = walk.read(engine, "_response_synthesizer")
    text = synthesize(walk, synth, asked.text, nodes, f"{path}._response_synthesizer", "synthesize")
    return Answer(text, nodes)


def _retriever_engine(walk: Walk, engine: RetrieverQueryEngine, asked: Asked, path: str) -> Answer:
    with walk.step() as names:
        nodes = _nodes(walk, engine, asked, path)
    with walk.step(tuple(names)):
        return _answer(walk, engine, asked, nodes, path)


def _citation(walk: Walk, engine: CitationQueryEngine, asked: Asked, path: str) -> Answer:
    """The nodes are cut into numbered sources."""
    with walk.step() as names:
        nodes = _nodes(walk, engine, asked, path)
        walk.read(engine, "text_splitter", "_metadata_mode", "_multimodal")
        if engine._multimodal:
            nodes = None
        if nodes is not None:
            own = clone(engine, text_splitter=own_splitter(engine.text_splitter))
            nodes = walk.call("sources", lambda nodes: own._create_citation_nodes(own_nodes(nodes)), nodes=nodes)
    with walk.step(tuple(names)):
        return _answer(walk, engine, asked, nodes, path)


def _transform(walk: Walk, engine: TransformQueryEngine, asked: Asked, path: str) -> Answer:
    inner = engine._query_engine
    made = _transformed(walk, engine, asked, path, lambda other: query(walk, inner, other, f"{path}._query_engine"))
    return made if isinstance(made, Answer) else Answer()


def _transformed(
    walk: Walk, engine: TransformQueryEngine, asked: Asked, path: str, then: Callable[[Asked], Any]
) -> Any:
    """`then` with the transformed query; None where that is not known."""
    [transform, metadata, _] = walk.read(engine, "_query_transform", "_transform_metadata", "_query_engine")
    with walk.step() as names:
        other = transformed(walk, transform, asked, metadata, f"{path}._query_transform", "transform")
    if other is None:
        return None
    with walk.step(tuple(names)):
        return then(other)


def _retry_source(walk: Walk, engine: RetrySourceQueryEngine, asked: Asked, path: str) -> Answer:
    [inner, judge, left] = walk.read(engine, "_query_engine", "_evaluator", "max_retries")
    first = query(walk, inner, asked, f"{path}._query_engine")
    if left <= 0:
        return first
    judge_answer(walk, judge, left, asked.text, first, f"{path}._evaluator")
    return Answer()


# ------------------------------------------------------------ engines chosen at run time


def _arm(
    walk: Walk, engine: BaseQueryEngine, chosen: Ref, asked: Ref, path: str, name: str, *, beside: bool = False
) -> Value:
    """The engine's answer, `{"text", "nodes"}`, where it is chosen; a false value otherwise."""
    body, before = walk.body(), set(walk.lowered)
    inner = query(body, engine, Asked(QUERY, (QUERY,)), path)
    if inner.text is None or inner.nodes is None:
        walk.draft.nodes += body.draft.nodes
        walk.forget(before)
        return None
    output = body.call("response", _response, text=inner.text, nodes=inner.nodes)
    return walk.hold(
        name, Role.BRANCH, named(condition=chosen, query=asked), body, output, attributes=Attributes(beside=beside)
    )


def _response(text: str, nodes: Nodes) -> dict[str, Any]:
    return {"text": text or "None", "nodes": nodes}  # as str(response) has it


def _router(walk: Walk, engine: RouterQueryEngine, asked: Asked, path: str) -> Answer:
    """The chosen engines answer side by side; several answers are summarised."""
    [selector, engines, metadatas] = walk.read(engine, "_selector", "_query_engines", "_metadatas")
    walk.read(engine, "_summarizer")
    inds = selected(walk, selector, metadatas, asked.text, f"{path}._selector")
    if inds is None or len(asked.texts) != 1 or asked.texts[0] != asked.text:
        return Answer()
    answers: dict[str, Ref] = {}
    several = isinstance(selector, LLMMultiSelector)
    for i, one in enumerate(engines):
        chosen = walk.call(f"chosen{i}", _among(i), inds=inds)
        answer = _arm(walk, one, chosen, asked.text, f"{path}._query_engines[{i}]", f"engine{i}", beside=several)
        if answer is not None:
            answers[f"engine{i}"] = answer
    if len(answers) < len(engines):
        return Answer()

    def take(inds: Sequence[int], **answers: Any) -> dict[str, Any]:
        taken = [answers[f"engine{i}"] for i in inds]
        nodes = [node for answer in taken for node in answer["nodes"]]
        return {"texts": [answer["text"] for answer in taken], "nodes": nodes, "several": len(taken) > 1}

    taken = walk.call("answers", take, inds=inds, **answers)
    return Answer(_summary(walk, engine, asked.text, taken, path), taken.at("nodes"))


def _among(index: int) -> Callable[..., bool]:
    return lambda inds: index in inds


def _summary(walk: Walk, engine: RouterQueryEngine, asked: Ref, taken: Ref, path: str) -> Value:
    """One answer as it is; of several, the summary."""
    texts: Inputs = named(condition=taken.at("several"), query=asked, texts=taken.at("texts"))
    made: Value = None
    with walk.noting(f"{path}._summarizer", engine._summarizer):
        rule_for(engine._summarizer, {TreeSummarize: None})
        body = walk.body()
        walk.lowered.add(id(engine._summarizer))
        output = tree(body, engine._summarizer, QUERY, Ref("$texts"), "summary")
        summary = walk.hold("summarise", Role.BRANCH, texts, body, output)
        made = walk.call(
            "answer",
            lambda taken, summary: summary if taken["several"] else taken["texts"][0],
            taken=taken,
            summary=summary,
        )
    return made


def _sub_questions(walk: Walk, engine: SubQuestionQueryEngine, asked: Asked, path: str) -> Answer:
    """Each sub-question is answered by its engine; the answers are the nodes of the last one."""
    [generator, engines, metadatas] = walk.read(engine, "_question_gen", "_query_engines", "_metadatas")
    asking = questions(walk, generator, metadatas, asked.text, f"{path}._question_gen")
    if asking is None:
        return Answer()
    body, before = walk.body(), set(walk.lowered)
    item = Ref(ITEM)
    answers: dict[str, Ref] = {}
    for i, (tool, one) in enumerate(engines.items()):
        chosen = body.call(f"chosen{i}", _is(tool), asked=item.at("tool_name"))
        where = f'{path}._query_engines["{tool}"]'
        answer = _arm(body, one, chosen, item.at("sub_question"), where, f"engine{i}")
        if answer is not None:
            answers[tool] = answer
    if len(answers) < len(engines):
        walk.draft.nodes += body.draft.nodes
        walk.forget(before)
        return Answer()
    refs = {f"engine{i}": ref for i, ref in enumerate(answers.values())}
    output = body.call("answered", lambda question, **arms: next(a for a in arms.values() if a), question=item, **refs)
    answered = walk.hold("answers", Role.MAP, named(items=asking), body, output)

    def pairs(questions: Sequence[Mapping[str, str]], answers: Sequence[Mapping[str, Any]]) -> list[NodeWithScore]:
        return [_pair_node(engine, one, answer) for one, answer in zip(questions, answers, strict=True)]

    nodes = walk.call("pairs", pairs, questions=asking, answers=answered)
    made = _answer(walk, engine, asked, nodes, path)
    sources = walk.call(
        "sources",
        lambda pairs, answers: [*pairs, *(n for a in answers for n in a["nodes"])],
        pairs=nodes,
        answers=answered,
    )
    return Answer(made.text, sources)


def _is(tool: str) -> Callable[..., bool]:
    return lambda asked: bool(asked == tool)


def _pair_node(engine: SubQuestionQueryEngine, question: Mapping[str, str], answer: Mapping[str, Any]) -> NodeWithScore:
    asked = SubQuestion(**question)
    return engine._construct_node(SubQuestionAnswerPair(sub_q=asked, answer=answer["text"], sources=answer["nodes"]))


_RULES: dict[type, Callable[..., Answer]] = {
    RetrieverQueryEngine: _retriever_engine,
    CitationQueryEngine: _citation,
    TransformQueryEngine: _transform,
    RetrySourceQueryEngine: _retry_source,
    RouterQueryEngine: _router,
    SubQuestionQueryEngine: _sub_questions,
}
