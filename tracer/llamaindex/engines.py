"""Query engines: what they retrieve, choose and answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer, TreeSummarize, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from teola_plugin.graph import ITEM, Attributes, Ref, Role, named
from teola_plugin.graph.refs import Inputs
from teola_plugin.shims.llamaindex.copies import nobody, own_splitter
from teola_plugin.shims.llamaindex.engines import (
    CitationQueryEngineParts,
    RelevancyEvaluatorParts,
    RetrievalParts,
    RetrieverQueryEngineParts,
    RetrySourceQueryEngineParts,
    RouterQueryEngineParts,
    SettingsParts,
    SubQuestionQueryEngineParts,
    TransformQueryEngineParts,
    citation_sources,
    sub_question_node,
)
from teola_plugin.shims.llamaindex.synthesizers import TreeSummarizeParts
from teola_plugin.tracer.llamaindex.classes import as_made, level, rule_for
from teola_plugin.tracer.llamaindex.lowering import SymbolicAnswer, SymbolicQuery, Value, Walk
from teola_plugin.tracer.llamaindex.model_calls import own_nodes, require_one_model
from teola_plugin.tracer.llamaindex.queries import numbered, questions, selected, takes_several, transformed
from teola_plugin.tracer.llamaindex.retrieval import postprocess, retrieve
from teola_plugin.tracer.llamaindex.synthesizers import QUERY, synthesize, tree
from teola_plugin.tracer.symbols import NotUnderstood

Nodes = Sequence[NodeWithScore]
ENTRIES = ("query", "retrieve", "synthesize")


def query(walk: Walk, engine: BaseQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    """`engine.query(asked)`, as far as it is understood."""
    try:
        with as_made():
            return answer(walk, engine, asked, path)
    except NotUnderstood as why:
        walk.note(path, engine, level(engine), reason=str(why))
        return SymbolicAnswer()


def answer(walk: Walk, engine: BaseQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    """`query` of an engine that is known. Raises `NotUnderstood` for others."""
    with walk.owning(engine):
        made = rule_for(engine, _RULES)(walk, engine, asked, path)
    if made.text is not None:
        walk.lowered.add(id(engine))
    return made


def found(walk: Walk, engine: BaseQueryEngine, asked: SymbolicQuery, path: str) -> Value:
    """`engine.retrieve(asked)`."""
    if isinstance(engine, TransformQueryEngine):
        rule_for(engine, _RULES)
        then: Value = _transformed(walk, engine, asked, path, partial(found, walk))
        return then
    if not isinstance(engine, (RetrieverQueryEngine, CitationQueryEngine)):
        raise NotUnderstood(f"{type(engine).__name__} does not retrieve")
    rule_for(engine, _RULES)
    kind = CitationQueryEngineParts if isinstance(engine, CitationQueryEngine) else RetrieverQueryEngineParts
    return _nodes(walk, walk.parts(kind, engine), asked, path)


def _nodes(walk: Walk, parts: RetrievalParts, asked: SymbolicQuery, path: str) -> Value:
    """Retrieved, and postprocessed one step after the other."""
    nodes = retrieve(walk, parts.retriever, asked, parts.path(path, "retriever"), "retrieve")
    return postprocess(walk, parts.node_postprocessors, asked.text, nodes, parts.path(path, "node_postprocessors"))


def _answer(
    walk: Walk, parts: RetrievalParts | SubQuestionQueryEngineParts, asked: SymbolicQuery, nodes: Value, path: str
) -> SymbolicAnswer:
    where = parts.path(path, "response_synthesizer")
    return SymbolicAnswer(synthesize(walk, parts.response_synthesizer, asked.text, nodes, where, "synthesize"), nodes)


def _retriever_engine(walk: Walk, engine: RetrieverQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    parts = walk.parts(RetrieverQueryEngineParts, engine)
    with walk.step() as names:
        nodes = _nodes(walk, parts, asked, path)
    with walk.step(tuple(names)):
        return _answer(walk, parts, asked, nodes, path)


def _citation(walk: Walk, engine: CitationQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    """The nodes are cut into numbered sources."""
    parts = walk.parts(CitationQueryEngineParts, engine)
    with walk.step() as names:
        nodes = _nodes(walk, parts, asked, path)
        if parts.multimodal:
            nodes = None
        if nodes is not None:
            nodes = walk.call("sources", lambda nodes: citation_sources(engine, own_nodes(nodes)), nodes=nodes)
    with walk.step(tuple(names)):
        return _answer(walk, parts, asked, nodes, path)


def _transform(walk: Walk, engine: TransformQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    made = _transformed(walk, engine, asked, path, partial(query, walk))
    return made if isinstance(made, SymbolicAnswer) else SymbolicAnswer()


def _transformed(
    walk: Walk,
    engine: TransformQueryEngine,
    asked: SymbolicQuery,
    path: str,
    then: Callable[[BaseQueryEngine, SymbolicQuery, str], Any],
) -> Any:
    """`then` of the engine in it with the transformed query; None where that is not known."""
    parts = walk.parts(TransformQueryEngineParts, engine)
    with walk.step() as names:
        where = parts.path(path, "query_transform")
        other = transformed(walk, parts.query_transform, asked, parts.transform_metadata, where, "transform")
    if other is None:
        return None
    with walk.step(tuple(names)):
        return then(parts.query_engine, other, parts.path(path, "query_engine"))


def _retry_source(walk: Walk, engine: RetrySourceQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    parts = walk.parts(RetrySourceQueryEngineParts, engine)
    first = query(walk, parts.query_engine, asked, parts.path(path, "query_engine"))
    if parts.max_retries <= 0:
        return first
    judge_answer(walk, parts.evaluator, parts.max_retries, asked.text, first, parts.path(path, "evaluator"))
    return SymbolicAnswer()


# ------------------------------------------------------------ engines chosen at run time


def _arm(walk: Walk, engine: BaseQueryEngine, chosen: Ref, asked: Ref, path: str, name: str) -> Value:
    """The engine's answer, `{"text", "nodes"}`, where it is chosen; a false value otherwise."""
    body, before = walk.body(), set(walk.lowered)
    inner = query(body, engine, SymbolicQuery(QUERY, (QUERY,)), path)
    if inner.text is None or inner.nodes is None:
        walk.draft.nodes += body.draft.nodes
        walk.forget(before)
        return None
    output = body.call("response", _response, text=inner.text, nodes=inner.nodes)
    return walk.hold(name, Role.BRANCH, named(condition=chosen, query=asked), body, output)


def _response(text: str, nodes: Nodes) -> dict[str, Any]:
    return {"text": text or "None", "nodes": nodes}  # as str(response) has it


def _router(walk: Walk, engine: RouterQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    """The chosen engines answer side by side, each from when its number is written; several answers are summarised."""
    parts = walk.parts(RouterQueryEngineParts, engine)
    choices = selected(walk, parts.selector, parts.metadatas, asked.text, parts.path(path, "selector"))
    if choices is None or len(asked.texts) != 1 or asked.texts[0] != asked.text:
        return SymbolicAnswer()
    body, engines, where = walk.body(), parts.query_engines, parts.path(path, "query_engines")
    require_one_model(walk, engines)
    answers: dict[str, Ref] = {}
    for i, one in enumerate(engines):
        chosen = body.call(f"chosen{i}", numbered(i, len(engines)), choice=Ref(ITEM))
        answer = _arm(body, one, chosen, QUERY, f"{where}[{i}]", f"engine{i}")
        if answer is not None:
            answers[f"engine{i}"] = answer
    if not answers:
        walk.draft.nodes += body.draft.nodes
        return SymbolicAnswer()
    output = body.call("answered", _the_one, **answers)
    several = Attributes(beside=takes_several(parts.selector))
    each = named(items=choices, query=asked.text)
    answered = walk.hold("answers", Role.MAP, each, body, output, attributes=several)
    if len(answers) < len(engines):
        return SymbolicAnswer()
    taken = walk.call("taken", _taken, answers=answered)
    return SymbolicAnswer(_summary(walk, parts, asked.text, taken, path), taken.at("nodes"))


def _the_one(**answers: Any) -> Any:
    """The answer of the arm that was taken; None where the model has chosen none that is there."""
    return next((answer for answer in answers.values() if answer), None)


def _taken(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    nodes = [node for answer in answers for node in answer["nodes"]]
    return {"texts": [answer["text"] for answer in answers], "nodes": nodes, "several": len(answers) > 1}


def _summary(walk: Walk, parts: RouterQueryEngineParts, asked: Ref, taken: Ref, path: str) -> Value:
    """One answer as it is; of several, the summary."""
    if walk.own_models is not None and not takes_several(parts.selector):
        return walk.call("answer", lambda taken: taken["texts"][0], taken=taken)
    texts: Inputs = named(condition=taken.at("several"), query=asked, texts=taken.at("texts"))
    made: Value = None
    summarizer: Any = parts.summarizer
    with walk.noting(parts.path(path, "summarizer"), summarizer):
        rule_for(summarizer, {TreeSummarize: None})
        body = walk.body()
        walk.lowered.add(id(summarizer))
        parts_of_summary = walk.parts(TreeSummarizeParts, summarizer)
        with body.streaming(parts_of_summary.streaming):
            output = tree(body, parts_of_summary, QUERY, Ref("$texts"), "summary")
        summary = walk.hold("summarise", Role.BRANCH, texts, body, output)
        made = walk.call(
            "answer",
            lambda taken, summary: summary if taken["several"] else taken["texts"][0],
            taken=taken,
            summary=summary,
        )
    return made


def _sub_questions(walk: Walk, engine: SubQuestionQueryEngine, asked: SymbolicQuery, path: str) -> SymbolicAnswer:
    """Each sub-question is answered by its engine; the answers are the nodes of the last one."""
    parts = walk.parts(SubQuestionQueryEngineParts, engine)
    asking = questions(walk, parts.question_gen, parts.metadatas, asked.text, parts.path(path, "question_gen"))
    if asking is None:
        return SymbolicAnswer()
    with walk.in_loop_of(engine):
        body, before = walk.body(), set(walk.lowered)
    item, engines, where = Ref(ITEM), parts.query_engines, parts.path(path, "query_engines")
    answers: dict[str, Ref] = {}
    for i, (tool, one) in enumerate(engines.items()):
        chosen = body.call(f"chosen{i}", _is(tool), asked=item.at("tool_name"))
        answer = _arm(body, one, chosen, item.at("sub_question"), f'{where}["{tool}"]', f"engine{i}")
        if answer is not None:
            answers[tool] = answer
    if len(answers) < len(engines):
        walk.draft.nodes += body.draft.nodes
        walk.forget(before)
        return SymbolicAnswer()
    refs = {f"engine{i}": ref for i, ref in enumerate(answers.values())}
    output = body.call("answered", lambda question, **arms: next(a for a in arms.values() if a), question=item, **refs)
    with walk.in_loop_of(engine):
        answered = walk.hold("answers", Role.MAP, named(items=asking), body, output)

    def pairs(questions: Sequence[Mapping[str, str]], answers: Sequence[Mapping[str, Any]]) -> list[NodeWithScore]:
        return [_pair_node(engine, one, answer) for one, answer in zip(questions, answers, strict=True)]

    nodes = walk.call("pairs", pairs, questions=asking, answers=answered)
    made = _answer(walk, parts, asked, nodes, path)
    sources = walk.call(
        "sources",
        lambda pairs, answers: [*pairs, *(n for a in answers for n in a["nodes"])],
        pairs=nodes,
        answers=answered,
    )
    return SymbolicAnswer(made.text, sources)


def _is(tool: str) -> Callable[..., bool]:
    return lambda asked: bool(asked == tool)


def _pair_node(engine: SubQuestionQueryEngine, question: Mapping[str, str], answer: Mapping[str, Any]) -> NodeWithScore:
    return sub_question_node(engine, question["sub_question"], question["tool_name"], answer["text"], answer["nodes"])


_RULES: dict[type, Callable[..., SymbolicAnswer]] = {
    RetrieverQueryEngine: _retriever_engine,
    CitationQueryEngine: _citation,
    TransformQueryEngine: _transform,
    RetrySourceQueryEngine: _retry_source,
    RouterQueryEngine: _router,
    SubQuestionQueryEngine: _sub_questions,
}


# ------------------------------------------------------------ engines that retry until a judge is content


TEXT, SOURCES = Ref("$text"), Ref("$sources")
"""An answer and its passages, inside the body of a holder."""


def judge_answer(walk: Walk, judge: Any, left: int, query: Ref, answer: SymbolicAnswer, path: str) -> None:
    """Judges an answer; while it is bad, its sources, and the answer from them, so many times."""
    if answer.text is not None and answer.nodes is not None:
        sources = walk.call("sources", _documents, nodes=answer.nodes)
        _judge(walk, judge, left, query, answer.text, sources, path)


def _judge(walk: Walk, judge: Any, left: int, query: Ref, text: Ref, sources: Ref, path: str) -> None:
    bad = _judged(walk, judge, query, text, sources, path, "verdict")
    if bad is None or walk.parts(RelevancyEvaluatorParts, judge).raise_error is not False:  # a bad answer is an error
        return
    again = walk.body()
    each = again.body()
    output = _judged(each, judge, QUERY, TEXT, each.call("source", _only, source=Ref(ITEM)), path, "opinion")
    if output is None:
        return
    given = named(items=SOURCES, query=QUERY, text=TEXT)
    opinions = again.hold("opinions", Role.MAP, given, each, output)
    anew = _answer_from_sources(again, path)
    if anew is not None and left > 1:
        _judge(again, judge, left - 1, QUERY, anew, SOURCES, path)
    again.draft.nodes.clear()  # the report has the judge already
    walk.hold("again", Role.BRANCH, named(condition=bad, query=query, text=text, sources=sources), again, opinions)


def _judged(walk: Walk, judge: Any, query: Ref, text: Ref, sources: Ref, path: str, name: str) -> Value:
    """Whether an answer is bad."""
    found: Value = None
    with walk.noting(path, judge):
        rule_for(judge, {RelevancyEvaluator: None})
        parts = walk.parts(RelevancyEvaluatorParts, judge)
        asked = walk.call(f"{name}.asked", _question, query=query, text=text)
        reader = _reader(parts.llm, text_qa_template=parts.eval_template, refine_template=parts.refine_template)
        with walk.answered_with("YES", "NO"):
            verdict = _from(walk, reader, asked, sources, path, name)
        found = walk.call(f"{name}.bad", lambda verdict: "yes" not in verdict.lower(), verdict=verdict)
    return found


def _answer_from_sources(walk: Walk, path: str) -> Value:
    """From the sources, by the models that LlamaIndex takes where nothing is said."""
    made: Value = None
    with walk.noting(path, Settings):
        parts = walk.parts(SettingsParts, Settings)
        if parts.llm is None:
            raise NotUnderstood("there is no default LLM")
        made = _from(walk, _reader(parts.llm), QUERY, SOURCES, path, "anew")
    return made


def _reader(llm: Any, **templates: Any) -> BaseSynthesizer:
    """Of the engine that LlamaIndex makes of an index of the sources. (It changes the LLM that it is given.)"""
    return get_response_synthesizer(copy.copy(llm), callback_manager=nobody(), **templates)


def _from(walk: Walk, reader: BaseSynthesizer, asked: Ref, sources: Ref, path: str, name: str) -> Ref:
    """What it says of the sources."""
    own = _splitter(walk)
    nodes = walk.call(f"{name}.nodes", lambda sources: _split_sources(own, sources), sources=sources)
    text = synthesize(walk, reader, asked, nodes, path, name)
    row = walk.draft.nodes.pop()  # whose reader it is has one
    if text is None:
        raise NotUnderstood(row.reason)
    return text


def _splitter(walk: Walk) -> Any:
    """What cuts documents where nothing is said. (`Settings.node_parser` is not merely read: it changes the parser.)"""
    parts = walk.parts(SettingsParts, Settings)
    used = parts.transformations or [parts.node_parser or SentenceSplitter()]
    if len(used) != 1 or type(used[0]) is not SentenceSplitter:
        raise NotUnderstood("documents are cut in an unknown way")
    return own_splitter(used[0])


def _split_sources(splitter: Any, sources: Sequence[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=part)) for text in sources for part in splitter.split_text(text)]


def _documents(nodes: Nodes) -> list[str]:
    return [node.get_content() for node in nodes]


def _only(source: str) -> list[str]:
    return [source]


def _question(query: str, text: str) -> str:
    return f"Question: {query}\nResponse: {text}"
