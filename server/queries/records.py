"""Submitted queries: what is kept of them, and their events while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

OPEN = ("queued", "running")
WAITING = "waiting"
"""The graph has stopped to ask somebody."""
UNFINISHED = (*OPEN, WAITING)
Status = Literal["queued", "running", "waiting", "done", "failed", "cancelled", "interrupted"]
ENDED = ("done", "failed", "cancelled", "interrupted")


@dataclass(frozen=True, slots=True)
class Record:
    """One submitted query. Times are Unix times; what it asks and answers is the tenant's own."""

    id: str
    tenant: str
    model: str
    app: str
    body: dict[str, Any]
    """The chat that it asks for, before its variables are filled in."""
    variables: dict[str, Any]
    created: float
    goal: float | None = None
    status: str = "queued"
    attempt: int = 0
    """How often it was begun."""
    repeatable: bool = False
    """Whether it may be begun again after a crash: nothing that it does is written anywhere."""
    query: str = ""
    """The live query that it is part of."""
    ended: float | None = None
    answer: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    expires: float | None = None
    waiting: dict[str, Any] | None = None
    """Where its graph has stopped last: `at`, a checkpoint; `next`, nodes; `interrupts`, each an `id` and a `value`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, kept: dict[str, Any]) -> Record:
        known = {one.name for one in fields(cls)}  # a later version may have kept more
        return cls(**{name: value for name, value in kept.items() if name in known})

    def with_(self, **changes: Any) -> Record:
        return replace(self, **changes)

    @property
    def over(self) -> bool:
        return self.status in ENDED

    @property
    def rests(self) -> bool:
        """Whether nothing happens to it by itself: it is over, or waits for somebody."""
        return self.over or self.status == WAITING

    def told(self) -> dict[str, Any]:
        """As clients see it."""
        seconds = None if self.ended is None else round(self.ended - self.created, 6)
        late = None if seconds is None or self.goal is None else seconds <= self.goal
        return {
            "id": self.id,
            "object": "query",
            "model": self.model,
            "app": self.app,
            "query": self.query,
            "status": self.status,
            "created": self.created,
            "ended": self.ended,
            "seconds": seconds,
            "goal": self.goal,
            "within_goal": late,
            "attempt": self.attempt,
            "answer": self.answer,
            "error": self.error,
            "waiting": self.waiting if self.status == WAITING else None,
        }


@dataclass(slots=True, eq=False)
class EventLog:
    """What is told of one query while it runs, in order; ids are `attempt-number`, so that a re-run is known as one."""

    attempt: int = 0
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(kind, data)"""

    def begin(self, attempt: int) -> None:
        self.attempt, self.events = attempt, []

    def after(self, last: str) -> tuple[int, bool]:
        """Where to go on for whoever has heard everything up to this id, and whether what they heard is void."""
        attempt, _, number = last.partition("-")
        if not (attempt.isascii() and attempt.isdigit() and number.isascii() and number.isdigit()):
            return 0, False
        if int(attempt) != self.attempt or int(number) >= len(self.events) + 1:
            return 0, True
        return int(number), False


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
