"""Reports on an instance's prefix cache travel with its results or with its answer to a health check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.engines.prefix_events import PrefixesCleared, PrefixEvents, PrefixRemoved, PrefixStored

MAX_EVENTS = 10_000
"""Events that wait for a parcel; beyond, the host is told that nothing is known."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Events of a prefix cache, as one more message of a parcel."""

    news: PrefixEvents


class CacheReports:
    """The instance's end: collects the events of its engine, if it publishes any, until a parcel leaves."""

    def __init__(self, engine: Engine) -> None:
        self._events: list[PrefixStored | PrefixRemoved | PrefixesCleared] = []
        if hasattr(engine, "on_prefix_events"):
            engine.on_prefix_events = self._add_events

    def _add_events(self, events: PrefixEvents) -> None:
        self._events.extend(events)
        if len(self._events) > MAX_EVENTS:
            self._events = [PrefixesCleared()]

    def take(self) -> list[CacheReport]:
        """Return the report for the next parcel, in a list; empty if there are no events."""
        events, self._events = tuple(self._events), []
        return [CacheReport(events)] if events else []


def without_reports(messages: Iterable[Any], on_events: Callable[[PrefixEvents], None] | None) -> Iterator[Any]:
    """Yield the results among the messages (the host's end), and pass the events of reports to `on_events`."""
    for message in messages:
        if not isinstance(message, CacheReport):
            yield message
        elif on_events is not None:
            on_events(message.news)
