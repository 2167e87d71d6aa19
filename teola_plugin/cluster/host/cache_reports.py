"""What an instance says of its prefix cache goes with its results, or with its answer to a health check: no message of
its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.engines.cache_news import CacheNews, Emptied, Forgot, Holds

MOST = 10_000
"""Pieces of news that wait for a parcel; beyond, the host is told that nothing is known."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """One more message of a parcel."""

    news: CacheNews


class CacheReports:
    """The instance's end: puts together what its engine says, if it does, until a parcel leaves."""

    def __init__(self, engine: Engine) -> None:
        self._news: list[Holds | Forgot | Emptied] = []
        if hasattr(engine, "on_cache_news"):
            engine.on_cache_news = self._hear

    def _hear(self, news: CacheNews) -> None:
        self._news.extend(news)
        if len(self._news) > MOST:
            self._news = [Emptied()]

    def take(self) -> list[CacheReport]:
        """At most one, for the next parcel."""
        news, self._news = tuple(self._news), []
        return [CacheReport(news)] if news else []


def without_reports(messages: Iterable[Any], hear: Callable[[CacheNews], None] | None) -> Iterator[Any]:
    """The host's end: results, and `hear` is told the rest."""
    for message in messages:
        if not isinstance(message, CacheReport):
            yield message
        elif hear is not None:
            hear(message.news)
