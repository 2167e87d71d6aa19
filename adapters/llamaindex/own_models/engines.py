"""Query engines ahead of the plain object: which engines they ask, and what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.schema import MetadataMode, NodeWithScore

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan, Question
from teola_plugin.adapters.llamaindex.own_models.calls import Failed
from teola_plugin.adapters.llamaindex.own_models.choosing import changing, choosing, takes_several, writing_questions
from teola_plugin.adapters.llamaindex.own_models.postprocessors import postprocessing
from teola_plugin.adapters.llamaindex.own_models.retrievers import (
    Nodes,
    Retrieve,
    models_of,
    retrieving,
)
from teola_plugin.adapters.llamaindex.own_models.synthesizers import Respond, responding
from teola_plugin.shims.llamaindex.engines import (
    CitationQueryEngineParts,
    RetrievalParts,
    RetrieverQueryEngineParts,
    RouterQueryEngineParts,
    SubQuestionQueryEngineParts,
    TransformQueryEngineParts,
    citation_sources,
    runs_in_loop,
    sub_question_node,
)
from teola_plugin.tracer.llamaindex.classes import as_made, rule_for
from teola_plugin.tracer.llamaindex.dry_run import own_nodes
from teola_plugin.tracer.symbols import NotUnderstood


@dataclass(frozen=True)
class Answer:
    """Of an engine: what its response is, as a text, and the nodes that it rests on."""

    text: str
    nodes: Sequence[NodeWithScore]


Query = Callable[[Ahead, Question], Awaitable[Answer]]
"""`query`: (how, question) -> the answer."""
EMPTY_RESPONSE = "Empty Response"


def querying(plan: Plan, engine: BaseQueryEngine) -> Query:
    """`query` of an engine. Raises `NotUnderstood`."""
    with as_made():
        made = rule_for(engine, _RULES)(plan, engine)
    plan.known[id(engine)] = engine
    return made


def _tried(plan: Plan, engine: Any) -> Query:
    """The same; what is not understood ends what runs ahead when it comes there."""
    try:
        return querying(plan, engine)
    except NotUnderstood as why:
        ended: Query = _ends(str(why))
        return ended


def _ends(why: str) -> Any:
    async def end(*_: Any) -> Any:
        raise NotUnderstood(why)

    return end


# ------------------------------------------------------------ over a retriever


def finding(plan: Plan, parts: RetrievalParts) -> Retrieve:
    """Retrieved, and postprocessed."""
    retrieve: Retrieve = retrieving(plan, parts.retriever)
    postprocess = postprocessing(plan, parts.node_postprocessors)

    async def find(ahead: Ahead, asked: Question) -> Nodes:
        return await postprocess(ahead, asked.text, await retrieve(ahead, asked))

    return find


async def answered_from(respond: Respond, ahead: Ahead, query: str, nodes: Nodes) -> str:
    """`synthesize`, as a text."""
    if not nodes:
        return EMPTY_RESPONSE
    return await respond(ahead, query, [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes])


def _retrieval(kind: type[RetrievalParts]) -> Callable[[Plan, Any], Query]:
    def rule(plan: Plan, engine: Any) -> Query:
        parts = kind.of(engine)
        if getattr(parts, "multimodal", False):
            raise NotUnderstood("it reads images, too")
        find = finding(plan, parts)
        plan.known[id(engine)] = engine  # its retriever is known, whatever its synthesizer is
        respond = _responding(plan, parts.response_synthesizer)

        async def query(ahead: Ahead, asked: Question) -> Answer:
            nodes = await find(ahead.for_more(), asked)
            if isinstance(engine, CitationQueryEngine):
                nodes = citation_sources(engine, own_nodes(nodes))
            return Answer(await answered_from(respond, ahead, asked.text, nodes), nodes)

        return query

    return rule


def _responding(plan: Plan, synth: Any) -> Respond:
    try:
        return responding(plan, synth)
    except NotUnderstood as why:
        made: Respond = _ends(str(why))
        return made


# ------------------------------------------------------------ several engines


def _sub_questions(plan: Plan, engine: SubQuestionQueryEngine) -> Query:
    parts = SubQuestionQueryEngineParts.of(engine)
    in_loop, write = runs_in_loop(engine), writing_questions(plan, parts.question_gen, parts.metadatas)
    plan.lists(in_loop)
    before = plan.is_async
    plan.is_async = before or in_loop  # what they ask in turn is asked in that loop
    engines = {name: _tried(plan, one) for name, one in parts.query_engines.items()}
    plan.is_async = before
    respond = _responding(plan, parts.response_synthesizer)

    async def query(ahead: Ahead, asked: Question) -> Answer:
        questions = await write(ahead.for_more(), asked.text)
        way = ahead.side_by_side() if in_loop else ahead.for_more()
        known = [one for one in questions if one["tool_name"] in engines]
        steps = [_asking(engines[one["tool_name"]], Question(one["sub_question"])) for one in known]
        found = await way.each(steps)
        pairs = [(one, made) for one, made in zip(known, found, strict=True) if not isinstance(made, Failed)]
        for _, made in pairs:  # the plain object goes on without those that fail
            if isinstance(made, BaseException):
                raise made
        nodes = [
            sub_question_node(engine, one["sub_question"], one["tool_name"], made.text, made.nodes)
            for one, made in pairs
        ]
        text = await answered_from(respond, ahead, asked.text, nodes)
        return Answer(text, [*nodes, *(node for _, made in pairs for node in made.nodes)])

    return query


def _asking(query: Query, asked: Question) -> Callable[[Ahead], Awaitable[Answer]]:
    return lambda ahead: query(ahead, asked)


def _router(plan: Plan, engine: RouterQueryEngine) -> Query:
    """The chosen engines answer one after the other; several answers are summarised."""
    parts = RouterQueryEngineParts.of(engine)
    choose = choosing(plan, parts.selector, parts.metadatas)
    if len({id(model) for one in parts.query_engines for model in _models(one)}) > 1:
        raise NotUnderstood("its engines embed one query with several models")
    engines = [_tried(plan, one) for one in parts.query_engines]
    several = takes_several(parts.selector)
    summarise: Respond = _responding(plan, parts.summarizer) if several else _ends("there is one answer")

    async def query(ahead: Ahead, asked: Question) -> Answer:
        chosen = await choose(ahead.for_more(), asked.text)
        if len(chosen) == 1:
            return await _asking(engines[chosen[0]], asked)(ahead)
        found = await ahead.all([_asking(engines[i], asked) for i in chosen])
        text = await summarise(ahead, asked.text, [made.text or "None" for made in found])
        return Answer(text, [node for made in found for node in made.nodes])

    return query


def _models(engine: Any) -> list[Any]:
    """What may embed the very query that an engine is asked."""
    if isinstance(engine, RouterQueryEngine):
        return [model for one in RouterQueryEngineParts.of(engine).query_engines for model in _models(one)]
    retriever = getattr(engine, "retriever", None)
    return [] if retriever is None else models_of(retriever)


# ------------------------------------------------------------ another query


def _transform(plan: Plan, engine: TransformQueryEngine) -> Query:
    parts = TransformQueryEngineParts.of(engine)
    change = changing(plan, parts.query_transform, parts.transform_metadata or {})
    then = querying(plan, parts.query_engine)

    async def query(ahead: Ahead, asked: Question) -> Answer:
        return await then(ahead, await change(ahead.for_more(), asked))

    return query


_RULES: dict[type, Callable[[Plan, Any], Query]] = {
    RetrieverQueryEngine: _retrieval(RetrieverQueryEngineParts),
    CitationQueryEngine: _retrieval(CitationQueryEngineParts),
    SubQuestionQueryEngine: _sub_questions,
    RouterQueryEngine: _router,
    TransformQueryEngine: _transform,
}
