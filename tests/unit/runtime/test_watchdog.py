"""Tests of engines that hang: callers get an error, slots are released, the pool closes. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from support.ports import PortReports, Scripted, answers, driven, enqueue_requests, event, hangs, port

from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Batching, EngineProfile
from teola_plugin.requests.payloads import Done, Failed, Generation, Piece, Request, Result
from teola_plugin.runtime.ports.batches import Patience, Watchdog

ONE = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1, max_requests=1)


def test_cancelled_request_ends_at_once_but_keeps_its_slot() -> None:
    """The request has ended for its caller; its slot is the engine's until that lets go of it."""

    async def check() -> None:
        results = PortReports()
        one = port(Scripted(hangs, profile=ONE), results)
        [first, second] = enqueue_requests(one, "a", "b")
        await asyncio.sleep(1)
        one.cancel([first])
        assert isinstance(results.error("a"), EngineError) and results.at("a") == 1.0
        assert not one.holds(first) and one.holds(second)
        assert [r.request for r in one.scheduler.running.by_id.values()] == ["a"]
        one.cancel([first])

    driven(check())


def test_an_engine_that_ignores_a_cancellation_is_restarted() -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(hangs, answers, profile=ONE)
        one = port(engine, results)
        [first, _] = enqueue_requests(one, "a", "b")
        await asyncio.sleep(1)
        one.cancel([first])
        await asyncio.sleep(9)
        assert not engine.restarted and engine.cancelled == ["a"]
        await asyncio.sleep(3)
        assert engine.restarted == 1 and results.text("b") == "b"
        assert results.at("b") == 12.0, "10 s of patience, then its work"
        assert not one.scheduler.running.by_id

    driven(check())


def test_engine_that_cancels_in_time_is_not_restarted() -> None:
    async def slowly(batch: Sequence[Request]) -> AsyncIterator[Result]:
        await asyncio.sleep(9)
        for request in batch:
            yield Failed(request.id, EngineError("it was cancelled."))

    async def check() -> None:
        results, engine = PortReports(), Scripted(slowly, answers, profile=ONE)
        one = port(engine, results)
        [first, _] = enqueue_requests(one, "a", "b")
        await asyncio.sleep(0.5)
        one.cancel([first])
        await asyncio.sleep(100)
        assert not engine.restarted and results.at("b") == 10.0

    driven(check())


@pytest.mark.parametrize("speaks", [True, False])
def test_engine_is_restarted_only_after_a_long_silence(speaks: bool) -> None:
    async def long(batch: Sequence[Request]) -> AsyncIterator[Result]:
        for _ in range(5):
            await asyncio.sleep(1000)
            if speaks:
                yield Piece(batch[0].id, "x")
        for request in batch:
            yield Done(request.id, Generation("xxxxx"))

    async def check() -> None:
        results, engine = PortReports(), Scripted(long, answers)
        one = port(engine, results)
        enqueue_requests(one, "a")
        await asyncio.sleep(6000)
        assert (results.text("a"), results.at("a"), engine.restarted) == (
            ("xxxxx", 5000.0, 0) if speaks else ("a", 1801.0, 1)
        )

    driven(check())


def test_idle_engine_is_never_restarted_for_silence() -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(answers)
        one = port(engine, results)
        for name in "abc":
            enqueue_requests(one, name)
            await asyncio.sleep(5000)
        assert not engine.restarted and len(results.ends) == 3

    driven(check())


def test_hanging_request_fails_after_its_attempts() -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(hangs)
        one = port(engine, results, patience=Patience(silence=100))
        enqueue_requests(one, "a")
        await asyncio.sleep(1000)
        error = results.error("a")
        assert isinstance(error, EngineUnavailable) and "100 s" in error.message and error.hint
        assert engine.restarted == 3 and len(engine.batches) == 3

    driven(check())


def test_a_pool_with_a_hanging_engine_closes() -> None:
    async def check() -> None:
        results = PortReports()
        one = port(Scripted(hangs, profile=ONE), results)
        enqueue_requests(one, "running", "queued")
        await asyncio.sleep(1)
        await one.close()
        assert asyncio.get_running_loop().time() == 6.0
        for name in ("running", "queued"):
            assert isinstance(results.error(name), EngineUnavailable) and "closed" in str(results.error(name))
            assert results.at(name) == 1.0, "nobody waits for what hangs"
        enqueue_requests(one, "late")
        assert isinstance(results.error("late"), EngineUnavailable)

    driven(check())


def test_a_pool_with_a_good_engine_closes_at_once() -> None:
    async def check() -> None:
        results = PortReports()
        one = port(Scripted(), results)
        enqueue_requests(one, "a")
        await asyncio.sleep(0.5)
        await one.close()
        assert asyncio.get_running_loop().time() == 0.5 and isinstance(results.error("a"), EngineUnavailable)

    driven(check())


def test_repeated_request_is_independent_of_its_hanging_first() -> None:
    """A client of a shared pool that comes back asks with the same ids."""

    async def check() -> None:
        results, engine = PortReports(), Scripted(hangs, answers)
        one = port(engine, results, patience=Patience(cancel=100))
        [first] = enqueue_requests(one, "a")
        await asyncio.sleep(1)
        one.cancel([first])
        del results.ends["a"]
        [again] = enqueue_requests(one, "a")
        await asyncio.sleep(2)
        assert results.text("a") == "a" and not one.holds(again)
        assert len({r.id for batch in engine.batches for r in batch}) == 2
        assert len(one.scheduler.running.by_id) == 1

    driven(check())


def test_request_cancelled_before_the_engine_starts_never_runs() -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted()
        one = port(engine, results)
        made = enqueue_requests(one, "a", "b")
        one.cancel(made[:1])
        await asyncio.sleep(2)
        assert [r.id for batch in engine.batches for r in batch] == ["b"] and results.text("b") == "b"
        assert not one.scheduler.running.by_id

    driven(check())


def test_watchdog_ignores_time_the_machine_slept() -> None:
    """Timers that come late find engines that had no time to react."""

    async def check() -> None:
        lost: list[str] = []
        watch = Watchdog(Patience(cancel=10), lost.append)
        loop = asyncio.get_running_loop()
        watch.note_batch()
        watch.note_cancellation("a")
        loop._virtual_now += 3600  # type: ignore[attr-defined]
        await asyncio.sleep(9)
        assert not lost
        await asyncio.sleep(2)
        assert lost

    driven(check())


def test_event_after_close_starts_no_batch() -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(profile=ONE)
        one = port(engine, results)
        enqueue_requests(one, "a", "b")
        await one.close()
        one.enqueue([], event("c"))
        await asyncio.sleep(5)
        assert not engine.batches

    driven(check())
