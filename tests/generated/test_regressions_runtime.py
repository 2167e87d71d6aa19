"""Faults of the runtime alone that random generation found, each shrunk."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from generated.hunting import KINDS
from generated.model_cases import COLLECTION, Op, graph_of, payloads, question
from generated.words import base, run_text
from generated.worlds import Latency, fakes, ingested, world_of

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeLLM, Faults
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Done, Failed, Prompt, Request, Result, Sampling
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind


class Changeable(FakeLLM):
    """An engine that answers differently at every attempt. The first attempt ends half-way."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        faults = Faults(fail_on=lambda request: self.attempts[request.id] < 2)
        super().__init__("llm", Latency(1).profiles()["llm"], self._text, faults=faults)

    def _text(self, prompt: Prompt, sampling: Sampling) -> str:
        return " ".join([("first", "second")[min(1, max(self.attempts.values()) - 1)]] * 12)

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        self.attempts.update(request.id for request in batch)
        async for result in super().execute(batch):
            yield result


@pytest.mark.parametrize("early", [True, False])
def test_different_retry_is_not_joined_to_the_streamed_text(early: bool) -> None:
    """The request fails, or its result is the text that was streamed."""
    lead = Primitive("p", K.PREFILLING, "llm", named(text=Ref("$input")), call="ask")
    graph = Graph([lead, Primitive("d", K.DECODING, "llm", named(prefilling=Ref("p")))], Ref("d"))
    plain_only = Graph([Primitive("c", K.CALL, inputs=named(x=Ref("$input")), call="none")], Ref("c"))
    calls: dict[str, Any] = {"ask": lambda given: question("why?"), "none": lambda x: x}

    async def run() -> tuple[str, str] | None:
        async with EnginePool.on_this_loop([Changeable()]) as pool:
            query = Query({"input": "why?"})
            live = pool.runtime.submit(query, graph if early else plain_only, calls, has_original=True)
            handle = live.call(K.PREFILLING, "llm", [question("why?")], stream=True)
            try:
                streamed = "".join([piece.text async for piece in handle.pieces])
                return streamed, (await handle)[0].text
            except TeolaError:
                return None
            finally:
                live.close()

    found = run_virtual(run())
    assert found is None or found[0] == found[1]


class AtOnce(FakeLLM):
    """A fake LLM that counts the requests which it has at the same time."""

    now = most_at_once = 0

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        self.now += len(batch)
        self.most_at_once = max(self.most_at_once, self.now)
        async for result in super().execute(batch):
            self.now -= isinstance(result, Done | Failed)
            yield result


@pytest.mark.parametrize("way", ["batch", "abatch"])
@pytest.mark.parametrize("most", [1, 2])
def test_max_concurrency_limits_requests_on_the_engine(way: str, most: int) -> None:
    """Two steps that need nothing of each other, for eight inputs: so many inputs are begun at once, as plain does."""
    stage = KINDS["chains"][0]
    engines = [e for e in stage.engines(Latency(2)) if e.name != "llm"]
    llm = AtOnce("llm", Latency(2).profiles()["llm"])

    async def abatch() -> None:
        async with (world := world_of([*engines, llm], virtual=True)).pool:
            await made(world).abatch([{"question": f"q{n}"} for n in range(8)], {"max_concurrency": most})

    def made(world: Any) -> Any:
        text = 'chain = assign(a=ask("Say {question}")) | assign(b=ask("Shorten {question}"))'
        return accelerate(run_text(text, base(world), "<program>")["chain"], pool=world.pool)

    if way == "abatch":
        run_virtual(abatch())
    else:
        with (world := world_of([*engines, llm])).pool:
            made(world).batch([{"question": f"q{n}"} for n in range(8)], {"max_concurrency": most})
    assert llm.most_at_once <= 2 * most


@pytest.mark.parametrize("kind", ["embed", "search", "generate", "put"])
@pytest.mark.parametrize("early", [True, False])
def test_cancelled_call_ends_at_any_moment(kind: str, early: bool) -> None:
    """The moment may be during the request, or during the comparison with a prefetch that a deletion made invalid."""

    async def run() -> None:
        async with EnginePool.on_this_loop(fakes(Latency(7))) as pool:
            rows_there = [f"a{number}" for number in range(120)]
            for id in rows_there:
                await ingested(pool.engine("store"), COLLECTION, id, "apple")
            for number in range(120):
                op = Op(kind, f"apple {number}", ("b",) if kind == "put" else ())
                graph, calls, inputs = graph_of([op] if early else [Op("embed", "another")])
                live = pool.runtime.submit(Query({"input": inputs}), graph, calls, has_original=True)
                await asyncio.sleep(number % 20 * 0.0005)  # not there yet, under way, or done
                aside = asyncio.ensure_future(pool.engine("store").delete(COLLECTION, [rows_there.pop()]))
                what, engine, requests = payloads(op)
                handle = live.call(what, engine, requests)
                asyncio.get_running_loop().call_later(number // 20 * 0.0003, handle.cancel)
                with contextlib.suppress(TeolaError):
                    await asyncio.wait_for(asyncio.ensure_future(handle._wait()), 5)
                live.close()
                await aside

    run_virtual(run())
