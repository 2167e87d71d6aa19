"""Tests of the depths of subplans in the whole query, and of the gangs among them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.query_parts import (
    CALLS,
    GENERATE,
    QUESTION,
    Calls,
    K,
    Scene,
    ask,
    generation,
    graph,
    in_scene,
)

from teola_plugin.graph import Fragment, Graph, Primitive, Query, Ref, named
from teola_plugin.requests.payloads import Generate
from teola_plugin.runtime.query_run import CallPosition, SubplanRun, current_position
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue
from teola_plugin.scheduling.live_query import in_gang

# ---------------------------------------------------------------- depth


def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the depth of each primitive as its engine gets it."""
    seen: dict[str, int] = {}
    handle = EngineScheduler.handle

    def spy(self: EngineScheduler, event: Any) -> Any:
        if isinstance(event, Enqueue):
            seen[event.primitive] = event.depth
        elif isinstance(event, DepthChanged):
            seen.update({name: depth for name, depth in event.depths.items() if name in seen})
        return handle(self, event)

    monkeypatch.setattr(EngineScheduler, "handle", spy)
    return seen


def test_subplan_depth_counts_from_the_whole_query(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> None:
        scene.prefetch(depth=0, value="a")
        scene.prefetch(depth=5, value="b")
        token = current_position.set(CallPosition(depth=3))
        scene.prefetch(value="c")
        current_position.reset(token)

    in_scene(body)
    assert seen == {"part1/g.p": 1, "part2/g.p": 6, "part3/g.p": 4}


def test_original_call_has_the_depth_of_its_call_site(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> None:
        for depth, text in ((2, "a"), (0, "b"), (7, "c")):
            token = current_position.set(CallPosition(depth))
            await scene.call_as_original(ask({"text": text}))
            current_position.reset(token)

    in_scene(body)
    assert list(seen.values()) == [2, 0, 7]


def test_original_call_is_deeper_than_prefetched_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> None:
        scene.prefetch(depth=4)
        token = current_position.set(CallPosition(2))
        await scene.call_as_original(ask({"text": "unplanned"}))
        current_position.reset(token)

    in_scene(body)
    assert seen == {"part1/g.p": 5, "llm.call#1": 6}


def test_original_call_overtakes_queued_prefetched_calls() -> None:
    async def body(scene: Scene) -> list[str]:
        for number in range(2):  # they fill the engine
            scene.prefetch(value=f"{number} " * 400)
        for text in ("later", "much later"):
            scene.prefetch(value=text)
        await asyncio.sleep(0.001)
        await scene.call_as_original(ask({"text": "now"}))
        return [request.payload.prompt.text for request in scene.requests["llm"]][2:3]

    assert in_scene(body, max_requests=2) == ["now"]


@pytest.mark.parametrize("who", ["a part", "the plain object"])
def test_adopted_request_takes_the_greater_depth(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> list[str]:
        for number in range(2):  # they fill the engine
            scene.prefetch(value=f"{number} " * 400, depth=9)
        for text, depth in ((QUESTION, 1), ("first", 4), ("last", 0)):
            scene.prefetch(value=text, depth=depth)
        await asyncio.sleep(0.001)
        token = current_position.set(CallPosition(8))
        answer = asyncio.ensure_future(scene.call_as_original()) if who == "the plain object" else scene.prefetch()
        await asyncio.sleep(0.001)
        current_position.reset(token)
        assert seen["part3/g.p"] == (8 if who == "the plain object" else 9)
        await asyncio.sleep(10)
        assert isinstance(answer, SubplanRun) or await answer
        order = [
            request.payload.prompt.text for request in scene.requests["llm"] if isinstance(request.payload, Generate)
        ]
        return order[2:]

    assert in_scene(body, max_requests=2) == [QUESTION, "first", "last"]


def test_grown_depth_reaches_the_subplan_that_made_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later part splices what makes its generation deeper; the engine knows it by the earlier part's name."""
    seen = watched(monkeypatch)
    then = Graph(generation("then", "$carry"), Ref("then"))
    fold = named(items=Ref("slow"), init=Ref("g", ("text",)))
    body_of = Fragment(then, then.output)
    slow = Primitive("slow", K.CALL, inputs=named(v=Ref("e")), call="three")
    embed = Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input")))
    deep = graph(*generation(), embed, slow, Primitive("f", K.FOLD, inputs=fold, fragment=body_of))

    async def body(scene: Scene) -> None:
        for number in range(2):
            scene.prefetch(value=f"{number} " * 400)
        scene.prefetch()
        scene.prefetch(deep, {**CALLS, "three": lambda v: [1, 2, 3]})
        await asyncio.sleep(0.2)
        assert "part4/g.p" not in seen and seen["part3/g.p"] == 8

    in_scene(body, max_requests=2)


# ---------------------------------------------------------------- gangs


Standing = tuple[str, str]
"""Objective and gang."""


def standings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Standing]:
    """Return the objective of each primitive as its engine gets it. Gangs have no name of their query."""
    seen: dict[str, Standing] = {}
    handle = EngineScheduler.handle

    def spy(self: EngineScheduler, event: Any) -> Any:
        if isinstance(event, Enqueue):
            seen[event.primitive] = event.objective.value, event.gang.partition("/")[2]
        elif isinstance(event, DepthChanged):
            seen.update({name: (how.value, gang.partition("/")[2]) for name, (how, gang) in event.objectives.items()})
        return handle(self, event)

    monkeypatch.setattr(EngineScheduler, "handle", spy)
    return seen


def test_parallel_subplans_are_scheduled_as_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = standings(monkeypatch)
    rated = graph(*generation("g"), *generation("h", "g"))

    async def body(scene: Scene) -> None:
        for text in ("a", "b"):
            scene.prefetch(rated, {"ask": lambda given: ask({"text": str(given["text"])})}, text, gang="step1.rate")
        scene.prefetch(value="alone")
        await asyncio.sleep(5)

    in_scene(body)
    gang = ("throughput", "step1.rate")
    both = {f"part{n}/{name}.p": gang for n in (1, 2) for name in ("g", "h")}
    assert seen == {**both, "part3/g.p": ("latency", "")}


def test_branch_calls_join_the_gang_of_their_planned_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = standings(monkeypatch)

    async def branch(scene: Scene, text: str) -> None:
        token = current_position.set(CallPosition(depth=2, gang="step1.rate"))
        if text == "planned":
            scene.prefetch(value=text, lookahead=False)
        await scene.call_as_original(ask({"text": text}), stream=text == "streamed")
        current_position.reset(token)

    async def body(scene: Scene) -> None:
        await asyncio.gather(*(branch(scene, text) for text in ("planned", "one", "two", "streamed")))
        await scene.call_as_original(ask({"text": "after"}))
        first, second = (scene.call_as_original(ask({"text": text})) for text in ("x", "y"))
        await asyncio.gather(first, second)

    in_scene(body)
    gang = ("throughput", "step1.rate")
    assert seen == {
        "part1/g.p": gang,
        "llm.call#2": gang,
        "llm.call#3": gang,
        "llm.call#4": ("latency", ""),  # somebody reads along
        "llm.call#5": ("latency", ""),
        "llm.call#6": ("throughput", "llm.calls"),
        "llm.call#7": ("throughput", "llm.calls"),
    }


def test_gang_request_becomes_latency_bound_if_adopted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = standings(monkeypatch)

    async def body(scene: Scene) -> list[Standing]:
        found = []
        for gang in ("one", "two", ""):
            scene.prefetch(gang=gang)
            await asyncio.sleep(0)
            found.append(seen["part1/g.p"])
        return found

    assert in_scene(body) == [("throughput", "one"), ("throughput", "one"), ("latency", "")]


def test_branches_do_not_delay_other_queries() -> None:
    """24 branches on 4 slots, and then a question: it gets the next slot, not the 25th."""

    async def body(scene: Scene) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        current_position.set(CallPosition(gang="step1.rate"))
        rest = [asyncio.ensure_future(scene.call_as_original(ask({"text": f"{n} " * 50}))) for n in range(24)]
        await asyncio.sleep(0.05)
        current_position.set(CallPosition())
        begun, other = loop.time(), scene.pool.runtime.watch(Query({"input": None}))
        await other.call(K.PREFILLING, "llm", [GENERATE])
        alone = loop.time() - begun
        await asyncio.gather(*rest)
        return alone, loop.time() - begun

    alone, all_of_them = in_scene(body, max_requests=4)
    assert alone < all_of_them / 2


def test_branches_share_their_successor_but_not_their_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch has a part, which knows what comes behind all of them, too."""
    seen = standings(monkeypatch)
    behind = generation("unite", "$input")
    nodes = graph(*generation("rate.model"), *(p.with_(call="unite") if p.prefills else p for p in behind))
    calls: Calls = {"ask": ask, "unite": lambda given: ask({"text": "unite"})}

    async def body(scene: Scene) -> None:
        for _ in range(3):
            scene.prefetch(nodes, calls, gang="step1.rate", members="rate")
        await asyncio.sleep(0.01)
        assert scene.count() == 4
        token = current_position.set(CallPosition(gang="step1.rate"))
        chains = [scene.prefetch(lookahead=False) for _ in range(3)]
        await asyncio.gather(*(scene.call_as_original() for _ in range(3)))
        current_position.reset(token)
        await scene.call_as_original(ask({"text": "unite"}))
        assert scene.count() == 4 and len(chains) == 3

    in_scene(body)
    gang = ("throughput", "step1.rate")
    assert seen == {f"part{n}/rate.model.p": gang for n in (1, 2, 3)} | {"part1/unite.p": ("latency", "")}


@pytest.mark.parametrize(
    ("name", "members", "is_one"),
    [
        ("rate", "rate", True),
        ("rate.model", "rate", True),
        ("rate#1", "rate", True),
        ("rate[0]/x", "rate", True),
        ("rates.model", "rate", False),
        ("unite", "rate", False),
        ("unite", "", True),
    ],
)
def test_gang_members_are_matched_by_component_name(name: str, members: str, is_one: bool) -> None:
    assert in_gang(name, members) is is_one
