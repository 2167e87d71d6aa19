"""Tests of prefetched generations without a reader: one piece at most, and a late reader gets the whole text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from teola_plugin.engines.fake import FakeLLM
from teola_plugin.engines.profiles import drafting, rtx3090
from teola_plugin.graph import Attributes, Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Piece, Prompt, Request, Result
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind
TEXT = "four words are here, " * 6
LINES = "".join(f"line {i}\n" for i in range(6))
LEAD = Primitive("lead", K.PREFILLING, "llm", named(question=Ref("$input")), call="ask")
ASKED = Generate(Prompt(text="a question"))


class World:
    """A pool of one LLM in virtual time, which notes what it was asked for and what it said."""

    def __init__(self, text: str = TEXT, *, drafts: bool = False, deaf: bool = False) -> None:
        machine = (drafting(rtx3090()) if drafts else rtx3090())["llm"]
        self.llm = FakeLLM("llm", machine, lambda *_: text)
        self.llm.takes_late_readers = not deaf
        self.requests: list[Request] = []
        self.results: list[Result] = []
        self.readers: list[str] = []
        execute, announce_reader = self.llm.execute, self.llm.announce_reader
        self.llm.announce_reader = lambda name: (self.readers.append(name), announce_reader(name))[1]  # type: ignore[method-assign]

        async def noted(batch: Sequence[Request]) -> AsyncIterator[Result]:
            self.requests += batch
            async for result in execute(batch):
                self.results.append(result)
                yield result

        self.llm.execute = noted  # type: ignore[method-assign]

    @property
    def pieces(self) -> list[str]:
        return [one.text for one in self.results if isinstance(one, Piece)]

    async def __aenter__(self) -> World:
        self.pool = EnginePool.on_this_loop([self.llm])
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self.pool.__aexit__(*failure)

    def prefetch(self, decoding: Primitive | None = None) -> QueryRun:
        last = decoding or Primitive("text", K.DECODING, "llm", named(prefilling=Ref("lead")))
        graph = Graph([LEAD, last], Ref(last.id))
        return self.pool.runtime.submit(
            Query({"input": "a question"}), graph, {"ask": lambda given: ASKED}, has_original=True
        )


async def read(run: QueryRun) -> list[str]:
    handle = run.call(K.PREFILLING, "llm", [ASKED], stream=True)
    pieces = [piece.text async for piece in handle.pieces]
    assert "".join(pieces) == (await handle)[0].text
    return pieces


async def from_the_start(**given: Any) -> list[str]:
    async with World(**given) as world:
        handle = world.pool.call(K.PREFILLING, "llm", [ASKED], stream=True)
        return [piece.text async for piece in handle.pieces]


def test_unread_generation_reports_first_token_and_end_only() -> None:
    async def main() -> None:
        async with World() as world:
            run = world.prefetch()
            await asyncio.sleep(10)
            assert [request.stream for request in world.requests] == [False]
            assert len(world.pieces) == 1 and not world.readers
            run.close()
            trace = run.trace.result()
            assert trace is not None
            spans = {span.primitive: span for span in trace.spans}
            assert spans["lead"].done == spans["text"].started, "the first token ends the prefilling"
            assert spans["text"].done - spans["text"].started > spans["lead"].done - spans["lead"].started  # type: ignore[operator]

    run_virtual(main())


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 5.0], ids=["at once", "prefilling", "decoding", "after it"])
def test_late_reader_gets_the_same_pieces(seconds: float) -> None:
    async def main() -> None:
        expected = await from_the_start()
        async with World() as world:
            run = world.prefetch()
            await asyncio.sleep(seconds)
            assert await read(run) == expected and len(world.requests) == 1
            assert len(world.readers) == (seconds < 5)
            run.close()

    run_virtual(main())


def test_late_reader_gets_remaining_pieces_as_they_come() -> None:
    async def main() -> None:
        async with World() as world:
            run = world.prefetch()
            await asyncio.sleep(0.2)
            before = asyncio.get_running_loop().time()
            handle, times = run.call(K.PREFILLING, "llm", [ASKED], stream=True), list[float]()
            async for _ in handle.pieces:
                times.append(asyncio.get_running_loop().time() - before)
            assert times[0] < 1e-6 < times[-1] and len(set(times)) > 5
            run.close()

    run_virtual(main())


def test_engine_without_late_streaming_streams_from_the_start() -> None:
    async def main() -> None:
        async with World(deaf=True) as world:
            run = world.prefetch()
            await asyncio.sleep(0.2)
            assert [request.stream for request in world.requests] == [True]
            assert await read(run) == world.pieces and not world.readers
            run.close()

    run_virtual(main())


def test_late_reader_gets_pieces_of_a_drafted_generation() -> None:
    async def main() -> None:
        async with World(drafts=True) as world:
            run = world.prefetch()
            await asyncio.sleep(0.2)
            pieces = await read(run)
            assert "".join(pieces) == TEXT and len(pieces) > 5
            run.close()

    run_virtual(main())


def test_list_read_as_it_is_written_streams_from_the_start() -> None:
    async def main() -> None:
        grows = Attributes(items="lines", stream_items=("each",))
        listed = Primitive("text", K.DECODING, "llm", named(prefilling=Ref("lead")), attributes=grows)
        async with World(LINES) as world:
            run = world.prefetch(listed)
            await asyncio.sleep(10)
            assert [request.stream for request in world.requests] == [True] and "".join(world.pieces) == LINES
            run.close()

    run_virtual(main())
