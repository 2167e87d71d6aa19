"""A pool without engines only traces: apps on models of their own prefetch the same calls as without a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, StateGraph
from llama_index.core import Document, SummaryIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import MockLLM
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.hosted_steps import HostedLLM, called, compared

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import fake_engines
from teola_plugin.observe import QueryTrace
from tests.support.provider_models import Model, Server

ITEMS = 4


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def pool(exporter: InMemorySpanExporter) -> Iterator[EnginePool]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with EnginePool.local(tracing=provider) as running:
        yield running
    provider.shutdown()


def ended_traces(pool: EnginePool) -> tuple[QueryTrace, ...]:
    """Return the traces of all queries. The pool is closed: then all have ended."""
    pool.close()
    return pool.traces


def span_names(pool: EnginePool, exporter: InMemorySpanExporter) -> list[str]:
    """Return the names of the spans that the pool has sent. It is closed: then all are sent."""
    pool.close()
    return [span.name for span in exporter.get_finished_spans()]


# ------------------------------------------------------------ LlamaIndex


class Grading(Workflow):
    """Grades one item after the other, and fails at the end if it is to."""

    def __init__(self, llm: HostedLLM, *, fails: bool = False) -> None:
        super().__init__(timeout=60)
        self.llm, self.fails = llm, fails

    @step
    async def grade(self, ev: StartEvent) -> StopEvent:
        grades = [str(await self.llm.acomplete(f"grade {number} for {ev.query}")) for number in range(ITEMS)]
        if self.fails:
            raise ValueError("no grade fits")
        return StopEvent(result=grades)


def test_workflow_prefetches_and_is_traced(pool: EnginePool, exporter: InMemorySpanExporter) -> None:
    original_llm, llm = compared(Grading, pool=pool, app="grader")

    assert original_llm.most_at_once == 1
    assert llm.most_at_once == ITEMS
    names = span_names(pool, exporter)
    assert names.count("grader") == 1
    assert len([name for name in names if name.startswith("HostedLLM")]) == ITEMS


def test_report_of_a_workflow_is_that_without_a_pool(pool: EnginePool) -> None:
    bare, traced = accelerate(Grading(HostedLLM())), accelerate(Grading(HostedLLM()), pool=pool)

    assert traced.explain(details=True) == bare.explain(details=True)


def test_workflow_that_fails_raises_its_error_and_is_traced(pool: EnginePool) -> None:
    llm, bare_llm = HostedLLM(), HostedLLM()
    fast, bare = accelerate(Grading(llm, fails=True), pool=pool), accelerate(Grading(bare_llm, fails=True))

    for failing in (fast, bare):
        with pytest.raises(ValueError, match="no grade fits"):
            called(failing)

    assert llm.prompts == bare_llm.prompts
    trace, bare_trace = fast.last_trace(), bare.last_trace()
    assert len(trace.spans) == len(bare_trace.spans) == ITEMS


def test_workflow_with_prefetching_off_is_only_traced(pool: EnginePool) -> None:
    _, llm = compared(Grading, pool=pool, speculate="off")

    assert llm.most_at_once == 1
    assert len(ended_traces(pool)) == 1


def test_workflow_on_a_pool_with_engines_keeps_its_calls_in_place() -> None:
    with EnginePool.local(fake_engines()) as engines:
        _, llm = compared(Grading, pool=engines)

    assert llm.most_at_once == 1


def engine(llm: HostedLLM) -> Any:
    index = SummaryIndex.from_documents([Document(text=f"text {number}", id_=str(number)) for number in range(ITEMS)])
    return index.as_query_engine(llm=llm, response_mode="accumulate")


def test_query_engine_prefetches_and_is_traced(pool: EnginePool, exporter: InMemorySpanExporter) -> None:
    original_llm, llm = HostedLLM(), HostedLLM()
    expected = str(engine(original_llm).query("oats"))
    fast = accelerate(engine(llm), pool=pool, app="reader", concurrent=[HostedLLM])

    assert str(fast.query("oats")) == expected

    assert llm.prompts == original_llm.prompts
    assert llm.most_at_once == ITEMS
    names = span_names(pool, exporter)
    assert names.count("reader") == 1
    assert len([name for name in names if name.startswith("HostedLLM")]) == ITEMS


def test_query_engine_inside_another_prefetches(pool: EnginePool) -> None:
    from llama_index.core.query_engine import RouterQueryEngine
    from llama_index.core.selectors import LLMSingleSelector
    from llama_index.core.tools import QueryEngineTool

    class FirstChoice(HostedLLM):
        def _end(self, prompt: str) -> str:
            answer = super()._end(prompt)
            return '[{"choice": 1, "reason": "first"}]' if "choices" in prompt.lower() else answer

    def router(llm: HostedLLM) -> Any:
        tools = [QueryEngineTool.from_defaults(engine(llm), name=name, description=name) for name in ("a", "b")]
        return RouterQueryEngine(LLMSingleSelector.from_defaults(llm), tools, llm=llm)

    original_llm, bare_llm, llm = FirstChoice(), FirstChoice(), FirstChoice()
    expected = str(router(original_llm).query("oats"))

    assert str(accelerate(router(bare_llm), concurrent=[FirstChoice]).query("oats")) == expected
    assert str(accelerate(router(llm), pool=pool, concurrent=[FirstChoice]).query("oats")) == expected

    assert llm.prompts == bare_llm.prompts == original_llm.prompts
    assert llm.most_at_once == bare_llm.most_at_once == ITEMS
    assert len(ended_traces(pool)) == 1


def test_async_query_is_traced_and_runs_as_the_original(pool: EnginePool) -> None:
    original_llm, llm = HostedLLM(), HostedLLM()
    expected = str(asyncio.run(engine(original_llm).aquery("oats")))
    fast = accelerate(engine(llm), pool=pool)

    assert str(asyncio.run(fast.aquery("oats"))) == expected

    assert llm.prompts == original_llm.prompts
    assert len(ended_traces(pool)) == 1


def test_deadline_of_a_query_holds(pool: EnginePool) -> None:
    from teola_plugin.errors import QueryTimeout

    fast = accelerate(engine(HostedLLM(latency_s=0.2)), pool=pool).with_request_context(deadline_s=0.05)

    with pytest.raises(QueryTimeout):
        asyncio.run(fast.aquery("oats"))


def test_agent_answers_as_before_and_is_traced(pool: EnginePool) -> None:
    async def run(agent: Any) -> str:
        return str(await agent.run("oats"))

    def agent() -> FunctionAgent:
        return FunctionAgent(name="helper", tools=[], llm=ChattingLLM(max_tokens=4))

    fast = accelerate(agent(), pool=pool)

    assert asyncio.run(run(fast)) == asyncio.run(run(agent()))
    assert len(ended_traces(pool)) == 1


class ChattingLLM(MockLLM):
    """A model that an agent takes for one that calls tools."""

    @property
    def metadata(self) -> Any:
        return super().metadata.model_copy(update={"is_function_calling_model": True})

    async def astream_chat_with_tools(self, tools: Any, chat_history: Any = None, **kwargs: Any) -> Any:
        return await self.astream_chat(chat_history)

    def get_tool_calls_from_response(self, response: Any, **kwargs: Any) -> list[Any]:
        return []


# ------------------------------------------------------------ LangChain and LangGraph


def function_of(model: Model) -> Any:
    def grade(question: str) -> list[str]:
        return [str(model.invoke(f"grade {number} for {question}").content) for number in range(ITEMS)]

    return RunnableLambda(grade)


def graph_of(model: Model) -> Any:
    class State(TypedDict):
        question: str
        grades: list[str]

    def grade(state: State) -> Any:
        return {"grades": [str(model.invoke(f"{n} {state['question']}").content) for n in range(ITEMS)]}

    graph = StateGraph(State)
    graph.add_node("grade", grade)
    graph.add_edge(START, "grade")
    graph.add_edge("grade", END)
    return graph.compile()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda app, value: app.invoke(value),
    "ainvoke": lambda app, value: asyncio.run(app.ainvoke(value)),
    "batch": lambda app, value: app.batch([value, value]),
    "limited batch": lambda app, value: app.batch([value, value], {"max_concurrency": 3}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("make", "value"), [(function_of, "oats"), (graph_of, {"question": "oats"})])
def test_langchain_app_prefetches_as_without_a_pool(make: Any, value: Any, way: str, pool: EnginePool) -> None:
    outcomes, servers = list[Any](), list[Server]()
    for options in (None, {}, {"pool": pool}):
        server = Server()
        app = make(Model(server=server))
        outcomes.append(WAYS[way](app if options is None else accelerate(app, **options), value))
        servers.append(server)

    original, bare, traced = servers
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert sorted(traced.calls) == sorted(bare.calls) == sorted(original.calls)
    assert traced.most_at_once == bare.most_at_once > original.most_at_once
    assert ended_traces(pool)
