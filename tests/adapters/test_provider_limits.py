"""Tests of limits on prefetched calls: after refusals of the provider there are fewer, and the app sees no refusal."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, TypedDict

import httpx
import pytest
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from pydantic import SecretStr

from benchmarks.public_apps.server import FakeServer, fake_server
from teola_plugin import accelerate, uninstall
from teola_plugin.runtime import provider_limits
from teola_plugin.runtime.provider_limits import MAX_PREFETCHED, ProviderLimit, provider_limit
from teola_plugin.shims import httpx as httpx_shim
from teola_plugin.shims.httpx import retry_after_s

DOCUMENTS = [f"document number {number}" for number in range(12)]


class Refused(Exception):
    """An error as OpenAI's client raises it."""

    def __init__(self, status: int = 429, headers: dict[str, str] | None = None) -> None:
        super().__init__("too many requests")
        self.status_code = status
        self.response = httpx.Response(status, headers=headers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(provider_limits.time, "monotonic", lambda: now[0])
    yield now


# ------------------------------------------------------------ the limit


def test_limit_halves_once_for_simultaneous_refusals_and_recovers_slowly(clock: list[float]) -> None:
    limit = ProviderLimit("a model")
    for _ in range(5):
        limit.note_failure(Refused(headers={"retry-after": "2"}), is_prefetch=True)
    assert limit.limit == MAX_PREFETCHED // 2
    assert limit.refused_prefetches == 5
    assert not limit.may_prefetch
    assert limit.seconds_to_wait == 2.0

    clock[0] += 2.0
    assert limit.may_prefetch
    assert limit.seconds_to_wait == 0.0
    for _ in range(MAX_PREFETCHED // 2):
        limit.note_success()
    assert limit.limit == MAX_PREFETCHED // 2 + 1
    for _ in range(1000):
        limit.note_success()
    assert limit.limit == MAX_PREFETCHED


def test_limit_never_falls_below_one(clock: list[float]) -> None:
    limit = ProviderLimit("a model")
    for _ in range(10):
        limit.note_failure(Refused(503), is_prefetch=True)
        clock[0] += 100
    assert limit.limit == 1


def test_refused_original_call_does_not_delay_later_original_calls(clock: list[float]) -> None:
    limit = ProviderLimit("a model")
    limit.note_failure(Refused(), is_prefetch=False)
    assert not limit.may_prefetch
    assert limit.seconds_to_wait == 0.0
    assert limit.refused_prefetches == 0
    limit.count(MAX_PREFETCHED, is_prefetch=False)
    assert limit.is_open(is_prefetch=False)
    assert not limit.is_open(is_prefetch=True)


def test_refusal_is_attributed_to_prefetched_calls_only_near_them(clock: list[float]) -> None:
    limit, headers = ProviderLimit("a model"), {"retry-after": "2"}
    assert not limit.note_response(429, headers, request_characters=1)

    limit.count(1, is_prefetch=True)
    assert limit.note_response(429, headers, request_characters=1)
    assert limit.seconds_to_wait == 2.0
    assert not limit.note_response(429, {"retry-after": "3600"}, request_characters=1)
    assert not limit.note_response(429, {}, request_characters=1)
    assert not limit.note_response(200, headers, request_characters=1)

    limit.count(-1, is_prefetch=True)
    limit.note_success()
    clock[0] += 1.5
    assert limit.note_response(429, headers, request_characters=1)
    clock[0] += 1.5
    assert not limit.note_response(429, headers, request_characters=1)
    rest = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6s"}
    assert limit.note_response(429, headers | rest, request_characters=1)


@pytest.mark.parametrize("error", [ValueError("no"), Refused(400), Refused(500)], ids=repr)
def test_failures_that_are_no_refusals_keep_the_limit(error: Exception) -> None:
    limit = ProviderLimit("a model")
    limit.note_failure(error, is_prefetch=True)
    assert limit.may_prefetch
    assert limit.limit == MAX_PREFETCHED


@pytest.mark.parametrize(
    ("headers", "until_s"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1.5"}, 1.5),
        ({"x-ratelimit-remaining-tokens": "24", "x-ratelimit-reset-tokens": "1h2m3.5s"}, 3723.5),
    ],
)
def test_nothing_is_prefetched_while_the_provider_limit_is_exhausted(
    clock: list[float], headers: dict[str, str], until_s: float
) -> None:
    limit = ProviderLimit("a model")
    limit.note_response(200, headers, request_characters=100)
    assert not limit.may_prefetch
    clock[0] += until_s + 0.001
    assert limit.may_prefetch


def test_reset_time_in_anthropic_headers_is_parsed() -> None:
    limit, reset = ProviderLimit("a model"), (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    name = "anthropic-ratelimit-requests-"
    limit.note_response(200, {f"{name}remaining": "0", f"{name}reset": reset}, request_characters=1)
    assert not limit.may_prefetch


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-remaining-requests": "many", "x-ratelimit-reset-requests": "1s"},
        {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "soon"},
        {"x-ratelimit-remaining-requests": "0"},
        {"x-ratelimit-remaining-requests": "100", "x-ratelimit-reset-requests": "1s"},
    ],
)
def test_unusable_rate_limit_headers_are_ignored(headers: dict[str, str]) -> None:
    limit = ProviderLimit("a model")
    limit.note_response(200, headers, request_characters=1)
    assert limit.may_prefetch


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": format_datetime(datetime(2020, 1, 1, tzinfo=UTC))}, 0.0),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_retry_after_header_is_parsed_to_seconds(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


def test_models_of_one_provider_and_name_share_a_limit() -> None:
    def model(name: str, address: str) -> ChatOpenAI:
        return ChatOpenAI(model=name, base_url=address, api_key=SecretStr("none"))

    one, equal = model("a", "http://127.0.0.1:1/v1"), model("a", "http://127.0.0.1:1/v1")
    assert provider_limit(one) is provider_limit(equal)
    assert provider_limit(one) is not provider_limit(model("b", "http://127.0.0.1:1/v1"))
    assert provider_limit(one) is not provider_limit(model("a", "http://127.0.0.1:2/v1"))


# ------------------------------------------------------------ an app on a server that limits requests


class State(TypedDict, total=False):
    documents: list[str]
    grades: list[str]


def grading_graph(server: FakeServer) -> Any:
    llm = ChatOpenAI(model="m", base_url=server.base_url, api_key=SecretStr("none"), temperature=0, max_retries=0)

    def grade(state: State) -> State:
        return {"grades": [llm.invoke(f"Grade {document}").text for document in state["documents"]]}

    async def agrade(state: State) -> State:
        return {"grades": [(await llm.ainvoke(f"Grade {document}")).text for document in state["documents"]]}

    builder = StateGraph(State)
    builder.add_node("grade", RunnableLambda(grade, agrade))
    builder.add_edge(START, "grade")
    return builder.compile()


REQUEST_LIMIT, TOKEN_LIMIT = (3.0, 1e9, 0.2), (1e9, 60.0, 0.3)


@pytest.fixture(params=[REQUEST_LIMIT, TOKEN_LIMIT], ids=["requests", "tokens"])
def limited_server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with fake_server(0.3, keeps_connections=False, limit=request.param) as server:
        yield server


def answered(server: FakeServer) -> Counter[str]:
    return Counter(str(request.body) for request in server.take_log() if request.status == 200)


@pytest.mark.parametrize("is_async", [False, True], ids=["invoke", "ainvoke"])
def test_refused_prefetched_calls_are_not_seen_by_the_app(
    limited_server: FakeServer, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    original = grading_graph(limited_server)
    fast = accelerate(original)
    given: State = {"documents": DOCUMENTS}

    def run(app: Any) -> Any:
        return asyncio.run(app.ainvoke(given)) if is_async else app.invoke(given)

    expected = run(original)
    requests = limited_server.take_log()
    assert all(request.status == 200 for request in requests)
    with caplog.at_level(logging.WARNING, "teola_plugin.limits"):
        for _ in range(3):
            assert run(fast) == expected
    log = limited_server.take_log()
    refused = [request for request in log if request.status == 429]

    assert Counter(str(one.body) for one in log if one.status == 200) == Counter(
        {str(request.body): 3 for request in requests}
    )
    assert refused  # the first query cannot know the limit
    assert len(refused) < 2 * len(DOCUMENTS)
    assert "refuses prefetched calls" in caplog.text


# ------------------------------------------------------------ httpx


def test_httpx_shim_uninstall_restores_the_clients() -> None:
    uninstall()
    before = httpx.Client.send, httpx.AsyncClient.send
    httpx_shim.install(lambda: None)
    assert httpx.Client.send is not before[0]
    httpx_shim.uninstall()
    assert (httpx.Client.send, httpx.AsyncClient.send) == before


class Watch:
    def __init__(self) -> None:
        self.seconds_to_wait = 0.0
        self.responses: list[tuple[int, str, int]] = []
        self.repeats = 0
        """How many requests are to be sent again."""

    def note_response(self, status: int, headers: Any, request_characters: int) -> bool:
        self.responses.append((status, headers["x-name"], request_characters))
        return len(self.responses) <= self.repeats


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("repeats", "sent"), [(0, 1), (1, 2), (9, 3)])
def test_request_refused_because_of_prefetched_calls_is_repeated(repeats: int, sent: int, is_async: bool) -> None:
    uninstall()
    watch, transport = Watch(), httpx.MockTransport(lambda request: httpx.Response(429, headers={"X-Name": "a"}))
    watch.repeats = repeats

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.post("http://somewhere/", content=b"four")

    httpx_shim.install(lambda: watch)
    try:
        if is_async:
            response = asyncio.run(post())
        else:
            with httpx.Client(transport=transport) as client:
                response = client.post("http://somewhere/", content=b"four")
    finally:
        httpx_shim.uninstall()
    assert response.status_code == 429
    assert watch.responses == [(429, "a", 4)] * sent


@pytest.mark.parametrize("is_async", [False, True])
def test_httpx_shim_reports_responses_and_delays_calls(is_async: bool) -> None:
    uninstall()
    watch, transport = Watch(), httpx.MockTransport(lambda request: httpx.Response(429, headers={"X-Name": "a"}))
    watch.seconds_to_wait = 0.05
    threads = set[int]()

    def find_watch() -> Watch:
        threads.add(threading.get_ident())
        return watch

    async def post() -> None:
        async with httpx.AsyncClient(transport=transport) as client:
            await client.post("http://somewhere/", content=b"four")

    httpx_shim.install(find_watch)
    began = time.perf_counter()
    try:
        if is_async:
            asyncio.run(post())
        else:
            with httpx.Client(transport=transport) as client:
                client.post("http://somewhere/", content=b"four")
    finally:
        httpx_shim.uninstall()
    assert watch.responses == [(429, "a", 4)]
    assert threads == {threading.get_ident()}
    assert time.perf_counter() - began >= 0.05
