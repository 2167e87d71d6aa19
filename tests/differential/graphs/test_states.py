"""Tests of states, their history, changes to them, and time travel: accelerated graphs show what the original shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from differential.graphs.plain import Names, plain
from differential.graphs.seen import saved, states
from differential.graphs.sides import Side
from langgraph.types import Command, StateUpdate
from support.graphs import GRAPHS, Kit

CONFIG: Any = {"configurable": {"thread_id": "thread"}}
QUESTION = {"question": "what is a class?"}

Story = Callable[[Any], Any]
"""A graph -> what is seen of it on the way."""
STORIES: dict[str, tuple[str, Story]] = {}


def story(name: str) -> Callable[[Story], Story]:
    """Register a function that is called with the graph of this name."""

    def listed(function: Story) -> Story:
        STORIES[function.__name__] = name, function
        return function

    return listed


@story("stopped_before_and_after")
def changed_at_a_stop(graph: Any) -> Any:
    graph.invoke(QUESTION, CONFIG)
    moved = graph.update_state(CONFIG, {"context": "mine", "said": ["by me"]})
    return moved, graph.get_state(CONFIG), graph.invoke(None, CONFIG), graph.invoke(None, CONFIG)


@story("stopped_before_and_after")
def changed_in_the_name_of_a_node(graph: Any) -> Any:
    """Update the state as a node. The run continues at the edges of that node."""
    graph.update_state(CONFIG, {"question": "from nothing", "context": "mine"}, as_node="find")
    first = graph.get_state(CONFIG).next
    graph.update_state(CONFIG, {"said": ["told"]}, as_node="ask")
    return first, graph.get_state(CONFIG).next, graph.invoke(None, CONFIG)


@story("conditional_edges")
def changed_several_times_at_once(graph: Any) -> Any:
    graph.invoke({"question": "short"}, CONFIG)
    first = [StateUpdate({"question": "another", "trail": ["a"]}, "short"), StateUpdate({"trail": ["b"]}, "long")]
    graph.bulk_update_state(CONFIG, [first, [StateUpdate({"trail": ["c"]}, "short")]])
    return graph.get_state(CONFIG), graph.invoke(None, CONFIG)


@story("reducers")
def replayed(graph: Any) -> Any:
    """Run the graph again from every earlier checkpoint."""
    graph.invoke(QUESTION, CONFIG)
    past = list(graph.get_state_history(CONFIG))
    return [graph.invoke(None, state.config) for state in past], len(list(graph.get_state_history(CONFIG)))


@story("corrective_rag")
def forked(graph: Any) -> Any:
    """Change an earlier state and continue from it on another branch of the history."""
    graph.invoke(QUESTION, CONFIG)
    (before,) = [state for state in graph.get_state_history(CONFIG) if state.next == ("grade",)][-1:]
    fork = graph.update_state(before.config, {"question": "another question"})
    forked = list(graph.stream(None, fork, stream_mode="debug"))
    return forked, graph.get_state(CONFIG), list(graph.get_state_history(CONFIG))


@story("asks_in_a_subgraph")
def changed_in_a_subgraph(graph: Any) -> Any:
    graph.invoke(QUESTION, CONFIG)
    task = graph.get_state(CONFIG, subgraphs=True).tasks[0]
    graph.update_state(task.state.config, {"question": "deep inside"})
    inner = graph.get_state(task.state.config)
    return inner.values, inner.next, graph.invoke(Command(resume="go on"), CONFIG)


@story("asks_once")
def answered_from_the_past(graph: Any) -> Any:
    """Answer the same question twice, the second time from an earlier checkpoint."""
    graph.invoke(QUESTION, CONFIG)
    snapshot = graph.get_state(CONFIG)
    first = graph.invoke(Command(resume="one"), CONFIG)
    second = graph.invoke(Command(resume="two"), snapshot.config)
    return first, second, graph.get_state(CONFIG).values


@story("chat_with_memory")
def history_in_parts(graph: Any) -> Any:
    for text in ("one", "two", "three"):
        graph.invoke({"messages": text}, CONFIG)
    everything = list(graph.get_state_history(CONFIG))
    some = list(graph.get_state_history(CONFIG, limit=2))
    older = list(graph.get_state_history(CONFIG, before=everything[3].config))
    steps = list(graph.get_state_history(CONFIG, filter={"step": 1}))
    return everything, [len(found) for found in (some, older, steps)]


@story("plan_and_execute")
def threads_apart(graph: Any) -> Any:
    other: Any = {"configurable": {"thread_id": "other"}}
    graph.invoke({"goal": "a house"}, CONFIG)
    graph.invoke({"goal": "a boat"}, other)
    graph.update_state(other, {"goal": "a plane", "todo": ["wings"]}, as_node="plan")
    return graph.get_state(CONFIG).values, graph.invoke(None, other), len(list(graph.get_state_history(other)))


@story("agent")
def agent_with_another_past(graph: Any) -> Any:
    """Replace the model's message before the tools run, and continue."""
    given = dict(GRAPHS["agent"].turns[0].given)
    graph.invoke(given, CONFIG, interrupt_before=["tools"])
    message = graph.get_state(CONFIG).values["messages"][-1]
    message.tool_calls[0]["args"] = {"a": 40, "b": 2}
    graph.update_state(CONFIG, {"messages": [message]})
    return graph.invoke(None, CONFIG)


def _run_story(side: Side, name: str, read_by: Any = None) -> Any:
    builder, play = STORIES[name]
    kit = side.kit()
    made = GRAPHS[builder].build(kit)
    side.counts.clear()
    names = Names()
    seen = names(plain(play(side.fast(made))))
    last = made if read_by is None else read_by(made)
    return seen, names(states(last, CONFIG)), names(saved(kit)), kit.side_effects, side.counts.original_requests.copy()


@pytest.mark.parametrize("name", STORIES)
def test_state_history_equals_the_originals(name: str, original_side: Side, accelerated_side: Side) -> None:
    """The original graph can read what the accelerated one wrote."""
    assert _run_story(accelerated_side, name) == _run_story(original_side, name)


@pytest.mark.parametrize("name", STORIES)
def test_accelerated_graph_reads_states_of_the_original(name: str, original_side: Side, accelerated_side: Side) -> None:
    assert _run_story(original_side, name, read_by=accelerated_side.fast) == _run_story(original_side, name)


async def _async_story(graph: Any) -> Any:
    await graph.ainvoke(QUESTION, CONFIG)
    moved = await graph.aupdate_state(CONFIG, {"context": "mine"})
    await graph.abulk_update_state(CONFIG, [[StateUpdate({"context": "theirs"}, "find")]])
    past = [state async for state in graph.aget_state_history(CONFIG)]
    end = await graph.ainvoke(None, CONFIG)
    again = await graph.ainvoke(None, past[-2].config)
    return moved, await graph.aget_state(CONFIG, subgraphs=True), past, end, again


async def test_async_state_history_equals_the_originals(original_side: Side, accelerated_side: Side) -> None:
    found = []
    for side in (original_side, accelerated_side):
        kit: Kit = side.kit()
        outcome = await _async_story(side.fast(GRAPHS["stopped_before_and_after"].build(kit)))
        names = Names()
        found.append((names(plain(outcome)), names(saved(kit))))
    assert found[0] == found[1]
