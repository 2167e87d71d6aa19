"""Tests of the original's steps in traces: nested, bounded, from any thread, and matched with primitives."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, PromptPart, Query, Ref, named
from teola_plugin.observe import QueryTrace, Step, timeline_text
from teola_plugin.observe.steps import StepLog, nested
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Prompt, Sampling
from teola_plugin.runtime.query_run import CallPosition, QueryRun, current_position, during
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind
PROMPT = (PromptPart.var("text"),)


@given(st.lists(st.integers(-1, 12), max_size=12))
def test_each_step_is_listed_once_below_its_parent(parents: list[int]) -> None:
    """Whatever the parents: some are not kept, some come later, some are themselves."""
    steps = [Step(i, "node", str(i), float(i), parent=max(0, parent)) for i, parent in enumerate(parents, start=1)]
    found = nested(steps)
    assert sorted(step.id for _, step in found) == [step.id for step in steps]
    places = {step.id: (place, level) for place, (level, step) in enumerate(found)}
    for step in steps:
        if 0 < step.parent < step.id:
            place, level = places[step.parent]
            assert places[step.id][0] > place and places[step.id][1] == level + 1
        else:
            assert places[step.id][1] == 0


def test_first_and_latest_of_many_steps_are_kept() -> None:
    log = StepLog(max_steps=10)
    for number in range(30):
        log.end(log.begin("node", str(number), float(number), None, {}), number + 0.5, "done", {})
    assert [step.name for step in log.steps()] == [*map(str, range(5)), *map(str, range(25, 30))]
    assert log.left_out == 20


def test_steps_may_be_recorded_from_any_thread() -> None:
    log, begin = StepLog(max_steps=10_000), threading.Barrier(8)

    def work(thread: int) -> None:
        begin.wait()
        outer = log.begin("node", f"{thread}", 0.0, None, {})
        for number in range(200):
            log.end(log.begin("tool", f"{thread}.{number}", 0.0, outer, {}), 1.0, "done", {"n": number})
        log.end(outer, 2.0, "done", {})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    found = log.steps()
    assert len(found) == 8 * 201 and len({step.id for step in found}) == len(found)
    outer = {step.id: step.name for step in found if step.kind == "node"}
    assert all(outer[step.parent] == step.name.partition(".")[0] for step in found if step.kind == "tool")


def test_second_end_and_foreign_parent_of_a_step_are_ignored() -> None:
    log, other = StepLog(), StepLog()
    outer = other.begin("node", "elsewhere", 0.0, None, {})
    step = log.begin("tool", "t", 1.0, outer, {"early": True, "args": ["a", 1], "of": None})
    log.end(step, 2.0, "failed", {"claimed": False})
    log.end(step, 9.0, "done", {"claimed": True})
    [found] = log.steps()
    facts = (("early", True), ("args", "a, 1"), ("of", "None"), ("claimed", False))
    assert found == Step(1, "tool", "t", 1.0, 2.0, 0, "failed", facts) and found.is_prefetched


# ---------------------------------------------------------------- in a live query


def ask(text: str) -> Generate:
    return Generate(Prompt(text=text), Sampling(max_tokens=8))


def generation(name: str) -> list[Primitive]:
    lead = Primitive(f"{name}.p", K.PREFILLING, "llm", named(text=Ref("$input").at(name)), call=name, prompt=PROMPT)
    return [lead, Primitive(f"{name}.d", K.DECODING, "llm", named(prefilling=Ref(lead.id)))]


def nodes(*names: str) -> tuple[Graph, dict[str, Any], dict[str, str]]:
    made = [p for name in names for p in generation(name)]
    calls = {name: lambda given: ask(given["text"]) for name in names}
    return Graph(made, Ref(made[-1].id)), calls, {name: name for name in names}


async def _call(run: QueryRun, text: str) -> None:
    await run.call(K.PREFILLING, "llm", [ask(text)])


async def _query() -> tuple[QueryTrace, QueryTrace]:
    async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
        run = pool.runtime.watch(Query({"input": None}), joins=True)
        first = run.step_began("superstep", "1", nodes=["a"])
        node = run.step_began("node", "a", first, task="t1")
        run.begin_subplan(*nodes("a", "b"), lookahead=True, members="a", step=node)
        with during(current_position, CallPosition(step=node)):
            await _call(run, "a")
            tool = run.step_began("tool", "lookup")
            with during(current_position, CallPosition(step=tool)):
                await _call(run, "unplanned")
            run.step_ended(tool, early=False)
        run.step_ended(node)
        run.step_ended(first)
        second = run.step_began("superstep", "2", nodes=["b"])
        node = run.step_began("node", "b", second)
        with during(current_position, CallPosition(step=node)):
            run.begin_subplan(*nodes("b"))
            await _call(run, "b")
            inner = pool.runtime.watch(Query({"input": None}))
            await _call(inner, "of another query")
        run.step_ended(node, outcome="failed")
        for one in (inner, run):
            one.close()
        found = [one.trace.result(0) for one in (run, inner)]
        assert found[0] is not None and found[1] is not None
        return found[0], found[1]


def test_primitives_are_assigned_to_their_steps() -> None:
    trace, inner = run_virtual(_query())
    names = {step.id: step.name for step in trace.steps} | {0: ""}
    assert [(step.kind, step.name, names[step.parent], step.outcome) for step in trace.steps] == [
        ("superstep", "1", "", "done"),
        ("node", "a", "1", "done"),
        ("tool", "lookup", "a", "done"),
        ("superstep", "2", "", "cancelled"),
        ("node", "b", "2", "failed"),
    ]
    assert {span.primitive: names[span.step] for span in trace.spans} == {
        "part1/a.p": "a", "part1/a.d": "a",
        "part1/b.p": "b", "part1/b.d": "b",  # planned before its node had begun, adopted and claimed by it
        "llm.call#2": "lookup",
    }  # fmt: skip
    assert {"part2/b.p", "part2/b.d"} <= trace.finished().keys()
    assert [span.step for span in inner.spans] == [0] and not inner.steps
    assert all(step.ended is None or step.seconds > 0 for step in trace.steps)
    assert "lookup" in timeline_text(trace)


def test_recording_a_step_costs_little() -> None:
    """A step is recorded where it is reported, without waiting for the pool's loop."""

    async def run() -> tuple[int, float]:
        async with EnginePool.on_this_loop(fake_engines()) as pool:
            live = pool.runtime.watch(Query({"input": None}))
            before = asyncio.get_running_loop().time()
            for _ in range(1000):
                live.step_ended(live.step_began("node", "n"))
            took = asyncio.get_running_loop().time() - before
            live.close()
            trace = live.trace.result(0)
            assert trace is not None
            return len(trace.steps), took

    count, took = asyncio.run(run())
    assert count == 1000 and took < 1.0
