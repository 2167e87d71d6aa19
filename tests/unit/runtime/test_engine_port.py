"""Tests of bad requests and broken replicas, which harm no other request. In virtual time."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from support.ports import (
    PortReports,
    Scripted,
    answers,
    driven,
    enqueue_requests,
    entry,
    event,
    hangs,
    port,
    raises,
    says,
)

from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Batching, EngineProfile
from teola_plugin.requests.payloads import (
    Done,
    EmbedText,
    Failed,
    Generate,
    Generation,
    Message,
    Piece,
    Prompt,
    Request,
    Result,
    Sampling,
)
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.failures import copied_error, with_location
from teola_plugin.runtime.loop_thread import PieceLog
from teola_plugin.runtime.ports.batches import Patience
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.scheduling.engine_queue import DepthChanged
from teola_plugin.scheduling.live_query import Objective

LOST = EngineUnavailable("it died.", engine="llm", retryable=True, hint="restart it")
ONE = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1, max_requests=1)


# ---------------------------------------------------------------- listeners


@pytest.mark.parametrize("fault", [RuntimeError, SystemExit])
@pytest.mark.parametrize("where", ["on_start", "on_piece", "on_end"])
def test_raising_listener_leaks_no_slot(
    where: str, fault: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(says("text"), profile=ONE)
        calls = results.listener()
        callbacks = {name: getattr(calls, name) for name in ("on_start", "on_piece", "on_end")}

        def bad(given: EngineRequest, *rest: Any) -> None:
            if given.request.id.startswith("bad"):
                raise fault("a listener's fault")
            callback_before(given, *rest)

        callback_before = callbacks[where]
        one = EnginePort("llm", {"0": engine}, PortListener(**{**callbacks, where: bad}))
        made = enqueue_requests(one, *(f"bad{n}" for n in range(10)), "good")
        await asyncio.sleep(1)
        assert results.text("good") == "text"
        assert all(each.has_ended for each in made), "whoever waits for them waits for ever"
        assert not one.scheduler.running.by_id and not any(one.holds(each) for each in made)

    driven(check())
    assert "a listener's fault" in caplog.text


# ---------------------------------------------------------------- requests that cannot be served


class Counting(Scripted):
    """An engine that computes sizes from the text, as real engines do."""

    def size(self, request: Request) -> float:
        return len(request.payload.prompt.text)


BAD: dict[str, Any] = {
    "no prompt": Generate(None),  # type: ignore[arg-type]
    "no text": Generate(Prompt(text=7)),  # type: ignore[arg-type]
    "another payload": EmbedText("x"),
    "nothing": object(),
}


@pytest.mark.parametrize("payload", BAD.values(), ids=BAD.keys())
def test_unqueueable_request_fails_alone(payload: Any) -> None:
    async def check() -> None:
        results, engine = PortReports(), Counting()
        one = port(engine, results)
        one.enqueue([entry("before"), entry("bad", payload), entry("after")], event("p"))
        error = results.error("bad")
        assert type(error) is EngineError and "llm" in error.message and "queued" in error.message and error.hint
        await asyncio.sleep(2)
        assert [results.text("before"), results.text("after")] == ["before", "after"]

    driven(check())


def test_unqueueable_requests_take_no_queue_capacity() -> None:
    async def check() -> None:
        results, engine = PortReports(), Counting()
        one = port(engine, results, max_queued=4)
        for n in range(20):
            one.enqueue([entry(f"bad{n}", BAD["no text"])], event("p"))
        enqueue_requests(one, "good")
        await asyncio.sleep(2)
        assert results.text("good") == "good"

    driven(check())


def test_request_whose_size_is_nan_fails_alone() -> None:
    class Nowhere(Scripted):
        def size(self, request: Request) -> float:
            return float("nan") if request.id == "bad" else 1

    async def check() -> None:
        results = PortReports()
        one = port(Nowhere(), results)
        enqueue_requests(one, "bad", "good")
        await asyncio.sleep(2)
        assert "size" in results.error("bad").message and results.text("good") == "good"

    driven(check())


def test_prompt_of_invalid_unicode_is_placed_like_others() -> None:
    """The engine decides whether it can serve such prompts. Placement only needs names of their blocks."""

    async def check() -> None:
        profile = EngineProfile(batching=Batching.CONTINUOUS, prefix_caching=True, max_requests=8)
        results = PortReports()
        one = port({n: Scripted(profile=profile) for n in "01"}, results)
        assert one.scheduler.wants_blocks
        one.enqueue([entry("odd", Generate(Prompt((Message("user", "\ud800" * 200),))))], event("p"))
        enqueue_requests(one, "good")
        await asyncio.sleep(2)
        assert results.error("odd") is None and results.text("good") == "good"

    driven(check())


def test_request_with_an_invalid_result_fails_alone() -> None:
    async def nonsense(batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            yield Piece(request.id, 7 if request.id == "bad" else "x")  # type: ignore[arg-type]
        for request in batch:
            yield Done(request.id, Generation("x"))

    async def check() -> None:
        results = PortReports()
        one = port(Scripted(nonsense), results)
        one.enqueue([entry("bad"), entry("good")], event("p"))
        await asyncio.sleep(2)
        assert isinstance(results.error("bad"), EngineError) and results.text("good") == "x"

    driven(check())


# ---------------------------------------------------------------- retries


REQUEST_CONTEXT: dict[str, Any] = {
    "depth": 7,
    "app": "shop",
    "weight": 3.0,
    "session": "s",
    "gang": "g",
    "when_idle": True,
    "objective": Objective.THROUGHPUT,
}


@pytest.mark.parametrize("term", REQUEST_CONTEXT)
@pytest.mark.parametrize("fault", ["fails", "raises", "is lost"])
def test_retry_keeps_the_request_context(term: str, fault: str) -> None:
    async def fails(batch: Sequence[Request]) -> AsyncIterator[Result]:
        await asyncio.sleep(1)
        for request in batch:
            yield Failed(request.id, LOST)

    async def check() -> None:
        script = {"fails": fails, "raises": raises(LOST), "is lost": hangs}[fault]
        results, engine = PortReports(), Scripted(script, answers)
        one = port(engine, results)
        enqueue_requests(one, "a", **{term: REQUEST_CONTEXT[term]})
        seen = []
        handle = one.scheduler.handle
        one.scheduler.handle = lambda e: (handle(e), seen.extend(one.scheduler.queue))[0]  # type: ignore[method-assign, func-returns-value]
        if fault == "is lost":
            await asyncio.sleep(0.5)
            one.lose("0", "it hangs")
        await asyncio.sleep(5)
        assert results.text("a") == "a" and engine.restarted == 1
        assert seen and all(getattr(queued, term) == REQUEST_CONTEXT[term] for queued in seen)

    driven(check())


def test_retry_has_the_last_announced_depth() -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(raises(LOST), answers)
        one = port(engine, results)
        enqueue_requests(one, "a", depth=1)
        one.depths(DepthChanged(0.0, "q", {"a": 9}, {"a": (Objective.THROUGHPUT, "gang")}))
        await asyncio.sleep(5)
        assert results.text("a") == "a"
        assert [(r.depth, r.objective) for batch in engine.batches for r in batch][-1] == (9, "throughput")

    driven(check())


def test_repeated_text_of_a_retry_is_delivered_once() -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(says("on", "e two", error=LOST), says("one", " two", " three"))
        one, made = port(engine, results), entry("a", stream=True)
        log = PieceLog()
        made.read_into(log)
        one.enqueue([made], event("a"))
        await asyncio.sleep(5)
        assert results.text("a") == results.pieces["a"] == "".join(p.text for p in log) == "one two three"

    driven(check())


DIFFERENT = {
    "at once": says("two", " three"),
    "later": says("one", " tiger"),
    "shorter": says("o", value="o"),
    "nothing": says(value=""),
}


@pytest.mark.parametrize("again", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_retry_with_other_text_fails_if_some_was_read(again: Any) -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(says("one", " two", error=LOST), again, answers)
        one, made = port(engine, results), entry("a", stream=True)
        log = PieceLog()
        made.read_into(log)
        one.enqueue([made], event("a"))
        await asyncio.sleep(5)
        error = results.error("a")
        assert isinstance(error, EngineError) and "another" in error.message and error.hint
        pieces = [p.text for p in made.stream.pieces]
        assert pieces == ["one", " two"] or "".join(pieces) == "one two"
        enqueue_requests(one, "b")
        await asyncio.sleep(2)
        assert results.text("b") == "b" and not one.scheduler.running.by_id

    driven(check())


@pytest.mark.parametrize(
    ("again", "text"),
    list(zip(DIFFERENT.values(), ["two three", "one tiger", "o", ""], strict=True)),
    ids=DIFFERENT.keys(),
)
def test_retry_with_other_text_counts_if_none_was_read(again: Any, text: str) -> None:
    async def check() -> None:
        results, engine = PortReports(), Scripted(says("one", " two", error=LOST), again)
        one, made = port(engine, results), entry("a")
        one.enqueue([made], event("a"))
        await asyncio.sleep(5)
        assert results.text("a") == text
        assert "".join(p.text for p in made.stream.pieces) == text, "who comes late would read another text"

    driven(check())


def test_sampled_text_is_retried_only_if_none_was_read() -> None:
    async def check() -> None:
        results = PortReports()
        payload = Generate(Prompt(text="x"), Sampling(temperature=1.0))
        one = port(Scripted(says("one", error=LOST), says("two")), results)
        one.enqueue([entry("a", payload)], event("a"))
        read = entry("b", payload, stream=True)
        read.read_into(PieceLog())
        await asyncio.sleep(5)
        assert results.text("a") == "two"
        other = port(Scripted(says("one", error=LOST), says("two")), results)
        other.enqueue([read], event("b"))
        await asyncio.sleep(5)
        assert results.error("b").message == LOST.message

    driven(check())


# ---------------------------------------------------------------- broken replicas


@pytest.mark.parametrize("error", [SystemExit(1), BaseException("a panic")], ids=repr)
def test_engine_that_exits_its_process_is_restarted(error: BaseException) -> None:
    """`test_loop_thread` covers KeyboardInterrupt, which belongs to the user on this thread."""

    async def check() -> None:
        results, engine = PortReports(), Scripted(raises(error), answers)
        one = port(engine, results)
        enqueue_requests(one, "a", "b")
        await asyncio.sleep(5)
        assert [results.text("a"), results.text("b")] == ["a", "b"] and engine.restarted == 1

    driven(check())


def test_requests_of_a_lost_replica_run_on_another() -> None:
    async def check() -> None:
        results, good = PortReports(), Scripted(profile=ONE)
        bad = Scripted(hangs, profile=ONE)
        one = port({"0": bad, "1": good}, results)
        enqueue_requests(one, "a", "b")
        await asyncio.sleep(2)
        one.lose("0", "it hangs")
        await asyncio.sleep(2)
        assert results.text("a") == "a" and results.text("b") == "b"
        assert [r.id for batch in good.batches for r in batch] == ["b", "a"]

    driven(check())


def test_one_unrecoverable_replica_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """While another one is being started again, too: what waits is done when that is up."""

    class Slow(Scripted):
        async def restart(self) -> None:
            await asyncio.sleep(60)
            await super().restart()

    async def check() -> None:
        results = PortReports()
        bad, slow = Scripted(raises(LOST), profile=ONE, restarts=0), Slow(raises(LOST), answers, profile=ONE)
        one = port({"0": bad, "1": slow}, results, max_attempts=9)
        enqueue_requests(one, *"abcd")
        await asyncio.sleep(30)
        assert not results.ends
        await asyncio.sleep(60)
        assert [results.text(name) for name in "abcd"] == list("abcd")

    driven(check())
    [warning] = [r for r in caplog.records if "could not be started again" in r.getMessage()]
    assert warning.levelno == logging.WARNING
    assert all(word in warning.getMessage() for word in ("llm", "replica 0", "no device", "1 of 2", "Look at"))


def test_engine_is_unavailable_once_no_replica_can_be_restarted() -> None:
    async def check() -> None:
        results = PortReports()
        one = port({n: Scripted(raises(LOST), restarts=0) for n in "01"}, results, max_attempts=9)
        enqueue_requests(one, *"abcd")
        await asyncio.sleep(30)
        errors = [results.error(name) for name in "abcd"]
        assert all(isinstance(e, EngineUnavailable) and "no device" in e.message and e.hint for e in errors)
        enqueue_requests(one, "late")
        assert "no device" in results.error("late").message
        assert not one.scheduler.queue

    driven(check())


def test_unrecoverable_replica_is_restarted_later() -> None:
    class Later(Scripted):
        async def restart(self) -> None:
            if asyncio.get_running_loop().time() < 1000:
                raise RuntimeError("no device")
            self.restarted += 1

    async def check() -> None:
        results, engine = PortReports(), Later(raises(LOST), answers)
        one = port(engine, results)
        enqueue_requests(one, "a")
        await asyncio.sleep(30)
        assert isinstance(results.error("a"), EngineUnavailable)
        await asyncio.sleep(1500)
        enqueue_requests(one, "b")
        await asyncio.sleep(2)
        assert results.text("b") == "b" and engine.restarted == 1

    driven(check())


def test_hanging_restart_makes_the_engine_unavailable() -> None:
    class Stuck(Scripted):
        async def restart(self) -> None:
            async for _ in hangs(()):
                pass

    async def check() -> None:
        results = PortReports()
        one = port(Stuck(raises(LOST)), results, patience=Patience(restart=20))
        enqueue_requests(one, "a")
        await asyncio.sleep(90)
        assert isinstance(results.error("a"), EngineUnavailable)

    driven(check())


# ---------------------------------------------------------------- one error object for each


def test_each_request_of_a_failed_batch_gets_its_own_error() -> None:
    async def check() -> None:
        results = PortReports()
        cause = ValueError("deep")
        fault = EngineError("all of it.", engine="llm", replica="3", hint="look")
        fault.__cause__ = cause
        fault.add_note("a note")
        one = port(Scripted(raises(fault)), results)
        made = [entry("a"), entry("b")]
        one.enqueue(made, event("p"))
        await asyncio.sleep(1)
        first, second = results.error("a"), results.error("b")
        assert first is not second and first is not fault
        named = [with_location(results.error(e.request.id), e) for e in made]
        assert "primitive a" in str(named[0]) and "primitive b" in str(named[1]) and "primitive" not in str(first)
        assert "primitive a" not in str(named[1])
        for error in (first, second, *named):
            assert type(error) is EngineError and error.replica == "3" and error.hint == "look"
            assert error.__cause__ is cause and error.__notes__ == ["a note"]
            again = pickle.loads(pickle.dumps(error))
            assert str(again) == str(error) and again.replica == "3"

    driven(check())


def test_foreign_exception_is_not_copied() -> None:
    mine = ValueError("mine")
    assert copied_error(mine) is mine and with_location(mine, entry("a")) is mine
