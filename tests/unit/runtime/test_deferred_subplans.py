"""Tests of subplans that start when they are called for, and of subplans that fail or end early."""

from __future__ import annotations

import asyncio
from typing import Any

from support.query_parts import (
    INPUT,
    TWO_GENERATIONS,
    K,
    Scene,
    ask,
    begin,
    generation,
    graph,
    in_scene,
    warmed,
)

from teola_plugin.graph import Primitive, Ref, named
from teola_plugin.requests.payloads import Generate, Prompt, Sampling
from teola_plugin.runtime.query_run import CallPosition, current_position, during

# ---------------------------------------------------------------- held parts


def test_deferred_subplan_begins_after_the_first_call_at_its_site() -> None:
    async def body(scene: Scene) -> None:
        part = scene.prefetch(warmed(), {"begin": begin}, INPUT, is_deferred=True)
        with during(current_position, CallPosition(deferred=part.deferred)):
            await scene.call_as_original()
        await asyncio.sleep(5)
        assert part.has_begun
        [call, warm] = [one for one in scene.requests["llm"] if one.kind is not K.FULL_PREFILLING]
        assert call.kind is K.PREFILLING and warm.kind is K.PARTIAL_PREFILLING, "the call goes first"

    in_scene(body)


def test_deferred_subplan_begins_once_scheduled_without_calls() -> None:
    async def body(scene: Scene) -> None:
        part = scene.prefetch(warmed(), {"begin": begin}, INPUT, is_deferred=True)
        await asyncio.sleep(1)
        assert not part.has_begun and scene.count(K.PARTIAL_PREFILLING) == 0, "nobody has come to it"
        scene.run.schedule_subplans(part.deferred)
        await asyncio.sleep(1)
        assert part.has_begun and scene.count(K.PARTIAL_PREFILLING) == 1

    in_scene(body)


def test_covered_subplan_begins_only_with_an_unplanned_call() -> None:
    async def body(scene: Scene) -> None:
        first = scene.prefetch()
        part = scene.prefetch(TWO_GENERATIONS, is_deferred=True, covering="part0")
        scene.run.schedule_subplans(part.deferred)
        await asyncio.sleep(1)
        with during(current_position, CallPosition(deferred=part.deferred)):
            await scene.call_as_original()
            await asyncio.sleep(0.01)
            assert not part.has_begun and scene.count() == 1, "the first part had asked for it"
            await scene.call_as_original(Generate(Prompt(text="something else"), Sampling(max_tokens=4)))
        await asyncio.sleep(0.01)
        assert part.has_begun
        first.close(), part.close()

    in_scene(body)


def test_finished_deferred_subplan_never_begins() -> None:
    async def body(scene: Scene) -> None:
        part = scene.prefetch(is_deferred=True)
        scene.run.schedule_subplans(part.deferred)
        scene.run.schedule_subplans(finished=[part])
        await asyncio.sleep(1)
        assert not part.has_begun and scene.count() == 0

    in_scene(body)


# ---------------------------------------------------------------- failures


def fails(given: dict[str, Any]) -> Generate:
    raise ZeroDivisionError("the user's")


def test_failing_subplan_does_not_affect_other_subplans() -> None:
    async def body(scene: Scene) -> None:
        early, other = scene.prefetch(), scene.prefetch(value="another")
        broken = scene.prefetch(calls={"ask": fails})
        before = Primitive("c", K.CALL, inputs=named(x=Ref("$input")), call="c")
        worse = scene.prefetch(graph(before, *generation("g", "c")), {"ask": ask, "c": fails})
        await asyncio.sleep(0.01)
        assert {name.partition("/")[0] for name in scene.run.errors} == {broken.name, worse.name}
        for part in (broken, worse):
            part.close()
        assert not scene.run.errors, "what they raised is let go with them"
        assert (
            await scene.call_as_original()
            and await scene.call_as_original(ask({"text": "another"}))
            and scene.count() == 2
        )
        for part in (early, other):
            part.close()
        assert scene.trace().outcome == "closed"

    in_scene(body)


def test_subplan_can_be_closed_repeatedly_at_any_time() -> None:
    async def body(scene: Scene) -> None:
        for pause in (0.0, 0.001, 0.1, 5.0):
            part = scene.prefetch(value=f"{pause}")
            await asyncio.sleep(pause)
            part.close()
            part.close()
        await asyncio.sleep(0.01)
        assert scene.pool.engine("llm").load().requests == 0
        assert (
            not scene.run.subplans and not scene.run.primitives and not scene.pool.runtime.request_count(scene.run.id)
        )
        assert scene.trace().outcome == "closed"

    in_scene(body)
