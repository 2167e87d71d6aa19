"""Tests that changes of a replica's cache are reported together with its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from teola_plugin.cluster.host.replica_host import MAX_EVENTS, CacheReports, without_reports
from teola_plugin.cluster.wire import pack, unpack
from teola_plugin.graph.prefix_blocks import PrefixesCleared, PrefixEvents, PrefixRemoved, PrefixStored
from teola_plugin.requests.payloads import Done


def test_cache_events_are_sent_with_the_results() -> None:
    engine: Any = SimpleNamespace(on_prefix_events=None)
    reports = CacheReports(engine)
    assert reports.take() == []
    engine.on_prefix_events((PrefixStored((1, 2)),))
    engine.on_prefix_events((PrefixRemoved((1, 2), 1), PrefixesCleared()))
    parcel = pack([Done("r", 3), *reports.take()])
    reported: list[PrefixEvents] = []
    assert list(without_reports(unpack(parcel), reported.append)) == [Done("r", 3)]
    assert reported == [(PrefixStored((1, 2)), PrefixRemoved((1, 2), 1), PrefixesCleared())]
    assert reports.take() == []
    assert list(without_reports(unpack(parcel), None)) == [Done("r", 3)]


def test_unfetched_cache_events_collapse_into_a_reset() -> None:
    engine: Any = SimpleNamespace(on_prefix_events=None)
    reports = CacheReports(engine)
    for _ in range(MAX_EVENTS + 1):
        engine.on_prefix_events((PrefixStored((1,)),))
    (report,) = reports.take()
    assert report.news == (PrefixesCleared(),)
    CacheReports(SimpleNamespace())  # type: ignore[arg-type]  # an engine that does not tell
