"""A submitted query of this process, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.server.queries.records import EventLog, Record

Event = tuple[str, str, dict[str, Any]]
"""(id, kind, data)"""


@dataclass(slots=True, eq=False)
class Running:
    """A submitted query of this process."""

    record: Record
    log: EventLog = field(default_factory=EventLog)
    task: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to read; a new one is made then."""

    @property
    def runs(self) -> bool:
        return self.task is not None and not self.task.done()

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        self.log.events.append((kind, data))
        self.news.set()
        self.news = asyncio.Event()


async def ended(record: Record, last: str) -> AsyncIterator[Event]:
    """Of a query of another process, or of long ago: its end is what is left."""
    if last:
        yield f"{record.attempt}-0", "reset", {}
    yield f"{record.attempt}-1", record.status, record.told()


async def followed(live: Running, last: str) -> AsyncIterator[Event]:
    """What happens to it from behind the event `last` on, until it rests."""
    at, void = live.log.after(last)
    attempt = live.log.attempt
    if void:
        yield f"{attempt}-0", "reset", {}
    while True:
        news = live.news
        for kind, data in live.log.events[at:]:
            at += 1
            yield f"{attempt}-{at}", kind, data
        if live.record.rests and at >= len(live.log.events):
            return
        if live.news is news and at >= len(live.log.events):
            await news.wait()
