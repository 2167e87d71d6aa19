"""Tests of a pool's own loop: only closing the pool ends it, and nobody waits for it for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, Faults, fake_engines
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Curve, EngineProfile, Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, Generate, Prompt, Request
from teola_plugin.runtime import loop_thread
from teola_plugin.runtime.loop_thread import LoopThread
from teola_plugin.runtime.ports import batches
from teola_plugin.runtime.ports.batches import Patience

K = PrimitiveKind
EMBED = Graph([Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input")))], Ref("e"))


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PATIENCE", Patience(cancel=0.2, closing=0.2))
    monkeypatch.setattr(loop_thread, "_STOP_TIMEOUT_S", 0.2)


async def one() -> int:
    return 1


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), RuntimeError("a fault"), BaseException("panic")])
def test_raising_callback_does_not_end_the_loop(thread: LoopThread, error: BaseException) -> None:
    def bad() -> None:
        raise error

    async def worse() -> None:
        raise error

    thread.post(bad)
    with pytest.raises(type(error)):
        thread.run(worse()).result(5)
    assert thread.run(one()).result(5) == 1


def test_only_callbacks_posted_before_stop_are_run() -> None:
    for _ in range(20):
        thread, done = LoopThread(), []
        thread.start()
        taken: list[int] = []

        def many(thread: LoopThread = thread, done: list[int] = done, taken: list[int] = taken) -> None:
            for n in range(10_000):
                try:
                    thread.post(done.append, n)
                except EngineUnavailable as error:
                    assert error.hint
                    return
                taken.append(n)

        poster = threading.Thread(target=many)
        poster.start()
        time.sleep(0.001)
        thread.stop()
        poster.join()
        assert done == taken
        assert not thread.try_post(done.append, -1)


def test_coroutine_cut_off_by_stop_raises_engine_unavailable(thread: LoopThread) -> None:
    running = thread.run(asyncio.sleep(60))
    given_up = thread.run(asyncio.sleep(60))
    given_up.cancel()
    thread.stop()
    for future in (running, thread.run(one())):
        with pytest.raises(EngineUnavailable, match="closed") as caught:
            future.result(5)
        assert caught.value.hint
    assert given_up.cancelled()


def test_loop_stops_despite_a_task_that_ignores_cancellation(thread: LoopThread, impatient: None) -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    thread.run(stubborn())
    thread.stop()
    assert not thread._thread.is_alive() and thread.loop.is_closed()


# ---------------------------------------------------------------- the same in a pool


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_pool_survives_an_engine_that_ends_its_process(error: type[BaseException]) -> None:
    request_ids: list[str] = []

    def first(request: Request) -> bool:
        request_ids.append(request.id)
        return len(request_ids) == 1

    faults = {"embedder": Faults(raise_on=first, raises=error)}
    with EnginePool.local(fake_engines(**faults)) as pool:
        assert pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(5)
        assert pool.call(K.EMBEDDING, "embedder", [EmbedText("y")]).result(5)


def test_engine_that_always_exits_fails_only_its_requests() -> None:
    faults = {"embedder": Faults(raise_on=lambda r: r.payload.text == "bad", raises=SystemExit)}
    with EnginePool.local(fake_engines(**faults)) as pool:
        with pytest.raises(EngineUnavailable, match="SystemExit") as caught:
            pool.call(K.EMBEDDING, "embedder", [EmbedText("bad")]).result(10)
        assert caught.value.hint
        assert pool.call(K.EMBEDDING, "embedder", [EmbedText("good")]).result(10)


def test_pool_with_a_hanging_engine_serves_others_and_closes(impatient: None) -> None:
    class Stuck(FakeEmbedder):
        """Hangs where it is told to, and when it is stopped."""

        async def stop(self) -> None:
            await asyncio.sleep(0)

    faults = Faults(hang_on=lambda r: r.payload.text == "bad", deaf=True)
    with EnginePool.local([Stuck("embedder", faults=faults), FakeLLM()]) as pool:
        handle = pool.call(K.EMBEDDING, "embedder", [EmbedText("bad")])
        with pytest.raises(TimeoutError):
            handle.result(0.05)
        assert pool.call(K.EMBEDDING, "embedder", [EmbedText("good")]).result(5)
        run = pool.runtime.submit(Query({"input": "bad"}, deadline=pool.runtime.time() + 0.05), EMBED, {})
        with pytest.raises(Exception, match="deadline"):
            run.output.result(5)
        hung = pool.call(K.EMBEDDING, "embedder", [EmbedText("bad")])
        began = time.monotonic()
    assert time.monotonic() - began < 10
    with pytest.raises(EngineUnavailable, match="closed"):
        hung.result(0)


def test_calls_and_cancels_during_close_raise_engine_unavailable() -> None:
    """Many threads make calls, as when a web server stops. Each call has its value or the error."""
    ask = [Generate(Prompt(text="what?"))]
    for _ in range(5):
        pool = EnginePool.local(fake_engines())
        pool.start()
        begun = threading.Barrier(5)

        def calls(pool: EnginePool = pool, begun: threading.Barrier = begun) -> int:
            begun.wait()
            for n in range(100_000):
                try:
                    handle = pool.call(K.PREFILLING, "llm", ask, stream=bool(n % 2))
                    if n % 3:
                        handle.result(5)
                    handle.cancel()
                except EngineUnavailable as error:
                    assert error.hint
                    return n
            raise AssertionError("the pool was never closed")

        with ThreadPoolExecutor(4) as threads:
            futures: list[Future[int]] = [threads.submit(calls) for _ in range(4)]
            begun.wait()
            time.sleep(0.01)
            pool.close()
            for future in futures:
                future.result(10)


def test_query_events_after_close_are_ignored() -> None:
    pool = EnginePool.local(fake_engines())
    pool.start()
    run = pool.runtime.submit(Query({"input": "x"}), EMBED, {}, has_original=True)
    handle = run.call(K.EMBEDDING, "embedder", [EmbedText("x")])
    assert handle.result(5)
    pool.close()
    run.observe("e", 1)
    run.close()
    handle.cancel()
    with pytest.raises(EngineError):
        run.call(K.EMBEDDING, "embedder", [EmbedText("y")])


def test_queries_of_a_failed_batch_get_their_own_errors() -> None:
    slow = EngineProfile({K.EMBEDDING: Curve(((1, 0.05), (2, 0.05)))})
    engine = FakeEmbedder("embedder", slow, faults=Faults(raise_on=lambda r: r.payload.text != "first"))
    with EnginePool.local([engine]) as pool:
        runs = [pool.runtime.submit(Query({"input": text}), EMBED, {}) for text in ("first", "a", "b")]
        assert runs[0].output.result(5)
        errors = [run.output.exception(5) for run in runs[1:]]
        assert engine.batches == 2, "the two were to be in one batch"
    for mine, other in ((0, 1), (1, 0)):
        assert f"(query {runs[1 + mine].id}," in str(errors[mine].__cause__)
        assert f"(query {runs[1 + other].id}," not in str(errors[mine].__cause__)


class _Ended:
    """Posts to the loop when it is collected, as a query does whose handler nobody holds any more."""

    def __init__(self, thread: LoopThread, event: threading.Event) -> None:
        self._thread, self._event = thread, event

    def __del__(self) -> None:
        self._thread.try_post(self._event.set)


def test_finalizer_run_during_a_post_can_post_too(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs wherever something is made, in the middle of `tell` as well."""
    first, second, kept = threading.Event(), threading.Event(), list[_Ended]()
    kept.append(_Ended(thread, second))
    make = loop_thread.copy_context
    monkeypatch.setattr(loop_thread, "copy_context", lambda: (kept.clear(), make())[1])
    teller = threading.Thread(target=thread.try_post, args=(first.set,), daemon=True)
    teller.start()
    assert first.wait(10) and second.wait(10)
