"""Parts of a live query: how deep they are in the whole, and what a later one adopts of an earlier one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.recording import record

from teola_plugin.engines.fake import FakeLLM, fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import Attributes, Fragment, Graph, Primitive, PrimitiveKind, PromptPart, Query, Ref, named
from teola_plugin.observe import QueryTrace
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import UNKNOWN, EmbedText, Generate, Prompt, Sampling
from teola_plugin.requests.request import Request
from teola_plugin.runtime.context import CallPlace, current_place, placed
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue
from teola_plugin.scheduling.objectives import in_gang

K = PrimitiveKind
QUESTION = "why is the sky blue? " * 8
ASKED = Generate(Prompt(text=QUESTION), Sampling(max_tokens=24))
PROMPT = (PromptPart.var("text"),)
Calls = dict[str, Callable[..., Any]]


def generation(name: str = "g", text: str = "$input") -> list[Primitive]:
    lead = Primitive(f"{name}.p", K.PREFILLING, "llm", named(text=Ref(text)), call="ask", prompt=PROMPT)
    return [lead, Primitive(name, K.DECODING, "llm", named(prefilling=Ref(lead.id)))]


def ask(given: dict[str, Any]) -> Generate:
    return Generate(Prompt(text=given["text"]), Sampling(max_tokens=24))


def graph(*primitives: Primitive) -> Graph:
    return Graph(primitives, Ref(primitives[-1].id))


CALLS: Calls = {"ask": ask}
ONE = graph(*generation())
TWO = graph(*generation("one"), *generation("two"), Primitive("both", K.CALL, inputs=named(a=Ref("one"), b=Ref("two"))))


class Scene:
    """A query that parts may join, in virtual time, and what its engines are asked for."""

    def __init__(self, pool: EnginePool, **query: Any) -> None:
        self.pool = pool
        self.asked: dict[str, list[Request]] = {name: record(pool.engine(name)) for name in pool.engine_names}
        self.run: QueryRun = pool.runtime.watch(Query({"input": None}, **query), joins=True)

    def ahead(self, graph: Graph = ONE, calls: Calls = CALLS, value: Any = QUESTION, **more: Any) -> PartRun:
        return self.run.part(graph, calls, value, **{"lookahead": True, **more})

    async def plain(self, asked: Generate = ASKED, *, stream: bool = False) -> str:
        handle = self.run.call(K.PREFILLING, "llm", [asked], stream=stream)
        pieces = "".join([piece.text async for piece in handle.pieces]) if stream else ""
        [made] = await handle
        assert not stream or pieces == made.text
        return str(made.text)

    def count(self, kind: PrimitiveKind = K.PREFILLING) -> int:
        return sum(request.kind is kind for asked in self.asked.values() for request in asked)

    def trace(self) -> QueryTrace:
        self.run.close()
        found = self.run.trace.result(0)
        assert found is not None
        return found


def in_scene(body: Callable[[Scene], Awaitable[Any]], *, engines: Sequence[Any] = (), most: int = 8) -> Any:
    async def run() -> Any:
        profiles = rtx3090() | {"llm": replace(rtx3090()["llm"], max_requests=most)}
        made = {engine.name: engine for engine in fake_engines(profiles)} | {engine.name: engine for engine in engines}
        async with EnginePool.on_this_loop(list(made.values())) as pool:
            scene = Scene(pool)
            return await body(scene)

    return run_virtual(run())


# ---------------------------------------------------------------- adoption


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause", [0.0, 0.01, 0.15, 5.0])
def test_a_later_part_adopts_what_an_earlier_one_has_asked_for(pause: float, stream: bool) -> None:
    """Queued, running or done: one request, which goes on when the earlier part is over."""

    async def body(scene: Scene) -> None:
        first = scene.ahead()
        await asyncio.sleep(pause)
        second = scene.ahead()
        first.close()
        await asyncio.sleep(0.01)
        text = await scene.plain(stream=stream)
        assert scene.count() == 1 and text
        assert await scene.plain() == text and scene.count() == 2, "two calls stay two"
        second.close()
        assert scene.trace().wasted() == (0, 0)

    in_scene(body)


def test_what_no_part_wants_any_more_is_stopped_with_the_last_of_them() -> None:
    async def body(scene: Scene) -> list[int]:
        parts, left = [scene.ahead() for _ in range(3)], []
        for part in parts:
            await asyncio.sleep(0.02)
            part.close()
            await asyncio.sleep(0.001)
            left.append(scene.pool.engine("llm").load().requests)
        assert scene.count() == 1 and not scene.run.primitives and not scene.pool.runtime.asked(scene.run.id)
        assert scene.trace().wasted()[0] > 0
        return left

    assert in_scene(body) == [1, 1, 0]


def test_a_part_that_ends_first_does_not_take_the_elder_ones_work_away() -> None:
    async def body(scene: Scene) -> None:
        scene.ahead()
        await asyncio.sleep(0.02)
        scene.ahead().close()
        assert await scene.plain() and scene.count() == 1
        assert scene.trace().wasted() == (0, 0)

    in_scene(body)


def test_what_an_earlier_part_has_made_is_still_there_when_it_is_over() -> None:
    async def body(scene: Scene) -> None:
        first = scene.ahead()
        await asyncio.sleep(5)
        first.close()
        scene.ahead()
        await scene.plain()
        assert scene.count() == 1
        trace = scene.trace()
        assert trace.wasted() == (0, 0) and trace.summary()["requests"] >= 1

    in_scene(body)


def test_the_part_of_the_chain_that_is_called_adopts_it_and_has_it_alone() -> None:
    """What runs in a node brings a graph of its own, which is no lookahead."""

    async def body(scene: Scene) -> None:
        ahead = scene.ahead()
        await asyncio.sleep(0.01)
        chain = scene.ahead(lookahead=False)
        ahead.close()
        await scene.plain()
        assert scene.count() == 1
        again = scene.ahead(lookahead=False)
        await asyncio.sleep(0.01)
        assert scene.count() == 2, "another call of the chain is another generation"
        for part in (chain, again):
            part.close()
        assert scene.trace().wasted()[0] == 1

    in_scene(body)


@pytest.mark.parametrize("first", ["the chain", "the plain object"])
def test_a_part_that_comes_late_to_what_is_asked_for_adopts_it(first: str) -> None:
    """It was begun before, and its own code took its time."""

    async def body(scene: Scene) -> None:
        slow = graph(Primitive("slow", K.EMBEDDING, "embedder", named(texts=Ref("$input"))), *late())
        scene.ahead(slow)
        chain = scene.ahead(lookahead=False) if first == "the chain" else None
        answer = asyncio.ensure_future(scene.plain())
        await asyncio.sleep(5)
        assert await answer and scene.count() == 1
        if chain is not None:
            chain.close()
        assert scene.trace().wasted()[0] == 1, "the embedding"

    in_scene(body)


def late() -> list[Primitive]:
    lead, decode = generation()
    return [lead.with_(after=("slow",)), decode]


def test_equal_generations_of_one_part_are_two() -> None:
    async def body(scene: Scene) -> None:
        scene.ahead(TWO)
        await asyncio.sleep(0.01)
        scene.ahead(TWO)
        await asyncio.gather(scene.plain(), scene.plain())
        assert scene.count() == 2, "neither one for both, nor asked again by the second part"

    in_scene(body)


def test_parts_of_one_gang_are_beside_each_other() -> None:
    """Branches that ask for the same, sampled, are to get answers of their own."""

    async def body(scene: Scene) -> None:
        for step in ("step1", "step2"):
            for _ in range(3):
                scene.ahead(gang=step)
            await asyncio.sleep(0.01)
            assert scene.count() == 3
        await asyncio.gather(*(scene.plain() for _ in range(3)))
        assert scene.count() == 3

    in_scene(body)


def test_a_loop_that_asks_for_the_same_again_is_ahead_each_time() -> None:
    async def body(scene: Scene) -> None:
        for turn in (1, 2, 3):
            part = scene.ahead()
            await asyncio.sleep(0.01)
            assert scene.count() == turn, "what the plain object has had is no longer to come"
            await scene.plain()
            assert scene.count() == turn
            part.close()

    in_scene(body)


def test_a_retrieval_is_adopted_like_everything_that_is_pure() -> None:
    async def body(scene: Scene) -> None:
        embed = graph(Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input"))))
        first = scene.ahead(embed)
        scene.ahead(embed)
        first.close()
        await asyncio.sleep(0.001)
        await scene.run.call(K.EMBEDDING, "embedder", [EmbedText(QUESTION)])
        assert scene.count(K.EMBEDDING) == 1

    in_scene(body)


# ---------------------------------------------------------------- streams, lists, prefixes


ITEMS = json.dumps([f"question {n} of this list" for n in range(4)])


def listed() -> list[Primitive]:
    """A list of two planned items and more, each item embedded as it closes."""
    lead = generation()[0]
    said = Attributes(items="json")
    items = [
        Primitive("d#0", K.PARTIAL_DECODING, "llm", named(prefilling=Ref(lead.id)), item=0, attributes=said),
        Primitive("d#1", K.PARTIAL_DECODING, "llm", named(previous=Ref("d#0")), item=1, attributes=said),
    ]
    whole = Primitive("d", K.DECODING, "llm", named(previous=Ref("d#1")), attributes=said)
    each = [Primitive(f"e{n}", K.EMBEDDING, "embedder", named(texts=Ref(f"d#{n}")), tentative=True) for n in range(2)]
    return [lead, *items, *each, whole]


def writer() -> FakeLLM:
    return FakeLLM("llm", rtx3090()["llm"], lambda prompt, sampling: ITEMS)


def stored(scene: Scene) -> dict[str, float]:
    """When each value came to the query's store, from now on."""
    came: dict[str, float] = {}
    put, begun = scene.run.store.put, asyncio.get_running_loop().time()

    def told(producer: str, value: Any) -> None:
        came.setdefault(producer, asyncio.get_running_loop().time() - begun)
        put(producer, value)

    scene.run.store.put = told  # type: ignore[method-assign]
    return came


ITEM_VALUES = ("d#0", "e0", "d#1", "e1")


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.2, 0.25, 5.0])
def test_items_of_a_stream_that_is_adopted_are_there_as_they_close(pause: float) -> None:
    async def body(scene: Scene) -> list[float]:
        came = stored(scene)
        first = scene.ahead(graph(*listed()))
        await asyncio.sleep(pause)
        second = scene.ahead(graph(*listed()))
        first.close()
        await asyncio.sleep(5)
        assert scene.count() == 1 and scene.count(K.EMBEDDING) == 2
        done = scene.trace().finished()
        items = [done[f"{second.name}/{name}"] for name in ITEM_VALUES]
        assert all(span.done is not None and span.outcome != "cancelled" for span in items)
        return [came[f"{second.name}/{name}"] for name in ITEM_VALUES]

    alone = in_scene(lambda scene: _alone(scene), engines=[writer()])
    found = in_scene(body, engines=[writer()])
    assert found == pytest.approx([max(pause, end) for end in alone], abs=0.03)


async def _alone(scene: Scene) -> list[float]:
    came = stored(scene)
    part = scene.ahead(graph(*listed()))
    await asyncio.sleep(5)
    return [came[f"{part.name}/{name}"] for name in ITEM_VALUES]


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.2, 0.25, 5.0])
def test_work_that_is_adopted_is_one_span(pause: float) -> None:
    """With the times at which it ran, whoever was there then; its tokens count once."""

    async def alone(scene: Scene) -> list[tuple[str, str, float, float, int]]:
        scene.ahead(graph(*listed()))
        await asyncio.sleep(10)
        return _times(scene.trace())

    async def adopted(scene: Scene) -> list[tuple[str, str, float, float, int]]:
        first = scene.ahead(graph(*listed()))
        await asyncio.sleep(pause)
        scene.ahead(graph(*listed()))
        first.close()
        await asyncio.sleep(10)
        return _times(scene.trace())

    assert in_scene(adopted, engines=[writer()]) == in_scene(alone, engines=[writer()])


def _times(trace: QueryTrace) -> list[tuple[str, str, float, float, int]]:
    """(primitive, kind, began, ended, tokens), without the parts' names."""
    return sorted(
        (s.primitive.partition("/")[2], s.kind, s.begin - trace.started, (s.done or 0.0) - trace.started, s.tokens)
        for s in trace.spans
    )


def test_items_of_a_list_are_adopted_one_by_one() -> None:
    each = Graph(generation("answer", "$item"), Ref("answer"))
    answers = graph(Primitive("m", K.MAP, inputs=named(items=Ref("$input")), fragment=Fragment(each, each.output)))

    async def body(scene: Scene) -> None:
        first = scene.ahead(answers, value=["a", "b"])
        await asyncio.sleep(0.01)
        second = scene.ahead(answers, value=["b", "c"])
        first.close()
        await asyncio.sleep(0.01)
        assert scene.count() == 3
        for text in ("b", "c"):
            await scene.plain(ask({"text": text}))
        assert scene.count() == 3
        second.close()
        assert scene.trace().wasted()[0] == 1, "nobody asked for the first"

    in_scene(body)


def warmed(**more: Any) -> Graph:
    """A prompt whose beginning is known, and whose rest is slow."""
    slow = Primitive("slow", K.EMBEDDING, "embedder", named(texts=Ref("$input", ("slow",))))
    lead = Primitive(
        "w", K.PARTIAL_PREFILLING, "llm", named(text=Ref("$input", ("known",))), call="begin", prompt=PROMPT
    )
    rest = named(text=Ref("$input", ("known",)), slow=Ref("slow"))
    full = Primitive("g.p", K.FULL_PREFILLING, "llm", rest, after=("w",), call="begin", prompt=PROMPT)
    return graph(slow, lead, full, Primitive("g", K.DECODING, "llm", named(prefilling=Ref("g.p"))))


def begin(given: dict[str, Any]) -> Generate:
    rest = str(len(given["slow"])) if "slow" in given else UNKNOWN
    return Generate(Prompt(text=given["known" if "known" in given else "text"] + rest), Sampling(max_tokens=8))


@pytest.mark.parametrize("pause", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("over", [False, True])
def test_a_prefix_is_warmed_up_once_in_a_query(pause: float, over: bool) -> None:
    async def body(scene: Scene) -> None:
        given = {"known": QUESTION * 20, "slow": "text " * 3000}
        first = scene.ahead(warmed(), {"begin": begin}, given)
        await asyncio.sleep(pause)
        if over and pause == 1.0:
            first.close()
        scene.ahead(warmed(), {"begin": begin}, {**given, "slow": "another " * 3000})
        await asyncio.sleep(5)
        assert scene.count(K.PARTIAL_PREFILLING) == 1 and scene.count(K.FULL_PREFILLING) == 1
        scene.ahead(warmed(), {"begin": begin}, {"known": "another", "slow": "third " * 3000})
        await asyncio.sleep(5)
        assert scene.count(K.PARTIAL_PREFILLING) == 2

    in_scene(body)


def test_a_prompt_waits_for_a_shared_warm_up_only_if_that_has_begun() -> None:
    async def body(scene: Scene) -> float:
        for number in range(4):  # they fill the engine
            scene.ahead(value=f"{number} " * 400)
        given = {"known": QUESTION, "slow": "text"}
        for _ in range(2):
            scene.ahead(warmed(), {"begin": begin}, given)
        await asyncio.sleep(10)
        spans = scene.trace().finished()
        full, warm = spans["part6/g.p"], spans["part6/w"]
        assert full.queued < min(span.done or 9e9 for name, span in spans.items() if name.endswith("/g"))
        return warm.seconds

    in_scene(body, most=4)


# ---------------------------------------------------------------- held parts


GIVEN = {"known": QUESTION * 20, "slow": "text " * 3000}


def test_a_held_part_begins_behind_the_first_call_at_its_place() -> None:
    async def body(scene: Scene) -> None:
        part = scene.ahead(warmed(), {"begin": begin}, GIVEN, held=True)
        with placed(CallPlace(held=part.held)):
            await scene.plain()
        await asyncio.sleep(5)
        assert part.begun
        [call, warm] = [one for one in scene.asked["llm"] if one.kind is not K.FULL_PREFILLING]
        assert call.kind is K.PREFILLING and warm.kind is K.PARTIAL_PREFILLING, "the call goes first"

    in_scene(body)


def test_a_held_part_begins_soon_where_nothing_is_called() -> None:
    async def body(scene: Scene) -> None:
        part = scene.ahead(warmed(), {"begin": begin}, GIVEN, held=True)
        await asyncio.sleep(1)
        assert not part.begun and scene.count(K.PARTIAL_PREFILLING) == 0, "nobody has come to it"
        scene.run.turn(part.held)
        await asyncio.sleep(1)
        assert part.begun and scene.count(K.PARTIAL_PREFILLING) == 1

    in_scene(body)


def test_a_part_that_is_covered_begins_only_with_a_call_that_nobody_foresaw() -> None:
    async def body(scene: Scene) -> None:
        first = scene.ahead()
        part = scene.ahead(TWO, held=True, covered=True)
        scene.run.turn(part.held)
        await asyncio.sleep(1)
        with placed(CallPlace(held=part.held)):
            await scene.plain()
            await asyncio.sleep(0.01)
            assert not part.begun and scene.count() == 1, "the first part had asked for it"
            await scene.plain(Generate(Prompt(text="something else"), Sampling(max_tokens=4)))
        await asyncio.sleep(0.01)
        assert part.begun
        first.close(), part.close()

    in_scene(body)


def test_a_held_part_that_is_over_never_begins() -> None:
    async def body(scene: Scene) -> None:
        part = scene.ahead(held=True)
        scene.run.turn(part.held)
        scene.run.turn(over=[part])
        await asyncio.sleep(1)
        assert not part.begun and scene.count() == 0

    in_scene(body)


# ---------------------------------------------------------------- failures


def fails(given: dict[str, Any]) -> Generate:
    raise ZeroDivisionError("the user's")


def test_a_part_whose_code_raises_hurts_nobody() -> None:
    async def body(scene: Scene) -> None:
        early, other = scene.ahead(), scene.ahead(value="another")
        broken = scene.ahead(calls={"ask": fails})
        before = Primitive("c", K.CALL, inputs=named(x=Ref("$input")), call="c")
        worse = scene.ahead(graph(before, *generation("g", "c")), {"ask": ask, "c": fails})
        await asyncio.sleep(0.01)
        assert {name.partition("/")[0] for name in scene.run.errors} == {broken.name, worse.name}
        for part in (broken, worse):
            part.close()
        assert not scene.run.errors, "what they raised is let go with them"
        assert await scene.plain() and await scene.plain(ask({"text": "another"})) and scene.count() == 2
        for part in (early, other):
            part.close()
        assert scene.trace().outcome == "closed"

    in_scene(body)


def test_a_part_may_be_closed_at_any_time_and_again() -> None:
    async def body(scene: Scene) -> None:
        for pause in (0.0, 0.001, 0.1, 5.0):
            part = scene.ahead(value=f"{pause}")
            await asyncio.sleep(pause)
            part.close()
            part.close()
        await asyncio.sleep(0.01)
        assert scene.pool.engine("llm").load().requests == 0
        assert not scene.run.parts and not scene.run.primitives and not scene.pool.runtime.asked(scene.run.id)
        assert scene.trace().outcome == "closed"

    in_scene(body)


# ---------------------------------------------------------------- depth


def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Depth of each primitive, as its engine knows it."""
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


def test_a_part_is_as_deep_as_it_stands_in_the_whole_query(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> None:
        scene.ahead(depth=0, value="a")
        scene.ahead(depth=5, value="b")
        token = current_place.set(CallPlace(depth=3))
        scene.ahead(value="c")
        current_place.reset(token)

    in_scene(body)
    assert seen == {"part1/g.p": 1, "part2/g.p": 6, "part3/g.p": 4}


def test_a_call_of_the_plain_object_is_as_deep_as_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> None:
        for depth, text in ((2, "a"), (0, "b"), (7, "c")):
            token = current_place.set(CallPlace(depth))
            await scene.plain(ask({"text": text}))
            current_place.reset(token)

    in_scene(body)
    assert list(seen.values()) == [2, 0, 7]


def test_a_call_is_never_less_urgent_than_what_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> None:
        scene.ahead(depth=4)
        token = current_place.set(CallPlace(2))
        await scene.plain(ask({"text": "unplanned"}))
        current_place.reset(token)

    in_scene(body)
    assert seen == {"part1/g.p": 5, "llm.call#1": 6}


def test_a_call_does_not_queue_behind_what_is_for_later() -> None:
    async def body(scene: Scene) -> list[str]:
        for number in range(2):  # they fill the engine
            scene.ahead(value=f"{number} " * 400)
        for text in ("later", "much later"):
            scene.ahead(value=text)
        await asyncio.sleep(0.001)
        await scene.plain(ask({"text": "now"}))
        return [request.payload.prompt.text for request in scene.asked["llm"]][2:3]

    assert in_scene(body, most=2) == ["now"]


@pytest.mark.parametrize("who", ["a part", "the plain object"])
def test_what_is_adopted_from_further_away_goes_by_the_greater_depth(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)

    async def body(scene: Scene) -> list[str]:
        for number in range(2):  # they fill the engine
            scene.ahead(value=f"{number} " * 400, depth=9)
        for text, depth in ((QUESTION, 1), ("first", 4), ("last", 0)):
            scene.ahead(value=text, depth=depth)
        await asyncio.sleep(0.001)
        token = current_place.set(CallPlace(8))
        answer = asyncio.ensure_future(scene.plain()) if who == "the plain object" else scene.ahead()
        await asyncio.sleep(0.001)
        current_place.reset(token)
        assert seen["part3/g.p"] == (8 if who == "the plain object" else 9)
        await asyncio.sleep(10)
        assert isinstance(answer, PartRun) or await answer
        order = [request.payload.prompt.text for request in scene.asked["llm"] if isinstance(request.payload, Generate)]
        return order[2:]

    assert in_scene(body, most=2) == [QUESTION, "first", "last"]


def test_depths_that_grow_with_a_part_reach_the_one_that_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
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
            scene.ahead(value=f"{number} " * 400)
        scene.ahead()
        scene.ahead(deep, {**CALLS, "three": lambda v: [1, 2, 3]})
        await asyncio.sleep(0.2)
        assert "part4/g.p" not in seen and seen["part3/g.p"] == 8

    in_scene(body, most=2)


# ---------------------------------------------------------------- gangs


Standing = tuple[str, str]
"""Objective and gang."""


def standings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Standing]:
    """What is wanted of each primitive, as its engine knows it; gangs without the name of their query."""
    seen: dict[str, Standing] = {}
    handle = EngineScheduler.handle

    def spy(self: EngineScheduler, event: Any) -> Any:
        if isinstance(event, Enqueue):
            seen[event.primitive] = event.objective.value, event.gang.partition("/")[2]
        elif isinstance(event, DepthChanged):
            seen.update({name: (how.value, gang.partition("/")[2]) for name, (how, gang) in event.wanted.items()})
        return handle(self, event)

    monkeypatch.setattr(EngineScheduler, "handle", spy)
    return seen


def test_parts_that_run_side_by_side_are_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = standings(monkeypatch)
    rated = graph(*generation("g"), *generation("h", "g"))

    async def body(scene: Scene) -> None:
        for text in ("a", "b"):
            scene.ahead(rated, {"ask": lambda given: ask({"text": str(given["text"])})}, text, gang="step1.rate")
        scene.ahead(value="alone")
        await asyncio.sleep(5)

    in_scene(body)
    gang = ("throughput", "step1.rate")
    both = {f"part{n}/{name}.p": gang for n in (1, 2) for name in ("g", "h")}
    assert seen == {**both, "part3/g.p": ("latency", "")}


def test_calls_of_branches_are_a_gang_with_what_is_planned_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = standings(monkeypatch)

    async def branch(scene: Scene, text: str) -> None:
        token = current_place.set(CallPlace(depth=2, gang="step1.rate"))
        if text == "planned":
            scene.ahead(value=text, lookahead=False)
        await scene.plain(ask({"text": text}), stream=text == "streamed")
        current_place.reset(token)

    async def body(scene: Scene) -> None:
        await asyncio.gather(*(branch(scene, text) for text in ("planned", "one", "two", "streamed")))
        await scene.plain(ask({"text": "after"}))
        first, second = (scene.plain(ask({"text": text})) for text in ("x", "y"))
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


def test_what_a_gang_asked_for_is_waited_for_by_whoever_adopts_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = standings(monkeypatch)

    async def body(scene: Scene) -> list[Standing]:
        found = []
        for gang in ("one", "two", ""):
            scene.ahead(gang=gang)
            await asyncio.sleep(0)
            found.append(seen["part1/g.p"])
        return found

    assert in_scene(body) == [("throughput", "one"), ("throughput", "one"), ("latency", "")]


def test_other_queries_are_not_held_up_by_branches() -> None:
    """24 branches on 4 slots, and then a question: it gets the next slot, not the 25th."""

    async def body(scene: Scene) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        current_place.set(CallPlace(gang="step1.rate"))
        rest = [asyncio.ensure_future(scene.plain(ask({"text": f"{n} " * 50}))) for n in range(24)]
        await asyncio.sleep(0.05)
        current_place.set(CallPlace())
        begun, other = loop.time(), scene.pool.runtime.watch(Query({"input": None}))
        await other.call(K.PREFILLING, "llm", [ASKED])
        alone = loop.time() - begun
        await asyncio.gather(*rest)
        return alone, loop.time() - begun

    alone, all_of_them = in_scene(body, most=4)
    assert alone < all_of_them / 2


def test_what_comes_behind_branches_is_adopted_and_their_own_calls_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch has a part, which knows what comes behind all of them, too."""
    seen = standings(monkeypatch)
    behind = generation("unite", "$input")
    nodes = graph(*generation("rate.model"), *(p.with_(call="unite") if p.prefills else p for p in behind))
    calls: Calls = {"ask": ask, "unite": lambda given: ask({"text": "unite"})}

    async def body(scene: Scene) -> None:
        for _ in range(3):
            scene.ahead(nodes, calls, gang="step1.rate", members="rate")
        await asyncio.sleep(0.01)
        assert scene.count() == 4
        token = current_place.set(CallPlace(gang="step1.rate"))
        chains = [scene.ahead(lookahead=False) for _ in range(3)]
        await asyncio.gather(*(scene.plain() for _ in range(3)))
        current_place.reset(token)
        await scene.plain(ask({"text": "unite"}))
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
def test_members_of_a_gang_go_by_the_names_of_their_components(name: str, members: str, is_one: bool) -> None:
    assert in_gang(name, members) is is_one
