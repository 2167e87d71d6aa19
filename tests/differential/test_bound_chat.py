"""Tests of chains whose `ChatOpenAI` is bound to a server: equal answers, and the plan makes every call of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_openai import ChatOpenAI
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import accelerate
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUESTION = {"question": "What grows?", "template": "a name that a function of ours might have, too"}


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


@pytest.fixture(scope="module")
def pool(stub: OpenAIStub) -> Iterator[EnginePool]:
    with EnginePool.local(llm=OpenAIServer(base_url=stub.base_url, prefix_caching=True, calibrate=False)) as made:
        yield made


def ask(text: str, model: Any) -> Runnable[Any, Any]:
    return ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", text)]) | model | StrOutputParser()


CHAINS: dict[str, tuple[Callable[[Any], Runnable[Any, Any]], int]] = {
    "independent steps": (
        lambda m: RunnablePassthrough.assign(a=ask("Rewrite {question}", m)).assign(b=ask("Shorten {question}", m)),
        2,
    ),
    "independent steps, and an answer": (
        lambda m: (
            RunnablePassthrough.assign(a=ask("Rewrite {question}", m)).assign(b=ask("Shorten {question}", m))
            | ask("Answer {a} or {b} by {template}", m)
        ),
        3,
    ),
}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("name", CHAINS)
def test_every_call_of_a_bound_chat_model_is_planned(name: str, way: str, pool: EnginePool, stub: OpenAIStub) -> None:
    make, calls = CHAINS[name]
    model = ChatOpenAI(model=MODEL, base_url=stub.base_url, api_key="none", temperature=0.0, max_retries=0)  # type: ignore[arg-type]
    chain = make(model)
    fast = accelerate(chain, pool=pool, bind=[(model, "llm")])

    def answered(one: Any) -> Any:
        return asyncio.run(one.ainvoke(QUESTION)) if way == "ainvoke" else one.invoke(QUESTION)

    before = answered(chain)
    stub.requests.clear()
    assert answered(fast) == before
    assert (
        sum(body.get("max_tokens") != 1 and body.get("max_completion_tokens") != 1 for _, body in stub.requests)
        == calls
    )
    planned = [span for span in fast.last_trace().spans if span.kind == "DECODING" and span.outcome == "done"]
    assert calls - 1 <= len(planned) <= calls, "the first may be the plain object's: it is a race"
