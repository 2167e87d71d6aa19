"""Streams in parcels by time: the first result at once, later ones together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from teola_plugin.requests.results import Piece, Result


async def coalesced(results: AsyncIterator[Result], seconds: float) -> AsyncIterator[list[Result]]:
    """Lists of results: the first piece of each request and every end go out at once, later pieces wait for company
    for up to `seconds`. Pieces of one request that wait together are joined."""
    queue: asyncio.Queue[Result | None] = asyncio.Queue()
    reader = asyncio.ensure_future(_read(results, queue))
    begun: set[str] = set()
    try:
        while (first := await queue.get()) is not None:
            held = [first]
            if not _urgent(first, begun):
                await _more(queue, held, begun, seconds)
            ended = _drain(queue, held, begun)
            yield _joined(held)
            if ended:
                break
        await reader  # raises what the engine raised
    finally:
        reader.cancel()


async def _read(results: AsyncIterator[Result], queue: asyncio.Queue[Result | None]) -> None:
    try:
        async for result in results:
            queue.put_nowait(result)
    finally:
        queue.put_nowait(None)


def _urgent(result: Result, begun: set[str]) -> bool:
    if isinstance(result, Piece) and result.request_id in begun:
        return False
    begun.add(result.request_id)
    return True


async def _more(queue: asyncio.Queue[Result | None], held: list[Result], begun: set[str], seconds: float) -> None:
    """Wait for company until the time is over or something urgent comes."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    while (left := ends - loop.time()) > 0:
        try:
            result = await asyncio.wait_for(queue.get(), left)
        except TimeoutError:
            return
        if result is None:
            queue.put_nowait(None)
            return
        held.append(result)
        if _urgent(result, begun):
            return


def _drain(queue: asyncio.Queue[Result | None], held: list[Result], begun: set[str]) -> bool:
    """What is there without waiting; whether it is the end."""
    while not queue.empty():
        result = queue.get_nowait()
        if result is None:
            return True
        _urgent(result, begun)
        held.append(result)
    return False


def joined(before: Result | None, after: Result) -> Piece | None:
    """Two pieces of one request as one; None where they are no such, or hold more than text."""
    if type(before) is Piece and type(after) is Piece:
        return Piece(after.request_id, before.text + after.text, before.tokens + after.tokens)
    return None


def _joined(results: list[Result]) -> list[Result]:
    """Neighbouring pieces of a request as one; the order of a request's results stays."""
    found: list[Result] = []
    places: dict[str, int] = {}
    for result in results:
        at = places.get(result.request_id)
        before = found[at] if at is not None else None
        together = joined(before, result) if at is not None else None
        if at is not None and together is not None:
            found[at] = together
            continue
        places[result.request_id] = len(found)
        found.append(result)
    return found
