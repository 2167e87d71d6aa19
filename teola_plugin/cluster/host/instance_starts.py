"""How the instances of an engine come up: all of them, or, after a loss, whichever can."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from teola_plugin.cluster.host.remote_instance import RemoteInstance

log = logging.getLogger("teola_plugin")
PendingStarts = dict[str, "asyncio.Task[None]"]


async def start_instances(
    made: Mapping[str, RemoteInstance], *, every: bool
) -> tuple[dict[str, RemoteInstance], PendingStarts]:
    """The instances that are up, and the starts that go on. With `every` that is all of them and none; otherwise one
    that is up is enough: the cluster may have shrunk. Raises `EngineUnavailable`, and then nothing is left."""
    starts = {number: asyncio.ensure_future(instance.start()) for number, instance in made.items()}
    try:
        if every:
            await asyncio.gather(*starts.values())
        else:
            await _one_of(starts)
    except BaseException:
        await stop_instances(made, starts)
        raise
    up = {number: made[number] for number, start in starts.items() if _succeeded(start)}
    return up, {number: start for number, start in starts.items() if not start.done()}


async def _one_of(starts: PendingStarts) -> None:
    going = set(starts.values())
    while going and not any(map(_succeeded, starts.values())):
        _, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
    for number, start in starts.items():
        if start.done() and (error := start.exception()) is not None:
            if not any(map(_succeeded, starts.values())):
                raise error
            log.warning("instance %s did not start again: %s", number, error)


def _succeeded(start: asyncio.Task[None]) -> bool:
    return start.done() and not start.cancelled() and start.exception() is None


async def stop_instances(made: Mapping[str, RemoteInstance], starts: PendingStarts) -> None:
    """Nothing is left of these instances, whether they are up or on their way."""
    for start in starts.values():
        start.cancel()
    await asyncio.gather(*starts.values(), return_exceptions=True)
    await asyncio.gather(*(instance.stop() for instance in made.values()))
