"""`RetrySourceQueryEngine`: asks again until a judge is content.

After a bad answer it has each source judged, one after the other, and then asks again, from all of them: none of that
waits for the other. (`RetryQueryEngine` calls the same engine again; that is planned when it is called.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from llama_index.core import Settings
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.response_synthesizers import BaseSynthesizer, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from teola_plugin.graph import ITEM, Ref, Role, named
from teola_plugin.shims.llamaindex.copies import nobody, own_splitter
from teola_plugin.shims.llamaindex.postprocessors import RelevancyEvaluatorParts, SettingsParts
from teola_plugin.tracer.llamaindex.classes import rule_for
from teola_plugin.tracer.llamaindex.synthesizers import QUERY, synthesize
from teola_plugin.tracer.llamaindex.walk import SymbolicAnswer, Value, Walk
from teola_plugin.tracer.symbols import NotUnderstood

Nodes = Sequence[NodeWithScore]
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
    anew = _answer(again, path)
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


def _answer(walk: Walk, path: str) -> Value:
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
    nodes = walk.call(f"{name}.nodes", lambda sources: _parts(own, sources), sources=sources)
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


def _parts(splitter: Any, sources: Sequence[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=part)) for text in sources for part in splitter.split_text(text)]


def _documents(nodes: Nodes) -> list[str]:
    return [node.get_content() for node in nodes]


def _only(source: str) -> list[str]:
    return [source]


def _question(query: str, text: str) -> str:
    return f"Question: {query}\nResponse: {text}"
