"""Tests of calls that are abandoned, that run in parallel, and that user code makes anywhere."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from differential.graphs.plain import Names, plain
from differential.graphs.recorder import Recorder
from differential.graphs.seen import saved
from differential.graphs.sides import Side
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from support import garbage
from support.graphs import GRAPHS
from support.graphs.state import Reduced

MANY = 64


def _numbered(side: Side) -> tuple[Any, Any]:
    return side.kit(), [{"question": f"question {i}"} for i in range(MANY)]


def _config(i: int) -> Any:
    return {"configurable": {"thread_id": f"thread {i}"}}


@pytest.mark.parametrize("name", ["reducers", "waiting_edge", "independent_steps"])
def test_graph_called_from_many_threads_gives_the_originals_results(
    name: str, original_side: Side, accelerated_side: Side
) -> None:
    found = []
    for side in (original_side, accelerated_side):
        kit, given = _numbered(side)
        graph = side.fast(GRAPHS[name].build(kit))
        side.counts.clear()
        with ThreadPoolExecutor(16) as threads:
            made = list(threads.map(graph.invoke, given, map(_config, range(MANY))))
        found.append((Names(raced=True)(plain(made)), side.counts.original_requests.copy()))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["reducers", "waiting_edge", "independent_steps"])
async def test_graph_called_from_many_tasks_gives_the_originals_results(
    name: str, original_side: Side, accelerated_side: Side
) -> None:
    found = []
    for side in (original_side, accelerated_side):
        kit, given = _numbered(side)
        graph = side.fast(GRAPHS[name].build(kit))
        side.counts.clear()
        made = await asyncio.gather(*[graph.ainvoke(one, _config(i)) for i, one in enumerate(given)])
        found.append((Names(raced=True)(plain(list(made))), side.counts.original_requests.copy()))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["values", "updates", "messages", "debug"])
@pytest.mark.parametrize("name", ["independent_steps", "subgraph_as_node", "agent"])
def test_closed_graph_stream_saves_the_originals_state(
    name: str, mode: str, original_side: Side, accelerated_side: Side
) -> None:
    """After its first chunk; the next call goes on from what was saved."""
    found = []
    for side in (original_side, accelerated_side):
        kit = side.kit()
        graph, recorder = side.fast(GRAPHS[name].build(kit)), Recorder()
        given = GRAPHS[name].turns[0].given
        stream = graph.stream(given, {**_config(0), "callbacks": [recorder]}, stream_mode=mode, durability="sync")
        first = next(stream)
        stream.close()
        names = Names()
        state = graph.get_state(_config(0))
        found.append(names((plain(first), plain(state.next), tuple(recorder.events)[-1:], saved(kit)[:1])))
        assert graph.invoke(None, _config(0))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["independent_steps", "independent_async_steps", "subgraph_as_node", "agent"])
async def test_closed_async_graph_stream_saves_the_originals_state(
    name: str, original_side: Side, accelerated_side: Side
) -> None:
    found = []
    for side in (original_side, accelerated_side):
        graph, recorder = side.fast(GRAPHS[name].build(side.kit())), Recorder()
        stream = graph.astream(GRAPHS[name].turns[0].given, {**_config(0), "callbacks": [recorder]}, durability="sync")
        first = await anext(stream)
        await stream.aclose()
        state = await graph.aget_state(_config(0))
        found.append((Names()(plain(first)), state.next, Counter(event[1] for event in recorder.events)))
        assert await graph.ainvoke(None, _config(0))
    assert found[0] == found[1]


def test_stream_read_by_several_threads_has_the_originals_chunks(original_side: Side, accelerated_side: Side) -> None:
    """Every chunk in a context of its own."""
    found = []
    for side in (original_side, accelerated_side):
        graph = side.fast(GRAPHS["subgraph_as_node"].build(side.kit()))
        stream = graph.stream({"question": "q"}, _config(0), stream_mode=["values", "messages"], subgraphs=True)
        chunks: list[Any] = []
        with ThreadPoolExecutor(4) as threads:
            while (chunk := threads.submit(next, stream, None).result()) is not None:
                chunks.append(chunk)
        found.append(Names()(plain(chunks)))
    assert found[0] == found[1]


@pytest.mark.parametrize("left_after", [0, 3, 99])
async def test_async_stream_read_by_several_tasks_has_the_originals_chunks(
    left_after: int, original_side: Side, accelerated_side: Side
) -> None:
    """And closed by yet another one."""
    found = []
    for side in (original_side, accelerated_side):
        graph = side.fast(GRAPHS["subgraph_as_node"].build(side.kit()))
        stream = graph.astream({"question": "q"}, _config(0), stream_mode=["values", "updates"], durability="sync")
        chunks: list[Any] = []
        while len(chunks) < left_after:
            chunk = await asyncio.create_task(anext(stream, None))  # type: ignore[arg-type]
            if chunk is None:
                break
            chunks.append(chunk)
        await asyncio.create_task(stream.aclose())  # type: ignore[arg-type]
        assert await graph.ainvoke(None if chunks else {"question": "q"}, _config(0))
        found.append(Names()(plain(chunks)))
    assert found[0] == found[1]


async def test_cancelled_graph_call_can_be_resumed_as_in_the_original(
    original_side: Side, accelerated_side: Side
) -> None:
    """In the middle of a node; what was saved before is there, and the graph can be called again."""
    found = []
    for side in (original_side, accelerated_side):
        kit, inside = side.kit(), asyncio.Event()
        llm = kit.llm

        async def slow(state: Reduced, llm: Any = llm, inside: Any = inside, kit: Any = kit) -> dict[str, Any]:
            reply = await llm.ainvoke(f"slow {state['question']}")
            if kit.note("slow") == 0:
                inside.set()
                await asyncio.sleep(60)
            return {"notes": [reply.content]}

        graph = StateGraph(Reduced)
        graph.add_node("fast", lambda state, llm=llm: {"notes": [llm.invoke("fast").content]})
        graph.add_node("slow", slow)
        graph.add_edge(START, "fast")
        graph.add_edge("fast", "slow")
        made = side.fast(graph.compile(checkpointer=kit.saver))
        call = asyncio.create_task(made.ainvoke({"question": "q"}, _config(0), durability="sync"))
        await inside.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        before = (await made.aget_state(_config(0))).next
        found.append((before, await made.ainvoke(None, _config(0)), kit.side_effects))
    assert found[0] == found[1]


def test_abandoned_streams_leave_the_graph_usable(accelerated_side: Side) -> None:
    """A generator that nobody reads to its end is closed with its query."""
    graph = accelerated_side.fast(GRAPHS["independent_steps"].build(accelerated_side.kit()))
    garbage.freeze_objects()
    for i in range(3):
        for _ in graph.stream({"question": "q"}, _config(i)):
            break
    assert graph.invoke({"question": "q"}, _config(9))
    assert graph.last_trace() is not None


def test_threads_started_by_a_node_behave_as_in_the_original(original_side: Side, accelerated_side: Side) -> None:
    """The threads are the node's own or of its own thread pool, and know nothing of the run."""
    found = []
    for side in (original_side, accelerated_side):
        kit = side.kit()
        llm = kit.llm

        def node(state: Reduced, config: RunnableConfig, llm: Any = llm) -> dict[str, Any]:
            replies: list[str] = []
            ask = partial(llm.invoke, f"in a thread: {state['question']}")
            thread = threading.Thread(target=lambda: replies.append(ask().content))
            thread.start()
            thread.join()
            with ThreadPoolExecutor(2) as threads:
                replies += threads.map(lambda text: llm.invoke(text, config).content, ["one", "two"])
            return {"notes": replies}

        graph = StateGraph(Reduced)
        graph.add_node(node)
        graph.add_edge(START, "node")
        side.counts.clear()
        recorder = Recorder()
        made = side.fast(graph.compile()).invoke({"question": "q"}, {"callbacks": [recorder]})
        found.append((made, Counter(event[1:3] for event in recorder.events), side.counts.original_requests.copy()))
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    assert found[0][1] == found[1][1]


async def test_sync_graph_call_works_inside_a_running_loop(original_side: Side, accelerated_side: Side) -> None:
    """A notebook cell, and a node in async code that calls a graph without awaiting it."""
    found = []
    for side in (original_side, accelerated_side):
        kit = side.kit()
        inner = side.fast(GRAPHS["private_channels"].build(kit))

        async def node(state: Reduced, inner: Any = inner) -> dict[str, Any]:
            return {"notes": [inner.invoke({"question": state["question"]}, _config(1))["answer"]]}

        graph = StateGraph(Reduced)
        graph.add_node(node)
        graph.add_edge(START, "node")
        outer = await side.fast(graph.compile()).ainvoke({"question": "q"})
        found.append((inner.invoke({"question": "q"}, _config(0)), outer))
    assert found[0] == found[1]


def test_recursive_graph_gives_the_originals_result(original_side: Side, accelerated_side: Side) -> None:
    """The graph calls itself by the name of the accelerated one."""
    found = []
    for side in (original_side, accelerated_side):
        kit, known = side.kit(), {}
        llm = kit.llm

        def node(state: Reduced, llm: Any = llm, known: Any = known) -> dict[str, Any]:
            below = known["graph"].invoke({"question": state["question"][1:]})["notes"] if state["question"] else []
            return {"notes": [llm.invoke(f"at {state['question']}").content, *below]}

        graph = StateGraph(Reduced)
        graph.add_node(node)
        graph.add_edge(START, "node")
        known["graph"] = side.fast(graph.compile())
        side.counts.clear()
        found.append((known["graph"].invoke({"question": "abc"}), side.counts.original_requests.copy()))
    assert found[0] == found[1]


WRONG = ({"recursion_limit": 0}, {"configurable": {"checkpoint_id": "none"}}, {"callbacks": 5}, {"tags": 7})


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_graph_config_raises_the_originals_error(
    wrong: Any, original_side: Side, accelerated_side: Side
) -> None:
    """The same error, before anything runs."""
    found = []
    for side in (original_side, accelerated_side):
        graph = side.fast(GRAPHS["private_channels"].build(side.kit()))
        with pytest.raises(Exception) as caught:
            graph.invoke({"question": "q"}, {**_config(0), **wrong})
        found.append(plain(caught.value))
    assert found[0] == found[1]
