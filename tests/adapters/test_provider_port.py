"""Tests of the port that makes provider calls: requests go to their query, and outcomes come from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from teola_plugin.adapters.provider_executor import (
    Outcome,
    ProviderExecutor,
    ProviderRequest,
    prefetchers,
    without_tail,
)
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Ref
from teola_plugin.requests.payloads import Request
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.ports.port import PortListener

QUERY = "query"


class PrefetchFutures:
    """Gives the futures of its prefetches to the test."""

    def __init__(self) -> None:
        self.outcomes: list[Future[Outcome]] = []

    def prefetch(self, request: ProviderRequest, request_id: str, graph: str) -> Future[Outcome]:
        self.outcomes.append(Future())
        return self.outcomes[-1]


@pytest.fixture
def prefetcher() -> Iterator[PrefetchFutures]:
    prefetchers[QUERY] = prefetcher = PrefetchFutures()
    yield prefetcher
    prefetchers.pop(QUERY, None)


class EndedRequests:
    """Notes how requests end."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        listener = PortListener(lambda *_: None, lambda *_: None, self._note)
        self.port = ProviderExecutor().make_port(listener)

    def _note(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        if error is None:
            self.values[entry.request.id] = value
        else:
            self.errors[entry.request.id] = str(error)


def work(name: str, query: str = QUERY) -> EngineRequest:
    request = Request(name, PrimitiveKind.PREFILLING, ProviderRequest("site", "input"), query=query)
    return EngineRequest(request, "wrapped", None, name)


def enqueue(port: Any, *works: EngineRequest) -> None:
    port.enqueue(works, None)


async def test_outcomes_reach_the_listener_from_another_thread(prefetcher: PrefetchFutures) -> None:
    ended = EndedRequests()
    enqueue(ended.port, work("one"), work("two"), work("three"))
    await asyncio.sleep(0)
    one, two, three = prefetcher.outcomes

    def arrive() -> None:
        one.set_result(Outcome("answer"))
        two.set_result(Outcome(error=ValueError("no")))

    thread = threading.Thread(target=arrive)
    thread.start()
    thread.join()
    await asyncio.sleep(0.01)

    assert ended.values == {"one": "answer"}
    assert "it raised ValueError" in ended.errors["two"]
    assert not three.done()
    assert "three" not in ended.errors


async def test_a_cancelled_request_ends_once(prefetcher: PrefetchFutures) -> None:
    ended, entry = EndedRequests(), work("one")
    enqueue(ended.port, entry)
    await asyncio.sleep(0)
    assert ended.port.holds(entry)

    ended.port.cancel([entry])
    prefetcher.outcomes[0].set_result(Outcome("late"))
    await asyncio.sleep(0.01)

    assert not ended.port.holds(entry)
    assert "cancelled" in ended.errors["one"]
    assert ended.values == {}


async def test_request_cancelled_before_it_starts_is_not_prefetched(prefetcher: PrefetchFutures) -> None:
    ended, entry = EndedRequests(), work("one")
    enqueue(ended.port, entry)
    ended.port.cancel([entry])
    await asyncio.sleep(0)
    assert prefetcher.outcomes == []


async def test_request_of_an_ended_query_fails() -> None:
    ended = EndedRequests()
    enqueue(ended.port, work("one", query="another"))
    await asyncio.sleep(0)
    assert "its query is over" in ended.errors["one"]


async def test_waiting_requests_fail_when_the_port_closes(prefetcher: PrefetchFutures) -> None:
    ended = EndedRequests()
    enqueue(ended.port, work("one"))
    await asyncio.sleep(0)
    await ended.port.close()
    assert "closed" in ended.errors["one"]


async def test_provider_executor_raises_for_batches() -> None:
    with pytest.raises(Exception, match="not in batches"):
        ProviderExecutor().execute([])


def _call(name: str, *inputs: str) -> Primitive:
    return Primitive(name, PrimitiveKind.CALL, inputs=tuple((one, Ref(one)) for one in inputs))


def test_graph_without_tail_keeps_inputs_of_requests() -> None:
    request = Primitive("ask", PrimitiveKind.PREFILLING, engine="wrapped", inputs=(("prompt", Ref("prompt")),))
    graph = Graph((_call("prompt", "$input"), request, _call("parse", "ask"), _call("pack", "parse")), Ref("pack"))
    assert [p.id for p in without_tail(graph)] == ["prompt", "ask"]
