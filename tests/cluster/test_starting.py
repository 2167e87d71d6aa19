"""Tests of how replicas start: all of them at first, and after a loss each as soon as it can."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from teola_plugin.cluster.host.remote_replica import start_replicas, stop_replicas
from teola_plugin.errors import EngineUnavailable


class Coming:
    """A replica that starts when it is let, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.room, self.stopped = fails, asyncio.Event(), False

    async def start(self) -> None:
        await self.room.wait()
        if self.fails:
            raise EngineUnavailable("it does not start.", hint="none")

    async def stop(self) -> None:
        self.stopped = True


def three(**made: Any) -> Any:
    return {"0": Coming(), "1": Coming(), "2": Coming(), **made}


async def test_first_start_waits_for_all_replicas() -> None:
    made = three()
    coming = asyncio.ensure_future(start_replicas(made, all_needed=True))
    for number in ("1", "2"):
        made[number].room.set()
        await asyncio.sleep(0.01)
        assert not coming.done()
    made["0"].room.set()
    up, starts = await coming
    assert list(up) == ["0", "1", "2"] and not starts


async def test_first_start_fails_if_one_replica_fails() -> None:
    made = three(**{"1": Coming(fails=True)})
    made["0"].room.set()
    made["1"].room.set()
    with pytest.raises(EngineUnavailable, match="does not start"):
        await start_replicas(made, all_needed=True)
    assert all(one.stopped for one in made.values())


async def test_restart_needs_one_replica_and_others_may_follow() -> None:
    made = three(**{"0": Coming(fails=True)})
    coming = asyncio.ensure_future(start_replicas(made, all_needed=False))
    made["0"].room.set()
    await asyncio.sleep(0.01)
    assert not coming.done()
    made["2"].room.set()
    up, starts = await coming
    assert list(up) == ["2"] and list(starts) == ["1"]
    made["1"].room.set()
    await starts["1"]


async def test_restart_fails_if_every_replica_fails() -> None:
    made = {"0": Coming(fails=True), "1": Coming(fails=True)}
    for one in made.values():
        one.room.set()
    with pytest.raises(EngineUnavailable):
        await start_replicas(made, all_needed=False)
    assert all(one.stopped for one in made.values())


async def test_stopping_cancels_replicas_that_are_starting() -> None:
    made = three()
    made["0"].room.set()
    _, starts = await start_replicas(made, all_needed=False)
    await stop_replicas(made, starts)
    assert all(start.cancelled() for start in starts.values()) and all(one.stopped for one in made.values())
