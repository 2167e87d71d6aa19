"""Reports of what has become of a primitive's requests, to the graph scheduler and the trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from teola_plugin.errors import QueryCancelled
from teola_plugin.graph import Primitive
from teola_plugin.requests.results import Piece
from teola_plugin.runtime import primitive_requests
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.driver.generation_group import (
    DecodingBegan,
    GroupEvent,
    ItemNotNeeded,
    ListGrew,
    PrefillingEnded,
)
from teola_plugin.runtime.driver.recording import RunTrace
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun
from teola_plugin.scheduling.graph_events import Finished, GraphEvent, ItemClosed, Started, Unused
from teola_plugin.scheduling.live_query import LiveQuery


class Driver(Protocol):
    """The `GraphDriver`, as `RequestDriver` and its helpers use it."""

    runs: dict[str, QueryRun]
    ports: Mapping[str, Port]
    trace: RunTrace
    code: ClientCode

    def now(self) -> float: ...

    def post(self, event: GraphEvent) -> None: ...

    def fail(self, run: QueryRun, name: str, error: BaseException) -> None: ...

    def fail_in_client_code(self, run: QueryRun, p: Primitive, error: BaseException) -> None: ...

    def fail_by_bug(self, query: str, primitive: str, error: Exception) -> None: ...

    def finish(self, run: QueryRun, name: str) -> None: ...

    def note_dispatch(self, run: QueryRun, p: Primitive) -> None: ...

    def query(self, run: QueryRun) -> LiveQuery | None: ...


class PrimitiveReporter:
    """Reports the progress of dispatched primitives, for all live queries of one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def note_start(self, run: QueryRun, live: LivePrimitiveRun, *, is_traced: bool = False) -> None:
        """Report that a request of a primitive has begun. `is_traced`: the trace knows that already."""
        if live.began:
            return
        live.began = True
        if not is_traced:
            self._driver.trace.started(run, live.primitive.id)
        self._driver.post(Started(self._driver.now(), run.id, live.primitive.id))

    def read_piece(self, run: QueryRun, live: LivePrimitiveRun, piece: Piece) -> None:
        """Report what a piece of a generation tells about its prefilling and decodings."""
        if live.group is not None:
            self._report(run, live, live.group.read_piece(piece.text))

    def finish(self, run: QueryRun, live: LivePrimitiveRun) -> None:
        """Report that all requests of a primitive have ended: its value, or its failure."""
        p, results = live.primitive, live.results
        failed = next((entry for entry in live.entries if entry.has_failed), None)
        if failed is not None:
            self._driver.fail(run, p.id, failed.error or QueryCancelled("cancelled"))
            return
        self._driver.trace.requests_ended(run, p.id, results)
        value = primitive_requests.value(p, results)
        if live.group is None:
            run.store.put(p.id, value)
            self._driver.finish(run, p.id)
            return
        self._report(run, live, live.group.finish(value))
        self._driver.trace.generated(run, live, results)

    def _report(self, run: QueryRun, live: LivePrimitiveRun, events: Iterator[GroupEvent]) -> None:
        driver = self._driver
        for event in list(events):
            now = driver.now()
            if isinstance(event, DecodingBegan):
                driver.trace.began_decoding(run, live, event.primitive)
            elif isinstance(event, PrefillingEnded):
                run.store.put(event.primitive, True)
                driver.trace.first(run, event.primitive)
                if event.has_decodings:
                    driver.trace.done(run, event.primitive)
                driver.post(Finished(now, run.id, event.primitive))
            elif isinstance(event, ItemNotNeeded):
                driver.post(Unused(now, run.id, event.primitive))
            elif isinstance(event, ListGrew):
                run.store.put(event.name, event.value)
                driver.post(ItemClosed(now, run.id, event.primitive, event.index, event.name))
            else:
                run.store.put(event.primitive, event.value)
                if event.is_whole_text:
                    driver.trace.requests_ended(run, event.primitive, [event.value], decoding=True)
                else:
                    driver.trace.done(run, event.primitive)
                driver.post(Finished(now, run.id, event.primitive))
