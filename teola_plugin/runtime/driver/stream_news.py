"""What the graph scheduler and the trace hear of a generation's stream."""

from __future__ import annotations

from teola_plugin.runtime.driver.generation_group import Began, Decoded, Grown, News, NotNeeded, Prefilled
from teola_plugin.runtime.driver.protocol import Driver
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun
from teola_plugin.scheduling.graph_events import Finished, ItemClosed, Unused


def tell(driver: Driver, run: QueryRun, live: LivePrimitiveRun, news: News) -> None:
    """The graph hears what a stream said of a prefilling and its decodings."""
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
