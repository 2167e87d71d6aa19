"""What became of the works of a primitive, as the graph scheduler and the trace hear it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from teola_plugin.errors import QueryCancelled
from teola_plugin.graph import Primitive
from teola_plugin.requests.results import Piece
from teola_plugin.runtime import primitive_requests as requests
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.driver.generation_group import Began, Decoded, Grown, News, NotNeeded, Prefilled
from teola_plugin.runtime.driver.recording import RunTrace
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun
from teola_plugin.scheduling.graph_events import Finished, GraphEvent, ItemClosed, Started, Unused
from teola_plugin.scheduling.live_query import LiveQuery


class Driver(Protocol):
    """What carries out the work of engines needs of the driver of the graph scheduler."""

    runs: dict[str, QueryRun]
    ports: Mapping[str, Port]
    trace: RunTrace
    code: ClientCode

    def now(self) -> float: ...

    def post(self, event: GraphEvent) -> None: ...

    def fail(self, run: QueryRun, name: str, error: BaseException) -> None: ...

    def died(self, run: QueryRun, p: Primitive, error: BaseException) -> None: ...

    def broken(self, query: str, primitive: str, error: Exception) -> None: ...

    def made(self, run: QueryRun, name: str) -> None: ...

    def dispatched(self, run: QueryRun, p: Primitive) -> None: ...

    def query(self, run: QueryRun) -> LiveQuery | None: ...


class PrimitiveNews:
    """Of all live queries of one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def began(self, run: QueryRun, live: LivePrimitiveRun, *, traced: bool = False) -> None:
        if live.began:
            return
        live.began = True
        if not traced:
            self._driver.trace.started(run, live.primitive.id)
        self._driver.post(Started(self._driver.now(), run.id, live.primitive.id))

    def piece(self, run: QueryRun, live: LivePrimitiveRun, piece: Piece) -> None:
        for news in list(live.group.piece(piece.text)) if live.group is not None else ():
            _tell(self._driver, run, live, news)

    def all_ended(self, run: QueryRun, live: LivePrimitiveRun) -> None:
        p, results = live.primitive, live.results
        failed = next((entry for entry in live.entries if entry.has_failed), None)
        if failed is not None:
            self._driver.fail(run, p.id, failed.error or QueryCancelled("cancelled"))
            return
        self._driver.trace.ended(run, p.id, results)
        value = requests.value(p, results)
        if live.group is None:
            run.store.put(p.id, value)
            self._driver.made(run, p.id)
            return
        for news in list(live.group.ended(value)):
            _tell(self._driver, run, live, news)
        self._driver.trace.generated(run, live, results)


def _tell(driver: Driver, run: QueryRun, live: LivePrimitiveRun, news: News) -> None:
    """Tell the graph scheduler and the trace what a stream said of a prefilling and its decodings."""
    now = driver.now()
    if isinstance(news, Began):
        driver.trace.began_decoding(run, live, news.primitive)
    elif isinstance(news, Prefilled):
        run.store.put(news.primitive, True)
        driver.trace.first(run, news.primitive)
        if news.goes_on:
            driver.trace.done(run, news.primitive)
        driver.post(Finished(now, run.id, news.primitive))
    elif isinstance(news, NotNeeded):
        driver.post(Unused(now, run.id, news.primitive))
    elif isinstance(news, Grown):
        run.store.put(news.name, news.value)
        driver.post(ItemClosed(now, run.id, news.primitive, news.index, news.name))
    elif isinstance(news, Decoded):
        run.store.put(news.primitive, news.value)
        if news.whole:
            driver.trace.ended(run, news.primitive, [news.value], decoding=True)
        else:
            driver.trace.done(run, news.primitive)
        driver.post(Finished(now, run.id, news.primitive))
