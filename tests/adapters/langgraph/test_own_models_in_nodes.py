"""Tests of nodes that call the user's own models: certain calls are prefetched, and nothing else changes."""

from __future__ import annotations

import asyncio
import datetime
import operator
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt
from support.hosted_model import LATENCY_S, HostedModel

from teola_plugin import accelerate
from teola_plugin.adapters import provider_executor
from teola_plugin.adapters.plan_report import Reason, Status


class State(TypedDict, total=False):
    """The state of the graphs."""

    topic: str
    items: list[str]
    notes: list[str]
    plan: str
    log: Annotated[list[str], operator.add]
    answer: str


Build = Callable[[HostedModel], Any]
INPUT: State = {"topic": "oats", "items": ["a", "b", "c"]}


def compiled(*nodes: Any, **options: Any) -> Any:
    """Compile a graph of these functions, one after the other."""
    builder = StateGraph(State)
    previous = START
    for node in nodes:
        builder.add_node(node.__name__, node)
        builder.add_edge(previous, node.__name__)
        previous = node.__name__
    builder.add_edge(previous, END)
    return builder.compile(**options)


def loop_in_a_node(model: HostedModel) -> Any:
    def take_notes(state: State) -> State:
        notes = []
        for item in state["items"]:
            print("taking notes on", item)
            notes.append(str(model.invoke(f"note {item}").content))
        return {"notes": notes}

    def write(state: State) -> State:
        return {"answer": str(model.invoke("write from " + ", ".join(state["notes"])).content)}

    return compiled(take_notes, write)


def loop_with_a_filter(model: HostedModel) -> Any:
    chain = ChatPromptTemplate.from_template("note {item} of {topic}") | model

    def take_notes(state: State) -> State:
        notes = []
        for item in state["items"]:
            if item == "b":
                continue
            notes.append(str(chain.invoke({"item": item, "topic": state["topic"]}).content))
        return {"notes": notes}

    return compiled(take_notes)


def comprehension(model: HostedModel) -> Any:
    def take_notes(state: State) -> State:
        return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}

    return compiled(take_notes)


def independent_nodes(model: HostedModel) -> Any:
    def plan(state: State) -> State:
        return {"plan": str(model.invoke(f"plan {state['topic']}").content)}

    def note(state: State) -> State:
        return {"notes": [str(model.invoke(f"note {state['topic']}").content)]}

    def write(state: State) -> State:
        return {"answer": str(model.invoke(f"write {state['plan']} {state['notes']}").content)}

    return compiled(plan, note, write)


def helper_function(model: HostedModel) -> Any:
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"{kind} {topic}").content)

    def both(state: State) -> State:
        first = ask("plan", state["topic"])
        second = ask("note", state["topic"])
        return {"answer": f"{first} {second}"}

    return compiled(both)


def rounds_with_feedback(model: HostedModel) -> Any:
    """Write, criticize by three criteria, write once more with the feedback."""

    def write(state: State) -> State:
        if state.get("notes"):
            return {"plan": str(model.invoke(f"write on {state['topic']} with {state.get('notes')}").content)}
        return {"plan": str(model.invoke(f"write on {state['topic']}").content)}

    def criticize(state: State) -> State:
        return {"notes": [str(model.invoke(f"{name} of {state['plan']}").content) for name in ("tone", "facts")]}

    def count(state: State) -> State:
        return {"answer": state.get("answer", "round") + "+"}

    builder = StateGraph(State)
    for node in (write, criticize, count):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "write")
    builder.add_edge("write", "criticize")
    builder.add_edge("criticize", "count")
    builder.add_conditional_edges("count", lambda state: END if state["answer"].endswith("++") else "write")
    return builder.compile()


def key_of_the_state(model: HostedModel) -> Any:
    """Write with a plan if there is one, then take notes on what was written."""

    def write(state: State) -> State:
        if "plan" not in state:
            return {"answer": str(model.invoke(f"write on {state['topic']}").content)}
        return {"answer": str(model.invoke(f"write by {state['plan']}").content)}

    def take_notes(state: State) -> State:
        return {"notes": [str(model.invoke(f"note {kind} of {state['answer']}").content) for kind in ("a", "b")]}

    return compiled(write, take_notes)


GAINING: dict[str, Build] = {
    build.__name__: build
    for build in (
        *(loop_in_a_node, loop_with_a_filter, comprehension, independent_nodes, helper_function),
        *(rounds_with_feedback, key_of_the_state),
    )
}


def called(graph: Any, way: str, input: Any = None) -> Any:
    """Return what a graph returns in one way of calling, with the ids of runs left out."""
    input = INPUT if input is None else input
    if way == "invoke":
        return graph.invoke(input)
    if way == "stream":
        return list(graph.stream(input, stream_mode="values"))
    if way == "ainvoke":
        return asyncio.run(graph.ainvoke(input))

    async def read() -> list[Any]:
        pieces = []
        async for message, _ in graph.astream(input, stream_mode="messages"):
            pieces.append((type(message).__name__, message.content))
        return pieces

    return asyncio.run(read())


WAYS = ("invoke", "stream", "ainvoke", "messages")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", GAINING.values(), ids=GAINING)
def test_certain_calls_of_nodes_equal_the_originals_and_overlap(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(build(plain), way)
    accelerated = accelerate(build(fast))

    result = called(accelerated, way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert plain.most_at_once == 1
    assert fast.most_at_once > 1
    assert "faster" in accelerated.explain()


def async_loop(model: HostedModel) -> Any:
    async def take_notes(state: State) -> State:
        notes = []
        for item in state["items"]:
            reply = await model.ainvoke(f"note {item}")
            notes.append(str(reply.content))
        return {"notes": notes}

    return compiled(take_notes)


@pytest.mark.parametrize("way", ["ainvoke", "messages"])
def test_calls_of_coroutine_nodes_overlap(way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(async_loop(plain), way)

    result = called(accelerate(async_loop(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 3


# ------------------------------------------------------------ calls that are not certain


def decided_by_an_answer(model: HostedModel) -> Any:
    def choose(state: State) -> State:
        verdict = str(model.invoke(f"judge {state['topic']}").content)
        if "oats" in verdict:
            return {"answer": verdict}
        return {"answer": str(model.invoke(f"rewrite {state['topic']}").content)}

    return compiled(choose)


def behind_code_of_its_own(model: HostedModel) -> Any:
    written: list[str] = []

    def write_down(state: State) -> State:
        written.append(state["topic"])
        return {"answer": str(model.invoke(f"seen {len(written)} times").content)}

    return compiled(write_down)


def left_early(model: HostedModel) -> Any:
    def find(state: State) -> State:
        for item in state["items"]:
            answer = str(model.invoke(f"try {item}").content)
            if "a" in answer:
                return {"answer": answer}
        return {"answer": ""}

    return compiled(find)


def routed(model: HostedModel) -> Any:
    def judge(state: State) -> State:
        return {"plan": str(model.invoke(f"judge {state['topic']}").content)}

    def accept(state: State) -> State:
        return {"answer": str(model.invoke(f"accept {state['topic']}").content)}

    def reject(state: State) -> State:
        return {"answer": str(model.invoke(f"reject {state['topic']}").content)}

    builder = StateGraph(State)
    for node in (judge, accept, reject):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "judge")
    builder.add_conditional_edges("judge", lambda state: "accept" if "oats" in state["plan"] else "reject")
    return builder.compile()


UNCERTAIN: dict[str, Build] = {
    build.__name__: build for build in (decided_by_an_answer, behind_code_of_its_own, left_early, routed)
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", UNCERTAIN.values(), ids=UNCERTAIN)
def test_no_call_is_made_that_the_original_does_not_make(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(build(plain), way)

    result = called(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts


@pytest.mark.parametrize("build", [rounds_with_feedback, key_of_the_state])
@pytest.mark.parametrize("given", [{"plan": ""}, {"plan": "sow"}, {"notes": ["wet"]}, {"notes": []}])
def test_state_key_with_a_value_is_read(build: Build, given: dict[str, Any]) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(build(plain), "invoke", {**INPUT, **given})

    result = called(accelerate(build(fast)), "invoke", {**INPUT, **given})

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once > 1


class Titled:
    """A value whose title only the original can compute."""

    def __getattr__(self, name: str) -> str:
        return "oats"


@pytest.mark.parametrize("way", WAYS)
def test_node_missing_from_an_earlier_plan_gets_its_own_plan(way: str) -> None:
    def build(model: HostedModel) -> Any:
        def write(state: State) -> State:
            title: str = state["topic"].title  # type: ignore[assignment]
            return {"plan": str(model.invoke(f"write on {title}").content)}

        def take_notes(state: State) -> State:
            return {"notes": [str(model.invoke(f"note {kind} of {state['plan']}").content) for kind in "abc"]}

        return compiled(write, take_notes)

    given: Any = {"topic": Titled()}
    plain, fast = HostedModel(), HostedModel()
    expected = called(build(plain), way, given)

    result = called(accelerate(build(fast)), way, given)

    assert str(result).count("answer") == str(expected).count("answer")
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 3


# ------------------------------------------------------------ prompts that only the run can tell


def dated_nodes(model: HostedModel) -> Any:
    def plan(state: State) -> State:
        dated = model.invoke(f"On {datetime.date.today()}: plan {state['topic']}").content
        return {"plan": str(dated), "log": [datetime.date.today().isoformat()]}

    def note(state: State) -> State:
        first = model.invoke(f"{state['log'][-1]}: note {state['topic']}").content
        return {"notes": [str(first), str(model.invoke(f"list {state['topic']}").content)]}

    def write(state: State) -> State:
        return {"answer": str(model.invoke(f"write {state['topic']} {state['plan']}").content)}

    return compiled(plan, note, write)


@pytest.mark.parametrize("way", WAYS)
def test_calls_behind_a_prompt_of_the_run_are_prefetched(way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(dated_nodes(plain), way)

    result = called(accelerate(dated_nodes(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert plain.most_at_once == 1
    assert fast.most_at_once >= 2


def test_explain_says_which_prompts_only_the_run_knows() -> None:
    rows = accelerate(dated_nodes(HostedModel())).report().calls

    assert [row.name for row in rows] == ["plan.model", "note.model", "note.model2", "write.model"]
    assert [row.reason for row in rows[:2]] == [Reason.PROMPT_AT_RUN_TIME, Reason.IN_ITS_NODE]
    assert "test_own_models_in_nodes.py:" in str(rows[0].explanation)
    assert rows[2].start == "when plan begins"
    assert rows[3].start == "when note begins"


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_error_of_a_call_with_a_prompt_of_the_run_is_the_originals(way: str) -> None:
    accelerated = accelerate(dated_nodes(HostedModel(fails_on="plan oats")))

    with pytest.raises(ValueError, match=r"refused: On .*: plan oats"):
        called(accelerated, way)


def test_nothing_passes_a_helper_that_may_raise() -> None:
    def build(model: HostedModel) -> Any:
        def check(topic: str) -> str:
            raise RuntimeError(f"{topic} is not allowed on {datetime.date.today()}")

        def note(state: State) -> State:
            first = model.invoke(f"note {check(state['topic'])}").content
            return {"notes": [str(first), str(model.invoke(f"list {state['topic']}").content)]}

        return compiled(note)

    model = HostedModel()

    with pytest.raises(RuntimeError, match="oats is not allowed"):
        accelerate(build(model)).invoke(INPUT)
    assert model.prompts == []


def test_explain_names_the_code_that_stands_before_the_first_call() -> None:
    def note(state: State) -> State:
        with open(os.devnull, "w") as file:
            file.write(state["topic"])
        return {"notes": [str(model.invoke(f"list {state['topic']}").content)]}

    def list_all(state: State) -> State:
        print_all(state)
        return {"notes": [str(model.invoke(f"list {state['topic']}").content)]}

    def print_all(state: State) -> None:
        os.write(1, b"")

    model = HostedModel()
    (row,) = (row for row in accelerate(compiled(list_all)).report().calls if row.name == "list_all.model")

    assert row.reason is Reason.BEHIND_CODE
    assert accelerate(compiled(note)).report().calls[0].status is Status.NOT_SEEN


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_error_of_a_prefetched_call_is_the_originals(way: str) -> None:
    accelerated = accelerate(loop_in_a_node(HostedModel(fails_on="note b")))

    with pytest.raises(ValueError, match="refused: note b"):
        called(accelerated, way)


def test_retried_node_makes_its_own_call() -> None:
    def build(model: HostedModel) -> Any:
        def take_notes(state: State) -> State:
            return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}

        builder = StateGraph(State)
        policy = RetryPolicy(max_attempts=2, initial_interval=0.01, jitter=False, retry_on=ValueError)
        builder.add_node("take_notes", take_notes, retry_policy=policy)
        builder.add_edge(START, "take_notes")
        return builder.compile()

    model = HostedModel(fails_on="note c")

    with pytest.raises(ValueError, match="refused: note c"):
        accelerate(build(model)).invoke(INPUT)
    assert model.prompts.count("note c") == 2


def test_cancelled_call_leaves_no_call_running() -> None:
    model = HostedModel()
    graph = accelerate(async_loop(model))

    async def cancel() -> None:
        task = asyncio.create_task(graph.ainvoke(INPUT))
        await asyncio.sleep(LATENCY_S / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.02)

    asyncio.run(cancel())
    assert model._running == 0


# ------------------------------------------------------------ what stands above the provider methods


@pytest.fixture
def response_cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    try:
        yield cache
    finally:
        set_llm_cache(None)


def test_nothing_is_prefetched_with_a_response_cache(response_cache: InMemoryCache) -> None:
    model = HostedModel()

    called(accelerate(comprehension(model)), "invoke", {"items": ["a", "a", "a"]})

    assert model.prompts == ["note a"]


def test_rate_limiter_of_a_model_is_respected() -> None:
    model = HostedModel(rate_limiter=InMemoryRateLimiter(requests_per_second=1_000, check_every_n_seconds=0.001))

    called(accelerate(comprehension(model)), "invoke")

    assert model.most_at_once == 1


def test_max_concurrency_of_one_keeps_node_calls_sequential() -> None:
    model = HostedModel()

    accelerate(comprehension(model)).invoke(INPUT, {"max_concurrency": 1})

    assert model.most_at_once == 1


def test_interrupted_graph_resumes_as_the_original() -> None:
    def build(model: HostedModel) -> Any:
        def ask(state: State) -> State:
            plan = str(model.invoke(f"plan {state['topic']}").content)
            approved = interrupt(plan)
            return {"plan": f"{plan} {approved}"}

        def write(state: State) -> State:
            return {"answer": str(model.invoke(f"write {state['topic']}").content)}

        return compiled(ask, write, checkpointer=InMemorySaver())

    plain, fast = HostedModel(), HostedModel()
    results = []
    for model, graph in ((plain, build(plain)), (fast, accelerate(build(fast)))):
        config = {"configurable": {"thread_id": "1"}}
        first = graph.invoke(INPUT, config)
        last = graph.invoke(Command(resume="yes"), config)
        results.append(([one.value for one in first["__interrupt__"]], last, model.prompts))

    assert results[0] == results[1]


def test_no_call_after_an_approval_is_made_before_it() -> None:
    def confirm(question: str) -> str:
        return str(interrupt(question))

    def build(model: HostedModel) -> Any:
        def plan(state: State) -> State:
            return {"plan": str(model.invoke(f"plan {state['topic']}").content)}

        def approve(state: State) -> State:
            return {"notes": [confirm("good?")]}

        def write(state: State) -> State:
            return {"answer": str(model.invoke(f"write {state['topic']}").content)}

        return compiled(plan, approve, write, checkpointer=InMemorySaver())

    model = HostedModel()
    graph = accelerate(build(model))
    config = {"configurable": {"thread_id": "1"}}

    graph.invoke(INPUT, config)
    assert model.prompts == ["plan oats"]
    graph.invoke(Command(resume="yes"), config)
    assert model.prompts == ["plan oats", "write oats"]


def test_prefetched_calls_read_the_checkpointed_state() -> None:
    def build(model: HostedModel) -> Any:
        def take_notes(state: State) -> State:
            return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}

        return compiled(take_notes, checkpointer=InMemorySaver())

    plain, fast = HostedModel(), HostedModel()
    for graph in (build(plain), accelerate(build(fast))):
        config = {"configurable": {"thread_id": "1"}}
        graph.invoke(INPUT, config)
        graph.invoke({"topic": "rye"}, config)

    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 3


@pytest.mark.parametrize("is_async", [False, True], ids=["invoke", "ainvoke"])
def test_sync_and_async_node_prefetches_calls_of_running_function(is_async: bool) -> None:
    def graph(model: HostedModel) -> Any:
        def note(state: State) -> State:
            return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}

        async def anote(state: State) -> State:
            return {"notes": [str((await model.ainvoke(f"anote {item}")).content) for item in state["items"]]}

        builder = StateGraph(State)
        builder.add_node("note", RunnableLambda(note, anote))
        builder.add_edge(START, "note")
        return builder.compile()

    runs = []
    for accelerates in (False, True):
        model = HostedModel()
        app = accelerate(graph(model)) if accelerates else graph(model)
        result = asyncio.run(app.ainvoke(INPUT)) if is_async else app.invoke(INPUT)
        runs.append((result, sorted(model.prompts)))
    assert runs[0] == runs[1]
    assert model.most_at_once == len(INPUT["items"])


# ------------------------------------------------------------ nodes side by side


@pytest.mark.parametrize("is_join", [True, False], ids=["join", "edges"])
@pytest.mark.parametrize("way", WAYS)
def test_node_after_two_parallel_nodes_waits_for_both(way: str, is_join: bool) -> None:
    def build(model: HostedModel) -> Any:
        def plan(state: State) -> State:
            return {"plan": str(model.invoke(f"plan {state['topic']}").content)}

        def praise(state: State) -> State:
            return {"log": [str(model.invoke(f"praise {state['topic']}").content)]}

        def object_to(state: State) -> State:
            return {"log": [str(model.invoke(f"object to {state['topic']}").content)]}

        def join(state: State) -> State:
            return {"notes": [str(model.invoke(", ".join(state["log"])).content)]}

        def write(state: State) -> State:
            return {"answer": str(model.invoke(f"write about {state['topic']}").content)}

        builder = StateGraph(State)
        for node in (plan, praise, object_to, join, write):
            builder.add_node(node.__name__, node)
        builder.add_edge(START, "plan").add_edge("plan", "praise").add_edge("plan", "object_to")
        if is_join:
            builder.add_edge(["praise", "object_to"], "join")
        else:
            builder.add_edge("praise", "join").add_edge("object_to", "join")
        return builder.add_edge("join", "write").compile()

    plain, fast = HostedModel(), HostedModel()
    expected = called(build(plain), way)

    result = called(accelerate(build(fast)), way)

    assert sorted(map(str, result)) == sorted(map(str, expected))
    assert fast.prompts == plain.prompts


def test_graph_with_functions_defined_later_runs_without_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provider_executor, "_shared", [])

    def note(state: State) -> State:
        return {"answer": complete(state["topic"])}

    fast = accelerate(compiled(note))

    def complete(topic: str) -> str:
        return f"all about {topic}"

    assert fast.invoke(INPUT)["answer"] == "all about oats"
    assert not caplog.records
    for pool in provider_executor._shared:
        pool.close()


@pytest.mark.parametrize("way", WAYS)
def test_root_state_is_the_value_returned_by_the_previous_node(way: str) -> None:
    def graph(model: HostedModel) -> Any:
        def plan(state: dict[str, Any]) -> dict[str, Any]:
            return {"topic": str(model.invoke(f"plan {state['topic']}").content)}

        def write(state: dict[str, Any]) -> dict[str, Any]:
            return {"answer": str(model.invoke(f"write {state['topic']}").content)}

        builder = StateGraph(dict)
        builder.add_sequence([plan, write])
        builder.add_edge(START, "plan")
        return builder.compile()

    plain, fast = HostedModel(), HostedModel()
    assert called(accelerate(graph(fast)), way) == called(graph(plain), way)
    assert fast.prompts == plain.prompts == ["plan oats", "write answer to plan oats"]
