"""Submitted queries: what is stored of them, and their events while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

OPEN = ("queued", "running")
WAITING = "waiting"
"""Status of a query whose graph has stopped to ask somebody."""
UNFINISHED = (*OPEN, WAITING)
Status = Literal["queued", "running", "waiting", "done", "failed", "cancelled", "interrupted"]
ENDED = ("done", "failed", "cancelled", "interrupted")


@dataclass(frozen=True, slots=True)
class Record:
    """A submitted query as it is stored. Times are Unix times; its body and its answer belong to the tenant."""

    id: str
    tenant: str
    model: str
    app: str
    body: dict[str, Any]
    """The chat, before its variables are filled in."""
    variables: dict[str, Any]
    created: float
    goal: float | None = None
    status: str = "queued"
    attempt: int = 0
    """How often it was begun."""
    repeatable: bool = False
    """True if it may be run again after a crash, because it writes nothing anywhere."""
    query: str = ""
    """Id of the live query that it is part of."""
    ended: float | None = None
    answer: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    expires: float | None = None
    waiting: dict[str, Any] | None = None
    """The last stop of its graph: `at`, a checkpoint; `next`, nodes; `interrupts`, each an `id` and a `value`."""

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Record:
        names = {one.name for one in fields(cls)}  # a later version may have stored more
        return cls(**{name: value for name, value in stored.items() if name in names})

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def is_at_rest(self) -> bool:
        """True if nothing happens to it by itself: it has ended, or waits for somebody."""
        return self.has_ended or self.status == WAITING

    def to_reply(self) -> dict[str, Any]:
        """Return the query as clients see it."""
        seconds = None if self.ended is None else round(self.ended - self.created, 6)
        within_goal = None if seconds is None or self.goal is None else seconds <= self.goal
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
            "within_goal": within_goal,
            "attempt": self.attempt,
            "answer": self.answer,
            "error": self.error,
            "waiting": self.waiting if self.status == WAITING else None,
        }


@dataclass(slots=True, eq=False)
class EventLog:
    """The events of one query while it runs. Their ids are `attempt-number`, so that a re-run is recognized."""

    attempt: int = 0
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(kind, data)"""

    def begin(self, attempt: int) -> None:
        self.attempt, self.events = attempt, []

    def after(self, last: str) -> tuple[int, bool]:
        """Return the index after the event of this id, and True if the events up to it are void."""
        attempt, _, number = last.partition("-")
        if not (attempt.isascii() and attempt.isdigit() and number.isascii() and number.isdigit()):
            return 0, False
        if int(attempt) != self.attempt or int(number) >= len(self.events) + 1:
            return 0, True
        return int(number), False


Event = tuple[str, str, dict[str, Any]]
"""(id, kind, data)"""


@dataclass(slots=True, eq=False)
class RunningQuery:
    """A submitted query that runs in this process, or waits for somebody."""

    record: Record
    log: EventLog = field(default_factory=EventLog)
    task: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, when there is a new event."""

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def add_event(self, kind: str, data: dict[str, Any]) -> None:
        """Add an event to the query's log, and wake up those who follow it.

        Called on the server's loop. Followers wait for `news`, which is set and replaced by a new one, so that none
        misses an event.
        """
        self.log.events.append((kind, data))
        self.news.set()
        self.news = asyncio.Event()


async def end_events(record: Record, last: str) -> AsyncIterator[Event]:
    """Yield the end of a query that ran in another process or long ago; its other events are gone.

    `last`: the id of the last event that the client has; empty for none. A client that has some first gets a `reset`,
    which voids them.
    """
    if last:
        yield f"{record.attempt}-0", "reset", {}
    yield f"{record.attempt}-1", record.status, record.to_reply()


async def follow_events(live: RunningQuery, last: str) -> AsyncIterator[Event]:
    """Yield the events after the event `last`, until the query is at rest."""
    at, is_void = live.log.after(last)
    attempt = live.log.attempt
    if is_void:
        yield f"{attempt}-0", "reset", {}
    while True:
        news = live.news
        for kind, data in live.log.events[at:]:
            at += 1
            yield f"{attempt}-{at}", kind, data
        if live.record.is_at_rest and at >= len(live.log.events):
            return
        if live.news is news and at >= len(live.log.events):
            await news.wait()
