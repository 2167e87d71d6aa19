"""What one client has yet to hear from an engine host. It asks; nothing is pushed.

So a client that stands still holds up nobody: what happens to its requests waits here, in little room, until it asks
again or is given up.
"""

from __future__ import annotations

import asyncio
from typing import Any

from teola_plugin.cluster.coalescing import joined
from teola_plugin.cluster.wire import RequestEvent, RequestPiece, RequestStarted

GAP = 0.0015
"""Seconds between two parcels to a client: what happens meanwhile goes together."""
BEGINNINGS = 0.01
"""Seconds that the news that something began may wait for company."""


class Outbox:
    """Events in order. Pieces of one request are joined while they wait, so that there are at most three of each:
    its beginning, its text, its end."""

    def __init__(self) -> None:
        self._news: list[RequestEvent] = []
        self._last: dict[str, int] = {}
        """Where the last of each request is."""
        self._some = asyncio.Event()
        self._turn = asyncio.Lock()
        self._closed = False
        self._taken, self._at = 0, 0.0

    def __len__(self) -> int:
        return len(self._news)

    def put(self, news: RequestEvent) -> None:
        at = self._last.get(news.request)
        before = self._news[at] if at is not None else None
        together = (
            joined(before.piece, news.piece)
            if isinstance(before, RequestPiece) and isinstance(news, RequestPiece)
            else None
        )
        if at is not None and together is not None:
            self._news[at] = RequestPiece(news.request, together)
        else:
            self._last[news.request] = len(self._news)
            self._news.append(news)
        if isinstance(news, RequestStarted):
            asyncio.get_running_loop().call_later(BEGINNINGS, self._some.set)
        else:
            self._some.set()

    def close(self) -> None:
        """Nothing more comes: who asks hears what is left, and then that."""
        self._closed = True
        self._some.set()

    async def take(self) -> tuple[int, list[Any]] | None:
        """What has happened since the last time, as soon as something has, and the how manieth time it is, from 1;
        None once it is closed. Several may ask at once: they take turns."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            ready = False
            while not ready and not self._closed:
                await self._some.wait()
                if (early := self._at + GAP - loop.time()) > 0:
                    await asyncio.sleep(early)
                self._some.clear()
                ready = bool(self._news)
            if not self._news:
                return None
            taken, self._news, self._last = self._news, [], {}
            self._at = loop.time()
            self._taken += 1
            return self._taken, taken
