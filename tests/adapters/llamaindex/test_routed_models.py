"""Tests that a binding holds wherever the accelerated object calls the model, and nowhere else."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import Document, Settings, SummaryIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai_like import OpenAILike
from support.openai_stub import MODEL, OpenAIStub, openai_stub

import teola_plugin
from teola_plugin import accelerate
from teola_plugin.adapters.plan_report import Status
from teola_plugin.adapters.routing import route_of
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

QUESTION = "why?"
BY_ITSELF = "text text text"
"""What the model answers without an engine."""
global_llm = MockLLM(max_tokens=3)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool.local({"llm": FakeLLM(), "embedder": FakeEmbedder()}) as made:
        yield made


@pytest.fixture
def llm() -> MockLLM:
    return MockLLM(max_tokens=3)


class AttributeFlow(Workflow):
    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.llm = llm

    @step
    async def speak(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(await self.llm.acomplete(QUESTION)))


class GlobalFlow(Workflow):
    @step
    async def speak(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(await global_llm.acomplete(QUESTION)))


class SettingsFlow(Workflow):
    @step
    async def speak(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(await Settings.llm.acomplete(QUESTION)))


def closure_flow(llm: Any) -> Workflow:
    class ClosureFlow(Workflow):
        @step
        async def speak(self, ev: StartEvent) -> StopEvent:
            return StopEvent(result=str(await llm.acomplete(QUESTION)))

    return ClosureFlow()


def run(workflow: Any) -> str:
    async def result() -> Any:
        return await workflow.run()

    return str(asyncio.run(result()))


FLOWS: dict[str, Callable[[MockLLM], Workflow]] = {
    "an attribute": AttributeFlow,
    "a closure": closure_flow,
    "the settings": lambda _: SettingsFlow(),
}


@pytest.mark.parametrize("holder", FLOWS)
def test_bound_llm_called_by_a_step_uses_the_engine(
    pool: EnginePool, llm: MockLLM, holder: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)
    flow = FLOWS[holder](llm)
    fast = accelerate(flow, pool=pool, bind=[(llm, "llm")])
    assert run(flow) == BY_ITSELF
    assert run(fast) != BY_ITSELF
    assert [span.engine for span in fast.last_trace().spans] == ["llm"]


def test_bound_global_llm_called_by_a_step_uses_the_engine(pool: EnginePool) -> None:
    flow = GlobalFlow()
    fast = accelerate(flow, pool=pool, bind=[(global_llm, "llm")])
    assert run(fast) != BY_ITSELF
    assert run(flow) == BY_ITSELF


class OwnComponent:
    """A class that LlamaIndex knows nothing of."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm


class OwnEngine(CustomQueryEngine):
    """A query engine whose model is an attribute of a component of the user's own."""

    component: Any

    def custom_query(self, query_str: str) -> str:
        return self.component.llm.complete(query_str).text  # type: ignore[no-any-return]

    async def acustom_query(self, query_str: str) -> str:
        return str(await self.component.llm.acomplete(query_str))


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_bound_llm_in_a_user_component_uses_the_engine(pool: EnginePool, llm: MockLLM, way: str) -> None:
    engine = OwnEngine(component=OwnComponent(llm))
    fast = accelerate(engine, pool=pool, bind=[(llm, "llm")])
    ask = (lambda one: one.query(QUESTION)) if way == "query" else (lambda one: asyncio.run(one.aquery(QUESTION)))
    assert str(ask(fast)) != BY_ITSELF
    assert str(ask(engine)) == BY_ITSELF


def summary_engine(llm: Any, **options: Any) -> Any:
    return SummaryIndex.from_documents([Document(text="lambs eat grass")]).as_query_engine(llm=llm, **options)


def test_streamed_answer_read_later_comes_from_the_engine(pool: EnginePool, llm: MockLLM) -> None:
    engine = summary_engine(llm, streaming=True)
    fast = accelerate(engine, pool=pool, bind=[(llm, "llm")])
    answer = fast.query(QUESTION)
    assert llm.complete(QUESTION).text == BY_ITSELF
    assert "".join(answer.response_gen) != BY_ITSELF


def test_bound_llm_outside_the_accelerated_object_skips_the_engine(pool: EnginePool, llm: MockLLM) -> None:
    fast = accelerate(summary_engine(llm), pool=pool, bind=[(llm, "llm")])
    assert str(fast.query(QUESTION)) != BY_ITSELF
    assert llm.complete(QUESTION).text == BY_ITSELF
    assert asyncio.run(llm.acomplete(QUESTION)).text == BY_ITSELF


def test_settings_changed_on_a_bound_llm_apply_to_calls(pool: EnginePool) -> None:
    from support.recording import record

    llm = MockLLM(max_tokens=3)
    fast = accelerate(summary_engine(llm), pool=pool, bind=[(llm, "llm")])
    requests = record(pool.engine("llm"))
    fast.query(QUESTION)
    llm.max_tokens = 7
    fast.query(QUESTION)
    payloads = [request.payload for request in requests if hasattr(request.payload, "sampling")]
    assert {payload.sampling.max_tokens for payload in payloads} == {3, 7}


def test_uninstall_stops_routing_of_bound_models(pool: EnginePool, llm: MockLLM) -> None:
    engine = summary_engine(llm)
    fast = accelerate(engine, pool=pool, bind=[(llm, "llm")])
    bound = pool.bound(llm, "llm")
    before = str(fast.query(QUESTION))
    assert before != BY_ITSELF
    teola_plugin.uninstall()
    try:
        assert str(fast.query(QUESTION)) == BY_ITSELF
        assert bound.complete(QUESTION).text == BY_ITSELF
    finally:
        again = accelerate(engine, pool=pool, bind=[(llm, "llm")])
    assert str(again.query(QUESTION)) == before


# ------------------------------------------------------------ objects of `pool.bound`


def test_a_bound_model_is_routed_wherever_it_is_called(pool: EnginePool, llm: MockLLM) -> None:
    bound = pool.bound(llm, "llm")
    assert bound.complete(QUESTION).text != BY_ITSELF
    assert asyncio.run(bound.acomplete(QUESTION)).text == bound.complete(QUESTION).text
    assert bound.chat([]).message.content != BY_ITSELF
    assert llm.complete(QUESTION).text == BY_ITSELF


def test_a_bound_model_shares_the_state_of_the_original(pool: EnginePool, llm: MockLLM) -> None:
    bound = pool.bound(llm, "llm")
    bound.system_prompt = "be brief"
    assert isinstance(bound, MockLLM)
    assert type(bound).__name__ == "MockLLM"
    assert llm.system_prompt == "be brief"
    assert route_of(type(bound)(max_tokens=2)) == (pool, "llm")


def test_a_bound_model_cannot_be_pickled(pool: EnginePool) -> None:
    bound = pool.bound(MockEmbedding(embed_dim=4), "embedder")
    assert len(bound.get_text_embedding("a")) == 32
    with pytest.raises(RegistrationError, match="cannot be pickled"):
        pickle.dumps(bound)


def test_a_bound_model_is_bound_to_one_engine(pool: EnginePool, llm: MockLLM) -> None:
    bound = pool.bound(llm, "llm")
    assert pool.bound(bound, "llm") is bound
    with EnginePool.local({"llm": FakeLLM()}) as other, pytest.raises(RegistrationError, match="is served by"):
        other.bound(bound, "llm")


# ------------------------------------------------------------ models that are made later


class CreatingFlow(Workflow):
    @step
    async def speak(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(await MockLLM(max_tokens=3).acomplete(QUESTION)))


def test_bound_class_created_in_a_step_uses_the_engine(pool: EnginePool) -> None:
    flow = CreatingFlow()
    fast = accelerate(flow, pool=pool, bind=[(MockLLM, "llm")])
    assert run(fast) != BY_ITSELF
    assert run(flow) == BY_ITSELF


def test_binding_a_class_that_is_no_model_raises(pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match="the class OwnComponent cannot be bound"):
        accelerate(CreatingFlow(), pool=pool, bind=[(OwnComponent, "llm")])


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_llm_on_served_server_created_in_step_uses_the_engine(stub: OpenAIStub) -> None:
    given: dict[str, Any] = {"model": MODEL, "api_base": stub.base_url, "api_key": "none", "is_chat_model": True}

    class ServerFlow(Workflow):
        def __init__(self) -> None:
            super().__init__()
            self.llm = OpenAILike(**given)

        @step
        async def speak(self, ev: StartEvent) -> StopEvent:
            return StopEvent(result=str(await OpenAILike(**given, temperature=0.5).acomplete(QUESTION)))

    flow = ServerFlow()
    fast = accelerate(flow, engines="auto")
    assert run(fast) == run(flow)
    assert [span.engine for span in fast.last_trace().spans] == [fast.__teola_session__.serving.bound[0].engine]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_report_lists_prefetched_calls_of_an_llm_on_served_server(stub: OpenAIStub) -> None:
    llm = OpenAILike(model=MODEL, api_base=stub.base_url, api_key="none", is_chat_model=True)
    index = SummaryIndex.from_documents([Document(text=text) for text in ("oats", "ivy", "grass")])
    fast = accelerate(index.as_query_engine(llm=llm, response_mode="accumulate"), engines="auto")
    fast.query(QUESTION)
    report = fast.report()
    assert report.prefetched == ("calls that RetrieverQueryEngine makes one after the other, side by side",)
    assert [row.name for row in report.with_status(Status.PREFETCHED)] == ["synthesize.answer"]
    assert "no gain" not in str(fast.explain())
