"""What an instance says of its prefix cache goes with its results, or with its answer to a health check: no message of
its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.engines.prefix_events import PrefixesCleared, PrefixEvents, PrefixRemoved, PrefixStored

MOST = 10_000
"""Pieces of news that wait for a parcel; beyond, the host is told that nothing is known."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """One more message of a parcel."""

    news: PrefixEvents


class CacheReports:
    """The instance's end: puts together what its engine says, if it does, until a parcel leaves."""

    def __init__(self, engine: Engine) -> None:
        self._news: list[PrefixStored | PrefixRemoved | PrefixesCleared] = []
        if hasattr(engine, "on_prefix_events"):
            engine.on_prefix_events = self._hear

    def _hear(self, news: PrefixEvents) -> None:
        self._news.extend(news)
        if len(self._news) > MOST:
            self._news = [PrefixesCleared()]

    def take(self) -> list[CacheReport]:
        """At most one, for the next parcel."""
        news, self._news = tuple(self._news), []
        return [CacheReport(news)] if news else []


def without_reports(messages: Iterable[Any], hear: Callable[[PrefixEvents], None] | None) -> Iterator[Any]:
    """The host's end: results, and `hear` is told the rest."""
    for message in messages:
        if not isinstance(message, CacheReport):
            yield message
        elif hear is not None:
            hear(message.news)
