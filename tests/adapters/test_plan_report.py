"""Tests of `fast.report()`: one row for each place with calls, with what happens there and how to improve it."""

from __future__ import annotations

import asyncio
import linecache
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.schema import TextNode
from support.own_leaves import Chat, Ledger, SyncChat

from benchmarks.public_apps.__main__ import APPS, ASYNC_ONLY, Runner
from benchmarks.public_apps.apps import App
from benchmarks.public_apps.server import FakeServer, fake_server
from teola_plugin import accelerate
from teola_plugin.adapters.plan_report import CallRow, PlanReport, Reason, Status, relative_source

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of ChatOpenAI with a schema
GOLDEN = Path(__file__).parents[1] / "golden" / "explain"
SCALE = 0.05
"""Latencies of the fake server, small, but long enough to keep calls apart."""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(SCALE, keeps_connections=False) as running:
        yield running


# ------------------------------------------------------------ the apps after public tutorials


def with_code(text: str) -> str:
    """Return a text of `explain()` with the line of code in place of each `file:line`, and without its columns."""

    def code(match: re.Match[str]) -> str:
        return f"<{linecache.getline(match[1], int(match[2])).strip()}>"

    plan = re.compile(r"\n\np-graph .*?(?=\n\nAdvice|\Z)", re.DOTALL)
    return re.sub(r"  +", "  ", re.sub(r"(benchmarks/\S+\.py):(\d+)", code, plan.sub("", text)))


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_explain_names_each_call_with_its_line(
    app: App, server: FakeServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    fast = accelerate(app.build(server.base_url))

    text = with_code(fast.explain(details=True)) + "\n"

    path = GOLDEN / f"{app.name.replace(' ', '_')}.txt"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_calls_reported_as_prefetched_are_claimed_by_a_query(app: App, server: FakeServer) -> None:
    fast = accelerate(app.build(server.base_url))
    expected = {row.name for row in fast.report().with_status(Status.PREFETCHED)}
    way: Any = "ainvoke" if app.kind == "workflow" or app.name in ASYNC_ONLY else "invoke"

    with asyncio.Runner() as loop:
        Runner(server, loop).run(app, fast, way)

    report = fast.report()
    counts = {row.name: row.counts for row in report.with_status(Status.PREFETCHED) if row.counts is not None}
    taken = {name for name, one in counts.items() if one.hits}
    assert {row.name for row in report.with_status(Status.PREFETCHED)} == expected
    assert not [name for name, one in counts.items() if one.wasted]
    if app.kind == "query_engine":  # the first call of a list is made by the original, and not every part is asked
        assert taken
    else:
        assert taken == counts.keys()
    if report.seconds_saved is not None:
        assert ("no gain" in report.expect) == (not counts)


# ------------------------------------------------------------ the line to write


def two_steps(model: Any) -> Any:
    """Return a chain of two independent calls."""
    ask = ChatPromptTemplate.from_template
    return RunnablePassthrough.assign(a=ask("A of {x}") | model).assign(b=ask("B of {x}") | model)


class State(TypedDict, total=False):
    x: str
    a: str
    b: str


def two_nodes(model: Any, **second: Any) -> Any:
    """Build a graph of two independent nodes. `second`: options of the second node."""
    graph = StateGraph(State)
    graph.add_node("one", lambda state: {"a": model.invoke(f"A of {state['x']}").text})
    graph.add_node("two", lambda state: {"b": model.invoke(f"B of {state['x']}").text}, **second)
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    return graph.compile()


class OwnLLM(MockLLM):
    """An LLM whose calls share something."""

    calls: int = 0

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self.calls += 1
        return CompletionResponse(text="an answer")


def accumulating(llm: Any) -> Any:
    """Return a query engine that calls the model for each of two nodes."""
    index = VectorStoreIndex([TextNode(text=text) for text in ("a", "b")], embed_model=MockEmbedding(embed_dim=4))
    return index.as_query_engine(llm=llm, response_mode="accumulate")


def chat(**options: Any) -> Any:
    return Chat(ledger=Ledger(), **options)


def row_of(report: PlanReport, reason: Reason) -> CallRow:
    return next(row for row in report.calls if row.reason is reason)


Make = Callable[[], Any]
LIMITER = InMemoryRateLimiter(requests_per_second=1000)
FIXES: dict[str, tuple[Make, Reason, str, Make]] = {
    "one call at a time": (
        lambda: accelerate(two_steps(SyncChat(ledger=Ledger()))),
        Reason.ONE_AT_A_TIME,
        "accelerate(..., concurrent=[SyncChat])",
        lambda: accelerate(two_steps(SyncChat(ledger=Ledger())), concurrent=[SyncChat]),
    ),
    "one call at a time in a graph": (
        lambda: accelerate(two_nodes(SyncChat(ledger=Ledger()))),
        Reason.ONE_AT_A_TIME,
        "accelerate(..., concurrent=[SyncChat])",
        lambda: accelerate(two_nodes(SyncChat(ledger=Ledger())), concurrent=[SyncChat]),
    ),
    "one thread": (
        lambda: accelerate(accumulating(OwnLLM())),
        Reason.ONE_THREAD,
        "accelerate(..., concurrent=[OwnLLM])",
        lambda: accelerate(accumulating(OwnLLM()), concurrent=[OwnLLM]),
    ),
    "switched off": (
        lambda: accelerate(two_steps(chat()), speculate="off"),
        Reason.SWITCHED_OFF,
        'accelerate(..., speculate="auto")',
        lambda: accelerate(two_steps(chat()), speculate="auto"),
    ),
    "switched off for a graph": (
        lambda: accelerate(two_nodes(chat()), speculate="off"),
        Reason.SWITCHED_OFF,
        'accelerate(..., speculate="auto")',
        lambda: accelerate(two_nodes(chat()), speculate="auto"),
    ),
    "rate limiter": (
        lambda: accelerate(two_steps(chat(rate_limiter=LIMITER))),
        Reason.RATE_LIMITER,
        "Chat(..., rate_limiter=None)",
        lambda: accelerate(two_steps(chat(rate_limiter=None))),
    ),
    "rate limiter in a graph": (
        lambda: accelerate(two_nodes(chat(rate_limiter=LIMITER))),
        Reason.RATE_LIMITER,
        "Chat(..., rate_limiter=None)",
        lambda: accelerate(two_nodes(chat(rate_limiter=None))),
    ),
    "cache of answers": (
        lambda: accelerate(two_steps(chat(cache=InMemoryCache()))),
        Reason.CACHE,
        "Chat(..., cache=None)",
        lambda: accelerate(two_steps(chat(cache=None))),
    ),
    "handlers": (
        lambda: accelerate(two_steps(chat(callbacks=[BaseCallbackHandler()]))),
        Reason.HANDLERS,
        'Chat(..., callbacks=None, verbose=False), and invoke(..., config={"callbacks": [...]})',
        lambda: accelerate(two_steps(chat(callbacks=None, verbose=False))),
    ),
    "cache of a node": (
        lambda: accelerate(two_nodes(chat(), cache_policy=CachePolicy())),
        Reason.NODE_CACHE,
        "add_node('two', ..., cache_policy=None)",
        lambda: accelerate(two_nodes(chat(), cache_policy=None)),
    ),
}


@pytest.mark.parametrize("name", FIXES)
def test_fix_in_a_report_row_makes_its_call_prefetched(name: str) -> None:
    make, reason, fix, make_changed = FIXES[name]
    before = make().report()

    after = make_changed().report()

    assert row_of(before, reason).fix == fix
    assert f"write: {fix}" in str(before)
    assert not before.with_status(Status.PREFETCHED)
    assert after.with_status(Status.PREFETCHED)
    assert reason not in {row.reason for row in after.calls}


@pytest.mark.parametrize("make", [two_steps, two_nodes])
def test_report_names_a_global_cache_while_it_is_set(make: Callable[[Any], Any]) -> None:
    fast = accelerate(make(chat()))
    set_llm_cache(InMemoryCache())
    try:
        cached = fast.report()
    finally:
        set_llm_cache(None)

    assert row_of(cached, Reason.CACHE_OF_ALL).fix == "set_llm_cache(None)"
    assert not cached.with_status(Status.PREFETCHED)
    assert fast.report().with_status(Status.PREFETCHED)


# ------------------------------------------------------------ reasons that no line changes


def test_report_names_the_line_of_opaque_code() -> None:
    model = chat()

    def first(state: State) -> State:
        with open("/dev/null") as file:
            return {"a": file.read()}

    graph = StateGraph(State)
    graph.add_node("first", first)
    graph.add_node("second", lambda state: {"b": model.invoke(f"B of {state['a']}").text})
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")

    rows = {row.name: row for row in accelerate(graph.compile()).report().calls}

    path, _, line = rows["first"].source.rpartition(":")
    assert rows["first"].status is Status.NOT_SEEN
    assert linecache.getline(path, int(line)).strip() == 'with open("/dev/null") as file:'
    assert rows["second.model"].reason is Reason.UNKNOWN_UPDATES
    assert relative_source(rows["first"].source) in str(rows["second.model"].explanation)


def test_report_names_functions_without_source() -> None:
    names: dict[str, Any] = {"model": chat()}
    exec("def unread(x):\n    return model.invoke(x)", names)

    rows = accelerate(RunnableLambda(names["unread"])).report().calls

    assert [(row.status, row.target, row.reason) for row in rows] == [(Status.NOT_SEEN, "unread", Reason.NO_SOURCE)]


def test_report_names_interrupt_before_a_node() -> None:
    model = chat()
    graph = StateGraph(State)
    graph.add_node("one", lambda state: {"a": model.invoke(f"A of {state['x']}").text})
    graph.add_node("two", lambda state: {"b": model.invoke(f"B of {state['x']}").text})
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")

    report = accelerate(graph.compile(interrupt_before=["two"])).report()

    assert row_of(report, Reason.INTERRUPTED_BEFORE).name == "two.model"
    assert row_of(report, Reason.INTERRUPTED_BEFORE).fix == ""


def test_report_names_node_that_changes_an_object() -> None:
    model, styles = chat(), {"style": "plain"}

    def choose(state: State) -> State:
        styles["style"] = state["x"]
        return {"a": "chosen"}

    graph = StateGraph(State)
    graph.add_node("choose", choose)
    graph.add_node("write", lambda state: {"b": model.invoke(f"B in {styles['style']} of {state['x']}").text})
    graph.add_edge(START, "choose")
    graph.add_edge("choose", "write")

    row = row_of(accelerate(graph.compile()).report(), Reason.OBJECTS_CHANGED)

    assert row.name == "write.model"
    assert "choose" in str(row.explanation)
