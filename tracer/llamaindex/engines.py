"""Lower query engines: retrieval, routing, sub-questions, retries and the final answer.

After a bad answer, `RetrySourceQueryEngine` has each source judged, one after the other, and then asks again, from all
of them: none of these calls waits for another. (`RetryQueryEngine` calls the same engine again; that call is planned
when it is made.)
"""

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
from teola_plugin.shims.llamaindex.copies import silent_callback_manager, silent_splitter
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
from teola_plugin.shims.llamaindex.synthesizers import SynthesizerParts, TreeSummarizeParts
from teola_plugin.tracer.llamaindex.classes import refuse_unknown_attributes, report_level, rule_for
from teola_plugin.tracer.llamaindex.lowering import Lowering, SymbolicAnswer, SymbolicQuery, Value, import_own_code
from teola_plugin.tracer.llamaindex.model_calls import copy_nodes, require_one_model
from teola_plugin.tracer.llamaindex.queries import (
    can_choose_several,
    choice_test,
    lower_question_generator,
    lower_selector,
    lower_transform,
)
from teola_plugin.tracer.llamaindex.retrieval import lower_postprocessors, lower_retriever
from teola_plugin.tracer.llamaindex.synthesizers import QUERY, lower_synthesizer, lower_tree_summary
from teola_plugin.tracer.symbols import NotUnderstood

Nodes = Sequence[NodeWithScore]
ENTRIES = ("query", "retrieve", "synthesize")


def try_lower_query(lowering: Lowering, engine: BaseQueryEngine, query: SymbolicQuery, path: str) -> SymbolicAnswer:
    """Lower `engine.query(query)`; report why and return an empty answer if the engine is not understood."""
    try:
        with refuse_unknown_attributes():
            return lower_query(lowering, engine, query, path)
    except NotUnderstood as error:
        lowering.add_report_row(path, engine, report_level(engine), reason=str(error))
        return SymbolicAnswer()


def lower_query(lowering: Lowering, engine: BaseQueryEngine, query: SymbolicQuery, path: str) -> SymbolicAnswer:
    """Lower `engine.query(query)`. Raises `NotUnderstood`."""
    if (method := lowering.written_method(engine)) is not None:
        own_answer: SymbolicAnswer = import_own_code().lower_own_engine(lowering, engine, method, query, path)
        return own_answer
    with lowering.marking_lowered(engine):
        answer = rule_for(engine, _RULES)(lowering, engine, query, path)
    if answer.text is not None:
        lowering.lowered.add(id(engine))
    return answer


def lower_retrieve(lowering: Lowering, engine: BaseQueryEngine, query: SymbolicQuery, path: str) -> Value:
    """Lower `engine.retrieve(query)`. Raises `NotUnderstood`."""
    if isinstance(engine, TransformQueryEngine):
        rule_for(engine, _RULES)
        nodes: Value = _after_transform(lowering, engine, query, path, partial(lower_retrieve, lowering))
        return nodes
    if not isinstance(engine, (RetrieverQueryEngine, CitationQueryEngine)):
        raise NotUnderstood(f"{type(engine).__name__} does not retrieve")
    rule_for(engine, _RULES)
    kind = CitationQueryEngineParts if isinstance(engine, CitationQueryEngine) else RetrieverQueryEngineParts
    return _lower_retrieval(lowering, lowering.read_parts(kind, engine), query, path)


def _lower_retrieval(lowering: Lowering, parts: RetrievalParts, query: SymbolicQuery, path: str) -> Value:
    """Lower the retriever and then the postprocessors, in order."""
    nodes = lower_retriever(lowering, parts.retriever, query, parts.path(path, "retriever"), "retrieve")
    return lower_postprocessors(
        lowering, parts.node_postprocessors, query.text, nodes, parts.path(path, "node_postprocessors")
    )


def _lower_synthesis(
    lowering: Lowering,
    parts: RetrievalParts | SubQuestionQueryEngineParts,
    query: SymbolicQuery,
    nodes: Value,
    path: str,
) -> SymbolicAnswer:
    """Lower the response synthesizer of an engine. Return the answer that it gives from these nodes."""
    where = parts.path(path, "response_synthesizer")
    return SymbolicAnswer(
        lower_synthesizer(lowering, parts.response_synthesizer, query.text, nodes, where, "synthesize"), nodes
    )


def _lower_retriever_engine(
    lowering: Lowering, engine: RetrieverQueryEngine, query: SymbolicQuery, path: str
) -> SymbolicAnswer:
    """Lower an engine that retrieves nodes and then answers from them; the answer's calls come after all retrieval."""
    parts = lowering.read_parts(RetrieverQueryEngineParts, engine)
    with lowering.in_order_after() as names:
        nodes = _lower_retrieval(lowering, parts, query, path)
    with lowering.in_order_after(tuple(names)):
        return _lower_synthesis(lowering, parts, query, nodes, path)


def _lower_citation(lowering: Lowering, engine: CitationQueryEngine, query: SymbolicQuery, path: str) -> SymbolicAnswer:
    """Lower an engine that cuts the retrieved nodes into numbered sources."""
    parts = lowering.read_parts(CitationQueryEngineParts, engine)
    with lowering.in_order_after() as names:
        nodes = _lower_retrieval(lowering, parts, query, path)
        if parts.multimodal:
            nodes = None
        if nodes is not None:
            nodes = lowering.add_call("sources", lambda nodes: citation_sources(engine, copy_nodes(nodes)), nodes=nodes)
    with lowering.in_order_after(tuple(names)):
        return _lower_synthesis(lowering, parts, query, nodes, path)


def _lower_transform_engine(
    lowering: Lowering, engine: TransformQueryEngine, query: SymbolicQuery, path: str
) -> SymbolicAnswer:
    """Lower an engine that changes the query and asks another one. Return an empty answer if not understood."""
    answer = _after_transform(lowering, engine, query, path, partial(try_lower_query, lowering))
    return answer if isinstance(answer, SymbolicAnswer) else SymbolicAnswer()


def _after_transform(
    lowering: Lowering,
    engine: TransformQueryEngine,
    query: SymbolicQuery,
    path: str,
    continue_with: Callable[[BaseQueryEngine, SymbolicQuery, str], Any],
) -> Any:
    """Lower the transform, then call `continue_with` on the inner engine and the new query.

    Returns None if the transform is not understood.
    """
    parts = lowering.read_parts(TransformQueryEngineParts, engine)
    with lowering.in_order_after() as names:
        where = parts.path(path, "query_transform")
        new_query = lower_transform(
            lowering, parts.query_transform, query, parts.transform_metadata, where, "transform"
        )
    if new_query is None:
        return None
    with lowering.in_order_after(tuple(names)):
        return continue_with(parts.query_engine, new_query, parts.path(path, "query_engine"))


def _lower_retry_source(
    lowering: Lowering, engine: RetrySourceQueryEngine, query: SymbolicQuery, path: str
) -> SymbolicAnswer:
    """Lower an engine that asks again, from the sources alone, after a judge has found the answer bad.

    Return the inner engine's answer if it never retries, else an empty answer, since the last one is not known.
    """
    parts = lowering.read_parts(RetrySourceQueryEngineParts, engine)
    first = try_lower_query(lowering, parts.query_engine, query, parts.path(path, "query_engine"))
    if parts.max_retries <= 0:
        return first
    lower_retries(lowering, parts.evaluator, parts.max_retries, query.text, first, parts.path(path, "evaluator"))
    return SymbolicAnswer()


# ------------------------------------------------------------ engines chosen at run time


def _add_branch(lowering: Lowering, engine: BaseQueryEngine, is_chosen: Ref, query: Ref, path: str, name: str) -> Value:
    """Add a branch that gives the engine's answer, `{"text", "nodes"}`, if it is chosen, and a false value otherwise.

    Returns None if the engine is not understood.
    """
    body, lowered_before = lowering.new_body(), set(lowering.lowered)
    answer = try_lower_query(body, engine, SymbolicQuery(QUERY, (QUERY,)), path)
    if answer.text is None or answer.nodes is None:
        lowering.draft.nodes += body.draft.nodes
        lowering.restore_lowered(lowered_before)
        return None

    def response(text: str, nodes: Nodes) -> dict[str, Any]:
        return {"text": text or "None", "nodes": nodes}  # "None" is `str()` of a response without text

    output = body.add_call("response", response, text=answer.text, nodes=answer.nodes)
    return lowering.add_holder(name, Role.BRANCH, named(condition=is_chosen, query=query), body, output)


def _lower_router(lowering: Lowering, engine: RouterQueryEngine, query: SymbolicQuery, path: str) -> SymbolicAnswer:
    """Lower a router: each chosen engine starts when the selector has written its number.

    Several answers run in parallel and are summarised.
    """
    parts = lowering.read_parts(RouterQueryEngineParts, engine)
    choices = lower_selector(lowering, parts.selector, parts.metadatas, query.text, parts.path(path, "selector"))
    if choices is None or len(query.texts) != 1 or query.texts[0] != query.text:
        return SymbolicAnswer()
    body, engines, where = lowering.new_body(), parts.query_engines, parts.path(path, "query_engines")
    require_one_model(lowering, engines)
    answers: dict[str, Ref] = {}
    for i, arm in enumerate(engines):
        is_chosen = body.add_call(f"chosen{i}", choice_test(i, len(engines)), choice=Ref(ITEM))
        answer = _add_branch(body, arm, is_chosen, QUERY, f"{where}[{i}]", f"engine{i}")
        if answer is not None:
            answers[f"engine{i}"] = answer
    if not answers:
        lowering.draft.nodes += body.draft.nodes
        return SymbolicAnswer()
    output = body.add_call("answered", _first_answer, **answers)
    attributes = Attributes(is_parallel=can_choose_several(parts.selector))
    inputs = named(items=choices, query=query.text)
    answered = lowering.add_holder("answers", Role.MAP, inputs, body, output, attributes=attributes)
    if len(answers) < len(engines):
        return SymbolicAnswer()
    selection = lowering.add_call("taken", _collect_answers, answers=answered)
    return SymbolicAnswer(_lower_summary(lowering, parts, query.text, selection, path), selection.at("nodes"))


def _first_answer(**answers: Any) -> Any:
    """Return the answer of the chosen engine; None if the model chose none that exists."""
    return next((answer for answer in answers.values() if answer), None)


def _collect_answers(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    nodes = [node for answer in answers for node in answer["nodes"]]
    return {"texts": [answer["text"] for answer in answers], "nodes": nodes, "several": len(answers) > 1}


def _lower_summary(lowering: Lowering, parts: RouterQueryEngineParts, query: Ref, selection: Ref, path: str) -> Value:
    """Return a single answer unchanged; add a summary if there may be several."""
    if lowering.own_models is not None and not can_choose_several(parts.selector):
        return lowering.add_call("answer", lambda selection: selection["texts"][0], selection=selection)
    texts: Inputs = named(condition=selection.at("several"), query=query, texts=selection.at("texts"))
    answer: Value = None
    summarizer: Any = parts.summarizer
    with lowering.reporting(parts.path(path, "summarizer"), summarizer):
        rule_for(summarizer, {TreeSummarize: None})
        body = lowering.new_body()
        lowering.lowered.add(id(summarizer))
        summarizer_parts = lowering.read_parts(TreeSummarizeParts, summarizer)
        with body.streaming(summarizer_parts.streaming):
            output = lower_tree_summary(body, summarizer_parts, QUERY, Ref("$texts"), "summary")
        summary = lowering.add_holder("summarise", Role.BRANCH, texts, body, output)
        answer = lowering.add_call(
            "answer",
            lambda selection, summary: summary if selection["several"] else selection["texts"][0],
            selection=selection,
            summary=summary,
        )
    return answer


def _lower_sub_questions(
    lowering: Lowering, engine: SubQuestionQueryEngine, query: SymbolicQuery, path: str
) -> SymbolicAnswer:
    """Lower an engine that answers sub-questions by other engines and then answers from their answers."""
    parts = lowering.read_parts(SubQuestionQueryEngineParts, engine)
    questions = lower_question_generator(
        lowering, parts.question_gen, parts.metadatas, query.text, parts.path(path, "question_gen")
    )
    if questions is None:
        return SymbolicAnswer()
    with lowering.in_loop_of(engine):
        body, lowered_before = lowering.new_body(), set(lowering.lowered)
    item, engines, where = Ref(ITEM), parts.query_engines, parts.path(path, "query_engines")
    answers: dict[str, Ref] = {}
    for i, (tool, arm) in enumerate(engines.items()):
        is_chosen = body.add_call(f"chosen{i}", _tool_test(tool), tool_name=item.at("tool_name"))
        answer = _add_branch(body, arm, is_chosen, item.at("sub_question"), f'{where}["{tool}"]', f"engine{i}")
        if answer is not None:
            answers[tool] = answer
    if len(answers) < len(engines):
        lowering.draft.nodes += body.draft.nodes
        lowering.restore_lowered(lowered_before)
        return SymbolicAnswer()
    refs = {f"engine{i}": ref for i, ref in enumerate(answers.values())}
    output = body.add_call(
        "answered", lambda question, **arms: next(a for a in arms.values() if a), question=item, **refs
    )
    with lowering.in_loop_of(engine):
        answered = lowering.add_holder("answers", Role.MAP, named(items=questions), body, output)

    def pairs(questions: Sequence[Mapping[str, str]], answers: Sequence[Mapping[str, Any]]) -> list[NodeWithScore]:
        """Return one node for each sub-question and its answer, as the original passes them to its synthesizer."""
        return [
            sub_question_node(engine, q["sub_question"], q["tool_name"], a["text"], a["nodes"])
            for q, a in zip(questions, answers, strict=True)
        ]

    nodes = lowering.add_call("pairs", pairs, questions=questions, answers=answered)
    answered_query = _lower_synthesis(lowering, parts, query, nodes, path)
    sources = lowering.add_call(
        "sources",
        lambda pairs, answers: [*pairs, *(n for a in answers for n in a["nodes"])],
        pairs=nodes,
        answers=answered,
    )
    return SymbolicAnswer(answered_query.text, sources)


def _tool_test(tool: str) -> Callable[..., bool]:
    return lambda tool_name: bool(tool_name == tool)


_RULES: dict[type, Callable[..., SymbolicAnswer]] = {
    RetrieverQueryEngine: _lower_retriever_engine,
    CitationQueryEngine: _lower_citation,
    TransformQueryEngine: _lower_transform_engine,
    RetrySourceQueryEngine: _lower_retry_source,
    RouterQueryEngine: _lower_router,
    SubQuestionQueryEngine: _lower_sub_questions,
}


# ------------------------------------------------------------ engines that retry until a judge is content


TEXT, SOURCES = Ref("$text"), Ref("$sources")
"""An answer and the texts of its sources, inside the body of a branch or loop."""


def lower_retries(lowering: Lowering, judge: Any, retries: int, query: Ref, answer: SymbolicAnswer, path: str) -> None:
    """Add a verdict on an answer and, while it is bad, up to `retries` rounds of new verdicts and answers."""
    if answer.text is not None and answer.nodes is not None:
        sources = lowering.add_call("sources", lambda nodes: [n.get_content() for n in nodes], nodes=answer.nodes)
        _add_retries(lowering, judge, retries, query, answer.text, sources, path)


def _add_retries(
    lowering: Lowering, judge: Any, retries_left: int, query: Ref, text: Ref, sources: Ref, path: str
) -> None:
    """Add a verdict on an answer and, for a bad one, verdicts on each source and a new answer; then retry that one,
    too.

    `retries_left`: rounds that may follow. Stop where the judge or the default models are not understood.
    """
    is_bad = _add_verdict(lowering, judge, query, text, sources, path, "verdict")
    # unless `raise_error` is False, a bad answer is an error, and nothing is retried
    if is_bad is None or lowering.read_parts(RelevancyEvaluatorParts, judge).raise_error is not False:
        return
    retry = lowering.new_body()
    judging = retry.new_body()
    output = _add_verdict(
        judging,
        judge,
        QUERY,
        TEXT,
        judging.add_call("source", lambda source: [source], source=Ref(ITEM)),
        path,
        "opinion",
    )
    if output is None:
        return
    inputs = named(items=SOURCES, query=QUERY, text=TEXT)
    opinions = retry.add_holder("opinions", Role.MAP, inputs, judging, output)
    new_answer = _add_new_answer(retry, path)
    if new_answer is not None and retries_left > 1:
        _add_retries(retry, judge, retries_left - 1, QUERY, new_answer, SOURCES, path)
    retry.draft.nodes.clear()  # the report has rows of these objects already
    lowering.add_holder(
        "again", Role.BRANCH, named(condition=is_bad, query=query, text=text, sources=sources), retry, opinions
    )


def _add_verdict(lowering: Lowering, judge: Any, query: Ref, text: Ref, sources: Ref, path: str, name: str) -> Value:
    """Add a judge's verdict on an answer: a true value if it is bad. None if the judge is not understood."""
    is_bad: Value = None
    with lowering.reporting(path, judge):
        rule_for(judge, {RelevancyEvaluator: None})
        parts = lowering.read_parts(RelevancyEvaluatorParts, judge)
        question = lowering.add_call(
            f"{name}.asked", lambda query, text: f"Question: {query}\nResponse: {text}", query=query, text=text
        )
        synthesizer = _source_synthesizer(
            parts.llm, text_qa_template=parts.eval_template, refine_template=parts.refine_template
        )
        with lowering.expecting_labels("YES", "NO"):
            verdict = _answer_from_sources(lowering, synthesizer, question, sources, path, name)
        is_bad = lowering.add_call(f"{name}.bad", lambda verdict: "yes" not in verdict.lower(), verdict=verdict)
    return is_bad


def _add_new_answer(lowering: Lowering, path: str) -> Value:
    """Add an answer from the sources by LlamaIndex's default models; None if they are not understood."""
    answer: Value = None
    with lowering.reporting(path, Settings):
        parts = lowering.read_parts(SettingsParts, Settings)
        if parts.llm is None:
            raise NotUnderstood("there is no default LLM")
        answer = _answer_from_sources(lowering, _source_synthesizer(parts.llm), QUERY, SOURCES, path, "anew")
    return answer


def _source_synthesizer(llm: Any, **templates: Any) -> BaseSynthesizer:
    """Create the synthesizer of the engine that LlamaIndex builds over the sources.

    It is created with a copy of the LLM, since that changes the LLM's attributes.
    """
    synthesizer = get_response_synthesizer(copy.copy(llm), callback_manager=silent_callback_manager(), **templates)
    vars(synthesizer).update(SynthesizerParts.as_attributes(llm=llm))
    return synthesizer


def _answer_from_sources(
    lowering: Lowering, synthesizer: BaseSynthesizer, question: Ref, sources: Ref, path: str, name: str
) -> Ref:
    """Lower a synthesizer that answers from the texts of sources. Raises `NotUnderstood`."""
    splitter = _default_splitter(lowering)

    def split(sources: Sequence[str]) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=part)) for text in sources for part in splitter.split_text(text)]

    nodes = lowering.add_call(f"{name}.nodes", split, sources=sources)
    text = lower_synthesizer(lowering, synthesizer, question, nodes, path, name)
    report_row = lowering.draft.nodes.pop()  # the object that owns this synthesizer has a row of its own
    if text is None:
        raise NotUnderstood(report_row.reason)
    return text


def _default_splitter(lowering: Lowering) -> Any:
    """Return the splitter that LlamaIndex uses by default. Raises `NotUnderstood` for one that is not known.

    `Settings.node_parser` is not called, because reading it changes the parser.
    """
    parts = lowering.read_parts(SettingsParts, Settings)
    transformations = parts.transformations or [parts.node_parser or SentenceSplitter()]
    if len(transformations) != 1 or type(transformations[0]) is not SentenceSplitter:
        raise NotUnderstood("documents are cut in an unknown way")
    return silent_splitter(transformations[0])
