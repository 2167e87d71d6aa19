"""Tests of requests that several plans of one query need: they are made once, with the same result."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.query_parts import (
    QUESTION,
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

from teola_plugin.engines.fake import FakeLLM
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import Attributes, Fragment, Graph, Primitive, Ref, named
from teola_plugin.observe import QueryTrace
from teola_plugin.requests.payloads import EmbedText

# ---------------------------------------------------------------- adoption


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause", [0.0, 0.01, 0.15, 5.0])
def test_later_subplan_adopts_requests_of_an_earlier_one(pause: float, stream: bool) -> None:
    """Queued, running or done: one request, which goes on when the earlier part is over."""

    async def body(scene: Scene) -> None:
        first = scene.prefetch()
        await asyncio.sleep(pause)
        second = scene.prefetch()
        first.close()
        await asyncio.sleep(0.01)
        text = await scene.call_as_original(stream=stream)
        assert scene.count() == 1 and text
        assert await scene.call_as_original() == text and scene.count() == 2, "two calls stay two"
        second.close()
        assert scene.trace().wasted() == (0, 0)

    in_scene(body)


def test_request_is_cancelled_when_its_last_subplan_closes() -> None:
    async def body(scene: Scene) -> list[int]:
        parts, left = [scene.prefetch() for _ in range(3)], []
        for part in parts:
            await asyncio.sleep(0.02)
            part.close()
            await asyncio.sleep(0.001)
            left.append(scene.pool.engine("llm").load().requests)
        assert scene.count() == 1 and not scene.run.primitives and not scene.pool.runtime.request_count(scene.run.id)
        assert scene.trace().wasted()[0] > 0
        return left

    assert in_scene(body) == [1, 1, 0]


def test_later_subplan_that_closes_first_keeps_the_shared_request() -> None:
    async def body(scene: Scene) -> None:
        scene.prefetch()
        await asyncio.sleep(0.02)
        scene.prefetch().close()
        assert await scene.call_as_original() and scene.count() == 1
        assert scene.trace().wasted() == (0, 0)

    in_scene(body)


def test_finished_result_outlives_its_subplan() -> None:
    async def body(scene: Scene) -> None:
        first = scene.prefetch()
        await asyncio.sleep(5)
        first.close()
        scene.prefetch()
        await scene.call_as_original()
        assert scene.count() == 1
        trace = scene.trace()
        assert trace.wasted() == (0, 0) and trace.summary()["requests"] >= 1

    in_scene(body)


def test_called_chain_adopts_the_prefetched_request_exclusively() -> None:
    """A chain that runs in a node has a plan of its own, which is no lookahead."""

    async def body(scene: Scene) -> None:
        ahead = scene.prefetch()
        await asyncio.sleep(0.01)
        chain = scene.prefetch(lookahead=False)
        ahead.close()
        await scene.call_as_original()
        assert scene.count() == 1
        again = scene.prefetch(lookahead=False)
        await asyncio.sleep(0.01)
        assert scene.count() == 2, "another call of the chain is another generation"
        for part in (chain, again):
            part.close()
        assert scene.trace().wasted()[0] == 1

    in_scene(body)


@pytest.mark.parametrize("first", ["the chain", "the plain object"])
def test_slow_subplan_adopts_a_request_made_meanwhile(first: str) -> None:
    """The subplan started before, and its own code took some time."""

    async def body(scene: Scene) -> None:
        slow = graph(Primitive("slow", K.EMBEDDING, "embedder", named(texts=Ref("$input"))), *late())
        scene.prefetch(slow)
        chain = scene.prefetch(lookahead=False) if first == "the chain" else None
        answer = asyncio.ensure_future(scene.call_as_original())
        await asyncio.sleep(5)
        assert await answer and scene.count() == 1
        if chain is not None:
            chain.close()
        assert scene.trace().wasted()[0] == 1, "the embedding"

    in_scene(body)


def late() -> list[Primitive]:
    lead, decode = generation()
    return [lead.with_(after=("slow",)), decode]


def test_equal_generations_of_one_subplan_stay_two() -> None:
    async def body(scene: Scene) -> None:
        scene.prefetch(TWO_GENERATIONS)
        await asyncio.sleep(0.01)
        scene.prefetch(TWO_GENERATIONS)
        await asyncio.gather(scene.call_as_original(), scene.call_as_original())
        assert scene.count() == 2, "neither one for both, nor asked again by the second part"

    in_scene(body)


def test_subplans_of_one_gang_do_not_share_generations() -> None:
    """Branches that ask for the same, sampled, are to get answers of their own."""

    async def body(scene: Scene) -> None:
        for step in ("step1", "step2"):
            for _ in range(3):
                scene.prefetch(gang=step)
            await asyncio.sleep(0.01)
            assert scene.count() == 3
        await asyncio.gather(*(scene.call_as_original() for _ in range(3)))
        assert scene.count() == 3

    in_scene(body)


def test_repeated_call_of_a_loop_is_prefetched_each_round() -> None:
    async def body(scene: Scene) -> None:
        for turn in (1, 2, 3):
            part = scene.prefetch()
            await asyncio.sleep(0.01)
            assert scene.count() == turn, "what the plain object has had is no longer to come"
            await scene.call_as_original()
            assert scene.count() == turn
            part.close()

    in_scene(body)


def test_embedding_is_adopted_by_a_later_subplan() -> None:
    async def body(scene: Scene) -> None:
        embed = graph(Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input"))))
        first = scene.prefetch(embed)
        scene.prefetch(embed)
        first.close()
        await asyncio.sleep(0.001)
        await scene.run.call(K.EMBEDDING, "embedder", [EmbedText(QUESTION)])
        assert scene.count(K.EMBEDDING) == 1

    in_scene(body)


# ---------------------------------------------------------------- streams, lists, prefixes


ITEMS = json.dumps([f"question {n} of this list" for n in range(4)])


def listed() -> list[Primitive]:
    """Return a graph of a list with two planned items and more. Each item is embedded as it closes."""
    lead = generation()[0]
    attributes = Attributes(items="json")
    items = [
        Primitive("d#0", K.PARTIAL_DECODING, "llm", named(prefilling=Ref(lead.id)), item=0, attributes=attributes),
        Primitive("d#1", K.PARTIAL_DECODING, "llm", named(previous=Ref("d#0")), item=1, attributes=attributes),
    ]
    whole = Primitive("d", K.DECODING, "llm", named(previous=Ref("d#1")), attributes=attributes)
    each = [Primitive(f"e{n}", K.EMBEDDING, "embedder", named(texts=Ref(f"d#{n}")), speculative=True) for n in range(2)]
    return [lead, *items, *each, whole]


def writer() -> FakeLLM:
    return FakeLLM("llm", rtx3090()["llm"], lambda prompt, sampling: ITEMS)


def stored(scene: Scene) -> dict[str, float]:
    """Record, from now on, when each value comes to the query's store."""
    came: dict[str, float] = {}
    put, begun = scene.run.store.put, asyncio.get_running_loop().time()

    def record_value(producer: str, value: Any) -> None:
        came.setdefault(producer, asyncio.get_running_loop().time() - begun)
        put(producer, value)

    scene.run.store.put = record_value  # type: ignore[method-assign]
    return came


ITEM_VALUES = ("d#0", "e0", "d#1", "e1")


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.2, 0.25, 5.0])
def test_adopted_stream_delivers_items_as_they_close(pause: float) -> None:
    async def body(scene: Scene) -> list[float]:
        came = stored(scene)
        first = scene.prefetch(graph(*listed()))
        await asyncio.sleep(pause)
        second = scene.prefetch(graph(*listed()))
        first.close()
        await asyncio.sleep(5)
        assert scene.count() == 1 and scene.count(K.EMBEDDING) == 2
        done = scene.trace().finished()
        items = [done[f"{second.name}/{name}"] for name in ITEM_VALUES]
        assert all(span.done is not None and span.outcome != "cancelled" for span in items)
        return [came[f"{second.name}/{name}"] for name in ITEM_VALUES]

    alone = in_scene(lambda scene: _times_alone(scene), engines=[writer()])
    found = in_scene(body, engines=[writer()])
    assert found == pytest.approx([max(pause, end) for end in alone], abs=0.03)


async def _times_alone(scene: Scene) -> list[float]:
    came = stored(scene)
    part = scene.prefetch(graph(*listed()))
    await asyncio.sleep(5)
    return [came[f"{part.name}/{name}"] for name in ITEM_VALUES]


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.2, 0.25, 5.0])
def test_adopted_request_has_one_span_in_the_trace(pause: float) -> None:
    """The span has the times at which the request ran. Its tokens count once."""

    async def alone(scene: Scene) -> list[tuple[str, str, float, float, int]]:
        scene.prefetch(graph(*listed()))
        await asyncio.sleep(10)
        return _times(scene.trace())

    async def adopted(scene: Scene) -> list[tuple[str, str, float, float, int]]:
        first = scene.prefetch(graph(*listed()))
        await asyncio.sleep(pause)
        scene.prefetch(graph(*listed()))
        first.close()
        await asyncio.sleep(10)
        return _times(scene.trace())

    assert in_scene(adopted, engines=[writer()]) == in_scene(alone, engines=[writer()])


def _times(trace: QueryTrace) -> list[tuple[str, str, float, float, int]]:
    """Return primitive, kind, start, end and tokens of each span, without names of subplans."""
    return sorted(
        (s.primitive.partition("/")[2], s.kind, s.begin - trace.started, (s.done or 0.0) - trace.started, s.tokens)
        for s in trace.spans
    )


def test_map_items_are_adopted_one_by_one() -> None:
    each = Graph(generation("answer", "$item"), Ref("answer"))
    answers = graph(Primitive("m", K.MAP, inputs=named(items=Ref("$input")), fragment=Fragment(each, each.output)))

    async def body(scene: Scene) -> None:
        first = scene.prefetch(answers, value=["a", "b"])
        await asyncio.sleep(0.01)
        second = scene.prefetch(answers, value=["b", "c"])
        first.close()
        await asyncio.sleep(0.01)
        assert scene.count() == 3
        for text in ("b", "c"):
            await scene.call_as_original(ask({"text": text}))
        assert scene.count() == 3
        second.close()
        assert scene.trace().wasted()[0] == 1, "nobody asked for the first"

    in_scene(body)


@pytest.mark.parametrize("pause", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("over", [False, True])
def test_prefix_is_warmed_up_once_per_query(pause: float, over: bool) -> None:
    async def body(scene: Scene) -> None:
        given = {"known": QUESTION * 20, "slow": "text " * 3000}
        first = scene.prefetch(warmed(), {"begin": begin}, given)
        await asyncio.sleep(pause)
        if over and pause == 1.0:
            first.close()
        scene.prefetch(warmed(), {"begin": begin}, {**given, "slow": "another " * 3000})
        await asyncio.sleep(5)
        assert scene.count(K.PARTIAL_PREFILLING) == 1 and scene.count(K.FULL_PREFILLING) == 1
        scene.prefetch(warmed(), {"begin": begin}, {"known": "another", "slow": "third " * 3000})
        await asyncio.sleep(5)
        assert scene.count(K.PARTIAL_PREFILLING) == 2

    in_scene(body)


def test_prompt_waits_for_shared_warm_up_only_if_it_began() -> None:
    async def body(scene: Scene) -> float:
        for number in range(4):  # they fill the engine
            scene.prefetch(value=f"{number} " * 400)
        given = {"known": QUESTION, "slow": "text"}
        for _ in range(2):
            scene.prefetch(warmed(), {"begin": begin}, given)
        await asyncio.sleep(10)
        spans = scene.trace().finished()
        full, warm = spans["part6/g.p"], spans["part6/w"]
        assert full.queued < min(span.done or 9e9 for name, span in spans.items() if name.endswith("/g"))
        return warm.seconds

    in_scene(body, max_requests=4)
