"""Graphs that nodes call, and graphs that are nodes: certain calls of their nodes are prefetched."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from support.hosted_model import LATENCY_S, HostedModel

from teola_plugin import accelerate


class StepState(TypedDict, total=False):
    """The state of the inner graph."""

    step: str
    queries: str
    notes: str
    log: Annotated[list[str], operator.add]


class State(TypedDict, total=False):
    """The state of the outer graph."""

    steps: list[str]
    step: str
    notes: Any
    report: str
    log: Annotated[list[str], operator.add]


Build = Callable[[HostedModel], Any]
INPUT: State = {"steps": ["a", "b", "c"], "step": "z"}


def compiled(schema: Any, *nodes: Any, **options: Any) -> Any:
    """Compile a graph of these functions, or pairs of a name and a graph, one after the other."""
    builder = StateGraph(schema)
    previous = START
    for node in nodes:
        name, runnable = node if isinstance(node, tuple) else (node.__name__, node)
        builder.add_node(name, runnable)
        builder.add_edge(previous, name)
        previous = name
    return builder.compile(**options)


def researcher(model: HostedModel, **options: Any) -> Any:
    def write_queries(state: StepState) -> StepState:
        return {"queries": str(model.invoke(f"queries for {state['step']}").content), "log": ["queries"]}

    def take_notes(state: StepState) -> StepState:
        return {"notes": str(model.invoke(f"notes on {state['queries']}, after {state['log']}").content)}

    return compiled(StepState, write_queries, take_notes, **options)


def async_researcher(model: HostedModel) -> Any:
    async def write_queries(state: StepState) -> StepState:
        return {"queries": str((await model.ainvoke(f"queries for {state['step']}")).content)}

    async def take_notes(state: StepState) -> StepState:
        return {"notes": str((await model.ainvoke(f"notes on {state['queries']}")).content)}

    return compiled(StepState, write_queries, take_notes)


def respond_with(model: HostedModel) -> Any:
    def respond(state: State) -> State:
        return {"report": str(model.invoke(f"report {state['notes']}").content)}

    return respond


def loop(model: HostedModel) -> Any:
    graph = researcher(model)

    def research(state: State) -> State:
        notes = []
        for step in state["steps"]:
            result = graph.invoke({"step": step})
            notes.append(result["notes"])
        return {"notes": notes}

    return compiled(State, research, respond_with(model))


def async_loop(model: HostedModel) -> Any:
    graph = async_researcher(model)

    async def research(state: State) -> State:
        notes = []
        for step in state["steps"]:
            result = await graph.ainvoke({"step": step})
            notes.append(result["notes"])
        return {"notes": notes}

    return compiled(State, research, respond_with(model))


def graph_as_a_node(model: HostedModel) -> Any:
    def outline(state: State) -> State:
        return {"report": str(model.invoke(f"outline {state['step']}").content)}

    return compiled(State, outline, ("research", researcher(model)), respond_with(model))


def called_twice(model: HostedModel) -> Any:
    graph = researcher(model)

    def research(state: State) -> State:
        first = graph.invoke({"step": "first"})
        second = graph.invoke({"step": "second", "log": ["given"]})
        return {"notes": first["notes"] + second["notes"]}

    return compiled(State, research)


def entrypoint_in_a_loop(model: HostedModel) -> Any:
    @entrypoint()
    def note(step: str) -> str:
        queries = model.invoke(f"queries for {step}").content
        return str(model.invoke(f"notes on {queries}").content)

    def research(state: State) -> State:
        return {"notes": [note.invoke(step) for step in state["steps"]]}

    return compiled(State, research, respond_with(model))


def entrypoint_before_a_node(model: HostedModel) -> Any:
    """The entrypoint calls tasks, and is called with a dictionary; the next node does not wait for its result."""

    @task
    def describe(kind: str, step: str) -> str:
        return str(model.invoke(f"{kind} of {step}").content)

    @entrypoint()
    def note(inputs: dict[str, str]) -> dict[str, str]:
        described = [describe(kind, inputs["step"]) for kind in ("tone", "facts")]
        return {"notes": " ".join(one.result() for one in described)}

    def research(state: State) -> State:
        return {"notes": note.invoke({"step": state["step"]})["notes"]}

    def outline(state: State) -> State:
        return {"step": str(model.invoke(f"outline {state['step']}").content)}

    return compiled(State, research, outline, respond_with(model))


def async_entrypoint(model: HostedModel) -> Any:
    @entrypoint()
    async def note(step: str) -> str:
        return " ".join([str((await model.ainvoke(f"{kind} of {step}")).content) for kind in ("tone", "facts")])

    async def research(state: State) -> State:
        return {"notes": await note.ainvoke(state["step"])}

    return compiled(State, research, respond_with(model))


def entrypoint_as_a_node(model: HostedModel) -> Any:
    def outline(state: State) -> State:
        return {"report": str(model.invoke(f"outline {state['step']}").content)}

    @entrypoint()
    def research(state: State) -> State:
        return {"notes": str(model.invoke(f"notes on {state['step']}").content)}

    return compiled(State, outline, ("research", research), respond_with(model))


GRAPHS = (loop, async_loop, graph_as_a_node, called_twice)
ENTRYPOINTS = (entrypoint_in_a_loop, entrypoint_before_a_node, async_entrypoint, entrypoint_as_a_node)
GAINING: dict[str, Build] = {build.__name__: build for build in (*GRAPHS, *ENTRYPOINTS)}


def gathered(model: HostedModel) -> Any:
    graph = async_researcher(model)

    async def research(state: State) -> State:
        results = await asyncio.gather(*[graph.ainvoke({"step": step}) for step in state["steps"]])
        return {"notes": [result["notes"] for result in results]}

    return compiled(State, research, respond_with(model))


def batched(model: HostedModel) -> Any:
    graph = researcher(model)

    def research(state: State) -> State:
        return {"notes": [one["notes"] for one in graph.batch([{"step": step} for step in state["steps"]])]}

    return compiled(State, research, respond_with(model))


def with_a_choice(model: HostedModel) -> Any:
    def judge(state: StepState) -> StepState:
        return {"queries": str(model.invoke(f"judge {state['step']}").content)}

    def accept(state: StepState) -> StepState:
        return {"notes": str(model.invoke(f"accept {state['step']}").content)}

    def reject(state: StepState) -> StepState:
        return {"notes": str(model.invoke(f"reject {state['step']}").content)}

    builder = StateGraph(StepState)
    for node in (judge, accept, reject):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "judge")
    builder.add_conditional_edges("judge", lambda state: "accept" if "a" in state["step"] else "reject")
    graph = builder.compile()

    def research(state: State) -> State:
        return {"notes": [graph.invoke({"step": step})["notes"] for step in state["steps"]]}

    return compiled(State, research, respond_with(model))


def keeping_its_state(model: HostedModel) -> Any:
    graph = researcher(model, checkpointer=True)

    def research(state: State) -> State:
        return {"notes": graph.invoke({"step": state["step"]})["notes"]}

    return compiled(State, research, respond_with(model), checkpointer=InMemorySaver())


def entrypoint_that_saves(model: HostedModel) -> Any:
    """What the entrypoint saves is not what it returns."""

    @entrypoint()
    def note(step: str) -> Any:
        notes = str(model.invoke(f"notes on {step}").content)
        return entrypoint.final(value=notes, save="saved")

    def research(state: State) -> State:
        return {"notes": note.invoke(state["step"])}

    return compiled(State, research, respond_with(model))


NOT_GAINING = (gathered, batched, with_a_choice, entrypoint_that_saves)
EXACT = {**GAINING, **{build.__name__: build for build in NOT_GAINING}}
WAYS = ("invoke", "ainvoke", "updates", "messages", "events")
CASES = [
    pytest.param(build, way, id=f"{name}-{way}")
    for name, build in EXACT.items()
    for way in WAYS
    if way != "invoke" or build not in (async_loop, gathered, async_entrypoint)  # coroutine nodes need a loop
]


def called(graph: Any, way: str) -> Any:
    """Return what a graph gives in one way of calling, without ids of runs."""
    if way == "invoke":
        return graph.invoke(INPUT)
    if way == "ainvoke":
        return asyncio.run(graph.ainvoke(INPUT))

    async def read() -> list[Any]:
        if way == "updates":
            return [piece async for piece in graph.astream(INPUT, stream_mode="updates", subgraphs=False)]
        if way == "messages":
            pieces = graph.astream(INPUT, stream_mode="messages")
            return [(type(message).__name__, message.content) async for message, _ in pieces]
        events = graph.astream_events(INPUT, version="v2")
        return [(event["event"], event["name"]) async for event in events]

    return asyncio.run(read())


@pytest.mark.parametrize(("build", "way"), CASES)
def test_prefetched_calls_of_inner_nodes_equal_the_originals(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(build(plain), way)

    result = called(accelerate(build(fast)), way)

    are_side_by_side = build in (gathered, batched, entrypoint_before_a_node)
    in_order = sorted if are_side_by_side and way in ("messages", "events") else list
    assert in_order(result) == in_order(expected)
    assert fast.prompts == plain.prompts
    assert build not in GAINING.values() or fast.most_at_once > 1


def test_explanation_names_the_calls_of_inner_nodes() -> None:
    explained = accelerate(graph_as_a_node(HostedModel())).explain()

    assert "research.write_queries.model: when outline begins" in explained


def test_inner_graph_with_checkpointed_state_makes_the_originals_calls() -> None:
    plain, fast = HostedModel(), HostedModel()
    for graph in (keeping_its_state(plain), accelerate(keeping_its_state(fast))):
        config = {"configurable": {"thread_id": "1"}}
        graph.invoke(INPUT, config)
        graph.invoke({"step": "y"}, config)

    assert fast.prompts == plain.prompts


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_error_of_an_inner_node_is_the_originals(way: str) -> None:
    accelerated = accelerate(loop(HostedModel(fails_on="notes on answer to queries for b")))

    with pytest.raises(ValueError, match="refused: notes on answer to queries for b"):
        called(accelerated, way)


@pytest.mark.parametrize("failing", ["queries for b", "notes on answer to queries for a"])
def test_error_of_an_entrypoint_is_the_originals(failing: str) -> None:
    accelerated = accelerate(entrypoint_in_a_loop(HostedModel(fails_on=failing)))

    with pytest.raises(ValueError, match=f"refused: {failing}"):
        called(accelerated, "invoke")


def test_entrypoint_with_previous_results_makes_the_originals_calls() -> None:
    def build(model: HostedModel) -> Any:
        @entrypoint(checkpointer=InMemorySaver())
        def note(step: str, *, previous: Any = None) -> str:
            return str(model.invoke(f"notes on {step} after {previous}").content)

        def research(state: State) -> State:
            config: Any = {"configurable": {"thread_id": "inner"}}
            return {"notes": [note.invoke(step, config) for step in state["steps"]]}

        return compiled(State, research, respond_with(model))

    plain, fast = HostedModel(), HostedModel()

    expected = called(build(plain), "invoke")
    result = called(accelerate(build(fast)), "invoke")

    assert (result, fast.prompts) == (expected, plain.prompts)


def test_interrupted_entrypoint_resumes_without_repeated_calls() -> None:
    def build(model: HostedModel) -> Any:
        @entrypoint()
        def note(step: str) -> str:
            drafted = str(model.invoke(f"draft {step}").content)
            approved = interrupt("good?")
            return str(model.invoke(f"finish {drafted} {approved}").content)

        def research(state: State) -> State:
            return {"notes": note.invoke(state["step"])}

        def summarize(state: State) -> State:
            return {"report": str(model.invoke(f"summarize {state['step']}").content)}

        return compiled(State, research, summarize, checkpointer=InMemorySaver())

    results = []
    for make in (lambda graph: graph, accelerate):
        model = HostedModel()
        graph = make(build(model))
        config = {"configurable": {"thread_id": "1"}}
        graph.invoke(INPUT, config)
        results.append((graph.invoke(Command(resume="yes"), config), model.prompts))

    assert results[0] == results[1]


def test_interrupted_inner_graph_resumes_without_repeated_calls() -> None:
    def build(model: HostedModel) -> Any:
        def draft(state: StepState) -> StepState:
            return {"queries": str(model.invoke(f"draft {state['step']}").content)}

        def approve(state: StepState) -> StepState:
            return {"notes": interrupt("good?")}

        def finish(state: StepState) -> StepState:
            return {"notes": str(model.invoke(f"finish {state['step']}").content)}

        graph = compiled(StepState, draft, approve, finish)

        def research(state: State) -> State:
            return {"notes": graph.invoke({"step": state["step"]})["notes"]}

        def summarize(state: State) -> State:
            return {"report": str(model.invoke(f"summarize {state['step']}").content)}

        return compiled(State, research, summarize, checkpointer=InMemorySaver())

    results = []
    for make in (lambda graph: graph, accelerate):
        model = HostedModel()
        graph = make(build(model))
        config = {"configurable": {"thread_id": "1"}}
        graph.invoke(INPUT, config)
        results.append((graph.invoke(Command(resume="yes"), config), model.prompts))

    assert results[0] == results[1]


def test_cancelled_call_leaves_no_inner_call_running() -> None:
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
