"""A client's line to one engine host: orders out, news in. Lives on the client's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from teola_plugin.cluster.client.tolerant_reading import read_parcel
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import actor_name
from teola_plugin.cluster.ray_errors import translated
from teola_plugin.cluster.wire import EngineFacts, Hello, Order, RequestEvent, pack_orders, size_of

log = logging.getLogger("teola_plugin")
PATIENCE = 60.0
"""Seconds that a host may take to come back before its requests fail."""
TRY = 5.0
"""Seconds for one greeting: what was sent to a node that is gone may never be answered."""
QUESTIONS = 2
"""How often a client asks at once: the host answers one while the answer to the other is on its way."""
BEAT = 15.0
"""Seconds between two signs of life: a host forgets a client that gives none (see `clients.SILENCE`)."""


class HostLink:
    """Orders of one turn of the loop leave together; news arrive in parcels. The link always has a question open at
    the host, which answers when there is news.

    When the host dies, the link says so (`lost`), finds the new one that Ray makes, and says that, too (`found`); if
    none comes within `PATIENCE`, it gives up (`gone`).
    """

    def __init__(
        self,
        pool: str,
        engine: str,
        hello: Hello,
        *,
        news: Callable[[list[RequestEvent]], None],
        refused: Callable[[Order, Exception], None],
        found: Callable[[EngineFacts], None],
        gone: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self._name, self._hello = actor_name(pool, engine), hello
        self._news, self._refused, self._found, self._gone = news, refused, found, gone
        self._host: Any = None
        self.sent = self.received = 0
        """Bytes."""
        self._orders: list[Order] = []
        self._number = self._greeting = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> EngineFacts:
        """Raises `EngineUnavailable` and what the host raises."""
        facts = await self._greet()
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._live())]
        return facts

    async def _greet(self) -> EngineFacts:
        self._greeting += 1
        try:
            host = await asyncio.get_running_loop().run_in_executor(None, actor, self._name)
            facts: EngineFacts = await host.hello.remote(replace(self._hello, greeting=self._greeting))
        except Exception as error:
            raise translated(error, self.engine) from None
        self._host, self._number = host, 0
        return facts

    async def close(self) -> None:
        """Take leave: the host forgets what this client still waits for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        host, self._host = self._host, None
        if host is not None:
            try:
                await asyncio.wait_for(host.leave.remote(self._hello.client), 5)
            except Exception as error:
                log.debug("the host of %s did not hear the farewell: %r", self.engine, error)

    async def _live(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            if self._host is not None:
                self._host.beat.remote(self._hello.client)

    # ------------------------------------------------------------ out

    def send(self, order: Order) -> None:
        """Soon, and in order. What is sent while the host is away is lost; the port says it again (`found`)."""
        if not self._orders:
            asyncio.get_running_loop().call_soon(self._flush)
        self._orders.append(order)

    def _flush(self) -> None:
        orders, self._orders = self._orders, []
        if self._host is None:
            return
        parcel = pack_orders(orders, self._refused)
        if parcel is not None:
            self._number += 1
            self.sent += size_of(parcel)
            self._host.orders.remote(self._hello.client, self._greeting, self._number, parcel)

    # ------------------------------------------------------------ in

    async def _listen(self) -> None:
        while True:
            try:
                await self._hear()
                reason: BaseException = ConnectionError("it did not hear of this client for long, and gave it up")
            except Exception as error:
                reason = translated(error, self.engine)
            self._host = None
            log.warning("engine %s: its host was lost (%s)", self.engine, reason)
            facts = await self._again(reason)
            if facts is None:
                return
            self._found(facts)

    async def _hear(self) -> None:
        """Until the host does not know this client (any more). Raises what Ray raises when the host is lost."""
        heard = _InOrder(self._news)
        questions = [asyncio.ensure_future(self._ask(heard)) for _ in range(QUESTIONS)]
        try:
            await asyncio.gather(*questions)
        finally:
            for question in questions:
                question.cancel()

    async def _ask(self, heard: _InOrder) -> None:
        host, greeting = self._host, self._greeting
        while (parcel := await host.news.remote(self._hello.client, greeting)) is not None:
            self.received += size_of(parcel)
            number, news = read_parcel(parcel, self.engine)
            heard.take(number, news)
            del parcel, news  # or they stay in shared memory until there is more to hear

    async def _again(self, reason: BaseException) -> EngineFacts | None:
        """Greet the new host as soon as there is one."""
        loop = asyncio.get_running_loop()
        ends, pause = loop.time() + PATIENCE, 0.1
        while loop.time() < ends:
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)
            try:
                return await asyncio.wait_for(self._greet(), TRY)
            except TimeoutError:
                log.debug("the host of %s does not answer yet", self.engine)
            except Exception as error:
                reason = error
        self._gone(reason)
        return None


class _InOrder:
    """Answers to questions that are open at once may overtake each other."""

    def __init__(self, deliver: Callable[[list[RequestEvent]], None]) -> None:
        self._deliver, self._next = deliver, 1
        self._early: dict[int, list[RequestEvent]] = {}

    def take(self, number: int, news: list[RequestEvent]) -> None:
        self._early[number] = news
        while (ready := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._deliver(ready)
