"""The seam sees provider calls wherever the model comes from, and a prefetched equal call is claimed there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from differential.recording import observe
from langchain.chat_models import init_chat_model
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from support.openai_stub import MODEL, Stub, openai_stub
from support.provider_models import Model, Server

from teola_plugin.adapters.langchain.composite_calls import CompositeCalls, PartCall, intercept_composite_methods

QUESTION = "why"


@tool
def lookup(word: str) -> str:
    """Look a word up."""
    return word


class Holder:
    """Has a model as an attribute, and a method that calls it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def ask(self, question: str) -> Any:
        return self.model.invoke(question)


def asks(model: Any, question: str) -> Any:
    return model.invoke(question)


GLOBAL: dict[str, Any] = {}

PLACES: dict[str, Callable[[Any], Runnable[Any, Any]]] = {
    "itself": lambda model: model,
    "a closure": lambda model: RunnableLambda(lambda question: model.invoke(question)),
    "a global": lambda model: (GLOBAL.update(model=model), RunnableLambda(lambda q: GLOBAL["model"].invoke(q)))[1],
    "an attribute": lambda model: RunnableLambda(functools.partial(lambda one, q: one.model.invoke(q), Holder(model))),
    "a method": lambda model: RunnableLambda(Holder(model).ask),
    "a partial": lambda model: RunnableLambda(functools.partial(asks, model)),
    "an equal model that is made in the function": lambda model: RunnableLambda(
        lambda question: Model(server=model.server, label=model.label).invoke(question)
    ),
    "with_retry": lambda model: model.with_retry(),
    "with_fallbacks": lambda model: model.with_fallbacks([Model()]),
    "with_config": lambda model: model.with_config(tags=["mine"]),
    "configurable_fields": lambda model: model.configurable_fields(label=ConfigurableField(id="label")),
}


def prefetched(*calls: PartCall) -> Any:
    """Prefetch these calls in the body, and wait until they have ended."""
    intercept_composite_methods()
    return CompositeCalls(calls, None, on_loop=False).running()


def wait_for_calls(count: int, calls: Callable[[], int]) -> None:
    """Wait until a provider has got so many calls."""
    for _ in range(500):
        if calls() >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"{calls()} calls, not {count}")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("entry", ["invoke", "stream"])
def test_a_prefetched_call_is_claimed_wherever_the_model_is(place: str, entry: str) -> None:
    plain, server = Server(), Server()
    expected = observe(PLACES[place](Model(server=plain, label="a")), entry, QUESTION)
    model = Model(server=server, label="a")
    chain = PLACES[place](model)
    streams = entry == "stream" and not isinstance(chain, RunnableLambda)
    part = RunnableLambda(lambda question: list(model.stream(question))) if streams else model

    with prefetched(PartCall(part, QUESTION, {})):
        wait_for_calls(1, lambda: server.calls.total())
        result = observe(chain, entry, QUESTION)

    assert result == expected
    assert server.calls == plain.calls
    assert server.calls.total() == 1


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with openai_stub() as server:
        yield server


def openai(stub: Stub, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=stub.base_url, api_key="k", model=MODEL, temperature=0.0, **more)  # type: ignore[arg-type]


def _initialised(stub: Stub, **more: Any) -> Any:
    return init_chat_model(MODEL, model_provider="openai", base_url=stub.base_url, api_key="k", temperature=0.0, **more)


CREATED: dict[str, tuple[Callable[[Stub], Any], dict[str, Any]]] = {
    "ChatOpenAI": (lambda stub: openai(stub), {}),
    "init_chat_model": (lambda stub: _initialised(stub), {}),
    "init_chat_model, configurable": (lambda stub: _initialised(stub, configurable_fields=("temperature",)), {}),
    "bind": (lambda stub: openai(stub).bind(stop=["x"]), {"stop": ["x"]}),
}


@pytest.mark.parametrize("name", CREATED)
def test_a_model_that_is_created_in_the_function_claims_the_call_of_an_equal_one(stub: Stub, name: str) -> None:
    create, kwargs = CREATED[name]
    chain = RunnableLambda(lambda question: create(stub).invoke(question))
    expected = chain.invoke(QUESTION)
    before = len(stub.asked)

    with prefetched(PartCall(openai(stub), QUESTION, kwargs)):
        wait_for_calls(before + 1, lambda: len(stub.asked))
        result = chain.invoke(QUESTION)

    assert result.content == expected.content
    assert result.response_metadata == expected.response_metadata
    assert len(stub.asked) == before + 1


def test_bound_tools_are_a_part_of_the_request(stub: Stub) -> None:
    bound = openai(stub).bind_tools([lookup])
    chain = RunnableLambda(lambda question: openai(stub).bind_tools([lookup]).invoke(question))
    before = len(stub.asked)
    with prefetched(PartCall(bound, QUESTION, {}), PartCall(openai(stub), QUESTION, {})):
        wait_for_calls(before + 2, lambda: len(stub.asked))
        chain.invoke(QUESTION)
    assert len(stub.asked) == before + 2


def test_another_configuration_is_another_call(stub: Stub) -> None:
    before = len(stub.asked)
    with prefetched(PartCall(openai(stub), QUESTION, {})):
        wait_for_calls(before + 1, lambda: len(stub.asked))
        openai(stub, max_tokens=3).invoke(QUESTION)
    assert len(stub.asked) == before + 2


def test_a_call_on_a_loop_is_not_claimed_from_a_call_on_a_thread() -> None:
    server = Server()
    model = Model(server=server)
    with prefetched(PartCall(model, QUESTION, {})):
        wait_for_calls(1, lambda: server.calls.total())
        asyncio.run(model.ainvoke(QUESTION))
    assert set(server.calls) == {("_generate", QUESTION), ("_agenerate", QUESTION)}
