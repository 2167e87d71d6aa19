"""Tests of provider calls: the first caller makes the call, and the other one claims it once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from teola_plugin.adapters.snapshots import snapshot
from teola_plugin.request_keys import UnknownValue
from teola_plugin.runtime.call_limits import ConcurrencyLimit
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.provider_call import CallNotShared, Parked, executing
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.provider_limits import is_transient
from teola_plugin.shims.interception import STREAM_OPENED


class Provider:
    """Counts its calls; `act` is what a call does."""

    def __init__(self, act: Callable[[list[Any]], Any] = lambda argument: ["answer"]) -> None:
        self.act, self.calls = act, 0


class Call:
    """One invocation of a provider with an argument."""

    kind = "GENERATION"

    def __init__(
        self,
        target: Provider,
        argument: Any = "a",
        *,
        streams: bool = False,
        on_loop: bool = False,
        is_pure: bool = False,
    ) -> None:
        self.target, self.argument, self.streams, self.on_loop = target, argument, streams, on_loop
        self.is_pure = is_pure
        self.events: list[Any] = []
        self.run_id = "run"

    def key(self) -> Any:
        return id(self.target), str(self.argument), self.streams

    def start(self, record: Callable[[Any], object] | None) -> Any:
        self.target.calls += 1
        if not self.on_loop:
            return self._chunks(record) if self.streams else self.target.act(self.argument)
        return self._achunks(record) if self.streams else self._aresult()

    def _chunks(self, record: Any) -> Iterator[Any]:
        for chunk in self.target.act(self.argument):
            (record or self.report)(f"token {chunk}")
            yield chunk

    async def _achunks(self, record: Any) -> Any:
        for chunk in self.target.act(self.argument):
            await asyncio.sleep(0)
            if record:
                record(f"token {chunk}")
            else:
                await self.report(f"token {chunk}")
            yield chunk

    async def _aresult(self) -> Any:
        await asyncio.sleep(0)
        result = self.target.act(self.argument)
        return await result if asyncio.iscoroutine(result) else result

    def report(self, event: Any) -> Any:
        self.events.append(event)
        return asyncio.sleep(0) if self.on_loop else None


def scopes(table: ProviderCallTable | None = None) -> tuple[CallScope, CallScope]:
    """Return the scope of an original, and that of a prefetch."""
    table = table or ProviderCallTable()
    return CallScope(table, Caller.ORIGINAL, snapshot), CallScope(table, Caller.PLANNER, snapshot)


@pytest.mark.parametrize("first", ["original", "prefetch"])
def test_second_caller_gets_the_result_of_the_first(first: str) -> None:
    provider, (original, prefetch) = Provider(), scopes()
    order = (original, prefetch) if first == "original" else (prefetch, original)

    results = [list(scope.items(Call(provider))) for scope in order]

    assert results == [[["answer"]], [["answer"]]]
    assert results[0][0] is not results[1][0]
    assert provider.calls == 1


@pytest.mark.parametrize("first", ["original", "prefetch"])
async def test_second_async_caller_gets_the_result_of_the_first(first: str) -> None:
    provider, (original, prefetch) = Provider(), scopes()
    order = (original, prefetch) if first == "original" else (prefetch, original)

    results = [[one async for one in scope.aitems(Call(provider, on_loop=True))] for scope in order]

    assert results == [[["answer"]], [["answer"]]]
    assert provider.calls == 1


def test_two_calls_of_the_original_stay_two_calls() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    list(prefetch.items(Call(provider)))
    for _ in range(2):
        list(original.items(Call(provider)))
    assert provider.calls == 2


def test_a_call_with_other_arguments_is_another_call() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    list(prefetch.items(Call(provider, "a")))
    list(original.items(Call(provider, "b")))
    assert provider.calls == 2


def test_original_gets_the_providers_own_object() -> None:
    answer = ["answer"]
    provider, (original, prefetch) = Provider(lambda _: answer), scopes()
    [shown] = prefetch.items(Call(provider))
    [value] = original.items(Call(provider))
    assert value is answer
    assert shown is not answer


def test_prefetched_chunks_and_reports_reach_the_original_in_order() -> None:
    provider, (original, prefetch) = Provider(lambda _: "xyz"), scopes()
    silent, claiming, alone = (Call(provider, streams=True) for _ in range(3))
    list(prefetch.items(silent))
    chunks = []
    for chunk in original.items(claiming):
        chunks.append(chunk)
        assert len(claiming.events) == len(chunks)
    list(original.items(alone))
    assert chunks == ["x", "y", "z"]
    assert silent.events == []
    assert claiming.events == alone.events == ["token x", "token y", "token z"]


async def test_chunks_are_delivered_as_they_arrive() -> None:
    more = asyncio.Event()

    class Slow(Call):
        async def _achunks(self, record: Any) -> Any:
            yield "x"
            await more.wait()
            yield "y"

    provider, (original, prefetch) = Provider(), scopes()

    async def run() -> list[Any]:
        return [one async for one in prefetch.aitems(Slow(provider, streams=True, on_loop=True))]

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    chunks = original.aitems(Slow(provider, streams=True, on_loop=True))
    assert await anext(chunks) == "x"
    more.set()
    assert await anext(chunks) == "y"
    await task


def raising(*errors: BaseException | None) -> Callable[[Any], Any]:
    """Return what raises these errors in turn, and then answers."""
    left = list(errors)

    def act(_: Any) -> Any:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return ["answer"]

    return act


class Refused(Exception):
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


def test_the_original_gets_the_exception_of_a_prefetch() -> None:
    error = ValueError("wrong")
    provider, (original, prefetch) = Provider(raising(error)), scopes()
    for scope in (prefetch, original):
        with pytest.raises(ValueError, match="wrong"):
            list(scope.items(Call(provider)))
    assert provider.calls == 1


@pytest.mark.parametrize("error", [Refused(429), Refused(503), Refused(408), TimeoutError(), ConnectionResetError()])
def test_original_calls_again_after_a_transient_error(error: Exception) -> None:
    provider, (original, prefetch) = Provider(raising(error)), scopes()
    with pytest.raises(type(error)):
        list(prefetch.items(Call(provider)))
    assert list(original.items(Call(provider))) == [["answer"]]
    assert provider.calls == 2


def test_error_after_a_delivered_chunk_is_raised() -> None:
    def act(_: Any) -> Iterator[str]:
        yield "x"
        raise Refused(503)

    provider, (original, prefetch) = Provider(act), scopes()
    with pytest.raises(Refused):
        list(prefetch.items(Call(provider, streams=True)))
    chunks = original.items(Call(provider, streams=True))
    assert next(chunks) == "x"
    with pytest.raises(Refused):
        next(chunks)
    assert provider.calls == 1


def test_transient_errors_are_recognized_by_status_and_type() -> None:
    passing = (Refused(429), Refused(500), TimeoutError(), type("APIConnectionError", (Exception,), {})())
    assert all(map(is_transient, passing))
    assert not any(map(is_transient, (Refused(400), Refused(401), ValueError())))


async def test_a_cancelled_prefetch_is_not_claimed() -> None:
    async def wait() -> Any:
        await asyncio.Event().wait()

    provider, (original, prefetch) = Provider(lambda _: wait()), scopes()

    async def run() -> list[Any]:
        return [one async for one in prefetch.aitems(Call(provider, on_loop=True))]

    task = asyncio.create_task(run())
    while not provider.calls:
        await asyncio.sleep(0)
    task.cancel()
    provider.act = lambda _: ["answer"]
    assert [one async for one in original.aitems(Call(provider, on_loop=True))] == [["answer"]]
    assert provider.calls == 2


async def test_cancelled_original_cancels_prefetch_and_awaits_its_end() -> None:
    ended: list[str] = []

    async def wait() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    provider, (original, prefetch) = Provider(lambda _: wait()), scopes()

    async def run(scope: CallScope) -> list[Any]:
        return [one async for one in scope.aitems(Call(provider, on_loop=True))]

    early = asyncio.create_task(run(prefetch))
    prefetch.stop = early.cancel
    while not provider.calls:
        await asyncio.sleep(0)
    plain = asyncio.create_task(run(original))
    await asyncio.sleep(0)
    plain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await plain
    assert ended == ["cancelled"]


def test_unclaimed_call_is_cancelled_when_its_query_ends() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    stopped: list[str] = []
    prefetch.stop = lambda: stopped.append("stopped")
    list(prefetch.items(Call(provider, "a")))
    list(prefetch.items(Call(provider, "b")))
    list(original.items(Call(provider, "a")))
    original.table.close()
    assert stopped == ["stopped"]
    with pytest.raises(CallNotShared):
        list(prefetch.items(Call(provider, "c")))
    assert provider.calls == 2, "nothing begins in a query that is over"


def test_planner_without_permission_waits_for_the_originals_call() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    prefetch.may_make = False
    with pytest.raises(Parked) as parked:
        list(prefetch.items(Call(provider)))
    assert provider.calls == 0
    over = threading.Event()
    parked.value.call.when_over(over.set)
    assert not over.is_set()
    list(original.items(Call(provider)))
    assert over.is_set()
    prefetch.expected = parked.value.call
    assert list(prefetch.items(Call(provider))) == [["answer"]]
    assert provider.calls == 1


@pytest.mark.parametrize("first", ["original", "prefetch"])
def test_expected_prefetch_is_made_once_by_whoever_begins_first(first: str) -> None:
    provider, table = Provider(), ProviderCallTable()
    original, prefetch = scopes(table)
    prefetch.expect(Call(provider))
    assert table.has_call(Call(provider).key()) and provider.calls == 0
    order = (original, prefetch) if first == "original" else (prefetch, original)
    assert [scope.result(Call(provider)) for scope in order] == [["answer"], ["answer"]]
    assert provider.calls == 1
    assert bool(prefetch.calls) is (first == "prefetch")


def test_expected_prefetch_that_is_dropped_leaves_its_call_to_the_original() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    prefetch.expect(Call(provider))
    prefetch.drop()
    with pytest.raises(CallNotShared):
        prefetch.result(Call(provider))
    assert original.result(Call(provider)) == ["answer"]
    assert provider.calls == 1


def test_two_waiting_planners_share_one_pure_call_of_the_original() -> None:
    table, provider = ProviderCallTable(), Provider()
    for _ in range(2):
        prefetch = CallScope(table, Caller.PLANNER, snapshot, may_make=False)
        with pytest.raises(Parked):
            list(prefetch.items(Call(provider, is_pure=True)))
    list(CallScope(table, Caller.ORIGINAL, snapshot).items(Call(provider, is_pure=True)))
    assert provider.calls == 1


def test_equal_pure_calls_of_the_planner_are_one_call() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    for _ in range(3):
        assert list(prefetch.items(Call(provider, is_pure=True))) == [["answer"]]
    assert list(original.items(Call(provider, is_pure=True))) == [["answer"]]
    assert provider.calls == 1


def test_two_pure_calls_of_the_original_stay_two_calls() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    list(prefetch.items(Call(provider, is_pure=True)))
    for _ in range(2):
        list(original.items(Call(provider, is_pure=True)))
    assert provider.calls == 2


def test_method_that_mutates_its_arguments_is_called_again() -> None:
    changed: list[str] = []
    provider, (original, prefetch) = Provider(lambda argument: argument.append(1) or ["answer"]), scopes()
    prefetch.on_change = lambda: changed.append("seen")
    argument: list[Any] = []
    list(prefetch.items(Call(provider, [])))
    list(original.items(Call(provider, argument)))
    assert (argument, provider.calls, changed) == ([1], 2, ["seen"])


@pytest.mark.parametrize("streams", [False, True])
def test_uncopyable_result_goes_to_the_original_only(streams: bool) -> None:
    values = [object(), object()]
    provider, (original, prefetch) = Provider(lambda _: values if streams else values[0]), scopes()
    assert list(prefetch.items(Call(provider, streams=streams))) == []
    assert list(original.items(Call(provider, streams=streams))) == (values if streams else values[:1])
    assert provider.calls == 1


def test_withdrawn_call_is_made_again_by_the_original() -> None:
    original, prefetch = scopes()

    def act(_: Any) -> Any:
        prefetch.withdraw("run")
        return ["answer"]

    provider = Provider(act)
    assert list(prefetch.items(Call(provider))) == [["answer"]]
    assert list(original.items(Call(provider))) == [["answer"]]
    assert provider.calls == 2


def test_offered_call_is_made_once_for_prefetch_and_original() -> None:
    provider, (original, prefetch) = Provider(), scopes()
    offer, again = (CallScope(original.table, Caller.PLANNER, snapshot, is_offer=True) for _ in range(2))
    list(offer.items(Call(provider)))
    with pytest.raises(CallNotShared):
        list(again.items(Call(provider)))
    for scope in (prefetch, original):
        assert list(scope.items(Call(provider))) == [["answer"]]
    assert provider.calls == 1


def test_dropped_offer_is_not_claimed() -> None:
    provider, (original, _) = Provider(), scopes()
    offer = CallScope(original.table, Caller.PLANNER, snapshot, is_offer=True)
    list(offer.items(Call(provider)))
    offer.drop()
    list(original.items(Call(provider)))
    assert provider.calls == 2


def test_call_without_a_key_is_made_by_the_original_only() -> None:
    class Endless(Call):
        def key(self) -> Any:
            raise UnknownValue("it contains itself")

    provider, (original, prefetch) = Provider(), scopes()
    with pytest.raises(UnknownValue):
        list(prefetch.items(Endless(provider)))
    assert list(original.items(Endless(provider))) == [["answer"]]
    assert provider.calls == 1


def test_executing_target_is_set_only_inside_its_method() -> None:
    inside: list[Any] = []
    provider, (original, _) = Provider(lambda _: inside.append(executing.get())), scopes()
    for _ in original.items(Call(provider)):
        assert executing.get() is None
    assert inside == [provider]


def test_prefetch_joins_the_running_call_of_a_limited_object() -> None:
    limit = ConcurrencyLimit(1)
    original, prefetch = scopes(ProviderCallTable(lambda target: [limit]))
    running, go_on = threading.Event(), threading.Event()

    def act(_: Any) -> Any:
        running.set()
        go_on.wait(5)
        return ["answer"]

    provider, results = Provider(act), list[Any]()
    threads = [
        threading.Thread(target=lambda scope=scope: results.extend(scope.items(Call(provider))))
        for scope in (original, prefetch)
    ]
    threads[0].start()
    running.wait(5)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(5)
    assert results == [["answer"], ["answer"]]
    assert (provider.calls, limit.original_calls, limit.prefetched_calls) == (1, 0, 0)


# ------------------------------------------------------------ methods that return a stream


class Opening(Call):
    """A method that works before it returns its chunks; without `is_generator` it returns a whole answer."""

    def __init__(self, target: Provider, *, is_generator: bool = True, **more: Any) -> None:
        super().__init__(target, streams=True, **more)
        self.is_generator = is_generator

    def start(self, record: Callable[[Any], object] | None) -> Any:
        self.target.calls += 1
        return self._aopened() if self.on_loop else self._opened()

    def _opened(self) -> Iterator[Any]:
        chunks = self.target.act(self.argument)
        if not self.is_generator:
            yield chunks
            return
        yield STREAM_OPENED
        yield from chunks

    async def _aopened(self) -> Any:
        for item in self._opened():
            await asyncio.sleep(0)
            yield item


def refuses(argument: Any) -> Any:
    raise ValueError("it does not begin")


def test_a_stream_is_claimed_chunk_by_chunk() -> None:
    provider, (original, prefetch) = Provider(lambda argument: ["a", "b"]), scopes()
    assert prefetch.last_result(Opening(provider)) == "b"
    assert list(original.stream(Opening(provider))) == ["a", "b"]
    assert provider.calls == 1


async def test_a_stream_is_claimed_chunk_by_chunk_on_a_loop() -> None:
    provider, (original, prefetch) = Provider(lambda argument: ["a", "b"]), scopes()
    assert await prefetch.alast_result(Opening(provider, on_loop=True)) == "b"
    assert [chunk async for chunk in await original.astream(Opening(provider, on_loop=True))] == ["a", "b"]
    assert provider.calls == 1


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_error_before_a_stream_opens_is_raised_at_the_call(is_prefetched: bool) -> None:
    provider, (original, prefetch) = Provider(refuses), scopes()
    if is_prefetched:
        with pytest.raises(ValueError, match="does not begin"):
            prefetch.last_result(Opening(provider))
    with pytest.raises(ValueError, match="does not begin"):
        original.stream(Opening(provider))
    assert provider.calls == 1


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_method_without_a_stream_returns_its_whole_result(is_prefetched: bool) -> None:
    provider, (original, prefetch) = Provider(lambda argument: ["whole"]), scopes()
    if is_prefetched:
        prefetch.stream(Opening(provider, is_generator=False))
    assert original.stream(Opening(provider, is_generator=False)) == ["whole"]
    assert provider.calls == 1


async def test_last_result_of_a_single_result_call_is_that_result() -> None:
    provider, (_, prefetch) = Provider(), scopes()
    assert prefetch.last_result(Call(provider)) == ["answer"]
    assert await prefetch.alast_result(Call(provider, "b", on_loop=True)) == ["answer"]
