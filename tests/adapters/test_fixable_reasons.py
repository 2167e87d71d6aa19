"""Tests of report rows with a remedy: for an engine that is not dedicated, or a model that a function creates.

The line of code that a row suggests changes the row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableBranch, RunnableConfig, RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from support.documented import chain as documented
from support.hosted_steps import HostedLLM
from support.own_leaves import Chat, Ledger

from benchmarks.public_apps.server import fake_server
from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.explain import explain_undedicated
from teola_plugin.adapters.plan_report import CallRow, PlanReport, Reason, Status
from teola_plugin.cluster.client.shared_engine import SharedEngine
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.engines.websearch import WebSearchEngine
from teola_plugin.graph import EngineProfile
from teola_plugin.langchain import ChatTeola, TeolaWebSearch


def row_of(report: PlanReport, reason: Reason) -> CallRow:
    return next(row for row in report.calls if row.reason is reason)


def row_named(report: PlanReport, name: str) -> CallRow:
    return next(row for row in report.calls if row.name == name)


# ------------------------------------------------------------ engines that are not dedicated


class State(TypedDict, total=False):
    x: str
    a: str
    b: str


def arm(pool: EnginePool) -> Any:
    """Return a chain with a branch that may be chosen."""
    ask, model = ChatPromptTemplate.from_template, ChatTeola(pool=pool, max_tokens=4)
    judged = RunnablePassthrough.assign(verdict=ask("Is {x} a question?") | model | StrOutputParser())
    return judged | RunnableBranch((lambda x: x["verdict"] == "yes", ask("Answer {x}") | model), lambda x: "no")


def node_that_may_run(pool: EnginePool) -> Any:
    """Build a graph with a search in a node that the first node may choose."""
    model = ChatTeola(pool=pool, max_tokens=4)
    retriever = TeolaWebSearch(pool=pool, engine="web", k=1)
    graph = StateGraph(State)
    graph.add_node("judge", lambda state: {"a": model.invoke(f"Is {state['x']} a question?").text})
    graph.add_node("search", lambda state: {"b": retriever.invoke(state["x"])[0].page_content})
    graph.add_node("end", lambda state: {"b": "no"})
    graph.add_edge(START, "judge")
    graph.add_conditional_edges("judge", lambda state: "search" if "y" in state["a"] else "end", ["search", "end"])
    return graph.compile()


UNDEDICATED: dict[str, tuple[Callable[[EnginePool], Any], str, tuple[str, ...], str]] = {
    "items of a list": (
        documented,
        "found.retrieve",
        ("embedder", "store"),
        "FakeEmbedder(..., dedicated=True), FakeStore(..., dedicated=True)",
    ),
    "an arm": (arm, "ahead.model", ("llm",), "FakeLLM(..., dedicated=True)"),
    "a node that may run": (node_that_may_run, "search.search", ("web",), "WebSearchEngine(..., dedicated=True)"),
}
"""An object, the name of the row, the engines that are not dedicated, and the line to write."""


@contextmanager
def pool_with(*dedicated: str) -> Iterator[EnginePool]:
    """Make a pool in which engines are dedicated that are named, and all that are not in `UNDEDICATED`."""
    undedicated = {name for _, _, names, _ in UNDEDICATED.values() for name in names} - {*dedicated}
    profiles = {name: replace(profile, dedicated=name not in undedicated) for name, profile in rtx3090().items()}
    web = WebSearchEngine("web", service="searxng", base_url="http://localhost:9", dedicated="web" in dedicated)
    engines = fake_engines(profiles)
    with EnginePool.local({**{engine.name: engine for engine in engines}, "web": web}) as pool:
        yield pool


@pytest.mark.parametrize("case", UNDEDICATED)
def test_report_names_undedicated_engine_and_its_fix(case: str) -> None:
    make, name, engines, fix = UNDEDICATED[case]
    others = {one for _, _, names, _ in UNDEDICATED.values() for one in names} - {*engines}
    with pool_with(*others) as pool:
        before = accelerate(make(pool), pool=pool).report()
    with pool_with(*others, *engines) as pool:
        after = accelerate(make(pool), pool=pool).report()

    assert row_named(before, name).reason is Reason.NOT_DEDICATED
    assert row_named(before, name).status is Status.IN_PLACE
    assert row_named(before, name).fix == fix
    assert f"write: {fix}" in str(before)
    assert row_named(after, name).status is Status.SPECULATIVE
    assert Reason.NOT_DEDICATED not in {row.reason for row in after.calls}


@pytest.mark.parametrize("options", [{"speculate": "off"}, {"passes": ()}])
def test_report_omits_undedicated_engines_without_speculation(options: dict[str, Any]) -> None:
    with pool_with() as pool:
        report = accelerate(documented(pool), **options).report()

    assert Reason.NOT_DEDICATED not in {row.reason for row in report.calls}


def test_report_omits_engines_without_effect() -> None:
    """Each call needs what the one before gave."""
    with pool_with() as pool:
        ask, model = ChatPromptTemplate.from_template, ChatTeola(pool=pool, max_tokens=4)
        report = accelerate(ask("A of {x}") | model | StrOutputParser() | ask("B of {a}") | model).report()

    assert [row.reason for row in report.calls] == [Reason.FIRST, Reason.NEEDS_RESULTS]


class PoolOfCluster:
    """A pool with one engine of a cluster, which is not dedicated."""

    profiles = {"llm": EngineProfile(dedicated=False)}

    def engine(self, name: str) -> SharedEngine:
        return object.__new__(SharedEngine)


def test_report_names_the_pool_file_option_of_a_shared_engine() -> None:
    explanation = explain_undedicated(PoolOfCluster(), lambda engines: "llm" in engines)  # type: ignore[arg-type]

    assert explanation is not None
    assert explanation.reason is Reason.NOT_DEDICATED_SHARED
    assert explanation.fix == "options: {dedicated: true} of the engine llm in the pool's file"


# ------------------------------------------------------------ models that functions create


def two_nodes(second: Callable[..., Any]) -> Any:
    model = Chat(ledger=Ledger())
    graph = StateGraph(State)
    graph.add_node("one", lambda state: {"a": model.invoke(f"A of {state['x']}").text})
    graph.add_node("two", second)
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    return graph.compile()


def node_creates_a_model(state: State) -> State:
    model = Chat(ledger=Ledger())
    return {"b": model.invoke(f"B of {state['x']}").text}


def node_with_a_model_of_the_state(state: State) -> State:
    model = Chat(ledger=Ledger(), name=state["x"])
    return {"b": model.invoke(f"B of {state['x']}").text}


MODEL = Chat(ledger=Ledger())


def node_with_a_model_outside(state: State) -> State:
    return {"b": MODEL.invoke(f"B of {state['x']}").text}


@pytest.mark.parametrize("node", [node_creates_a_model, node_with_a_model_of_the_state])
def test_report_names_model_created_in_a_node_and_its_fix(node: Any) -> None:
    before = accelerate(two_nodes(node)).report()
    after = accelerate(two_nodes(node_with_a_model_outside)).report()

    row = row_of(before, Reason.MODEL_INSIDE)
    assert (row.target, row.status) == ("Chat", Status.IN_PLACE)
    assert row.source.rpartition(":")[2] == str(node.__code__.co_firstlineno + 1)
    assert row.fix == "model = Chat(...)  # outside of the function"
    assert "Chat is called inside the function" in before.expect
    assert not before.with_status(Status.NOT_SEEN)
    assert [row.name for row in after.with_status(Status.PREFETCHED)] == ["two.model"]
    assert Reason.MODEL_INSIDE not in {row.reason for row in after.calls}


def test_report_names_model_created_in_a_function_of_a_chain() -> None:
    model = Chat(ledger=Ledger())

    def creates(x: str) -> list[AIMessage]:
        return [model.invoke(f"A of {x}"), Chat(ledger=Ledger()).invoke(f"B of {x}")]

    def uses(x: str) -> list[AIMessage]:
        return [model.invoke(f"A of {x}"), model.invoke(f"B of {x}")]

    before = accelerate(RunnableLambda(creates)).report()
    after = accelerate(RunnableLambda(uses)).report()

    assert row_of(before, Reason.MODEL_INSIDE).target == "Chat"
    assert not before.with_status(Status.NOT_SEEN)
    assert [row.name for row in after.with_status(Status.PREFETCHED)] == ["uses.model2"]


def test_report_names_model_chosen_by_settings_without_fix() -> None:
    def second(state: State, config: RunnableConfig) -> State:
        model = Chat(ledger=Ledger(), name=config["configurable"]["name"])
        return {"b": model.invoke(f"B of {state['x']}").text}

    row = row_of(accelerate(two_nodes(second)).report(), Reason.MODEL_OF_SETTINGS)

    assert (row.name.partition(":")[0], row.target, row.fix) == ("two", "Chat", "")


def node_with_a_model_of_the_config(state: State, config: RunnableConfig) -> State:
    model = ChatOpenAI(model=config["configurable"]["model"])
    return {"b": model.invoke(f"B of {state['x']}").text}


def node_with_a_model_of_the_environment(state: State) -> State:
    model = ChatOpenAI(model=os.environ["TEOLA_TEST_MODEL"])
    return {"b": model.invoke(f"B of {state['x']}").text}


@pytest.mark.parametrize(
    ("node", "said_before"),
    [
        (node_with_a_model_of_the_config, "from the second call with the same settings on"),
        (node_with_a_model_of_the_environment, "with other settings from their second call on"),
    ],
)
def test_speed_up_with_model_of_settings_is_known_after_calls(
    node: Any, said_before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(0.2, keeps_connections=False) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("TEOLA_TEST_MODEL", "small")
        first = ChatOpenAI(model="small")
        graph = StateGraph(State)
        graph.add_node("one", lambda state: {"a": first.invoke(f"A of {state['x']}").text})
        graph.add_node("two", node)
        graph.add_edge(START, "one")
        graph.add_edge("one", "two")
        fast: Any = accelerate(graph.compile())
        before = fast.report()
        for _ in range(4):
            fast.invoke({"x": "oats"}, {"configurable": {"model": "small"}})
            time.sleep(0.05)  # plans that are missing are made behind the call
        after = fast.report()

    assert [row.target for row in before.calls if row.name.startswith("two")] == ["ChatOpenAI"]
    assert before.expect.startswith("not known yet")
    assert said_before in before.text()
    assert before.expected_speed_up is None
    assert after.expected_speed_up > 1.3
    assert "times faster in the last call" in after.expect


class Found(Event):
    text: str


class Creates(Workflow):
    @step
    async def find(self, ev: StartEvent) -> Found:
        return Found(text=ev.query)

    @step
    async def answer(self, ev: Found) -> StopEvent:
        llm = HostedLLM()
        return StopEvent(result=[str(await llm.acomplete("A")), str(await llm.acomplete("B"))])


class Uses(Creates):
    def __init__(self) -> None:
        super().__init__()
        self.llm = HostedLLM()

    @step
    async def answer(self, ev: Found) -> StopEvent:
        return StopEvent(result=[str(await self.llm.acomplete("A")), str(await self.llm.acomplete("B"))])


def test_report_names_llm_created_in_a_step_and_its_fix() -> None:
    before = accelerate(Creates()).report()
    after = accelerate(Uses()).report()

    row = row_of(before, Reason.MODEL_INSIDE)
    assert (row.name.partition(":")[0], row.target) == ("answer", "HostedLLM")
    assert row.fix == "model = HostedLLM(...)  # outside of the function"
    assert not before.with_status(Status.NOT_SEEN)
    assert after.with_status(Status.PREFETCHED)
    assert Reason.MODEL_INSIDE not in {row.reason for row in after.calls}
