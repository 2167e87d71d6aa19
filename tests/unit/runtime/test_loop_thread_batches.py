"""Tests of posts from many threads to the pool's loop: one wake-up serves all, none is lost, and the order stays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from teola_plugin.runtime.loop_thread import LoopThread

whose: ContextVar[str] = ContextVar("whose", default="")


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("test-loop")
    made.start()
    yield made
    made.stop()


class BusyLoop:
    """Keeps the loop busy until it is left, so that what is posted meanwhile waits."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._busy, self._go = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self._loop.post(lambda: (self._busy.set(), self._go.wait(10)))
        assert self._busy.wait(10)

    def __exit__(self, *_: object) -> None:
        self._go.set()


def settled(loop: LoopThread) -> None:
    done = threading.Event()
    loop.post(done.set)
    assert done.wait(10)


def test_loop_wakes_once_for_all_callbacks_posted_meanwhile(loop: LoopThread, monkeypatch: Any) -> None:
    woken, seen = [], []
    plain = loop.loop.call_soon_threadsafe
    with BusyLoop(loop):
        monkeypatch.setattr(loop.loop, "call_soon_threadsafe", lambda *a, **k: (woken.append(a), plain(*a, **k))[1])
        for i in range(100):
            loop.post(seen.append, i)
    settled(loop)
    assert seen == list(range(100))
    assert len(woken) <= 2


def test_coroutines_keep_their_order_among_callbacks(loop: LoopThread) -> None:
    seen: list[str] = []

    async def record(what: str) -> None:
        seen.append(what)

    with BusyLoop(loop):
        first = loop.run(record("a"))
        loop.post(seen.append, "b")
        second = loop.run(record("c"))
    first.result(10), second.result(10)
    settled(loop)
    assert sorted(seen) == ["a", "b", "c"] and seen.index("a") < seen.index("c")


def test_callback_runs_in_context_of_its_submitter(loop: LoopThread) -> None:
    seen: list[str] = []

    def post(name: str) -> None:
        whose.set(name)
        loop.post(lambda: seen.append(whose.get()))

    with BusyLoop(loop):
        threads = [threading.Thread(target=post, args=(name,)) for name in ("a", "b", "c")]
        for thread in threads:
            thread.start()
            thread.join()
    settled(loop)
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)], ids=repr)
def test_failing_callback_does_not_stop_the_others(
    loop: LoopThread, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def fail() -> None:
        raise error

    with caplog.at_level(logging.CRITICAL + 1), BusyLoop(loop):
        loop.post(seen.append, 1)
        loop.post(fail)
        loop.post(seen.append, 2)
        loop.post(seen.append, 3)
    settled(loop)
    assert seen == [1, 2, 3]


def test_lazy_callbacks_wait_for_the_next_post_and_run_first(loop: LoopThread, monkeypatch: Any) -> None:
    woken, seen = [], []
    plain = loop.loop.call_soon_threadsafe
    monkeypatch.setattr(loop.loop, "call_soon_threadsafe", lambda *a, **k: (woken.append(a), plain(*a, **k))[1])
    assert loop.post_lazily(seen.append, "first") and loop.post_lazily(seen.append, "second")
    assert not woken and not seen
    loop.post(seen.append, "third")
    settled(loop)
    assert seen == ["first", "second", "third"]


def test_lazy_callbacks_run_before_the_loop_stops() -> None:
    made, seen = LoopThread("test-loop"), []
    made.start()
    assert made.post_lazily(seen.append, "left")
    made.stop()
    assert seen == ["left"]
    assert not made.post_lazily(seen.append, "too late")
