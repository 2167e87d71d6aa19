"""Runs queries in parallel in virtual time, with writes from outside, and checks what their results must fulfil."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from generated.model_cases import COLLECTION, IDS, K_ALL, WORDS, Ahead, Case, Op, a_case, payloads, rows, vector
from generated.model_store import HistoricStore, History, nearest
from generated.worlds import Latency, ingested

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, Faults, embed_words
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Query
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Done, Generate, IngestRow, Prompt, Request, Result, Sampling
from teola_plugin.runtime.query_run import QueryRun, SubplanRun
from teola_plugin.runtime.virtual_time import run_virtual


def answer(prompt: Prompt, sampling: Sampling) -> str:
    return f"answer to {prompt.flat()} in full"


@dataclass(slots=True)
class Scene:
    """One pool, and what is recorded about it."""

    history: History = field(default_factory=History)
    attempts: Counter[str] = field(default_factory=Counter)
    generated: Counter[Generate] = field(default_factory=Counter)
    """Generations that ended well."""
    taken: Counter[Generate] = field(default_factory=Counter)
    """Generations that plain objects got."""
    writing: Counter[str] = field(default_factory=Counter)
    """Rows that plain objects began to write."""
    written: Counter[str] = field(default_factory=Counter)
    """Rows of writes that ended well."""
    wrong: list[str] = field(default_factory=list)

    def fails(self, request: Request) -> bool:
        """Return True if the content of a request makes it fail, always or on the first attempt."""
        text = str(request.payload)
        return "broken" in text or ("flaky" in text and self.attempts[request.id] < 2)


def shown(row: IngestRow) -> str:
    return f"{row.chunk.id}: {row.chunk.text} {dict(row.chunk.metadata)}"


def run_case(seed: int) -> list[str]:
    """Run the case of this seed. Return what is wrong, or nothing."""
    return run_virtual(_run(seed), seed)


def cases_of(seed: int) -> list[Case]:
    draw = random.Random(seed)
    return [a_case(draw) for _ in range(draw.choice((1, 2, 2, 3)))]


async def _run(seed: int) -> list[str]:
    scene, profiles = Scene(), Latency(seed).profiles()
    faults = Faults(fail_on=scene.fails)
    store = HistoricStore("store", profiles["store"], faults=faults)
    aside = HistoricStore("aside", profiles["store"])
    store.history = aside.history = scene.history
    aside._collections, aside._orders = store._collections, store._orders
    llm = FakeLLM("llm", profiles["llm"], answer, faults=faults)
    engines = [llm, FakeEmbedder("embedder", profiles["embedder"], faults=faults), store]
    for engine in engines:
        _count(engine, scene)
    async with EnginePool.on_this_loop(engines) as pool:
        plain = [_query(pool, scene, f"{seed}-{n}", case) for n, case in enumerate(cases_of(seed))]
        try:
            await asyncio.gather(*plain, _outside(aside, random.Random(seed + 1)))
            await asyncio.sleep(5.0)  # what nobody wants any more comes to its end
            _check_the_end(pool, store, scene)
        except TeolaError as error:
            scene.wrong.append(f"it stands still: {error}")
    _check_counts(scene)
    return scene.wrong


def _count(engine: Any, scene: Scene) -> None:
    execute = engine.execute

    async def counted(batch: Sequence[Request]) -> AsyncIterator[Result]:
        requests = {request.id: request for request in batch}
        for request in batch:
            scene.attempts[request.id] += 1
        async for result in execute(batch):
            payload = requests[result.request_id].payload
            if isinstance(result, Done) and isinstance(payload, Generate):
                scene.generated[payload] += 1
            yield result

    engine.execute = counted


async def _outside(aside: HistoricStore, draw: random.Random) -> None:
    """Write now and then, as another process does."""
    for _ in range(draw.randrange(4)):
        await asyncio.sleep(draw.random() * 0.03)
        if draw.random() < 0.7:
            text = f"{draw.choice(WORDS)} outside {draw.randrange(9)}"
            await ingested(aside, COLLECTION, draw.choice(IDS), text, by="another")
        else:
            await aside.delete(COLLECTION, [draw.choice(IDS)])


async def _query(pool: EnginePool, scene: Scene, name: str, case: Case) -> None:
    await asyncio.sleep(case.begins)
    run = pool.runtime.submit(Query({"input": case.inputs}, id=name), case.graph, case.calls, has_original=True)
    beside: list[asyncio.Task[None]] = []
    cut = random.Random(name).randrange(len(case.ops)) if case.cancelled else len(case.ops)
    parts: dict[Ahead, SubplanRun] = {}
    for number, op in enumerate(case.ops[:cut]):
        _begin_and_end(run, case, number, parts)
        await asyncio.sleep(op.pause)
        step = _step(pool, run, scene, op)
        if op.beside:
            beside.append(asyncio.create_task(step))
        else:
            await step
    if case.cancelled:
        run.cancel()
    await asyncio.gather(*beside)  # each call ends, whatever became of the query
    run.close()


def _begin_and_end(run: QueryRun, case: Case, number: int, parts: dict[Ahead, SubplanRun]) -> None:
    """Begin the subplans of a step, and then end others, so that new ones can take over pending requests."""
    for one in case.parts:
        if one.begins == number:
            how: dict[str, Any] = {"depth": one.depth, "gang": one.gang, "lookahead": one.lookahead}
            parts[one] = run.begin_subplan(one.graph, one.calls, one.inputs, **how)
    for one in [one for one in parts if one.ends <= number]:
        parts.pop(one).close()


async def _step(pool: EnginePool, run: QueryRun, scene: Scene, op: Op) -> None:
    if op.do == "observe":
        run.observe(op.text, op.text)
    elif op.do == "delete":
        await asyncio.wrap_future(pool.admin("store", "delete", COLLECTION, list(op.ids)))
    elif op.do == "clear":
        await asyncio.wrap_future(pool.admin("store", "delete_collection", COLLECTION))
    else:
        await _call(run, scene, op)


async def _call(run: QueryRun, scene: Scene, op: Op) -> None:
    kind, engine, requests = payloads(op)
    begun = scene.history.tick()
    if op.do == "put":
        scene.writing.update(map(shown, requests))
    handle = run.call(kind, engine, requests, stream=op.stream)
    if op.gives_up is not None:
        asyncio.get_running_loop().call_later(op.gives_up, handle.cancel)
    pieces = ""
    try:
        if op.stream:
            pieces = "".join([piece.text async for piece in handle.pieces])
        values = await handle
    except TeolaError as error:
        if not run.closed and op.gives_up is None and "broken" not in op.text:
            scene.wrong.append(f"{run.id} {op}: {error!r}")
        return
    if "broken" in op.text and op.do != "search":  # only the text of a row or a prompt reaches the engine
        scene.wrong.append(f"{run.id} {op}: it should have failed, and gave {values}")
    _check(run, scene, op, values, begun, pieces)


def _check(run: QueryRun, scene: Scene, op: Op, values: list[Any], begun: int, pieces: str) -> None:
    ended = scene.history.tick()
    if op.do == "embed" and tuple(values[0]) != tuple(embed_words(op.text, "query")):
        scene.wrong.append(f"{run.id} {op}: another vector")
    if op.do == "generate":
        [payload] = payloads(op)[2]
        scene.taken[payload] += 1
        wanted = answer(payload.prompt, payload.sampling)
        if values[0].text != wanted or (op.stream and pieces != wanted):
            scene.wrong.append(f"{run.id} {op}: {values[0].text!r}, streamed {pieces!r}, not {wanted!r}")
    if op.do == "search":
        states = scene.history.states(begun, ended)
        if not any(values[0] == nearest(state, vector(op.text), K_ALL) for state in states):
            found = [f"{hit.id}: {hit.text}" for hit in values[0]]
            there = [[f"{id}: {row[0].text}" for id, row in state.items()] for state in states]
            scene.wrong.append(f"{run.id} {op}: found {found}; meanwhile there was {there}")
    if op.do == "put":
        scene.written.update(map(shown, rows(op)))
        during = {shown(c.row) for c in scene.history.commits if c.row is not None and begun < c.at < ended}
        for row in rows(op):
            if shown(row) not in during:
                scene.wrong.append(f"{run.id} {op}: {shown(row)} was not written while it said so")


def _check_counts(scene: Scene) -> None:
    """Check that each generation serves one call, and that calls of the original wrote each row once."""
    for key, count in (scene.taken - scene.generated).items():
        scene.wrong.append(f"{count} more calls got a generation than there were: {key}")
    made = Counter(
        shown(c.row) for c in scene.history.commits if c.row is not None and not c.row.chunk.metadata.get("by")
    )
    for key, count in (made - scene.writing).items():
        scene.wrong.append(f"written {count} times more than the plain object asked for: {key}")
    for key, count in (scene.written - made).items():
        scene.wrong.append(f"written {count} times less than the plain object was told: {key}")


def _check_the_end(pool: EnginePool, store: HistoricStore, scene: Scene) -> None:
    """Check that the runtime is empty, and that the store has the rows of its history."""
    left = [f"{name}: {n}" for name in pool.engine_names if (n := pool.engine(name).load().requests)]
    left += [f"query {name}" for name in pool.runtime._driver.runs]
    left += [
        f"{name}: {len(port._outstanding)} at the port"
        for name, port in pool.runtime._ports.items()
        if len(port._outstanding)
    ]
    if left:
        scene.wrong.append(f"left behind: {left}")
    held = {id: chunk for id, (chunk, _) in store._rows(COLLECTION).items()}
    wanted = {id: chunk for id, (chunk, _) in scene.history.commits[-1].state.items()}
    if held != wanted:
        scene.wrong.append(f"the store holds {held}, not {wanted}")
