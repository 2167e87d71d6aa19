"""The clients of one engine host: the requests of each, and the events that it has not got yet.

A client calls for its events; nothing is pushed. So a client that stands still delays nobody: its events wait, in
little room, until it calls again or is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar

from teola_plugin.cluster.coalescing import joined
from teola_plugin.cluster.wire import RequestEvent, RequestPiece, RequestStarted
from teola_plugin.runtime.engine_requests import EngineRequest

PARCEL_INTERVAL_S = 0.0015
"""Seconds between two parcels to a client: events of that time travel together."""
START_DELAY_S = 0.01
"""Seconds that the event of a request's start may wait for others."""


class Outbox:
    """Events for one client, in order.

    Pieces of one request are joined while they wait, so that there are at most three events of each: its start, its
    text, its end.
    """

    def __init__(self) -> None:
        self._events: list[RequestEvent] = []
        self._positions: dict[str, int] = {}
        """Position of the last event of each request."""
        self._has_events = asyncio.Event()
        self._turn = asyncio.Lock()
        self._closed = False
        self._parcel_number, self._last_sent = 0, 0.0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: RequestEvent) -> None:
        """Add an event for the client; join a piece of text with the piece of the same request that still waits.

        It wakes `take`: at once, or for the start of a request after `START_DELAY_S`, so that it travels with others.
        """
        position = self._positions.get(event.request)
        previous = self._events[position] if position is not None else None
        joined_piece = (
            joined(previous.piece, event.piece)
            if isinstance(previous, RequestPiece) and isinstance(event, RequestPiece)
            else None
        )
        if position is not None and joined_piece is not None:
            self._events[position] = RequestPiece(event.request, joined_piece)
        else:
            self._positions[event.request] = len(self._events)
            self._events.append(event)
        if isinstance(event, RequestStarted):
            asyncio.get_running_loop().call_later(START_DELAY_S, self._has_events.set)
        else:
            self._has_events.set()

    def close(self) -> None:
        """Accept no more events: `take` returns those that are left, then None."""
        self._closed = True
        self._has_events.set()

    async def take(self) -> tuple[int, list[Any]] | None:
        """Return the events since the last call, once there are any, with the number of the call, from 1.

        Returns None once the outbox is closed. Several may call at once: they take turns.
        """
        loop = asyncio.get_running_loop()
        async with self._turn:
            ready = False
            while not ready and not self._closed:
                await self._has_events.wait()
                if (wait_s := self._last_sent + PARCEL_INTERVAL_S - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                self._has_events.clear()
                ready = bool(self._events)
            if not self._events:
                return None
            events, self._events, self._positions = self._events, [], {}
            self._last_sent = loop.time()
            self._parcel_number += 1
            return self._parcel_number, events


T = TypeVar("T")
SILENCE = 60.0
"""Seconds without a sign of life after which a client is taken for dead."""
MAX_EVENTS = 100_000
"""Events that may wait for a client; one that does not fetch them is taken for dead, too."""


class Client:
    """One process that uses the engine."""

    def __init__(self, name: str, greeting: int = 1) -> None:
        self.id, self.greeting = name, greeting
        self.entries: dict[str, EngineRequest] = {}
        """Requests by the id that the client gave."""
        self.apps: dict[str, str] = {}
        self.last_heard = asyncio.get_running_loop().time()
        self.outbox = Outbox()
        self._next, self._out_of_order = 1, dict[int, Any]()

    def beat(self) -> None:
        self.last_heard = asyncio.get_running_loop().time()

    def is_lost(self, silence: float) -> bool:
        """Return True if the client was silent for so many seconds, or does not fetch its events."""
        return asyncio.get_running_loop().time() - self.last_heard > silence or len(self.outbox) > MAX_EVENTS

    def unique_name(self, name: str) -> str:
        """Return the client's name for a request or query, made unique among clients and their greetings.

        A request that the client repeats after it was given up differs from the one that still ends.
        """
        return f"{self.id}#{self.greeting}|{name}"

    def unique_group(self, name: str) -> str:
        """Return `unique_name` for a session or a gang; empty for none."""
        return self.unique_name(name) if name else ""

    def add_request(self, request: str, entry: EngineRequest, app: str) -> None:
        self.entries[request] = entry
        self.apps[entry.request.id] = app

    def remove_request(self, request: str) -> None:
        entry = self.entries.pop(request, None)
        if entry is not None:
            self.apps.pop(entry.request.id, None)

    def in_order(self, number: int, parcel: T) -> Iterator[T]:
        """Yield this parcel and those that waited for it, once all before it have come."""
        self.beat()
        self._out_of_order[number] = parcel
        while self._next in self._out_of_order:
            self._next += 1  # first: if reading the parcel fails, the next one comes all the same
            yield self._out_of_order.pop(self._next - 1)

    def send_event(self, event: RequestEvent) -> None:
        self.outbox.put(event)

    def close(self) -> None:
        self.outbox.close()


class Clients:
    """The clients of a host, by name."""

    def __init__(self) -> None:
        self._by_id: dict[str, Client] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_id.values()))

    def add(self, name: str, greeting: int = 1) -> Client:
        """Add a client that has just greeted."""
        client = self._by_id[name] = Client(name, greeting)
        return client

    def get(self, name: str, greeting: int | None = None) -> Client | None:
        """Return the client of that name, if it is known and, if given, in that greeting."""
        client = self._by_id.get(name)
        return client if client is not None and greeting in (None, client.greeting) else None

    def remove(self, name: str) -> Client | None:
        """Forget a client and close its outbox. Return the client; None if it was not known."""
        client = self._by_id.pop(name, None)
        if client is not None:
            client.close()
        return client

    def of(self, entry: EngineRequest) -> tuple[Client | None, str]:
        """Return the client that waits for an entry, and the client's id for it.

        An entry's id has the form `client#greeting|request`. The client is None if it has left, if it has greeted again
        since, or if it waits for another entry of that id.
        """
        owner, _, request = entry.request.id.partition("|")
        name, _, greeting = owner.rpartition("#")
        client = self.get(name, int(greeting))
        return (client if client is not None and client.entries.get(request) is entry else None), request

    def close(self) -> None:
        for client in self._by_id.values():
            client.close()
