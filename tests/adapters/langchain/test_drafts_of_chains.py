"""What an answer may repeat reaches the engine beside the request, and never decides which request it is."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
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
def test_a_refinement_gets_the_answer_before_it_as_its_draft(tokens: int, passes: Any) -> None:
    quick = profiles.scaled(profiles.rtx3090(), 0.0)["llm"]
    with EnginePool.local({"llm": FakeLLM("llm", replace(quick, drafts=tokens))}) as pool:
        chain = refined(pool)
        plain = chain.invoke(QUESTION)
        asked = record(pool.engine("llm"))
        assert accelerate(chain, passes=passes, app="mine").invoke(QUESTION) == plain
        [first, second] = [one for one in asked if isinstance(one.payload, Generate)]
        assert first.app == second.app == "mine"
        assert first.drafts == ()
        assert bool(second.drafts) == bool(tokens and passes)
        if second.drafts:
            assert second.drafts[0] in second.payload.prompt.flat() and second.drafts[0]


def test_explain_says_where_drafts_come_from() -> None:
    quick = profiles.scaled(profiles.rtx3090(), 0.0)["llm"]
    with EnginePool.local({"llm": FakeLLM("llm", replace(quick, drafts=8))}) as pool:
        told = accelerate(refined(pool)).explain(details=True)
    assert "\nDrafts\n" in told and "an earlier answer; its own prompt and text; recent outputs" in told
    with EnginePool.local({"llm": FakeLLM("llm", quick)}) as pool:
        assert "\nDrafts\n" not in accelerate(refined(pool)).explain(details=True)


def test_traces_count_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeLLM._generated

    def generated(self: FakeLLM, job: Any) -> Any:
        return replace(made(self, job), drafted=10, accepted=7)

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
