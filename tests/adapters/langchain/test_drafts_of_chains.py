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
