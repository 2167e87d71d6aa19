"""The contract of `base.Engine` as tests: subclass `EngineConformance` in a test module, and pytest runs them all.

::

    class TestMyEngine(EngineConformance):
        async def make(self):
            return MyEngine("mine")

        def payloads(self, kind):
            return [EmbedText("one"), EmbedText("two")]
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from teola_plugin.engines.base import Engine
from teola_plugin.errors import EngineError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.graph.primitive import SERVED_KINDS
from teola_plugin.requests.payloads import Done, Failed, Generation, Piece, Request, Result, Warmed

_MAX_SECONDS = 60.0
"""Maximum seconds of a batch."""


async def collect(engine: Engine, batch: Sequence[Request]) -> list[Result]:
    """Return all results of a batch. Raise TimeoutError if the engine does not end it in time.

    The limit is 60 s. Results come in the order in which the engine ends the requests.
    """
    async with asyncio.timeout(_MAX_SECONDS):
        return [result async for result in engine.execute(batch)]


def ends(results: Sequence[Result], batch: Sequence[Request]) -> dict[str, Done | Failed]:
    """Return the end of each request of a batch, in order. Assert that each has exactly one, and nothing after it."""
    last: dict[str, Done | Failed] = {}
    for result in results:
        assert result.request_id not in last, f"{result.request_id} went on after its end"
        if isinstance(result, Done | Failed):
            last[result.request_id] = result
    assert last.keys() == {request.id for request in batch}, "not every request ended, or others did"
    return {request.id: last[request.id] for request in batch}


def survives(result: Result, copy: Any) -> None:
    """Assert that a result that was pickled and unpickled is equal to the one before; errors keep type, text and
    `retryable`."""
    assert [type(copy), copy.request_id] == [type(result), result.request_id]
    if isinstance(result, Failed):
        before, after = result.error, copy.error
        assert [type(after), str(after), after.retryable] == [type(before), str(before), before.retryable]
    elif isinstance(result, Done):
        assert same(copy.value, result.value)


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal; the number of cached prompt tokens does not count."""
    if isinstance(one, Generation) and isinstance(other, Generation):
        return (one.text, one.finish_reason) == (other.text, other.finish_reason)
    if isinstance(one, Warmed) and isinstance(other, Warmed):
        return True
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def children() -> set[int]:
    """Return the living child processes of this one; set() without /proc."""
    pids = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state not in "ZX":
            pids.add(int(entry.name))
    return pids


_T = TypeVar("_T")
_ids = itertools.count(1)


class EngineConformance:
    """Supply `make` and `payloads`; override `bad_payload`, `running` and `run` where the defaults do not fit.

    Each test is a plain function, and runs its coroutine through `run`.
    """

    async def make(self) -> Engine:
        """Return a new engine that is not started."""
        raise NotImplementedError

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        """Return at least two valid payloads of a kind, with values that do not depend on earlier requests.

        Return [] for a kind that is never sent alone (decodings).
        """
        raise NotImplementedError

    def bad_payload(self, kind: PrimitiveKind) -> Any:
        """Return a payload that the engine must refuse; by default an object that is no payload at all."""
        return 42

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        """Provide a started engine. Override this to share one that is slow to start, and set `shared`."""
        engine = await self.make()
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()

    shared = False
    """True if `running` provides an engine that others use, too: tests that need one of their own are skipped."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a test's coroutine; override for an engine that lives on a loop of its own."""
        return asyncio.run(work)

    # ------------------------------------------------------------ life cycle

    def test_describes_itself(self) -> None:
        """Require all methods of the protocol, a name, kinds of requests, a usable profile, and non-empty versions."""

        async def check() -> None:
            async with self.running() as engine:
                assert isinstance(engine, Engine), "a method of the protocol is missing"
                assert isinstance(engine.name, str) and engine.name
                assert engine.kinds and engine.kinds <= SERVED_KINDS
                profile = engine.profile
                assert isinstance(profile, EngineProfile)
                assert profile.max_batch > 0 and profile.max_requests > 0 and profile.max_efficient_batch > 0
                versions = engine.versions()
                assert isinstance(versions, Mapping) and versions, "say what runs below"
                assert all(isinstance(part, str) and part for item in versions.items() for part in item)

        self.run(check())

    def test_starts_and_stops_any_number_of_times(self) -> None:
        """Require `start` and `stop` to be idempotent, and a stopped engine to fail every request."""

        async def check() -> None:
            engine = await self.make()
            try:
                await engine.start()
                await engine.start()
                await self._values(engine, self._good(engine))
            finally:
                await engine.stop()
            await engine.stop()
            after = self._good(engine)
            failed = [end for end in ends(await collect(engine, after), after).values() if isinstance(end, Failed)]
            assert len(failed) == len(after), "a stopped engine must fail what it is asked for"

        self._skip_if_shared()
        self.run(check())

    def test_starts_again_on_another_loop(self) -> None:
        """A pool may be closed and started again: values stay the same, and the profile keeps its curves."""

        async def live(engine: Engine) -> list[Any]:
            await engine.start()
            try:
                return list((await self._values(engine, self._good(engine))).values())
            finally:
                await engine.stop()

        self._skip_if_shared()
        engine = self.run(self.make())
        before = self.run(live(engine))
        curves = engine.profile.curves.keys()
        after = self.run(live(engine))
        assert all(same(one, other) for one, other in zip(after, before, strict=True))
        assert curves <= engine.profile.curves.keys()

    def test_stops_before_it_was_started(self) -> None:
        """Require `stop` to do no harm on an engine that was never started."""

        async def check() -> None:
            engine = await self.make()
            await engine.stop()

        self._skip_if_shared()
        self.run(check())

    def test_leaves_no_process_and_no_thread(self) -> None:
        """Require that no child process and no thread of the engine is alive after `stop`."""

        async def check() -> None:
            async with self.running() as engine:
                await self._values(engine, self._good(engine))

        self._skip_if_shared()
        before = children(), set(threading.enumerate())
        self.run(check())
        assert children() <= before[0], "a child process outlived stop()"
        assert set(threading.enumerate()) <= before[1], "a thread outlived stop()"

    # ------------------------------------------------------------ requests

    def test_every_request_ends_once(self) -> None:
        """Require exactly one end for each request, also in an empty batch, alone, and with an id that is reused."""

        async def check() -> None:
            async with self.running() as engine:
                batch = self._good(engine)
                await self._values(engine, batch)
                assert await collect(engine, []) == []
                for request in batch:  # alone, and with the same ids again: a retried request keeps its id
                    await self._values(engine, [request])

        self.run(check())

    def test_pieces_make_up_the_value(self) -> None:
        """Require that the streamed pieces of a request, joined, are the text of its value."""

        async def check() -> None:
            async with self.running() as engine:
                batch = self._good(engine, stream=True)
                results = await collect(engine, batch)
                for request_id, end in ends(results, batch).items():
                    pieces = [r.text for r in results if isinstance(r, Piece) and r.request_id == request_id]
                    assert isinstance(end, Done)
                    if pieces or isinstance(end.value, Generation):
                        assert "".join(pieces) == end.value.text

        self.run(check())

    def test_a_bad_request_fails_alone(self) -> None:
        """Require that an invalid payload fails its own request and no other one of the batch."""

        async def check() -> None:
            async with self.running() as engine:
                for kind in self._kinds(engine):
                    first, *later = self._good(engine, kind)
                    bad = _request(kind, self.bad_payload(kind))
                    self._fails_alone(await collect(engine, [first, bad, *later]), [first, *later], bad)

        self.run(check())

    def test_a_request_of_another_kind_fails_alone(self) -> None:
        """Require that a request of a kind that the engine does not serve fails, and no other one of the batch."""

        async def check() -> None:
            async with self.running() as engine:
                foreign = sorted(SERVED_KINDS - engine.kinds, key=lambda kind: kind.name)[0]
                good = self._good(engine)
                bad = _request(foreign, self.bad_payload(foreign))
                self._fails_alone(await collect(engine, [bad, *good]), good, bad)

        self.run(check())

    def test_results_can_be_pickled(self) -> None:
        """Require that values and errors can be pickled, since they travel between processes in a shared pool."""

        async def check() -> None:
            async with self.running() as engine:
                bad = [_request(kind, self.bad_payload(kind)) for kind in self._kinds(engine)]
                for result in await collect(engine, [*self._good(engine), *bad]):
                    survives(result, pickle.loads(pickle.dumps(result)))

        self.run(check())

    def test_batches_run_side_by_side(self) -> None:
        """Require that a continuous engine executes four batches at once, and that all of their requests succeed."""

        async def check() -> None:
            async with self.running() as engine:
                if engine.profile.batching is not Batching.CONTINUOUS:
                    self._skip("only for CONTINUOUS engines")
                batches = [self._good(engine) for _ in range(4)]
                results_of_batches = await asyncio.gather(*(collect(engine, batch) for batch in batches))
                for results, batch in zip(results_of_batches, batches, strict=True):
                    assert all(isinstance(end, Done) for end in ends(results, batch).values())

        self.run(check())

    # ------------------------------------------------------------ cancelling

    def test_cancels_unknown_requests_in_peace(self) -> None:
        """Require that cancelling an unknown or an ended request does nothing."""

        async def check() -> None:
            async with self.running() as engine:
                [first, *_] = batch = self._good(engine)
                await engine.cancel("nobody")
                await self._values(engine, batch)
                await engine.cancel(first.id)  # it has ended
                await self._values(engine, batch)

        self.run(check())

    def test_a_cancelled_request_ends_once_and_alone(self) -> None:
        """Require that a cancelled request ends once, is not to be retried, and leaves others of its batch alone."""

        async def check() -> None:
            async with self.running() as engine:
                [first, *not_cancelled] = batch = self._good(engine)
                work = asyncio.create_task(collect(engine, batch))
                await asyncio.sleep(0)
                await engine.cancel(first.id)
                await engine.cancel(first.id)
                end_by_id = ends(await work, batch)
                end = end_by_id[first.id]
                assert isinstance(end, Done) or not end.error.retryable, "a cancelled request must not be tried again"
                assert all(isinstance(end_by_id[request.id], Done) for request in not_cancelled)
                assert engine.load().requests == 0

        self.run(check())

    def test_a_caller_may_leave_early(self) -> None:
        """Require that requests whose results are no longer read do not count as load, and that the engine goes on."""

        async def check() -> None:
            async with self.running() as engine:
                async with aclosing(engine.execute(self._good(engine))) as results:  # type: ignore[type-var]
                    async for _ in results:
                        break
                assert engine.load().requests == 0, "requests that nobody waits for must not count"
                await self._values(engine, self._good(engine))

        self.run(check())

    # ------------------------------------------------------------ load, sizes, reset

    def test_load_and_sizes(self) -> None:
        """Require positive sizes of requests, no running requests before and after a batch, and a KV cache use from 0
        to 1."""

        async def check() -> None:
            async with self.running() as engine:
                assert engine.load().requests == 0
                batch = self._good(engine)
                assert all(engine.size(request) > 0 for request in batch)
                await collect(engine, batch)
                load = engine.load()
                assert load.requests == 0 and 0.0 <= load.kv_used <= 1.0

        self.run(check())

    def test_reset_changes_no_value(self) -> None:
        """Require that the same requests have the same values before and after `reset`, which clears caches."""

        async def check() -> None:
            async with self.running() as engine:
                batch = self._good(engine)
                before = await self._values(engine, batch)
                await engine.reset()
                await engine.reset()
                after = await self._values(engine, batch)
                assert all(same(after[request.id], before[request.id]) for request in batch)

        self.run(check())

    # ------------------------------------------------------------ helpers

    def _kinds(self, engine: Engine) -> list[PrimitiveKind]:
        kinds = sorted(engine.kinds, key=lambda kind: kind.name)
        return [kind for kind in kinds if self.payloads(kind)]

    def _good(self, engine: Engine, kind: PrimitiveKind | None = None, *, stream: bool = False) -> list[Request]:
        """Return one request per payload, of all kinds of the engine by default, with new ids."""
        kinds = self._kinds(engine) if kind is None else [kind]
        return [_request(one_kind, payload, stream=stream) for one_kind in kinds for payload in self.payloads(one_kind)]

    async def _values(self, engine: Engine, batch: Sequence[Request]) -> dict[str, Any]:
        """Execute a batch, in which no request may fail. Return the values by request id."""
        end_by_id = ends(await collect(engine, batch), batch)
        for request_id, end in end_by_id.items():
            if isinstance(end, Failed):
                raise AssertionError(f"{request_id} failed") from end.error
        return {request_id: end.value for request_id, end in end_by_id.items() if isinstance(end, Done)}

    def _fails_alone(self, results: Sequence[Result], good: Sequence[Request], bad: Request) -> None:
        """Assert that the bad request failed with a permanent `EngineError`, and that all good ones of its batch
        succeeded."""
        by_id = ends(results, [*good, bad])
        end = by_id[bad.id]
        assert isinstance(end, Failed) and isinstance(end.error, EngineError), f"{bad.kind} must fail, it gave {end}"
        assert not end.error.retryable, "doing a bad request again cannot help"
        wrong = [by_id[request.id] for request in good if not isinstance(by_id[request.id], Done)]
        assert not wrong, f"good requests failed with the bad one: {wrong}"

    def _skip_if_shared(self) -> None:
        if self.shared:
            self._skip("needs an engine of its own")

    def _skip(self, reason: str) -> None:
        import pytest

        pytest.skip(reason)


def _request(kind: PrimitiveKind, payload: Any, *, stream: bool = False) -> Request:
    return Request(f"conformance-{next(_ids)}", kind, payload, stream=stream)
