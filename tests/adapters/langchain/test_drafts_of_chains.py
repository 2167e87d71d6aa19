"""Tests of draft texts of chains: they reach the engine with the request, and do not change its key."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
from langchain_classic.output_parsers.boolean import BooleanOutputParser
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from support.recording import record

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.langchain import ChatTeola
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.requests.payloads import Generate

FIRST = ChatPromptTemplate.from_template("Answer: {question}")
REFINE = ChatPromptTemplate.from_template("Refine for {question}: {first}")
QUESTION = {"question": "What do lambs eat?"}


def refined(pool: EnginePool) -> Any:
    llm = ChatTeola(pool=pool)
    return (
        RunnablePassthrough.assign(first=FIRST | llm | StrOutputParser())
        | RunnablePassthrough.assign(second=REFINE | llm | StrOutputParser())
        | itemgetter("second")
    )


@pytest.mark.parametrize(
    ("tokens", "passes"), [(8, DEFAULT_PASSES), (0, DEFAULT_PASSES), (8, ())], ids=["takes", "takes none", "no passes"]
)
def test_refining_request_gets_the_earlier_answer_as_draft(tokens: int, passes: Any) -> None:
    quick = profiles.scaled(profiles.rtx3090(), 0.0)["llm"]
    with EnginePool.local({"llm": FakeLLM("llm", replace(quick, drafts=tokens))}) as pool:
        chain = refined(pool)
        plain = chain.invoke(QUESTION)
        requests = record(pool.engine("llm"))
        assert accelerate(chain, passes=passes, app="mine").invoke(QUESTION) == plain
        [first, second] = [one for one in requests if isinstance(one.payload, Generate)]
        assert first.app == second.app == "mine"
        assert first.drafts == ()
        assert bool(second.drafts) == bool(tokens and passes)
        if second.drafts:
            assert second.drafts[0] in second.payload.prompt.flat() and second.drafts[0]


def test_explain_lists_the_sources_of_drafts() -> None:
    quick = profiles.scaled(profiles.rtx3090(), 0.0)["llm"]
    with EnginePool.local({"llm": FakeLLM("llm", replace(quick, drafts=8))}) as pool:
        explanation = accelerate(refined(pool)).explain(details=True)
    assert "\nDrafts\n" in explanation and "an earlier answer; its own prompt and text; recent outputs" in explanation
    with EnginePool.local({"llm": FakeLLM("llm", quick)}) as pool:
        assert "\nDrafts\n" not in accelerate(refined(pool)).explain(details=True)


JUDGE = ChatPromptTemplate.from_template("Is it so? YES or NO.\n{first}")
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {"city": {"type": "string"}}}}}
ROUTE = {"title": "Route", "type": "object", "properties": {"to": {"enum": ["db", "web"]}}, "required": ["to"]}


def judged(llm: ChatTeola) -> Any:
    return RunnablePassthrough.assign(first=FIRST | llm | StrOutputParser()) | JUDGE | llm | BooleanOutputParser()


def routed(llm: ChatTeola) -> Any:
    return FIRST | llm.bind(json_schema=ROUTE) | StrOutputParser()


def with_tools(llm: ChatTeola) -> Any:
    return FIRST | llm.bind_tools([TOOL])


@pytest.mark.parametrize(
    ("make", "first", "what"),
    [
        (judged, "YES\ue000", "the labels that are understood"),
        (routed, '{"to": "db"}\ue000', "the form of its JSON"),
        (with_tools, '\ue000<tool_call>\n{"name": "look_up", "arg', "calls of its tools, earlier ones first"),
    ],
)
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "plain"])
def test_requests_draft_labels_schemas_and_tools(make: Any, first: str, what: str, planned: bool) -> None:
    quick = profiles.scaled(profiles.rtx3090(), 0.0)["llm"]
    with EnginePool.local({"llm": FakeLLM("llm", replace(quick, drafts=8))}) as pool:
        chain = make(ChatTeola(pool=pool))
        fast = accelerate(chain)
        requests = record(pool.engine("llm"))
        with suppress(ValueError):  # what a fake writes is no label
            (fast if planned else chain).invoke(QUESTION)
        request = [one for one in requests if isinstance(one.payload, Generate)][-1]
        assert len(set(request.drafts)) == len(request.drafts)
        if planned or make is not judged:  # what reads an answer, the graph alone knows
            assert any(text.startswith(first) for text in request.drafts)
        assert what in fast.explain(details=True)


def test_sampled_requests_get_no_drafts() -> None:
    quick = profiles.scaled(profiles.rtx3090(), 0.0)["llm"]
    with EnginePool.local({"llm": FakeLLM("llm", replace(quick, drafts=8))}) as pool:
        requests = record(pool.engine("llm"))
        with_tools(ChatTeola(pool=pool, temperature=0.5)).invoke(QUESTION)
        assert [one.drafts for one in requests] == [()]


def test_trace_summary_counts_drafted_and_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeLLM._generated

    def generated(self: FakeLLM, *given: Any) -> Any:
        return replace(made(self, *given), drafted=10, accepted=7)

    monkeypatch.setattr(FakeLLM, "_generated", generated)
    quick = profiles.scaled(profiles.rtx3090(), 0.0)["llm"]
    with EnginePool.local({"llm": FakeLLM("llm", replace(quick, drafts=8))}) as pool:
        chain = refined(pool)
        fast = accelerate(chain)
        fast.invoke(QUESTION)
        summary = fast.last_trace().summary()
        assert (summary["drafted_tokens"], summary["accepted_tokens"]) == (20, 14)
        with pool.watching() as run:
            chain.invoke(QUESTION)
        assert run.trace.result().summary()["drafted_tokens"] == 20
