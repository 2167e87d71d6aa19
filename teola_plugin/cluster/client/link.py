"""A client's connection to one engine host: orders go out, events come in. Lives on the client's loop."""

from __future__ import annotations

import asyncio
import io
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import actor_name
from teola_plugin.cluster.ray_errors import translated
from teola_plugin.cluster.remote_values import collecting_refs
from teola_plugin.cluster.wire import (
    EngineFacts,
    Hello,
    Order,
    Parcel,
    RequestEvent,
    pack_orders,
    sendable,
    size_of,
    unpack,
)

log = logging.getLogger("teola_plugin")
HOST_TIMEOUT_S = 60.0
"""Seconds that a host may take to come back before its requests fail."""
GREETING_TIMEOUT_S = 5.0
"""Seconds for one greeting: a node that is gone may never answer."""
OPEN_CALLS = 2
"""Calls for events that a client has open at once: the host answers one while the other's answer is on its way."""
HEARTBEAT_S = 15.0
"""Seconds between two signs of life: a host forgets a client that gives none (see `clients.SILENCE`)."""


class HostLink:
    """Orders of one turn of the loop leave together; events arrive in parcels. The link always has calls open at the
    host, which answers them when there are events.

    When the host dies, the link connects to the new one that Ray makes and calls `on_found`; if none comes within
    `HOST_TIMEOUT_S`, it gives up and calls `on_gone`.
    """

    def __init__(
        self,
        pool: str,
        engine: str,
        hello: Hello,
        *,
        on_events: Callable[[list[RequestEvent]], None],
        on_refused: Callable[[Order, Exception], None],
        on_found: Callable[[EngineFacts], None],
        on_gone: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self._name, self._hello = actor_name(pool, engine), hello
        self._on_events, self._on_refused, self._on_found, self._on_gone = on_events, on_refused, on_found, on_gone
        self._host: Any = None
        self.sent_bytes = self.received_bytes = 0
        self._orders: list[Order] = []
        self._number = self._greeting = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> EngineFacts:
        """Greet the host and start listening. Raises `EngineUnavailable` and what the host raises."""
        facts = await self._greet()
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._send_heartbeats())]
        return facts

    async def _greet(self) -> EngineFacts:
        """Find the engine's host, introduce this client to it, and return the facts that it reports about the engine.

        Each greeting has a new number, by which the host tells this connection from earlier ones. Raise
        `EngineUnavailable` if there is no host, and what the host raises.
        """
        self._greeting += 1
        try:
            host = await asyncio.get_running_loop().run_in_executor(None, actor, self._name)
            facts: EngineFacts = await host.hello.remote(replace(self._hello, greeting=self._greeting))
        except Exception as error:
            raise translated(error, self.engine) from None
        self._host, self._number = host, 0
        return facts

    async def close(self) -> None:
        """Tell the host to forget what this client still waits for, and stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        host, self._host = self._host, None
        if host is not None:
            try:
                await asyncio.wait_for(host.leave.remote(self._hello.client), 5)
            except Exception as error:
                log.debug("the host of %s did not hear the farewell: %r", self.engine, error)

    async def _send_heartbeats(self) -> None:
        """Tell the host every `HEARTBEAT_S` seconds that this client is alive, until the task is cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._host is not None:
                self._host.beat.remote(self._hello.client)

    # ------------------------------------------------------------ out

    def send(self, order: Order) -> None:
        """Send an order soon, and in order. Orders sent while the host is away are lost; the port repeats them
        (`on_found`)."""
        if not self._orders:
            asyncio.get_running_loop().call_soon(self._flush)
        self._orders.append(order)

    def _flush(self) -> None:
        """Send all orders of this turn of the loop to the host in one parcel; drop them while there is no host.

        Orders that cannot be pickled go to `on_refused`.
        """
        orders, self._orders = self._orders, []
        if self._host is None:
            return
        parcel = pack_orders(orders, self._on_refused)
        if parcel is not None:
            self._number += 1
            self.sent_bytes += size_of(parcel)
            self._host.orders.remote(self._hello.client, self._greeting, self._number, parcel)

    # ------------------------------------------------------------ in

    async def _listen(self) -> None:
        """Receive events for as long as the link is open, and connect again each time the host is lost.

        This is a task of the client's loop. It ends when no host comes back within `HOST_TIMEOUT_S`.
        """
        while True:
            try:
                await self._receive_events()
                reason: BaseException = ConnectionError("it did not hear of this client for long, and gave it up")
            except Exception as error:
                reason = translated(error, self.engine)
            self._host = None
            log.warning("engine %s: its host was lost (%s)", self.engine, reason)
            facts = await self._reconnect(reason)
            if facts is None:
                return
            self._on_found(facts)

    async def _receive_events(self) -> None:
        """Deliver events until the host does not know this client any more. Raises what Ray raises when the host is
        lost."""
        ordered = _InOrder(self._on_events)
        calls = [asyncio.ensure_future(self._call_for_events(ordered)) for _ in range(OPEN_CALLS)]
        try:
            await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    async def _call_for_events(self, ordered: _InOrder) -> None:
        """Fetch parcels of events from the host, one call after the other, until it answers None since it forgot this
        client.

        `OPEN_CALLS` of these run at once, so `ordered` restores the order of the parcels.
        """
        host, greeting = self._host, self._greeting
        while (parcel := await host.news.remote(self._hello.client, greeting)) is not None:
            self.received_bytes += size_of(parcel)
            number, events = read_parcel(parcel, self.engine)
            ordered.take(number, events)
            del parcel, events  # or they stay in shared memory until the next events

    async def _reconnect(self, reason: BaseException) -> EngineFacts | None:
        """Greet the new host as soon as there is one. Return None if none comes in time."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + HOST_TIMEOUT_S, 0.1
        while loop.time() < deadline:
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)
            try:
                return await asyncio.wait_for(self._greet(), GREETING_TIMEOUT_S)
            except TimeoutError:
                log.debug("the host of %s does not answer yet", self.engine)
            except Exception as error:
                reason = error
        self._on_gone(reason)
        return None


class _InOrder:
    """Delivers events in order, since answers to calls that are open at once may overtake each other."""

    def __init__(self, deliver: Callable[[list[RequestEvent]], None]) -> None:
        self._deliver, self._next = deliver, 1
        self._out_of_order: dict[int, list[RequestEvent]] = {}

    def take(self, number: int, events: list[RequestEvent]) -> None:
        """Accept the events of parcel `number`, and deliver all parcels that are now next in line.

        `number` counts parcels from 1. Parcels that come too soon wait here for the missing ones.
        """
        self._out_of_order[number] = events
        while (ready := self._out_of_order.pop(self._next, None)) is not None:
            self._next += 1
            self._deliver(ready)


def read_parcel(parcel: Parcel, engine: str) -> tuple[int, list[RequestEvent]]:
    """Return the number of a parcel and its events; those that hold something unknown become ends that say so.

    A chunk that another app has stored may have metadata of a class that only that app has: the other events are still
    read.
    """
    try:
        number, *events = unpack(parcel)
    except (ImportError, AttributeError):
        number, *readable = _unpack_tolerantly(parcel)
        events = [sendable(engine, event) for event in readable]
    return number, events


def _unpack_tolerantly(parcel: Parcel) -> list[Any]:
    """Return the messages of a parcel, with placeholders for objects whose classes cannot be imported here."""
    body, refs = parcel if isinstance(parcel, tuple) else (parcel, [])
    with collecting_refs(refs):
        messages: list[Any] = _TolerantUnpickler(io.BytesIO(body)).load()
    return messages


class _TolerantUnpickler(pickle.Unpickler):
    """Replaces what cannot be imported by an object that cannot be pickled again, and so is detected."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, or a placeholder class with its name if it cannot be imported here."""
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (_UnknownObject,), {"__module__": module})


class _UnknownObject:
    def __new__(cls, *_: Any, **__: Any) -> _UnknownObject:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def __reduce_ex__(self, _: Any) -> Any:
        raise pickle.PicklingError(f"{type(self).__module__}.{type(self).__name__} cannot be imported in this process")
