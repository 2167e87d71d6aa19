"""Tests of values whose classes the user defined: their methods run as often as in the original chain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.langchain import ChatTeola

TOLD: Counter[str] = Counter()


class Telling:
    def __format__(self, how: str) -> str:
        TOLD["format"] += 1
        return "told"


class Pieces(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        TOLD[key] += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("given", [{"question": Telling()}, {"question": Pieces(a="x")}, Pieces(question="x")])
def test_methods_of_input_values_run_as_often_as_originally(given: Any) -> None:
    with EnginePool.local(engines=[FakeLLM()]) as pool:
        llm = ChatTeola(pool=pool)

        def ask(text: str) -> Any:
            return ChatPromptTemplate.from_template(text) | llm | StrOutputParser()

        both = RunnablePassthrough.assign(a=ask("one of {question}"), b=ask("two"))
        chain = both | RunnablePassthrough.assign(c=ask("three {question}"))
        counts = []
        for one in (chain, accelerate(chain)):
            TOLD.clear()
            counts.append((one.invoke(given), TOLD.copy()))
    assert counts[0][0] == counts[1][0]
    assert counts[0][1] == counts[1][1]
