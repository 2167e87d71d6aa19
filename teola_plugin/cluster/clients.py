"""The clients of one engine host: what each waits for, and what it has yet to hear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

from teola_plugin.cluster.chunked import joined
from teola_plugin.cluster.wire import Began, News, Parcel, Said
from teola_plugin.engines.base import Piece
from teola_plugin.runtime.request_table import RequestEntry

GAP = 0.003
"""Seconds between two parcels to a client: what happens meanwhile goes together."""
BEGINNINGS = 0.01
"""Seconds that the news that something began may wait for company."""
T = TypeVar("T")
SILENCE = 60.0
"""Seconds after which a client that gave no sign of life is taken for dead."""


class Client:
    """One process that uses the engine."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.entries: dict[str, RequestEntry] = {}
        """By the id that the client gave."""
        self.apps: dict[str, str] = {}
        self.heard = asyncio.get_running_loop().time()
        self.parcels: dict[int, Parcel] = {}
        """Those that it has to fetch, by number."""
        self._outbox: list[News] = []
        self._news = asyncio.Event()
        self._next, self._early = 1, dict[int, Any]()
        self._closed = False

    def beat(self) -> None:
        self.heard = asyncio.get_running_loop().time()

    @property
    def silent(self) -> bool:
        return asyncio.get_running_loop().time() - self.heard > SILENCE

    def own(self, name: str) -> str:
        """The client's name for a request, query or session, made unique among clients."""
        return f"{self.id}|{name}"

    def hold(self, request: str, entry: RequestEntry, app: str) -> None:
        self.entries[request] = entry
        self.apps[entry.request.id] = app

    def let_go(self, request: str) -> None:
        entry = self.entries.pop(request, None)
        if entry is not None:
            self.apps.pop(entry.request.id, None)

    def in_order(self, number: int, parcel: T) -> Iterator[T]:
        """This parcel and those that waited for it, once all before it have come."""
        self.beat()
        self._early[number] = parcel
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1

    # ------------------------------------------------------------ news

    def tell(self, news: News) -> None:
        before = self._outbox[-1] if self._outbox else None
        together: Piece | None = None
        if isinstance(news, Said) and isinstance(before, Said) and before.request == news.request:
            together = joined(before.piece, news.piece)
        if together is not None:
            self._outbox[-1] = Said(news.request, together)
        else:
            self._outbox.append(news)
        if isinstance(news, Began):
            asyncio.get_running_loop().call_later(BEGINNINGS, self._news.set)
        else:
            self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def read(self) -> AsyncIterator[list[Any]]:
        """What has happened since the last time, whenever something has."""
        loop = asyncio.get_running_loop()
        sent = 0.0
        while not self._closed or self._outbox:
            await self._news.wait()
            if (early := sent + GAP - loop.time()) > 0:
                await asyncio.sleep(early)
            self._news.clear()
            messages, self._outbox = self._outbox, []
            if messages:
                sent = loop.time()
                yield messages
            del messages


class Clients:
    """By name."""

    def __init__(self) -> None:
        self._by_id: dict[str, Client] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_id.values()))

    def add(self, name: str) -> Client:
        """The client of that name, known or new."""
        found = self._by_id.get(name)
        if found is None:
            found = self._by_id[name] = Client(name)
        return found

    def remove(self, name: str) -> Client | None:
        gone = self._by_id.pop(name, None)
        if gone is not None:
            gone.close()
        return gone

    def of(self, entry: RequestEntry) -> tuple[Client | None, str]:
        """Who asked for it, and under which id."""
        client, _, request = entry.request.id.partition("|")
        return self._by_id.get(client), request

    def close(self) -> None:
        for client in self._by_id.values():
            client.close()
