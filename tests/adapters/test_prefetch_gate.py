"""Apps whose calls are answered at once: nothing is prefetched, until calls have to wait for their provider."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langgraph.graph import END, START, StateGraph
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from typing_extensions import TypedDict

from benchmarks.public_apps import langchain_apps, langgraph_apps, llamaindex_apps
from benchmarks.public_apps.__main__ import WAYS, Runner
from benchmarks.public_apps.apps import App
from benchmarks.public_apps.server import FakeServer, fake_server
from teola_plugin import accelerate
from teola_plugin.runtime import prefetch_gate
from teola_plugin.runtime.prefetch_gate import (
    QUERIES_UNTIL_NEXT,
    SHORT_QUERIES,
    WAITS_IN_ROW,
    CallWaits,
    PrefetchGate,
    scope_in_place,
)
from teola_plugin.shims.langchain_interceptors import live_scopes
from tests.support import provider_models
from tests.support.hosted_steps import HostedLLM
from tests.support.provider_models import Model, Server

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of ChatOpenAI with a schema

NO_WAIT = "answered at once"
WAIT_S = 0.06
"""Seconds that a call of a slow model takes: long enough to be prefetched, in queries that are short."""


@pytest.fixture(autouse=True)
def gates_may_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any query of a test count as short."""
    monkeypatch.setattr(prefetch_gate, "SHORT_QUERY_S", 60.0)


@pytest.fixture
def gates_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all queries in place from the first on, whatever their calls take."""
    monkeypatch.setattr(prefetch_gate, "SHORT_QUERIES", -1000)
    monkeypatch.setattr(prefetch_gate, "SHORTEST_WAIT_S", 60.0)


@pytest.fixture
def any_wait_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the waits of a busy machine for answers at once."""
    monkeypatch.setattr(prefetch_gate, "SHORTEST_WAIT_S", 60.0)


# ------------------------------------------------------------ the rule


def waits(mean_s: float) -> CallWaits:
    measured = CallWaits()
    measured.calls, measured.seconds = 10, 10 * mean_s
    return measured


PREFETCHING, AT_ONCE, WAITED = None, waits(0.001), waits(0.02)


@pytest.mark.parametrize(
    ("queries", "is_closed"),
    [
        pytest.param([], False, id="none"),
        pytest.param([PREFETCHING] * (SHORT_QUERIES - 1), False, id="few"),
        pytest.param([PREFETCHING] * SHORT_QUERIES, True, id="short ones"),
        pytest.param([PREFETCHING] * SHORT_QUERIES + [AT_ONCE] * 100, True, id="answers at once"),
        pytest.param([PREFETCHING] * SHORT_QUERIES + [WAITED] * (WAITS_IN_ROW - 1), True, id="one waited"),
        pytest.param([PREFETCHING] * SHORT_QUERIES + [WAITED, AT_ONCE, WAITED], True, id="one waited, twice"),
        pytest.param([PREFETCHING] * SHORT_QUERIES + [WAITED] * WAITS_IN_ROW, False, id="calls wait"),
        pytest.param(
            [PREFETCHING] * SHORT_QUERIES + [WAITED] * WAITS_IN_ROW + [PREFETCHING] * QUERIES_UNTIL_NEXT,
            False,
            id="calls wait, for the next queries",
        ),
        pytest.param(
            [PREFETCHING] * SHORT_QUERIES
            + [WAITED] * WAITS_IN_ROW
            + [PREFETCHING] * (QUERIES_UNTIL_NEXT + SHORT_QUERIES),
            True,
            id="measured again",
        ),
    ],
)
def test_gate_closes_behind_short_queries_whose_calls_do_not_wait(
    queries: list[CallWaits | None], is_closed: bool
) -> None:
    gate = PrefetchGate(set())
    for measured in queries:
        gate.note(0.01, measured)
    assert gate.is_closed is is_closed


def test_gate_opens_at_once_behind_a_long_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_gate, "SHORT_QUERY_S", 0.25)
    gate = PrefetchGate(set())
    for _ in range(SHORT_QUERIES):
        gate.note(0.01, None)
    gate.note(0.3, AT_ONCE)
    assert not gate.is_closed


def test_gate_stays_open_while_queries_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_gate, "SHORT_QUERY_S", 0.25)
    gate = PrefetchGate(set())
    for seconds in (0.01, 0.3) * 20:
        gate.note(seconds, None)
    assert not gate.is_closed


def test_waits_leave_out_the_time_of_the_cpu() -> None:
    measured = CallWaits()
    measured.add(0.02, 0.019)
    assert measured.seconds == pytest.approx(0.001)
    measured.add(0.1, 0.1)  # that long, the CPU may have worked for other tasks
    assert measured.seconds == pytest.approx(0.101)


# ------------------------------------------------------------ what runs in place


class State(TypedDict, total=False):
    topic: str
    first: str
    second: str
    third: str


def chain(model: Model) -> Runnable[Any, Any]:
    """Return a chain of three calls in a row that do not need each other."""

    def part(name: str) -> Runnable[Any, Any]:
        return ChatPromptTemplate.from_template(f"{name} of {{topic}}") | model | (lambda message: message.content)

    steps = [RunnablePassthrough.assign(**{name: part(name)}) for name in ("first", "second", "third")]
    return steps[0] | steps[1] | steps[2]


def graph(model: Model) -> Any:
    """Return a graph of three nodes in a row that read nothing of each other."""

    def first(state: State) -> State:
        return {"first": model.invoke(f"first of {state['topic']}").content}

    def second(state: State) -> State:
        return {"second": model.invoke(f"second of {state['topic']}").content}

    def third(state: State) -> State:
        return {"third": model.invoke(f"third of {state['topic']}").content}

    builder = StateGraph(State)
    for node in (first, second, third):
        builder.add_node(node)
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", "third")
    builder.add_edge("third", END)
    return builder.compile()


async def _last(stream: Any) -> Any:
    return [one async for one in stream][-1]


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda app: app.invoke({"topic": "tea"}),
    "ainvoke": lambda app: asyncio.run(app.ainvoke({"topic": "tea"})),
    "stream": lambda app: list(app.stream({"topic": "tea"}))[-1],
    "astream": lambda app: asyncio.run(_last(app.astream({"topic": "tea"}))),
    "astream_events": lambda app: asyncio.run(_last(app.astream_events({"topic": "tea"}, version="v2")))["data"],
    "batch_as_completed": lambda app: list(app.batch_as_completed([{"topic": "tea"}])),
}


@pytest.fixture(params=[chain, graph], ids=["chain", "graph"])
def app(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield an app whose model answers at once, and check that nothing listens to calls behind the test."""
    monkeypatch.setattr(provider_models, "PAUSE_S", 0.0)
    listening = set(live_scopes)
    yield request.param(Model())
    assert set(live_scopes) == listening
    assert scope_in_place.get() is None


def _model_of(app: Any) -> Server:
    model = app.steps[0].mapper.steps__["first"].steps[1] if hasattr(app, "steps") else None
    model = model or app.nodes["first"].bound.func.__closure__[0].cell_contents
    assert isinstance(model.server, Server)
    return model.server


@pytest.mark.usefixtures("any_wait_is_short")
@pytest.mark.parametrize("entry", ENTRIES)
def test_app_that_is_answered_at_once_runs_in_place_with_the_same_results(app: Any, entry: str) -> None:
    run = ENTRIES[entry]
    expected, fast = run(app), accelerate(app)
    assert [run(fast) for _ in range(SHORT_QUERIES + 2)] == [expected] * (SHORT_QUERIES + 2)
    assert NO_WAIT in fast.explain()
    assert fast.report().expected_speed_up == 1.0
    trace = fast.last_trace()
    assert [span.outcome for span in trace.spans] == ["done"] * 3


@pytest.mark.parametrize("entry", ["invoke", "ainvoke", "stream", "astream"])
def test_app_prefetches_again_once_its_calls_have_to_wait(
    app: Any, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fast, server = ENTRIES[entry], accelerate(app), _model_of(app)
    for _ in range(SHORT_QUERIES):
        run(fast)
    monkeypatch.setattr(provider_models, "PAUSE_S", WAIT_S)
    server.most_at_once = 0
    for _ in range(WAITS_IN_ROW):
        run(fast)
    assert server.most_at_once == 1
    assert NO_WAIT not in fast.explain()
    run(fast)
    assert server.most_at_once == 3


@pytest.mark.usefixtures("gates_closed")
@pytest.mark.parametrize("entry", ENTRIES)
def test_error_of_a_call_in_place_reaches_the_caller(app: Any, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise ConnectionError("no route to the model")

    monkeypatch.setattr(Server, "begin", refuse)
    fast = accelerate(app)
    with pytest.raises(ConnectionError, match="no route"):
        ENTRIES[entry](fast)


@pytest.mark.usefixtures("gates_closed")
def test_stream_in_place_that_is_not_read_to_its_end_ends_the_query(app: Any) -> None:
    fast = accelerate(app)
    stream = fast.stream({"topic": "tea"})
    next(stream)
    stream.close()


@pytest.mark.usefixtures("gates_closed")
def test_accelerated_chain_inside_a_query_in_place_prefetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_models, "PAUSE_S", 0.02)
    model = Model()
    monkeypatch.setattr(prefetch_gate, "SHORT_QUERIES", 1000)
    inner = accelerate(chain(model))
    monkeypatch.setattr(prefetch_gate, "SHORT_QUERIES", -1000)
    outer = accelerate(chain(model) | RunnableLambda(lambda state: inner.invoke({"topic": state["first"]})))
    outer.invoke({"topic": "tea"})
    assert (model.server.most_at_once, sum(model.server.calls.values())) == (1, 6)


@pytest.mark.usefixtures("gates_closed")
def test_time_of_the_own_code_of_an_app_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_models, "PAUSE_S", 0.0)
    measured: list[CallWaits | None] = []
    monkeypatch.setattr(PrefetchGate, "note", lambda gate, seconds, waits: measured.append(waits))

    def pause(state: State) -> State:
        time.sleep(0.5)
        return state

    accelerate(chain(Model()) | RunnableLambda(pause)).invoke({"topic": "tea"})
    (waited,) = measured
    assert waited is not None and waited.calls == 3
    assert waited.seconds < 0.5


class ThreeCalls(Workflow):
    """A workflow whose step makes three calls that do not need each other."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(timeout=20)
        self.llm = llm

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        answers = []
        for name in ("first", "second", "third"):
            answers.append(str(await self.llm.acomplete(f"{name} of {ev.topic}")))
        return StopEvent(result=answers)


def test_workflow_prefetches_unless_it_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = HostedLLM(latency_s=0.0)
    workflow = ThreeCalls(llm)
    fast = accelerate(workflow)

    async def run(app: Any) -> Any:
        return await app.run(topic="tea")

    expected = asyncio.run(run(workflow))
    monkeypatch.setattr(prefetch_gate, "SHORTEST_WAIT_S", WAIT_S / 2)
    assert [asyncio.run(run(fast)) for _ in range(SHORT_QUERIES + 2)] == [expected] * (SHORT_QUERIES + 2)
    assert NO_WAIT in fast.explain()
    llm.latency_s, llm._most = WAIT_S, 0
    for _ in range(WAITS_IN_ROW):
        asyncio.run(run(fast))
    assert llm.most_at_once == 1
    asyncio.run(run(fast))
    assert llm.most_at_once == 3


# ------------------------------------------------------------ apps on a server


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(0.0, keeps_connections=False) as running:
        yield running


def _apps() -> Iterator[Any]:
    names = ("multi-query", "decomposition", "four analysts", "subgraph", "sub-questions", "fusion", "workflow")
    for one in (*langchain_apps.APPS, *langgraph_apps.APPS, *llamaindex_apps.APPS):
        if any(name in one.name for name in names):
            yield from (pytest.param(one, way, id=f"{one.name}, {way}") for way in WAYS[one.kind])


@pytest.mark.usefixtures("gates_closed")
@pytest.mark.parametrize(("one", "way"), list(_apps()))
def test_server_gets_the_same_requests_from_an_app_in_place(one: App, way: Any, server: FakeServer) -> None:
    if way == "invoke" and "subgraph" in one.name:
        pytest.skip("its nodes are coroutines")
    original = one.build(server.base_url)
    with asyncio.Runner() as loop:
        runner = Runner(server, loop)
        fast = accelerate(original)
        runs = [runner.run(one, app, way) for app in (original, original, fast, fast)]
    assert len({run.result for run in runs}) == 1
    first, last = ([repr((request.path, request.body)) for request in run.requests] for run in (runs[1], runs[-1]))
    assert first == last if way == "invoke" else sorted(first) == sorted(last)
