"""Groups streamed results by time: the first result goes out at once, later ones together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from teola_plugin.requests.payloads import Piece, Result


async def coalesced(results: AsyncIterator[Result], seconds: float) -> AsyncIterator[list[Result]]:
    """Yield lists of results: the first piece of each request and every end at once, later pieces after up to
    `seconds`.

    Pieces of one request that wait together are joined.
    """
    queue: asyncio.Queue[Result | None] = asyncio.Queue()
    reader = asyncio.ensure_future(_read_into(results, queue))
    started_ids: set[str] = set()
    try:
        while (first := await queue.get()) is not None:
            batch = [first]
            if not _is_urgent(first, started_ids):
                await _collect(queue, batch, started_ids, seconds)
            is_last = _take_queued(queue, batch, started_ids)
            yield _joined(batch)
            if is_last:
                break
        await reader  # raises what the engine raised
    finally:
        reader.cancel()


async def _read_into(results: AsyncIterator[Result], queue: asyncio.Queue[Result | None]) -> None:
    """Put all results of an engine into the queue, then None, also if the engine raises."""
    try:
        async for result in results:
            queue.put_nowait(result)
    finally:
        queue.put_nowait(None)


def _is_urgent(result: Result, started_ids: set[str]) -> bool:
    """Return True if a result must go out at once: the first piece of a request, or its end. Record its request as
    started."""
    if isinstance(result, Piece) and result.request_id in started_ids:
        return False
    started_ids.add(result.request_id)
    return True


async def _collect(
    queue: asyncio.Queue[Result | None], batch: list[Result], started_ids: set[str], seconds: float
) -> None:
    """Wait for more results until the time is up or an urgent one comes."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while (left := deadline - loop.time()) > 0:
        try:
            result = await asyncio.wait_for(queue.get(), left)
        except TimeoutError:
            return
        if result is None:
            queue.put_nowait(None)
            return
        batch.append(result)
        if _is_urgent(result, started_ids):
            return


def _take_queued(queue: asyncio.Queue[Result | None], batch: list[Result], started_ids: set[str]) -> bool:
    """Add the results that are there without waiting. Return True at the end of the stream."""
    while not queue.empty():
        result = queue.get_nowait()
        if result is None:
            return True
        _is_urgent(result, started_ids)
        batch.append(result)
    return False


def joined(before: Result | None, after: Result) -> Piece | None:
    """Return two pieces of one request as one; None if they are not such pieces, or hold more than text.

    The caller makes sure that both belong to one request. A subclass of `Piece` is never joined, since it holds more.
    """
    if type(before) is Piece and type(after) is Piece:
        return Piece(after.request_id, before.text + after.text, before.tokens + after.tokens)
    return None


def _joined(results: list[Result]) -> list[Result]:
    """Join neighbouring pieces of each request; the order of a request's results stays."""
    merged: list[Result] = []
    positions: dict[str, int] = {}
    for result in results:
        position = positions.get(result.request_id)
        previous = merged[position] if position is not None else None
        piece = joined(previous, result) if position is not None else None
        if position is not None and piece is not None:
            merged[position] = piece
            continue
        positions[result.request_id] = len(merged)
        merged.append(result)
    return merged
