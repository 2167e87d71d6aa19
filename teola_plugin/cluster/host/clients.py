"""The clients of one engine host: what each waits for, and what it has yet to hear."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar

from teola_plugin.cluster.host.outbox import Outbox
from teola_plugin.cluster.wire import RequestEvent
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest

T = TypeVar("T")
SILENCE = 60.0
"""Seconds after which a client that gave no sign of life is taken for dead."""
MOST = 100_000
"""Events that may wait for a client; one that asks for more and does not listen is taken for dead, too."""


class Client:
    """One process that uses the engine."""

    def __init__(self, name: str, greeting: int = 1) -> None:
        self.id, self.greeting = name, greeting
        self.entries: dict[str, EngineRequest] = {}
        """By the id that the client gave."""
        self.apps: dict[str, str] = {}
        self.heard = asyncio.get_running_loop().time()
        self.outbox = Outbox()
        self._next, self._early = 1, dict[int, Any]()

    def beat(self) -> None:
        self.heard = asyncio.get_running_loop().time()

    def lost(self, silence: float) -> bool:
        """Whether it has not been heard of for so many seconds, or does not listen."""
        return asyncio.get_running_loop().time() - self.heard > silence or len(self.outbox) > MOST

    def own(self, name: str) -> str:
        """The client's name for a request or query, made unique among clients and their greetings: what it
        says again after it was given up is not what still ends."""
        return f"{self.id}#{self.greeting}|{name}"

    def own_group(self, name: str) -> str:
        """`own` for a session or a gang; what is in none stays in none."""
        return self.own(name) if name else ""

    def hold(self, request: str, entry: EngineRequest, app: str) -> None:
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
            self._next += 1  # first: whoever reads the parcel may fail, and the next one comes all the same
            yield self._early.pop(self._next - 1)

    def tell(self, news: RequestEvent) -> None:
        self.outbox.put(news)

    def close(self) -> None:
        self.outbox.close()


class Clients:
    """By name."""

    def __init__(self) -> None:
        self._by_id: dict[str, Client] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_id.values()))

    def add(self, name: str, greeting: int = 1) -> Client:
        """One that has just come."""
        made = self._by_id[name] = Client(name, greeting)
        return made

    def get(self, name: str, greeting: int | None = None) -> Client | None:
        """The client of that name, if it is here, and since that greeting of its own."""
        found = self._by_id.get(name)
        return found if found is not None and greeting in (None, found.greeting) else None

    def remove(self, name: str) -> Client | None:
        gone = self._by_id.pop(name, None)
        if gone is not None:
            gone.close()
        return gone

    def of(self, entry: EngineRequest) -> tuple[Client | None, str]:
        """Who waits for it, and under which id."""
        owner, _, request = entry.request.id.partition("|")
        name, _, greeting = owner.rpartition("#")
        found = self.get(name, int(greeting))
        return (found if found is not None and found.entries.get(request) is entry else None), request

    def close(self) -> None:
        for client in self._by_id.values():
            client.close()
