"""Tests of access: keys, caps, limits, requests that join a query, and admission by the goal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.service import Key, RunningServer, key, running_server

from teola_plugin.cli.main import main
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.server.admission import FIRST, Admission, AdmissionRefusal, Ticket
from teola_plugin.server.callers import KeyLimits, find_key, hash_secret, new_key, secret_from_headers
from teola_plugin.server.client import AsyncQueryClient, QueryClient, joining
from teola_plugin.server.settings import KeySettings, host_without_port, is_loopback

CHAT: dict[str, Any] = {"model": "llm", "messages": [{"role": "user", "content": "hello"}]}
ONE, OTHER = key("one", operator=True), key("other", models=["llm"], max_output_tokens=3)
BUSY = key("busy", concurrent=1)
FEW = key("few", requests_per_minute=2)
COSTLY = key("costly", tokens_per_minute=10)
SHORT = key("short", max_seconds=0.2)


def sleeping_llm(seconds: float, requests: int = 64) -> FakeLLM:
    """Return an LLM with a fixed time for each token and a limit on parallel requests."""
    curve = {PrimitiveKind.DECODING: Curve.linear(0.0, seconds), PrimitiveKind.PREFILLING: Curve.linear(0, 0)}
    return FakeLLM("llm", replace(profiles.noop()["llm"], curves=curve, max_requests=requests))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    keys = [one.settings for one in (ONE, OTHER, BUSY, FEW, COSTLY, SHORT)]
    with running_server(EnginePool.local([sleeping_llm(0.002), FakeEmbedder()]), keys=keys, joined_idle=0.3) as server:
        yield server


def chat(server: RunningServer, who: Key, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    with server.client(who.secret) as http:
        return http.post("/v1/chat/completions", json={**CHAT, **more}, headers=headers)


# ------------------------------------------------------------ keys


@pytest.mark.parametrize(
    "secret",
    ["", "sk-teola-wrong", ONE.secret + "x", ONE.settings["hash"]],
    ids=["none", "unknown", "longer", "the hash"],  # keys are new in each process
)
def test_requests_without_valid_key_get_401(server: RunningServer, secret: str) -> None:
    with server.client(secret) as http:
        for answer in (http.post("/v1/chat/completions", json=CHAT), http.get("/v1/models"), http.get("/metrics")):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/health").status_code == 200


def test_key_is_accepted_as_x_api_key(server: RunningServer) -> None:
    with server.client() as http:
        assert http.get("/v1/models", headers={"X-Api-Key": ONE.secret}).status_code == 200


def test_key_lists_only_its_models(server: RunningServer) -> None:
    with server.client(OTHER.secret) as http:
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["llm"]
        answer = http.post("/v1/embeddings", json={"model": "embedder", "input": "x"})
    assert answer.status_code == 404
    assert "known: llm." in answer.json()["error"]["message"]


def test_metrics_are_limited_to_operators(server: RunningServer) -> None:
    with server.client(OTHER.secret) as http:
        assert http.get("/metrics").status_code == 403
        assert list(http.get("/version").json()) == ["version"]
    with server.client(ONE.secret) as http:
        assert http.get("/metrics").status_code == 200


def test_keys_are_kept_as_hashes(capsys: Any) -> None:
    assert main(["key", "team"]) == 0
    secret, *_, output = capsys.readouterr().out.partition("\n")
    settings = KeySettings(name="team", hash=hash_secret(secret))  # type: ignore[call-arg]
    assert settings.hash in output
    assert find_key(secret, [settings]) is settings
    assert find_key(new_key().secret, [settings]) is None
    assert secret not in repr(settings)
    assert settings.hash not in repr(settings)


def test_secret_is_read_from_either_header() -> None:
    assert (
        secret_from_headers("Bearer abc", "")
        == secret_from_headers("bearer  abc ", "x")
        == secret_from_headers("Basic zzz", "abc")
        == "abc"
    )
    assert secret_from_headers("", "") == ""


def test_loopback_hosts_are_recognized() -> None:
    names = {"localhost:80": "localhost", "[::1]:80": "::1", "a.b": "a.b", "127.0.0.1": "127.0.0.1"}
    assert {header: host_without_port(header) for header in names} == names
    assert is_loopback("127.1.2.3") and is_loopback("::1") and not is_loopback("0.0.0.0") and not is_loopback("x.org")


# ------------------------------------------------------------ caps and limits


def test_answer_is_cut_at_the_output_limit_of_the_key(server: RunningServer) -> None:
    assert chat(server, OTHER, max_tokens=50).json()["usage"]["completion_tokens"] == 3


def test_deadline_of_key_caps_deadline_of_request(server: RunningServer) -> None:
    reply = chat(server, SHORT, {"X-Teola-Deadline": "30"}, max_tokens=5000, ignore_eos=True)
    assert reply.status_code == 504


def test_concurrent_requests_of_a_key_are_limited(server: RunningServer) -> None:
    slow = threading.Thread(target=lambda: chat(server, BUSY, max_tokens=300, ignore_eos=True))
    slow.start()
    limits = server.service.callers["busy"].limits
    while not limits.running:
        time.sleep(0.01)
    reply = chat(server, BUSY)
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["code"] == "concurrency_limit"
    slow.join()
    assert chat(server, BUSY).status_code == 200


def test_requests_per_minute_of_a_key_are_limited(server: RunningServer) -> None:
    reply = [chat(server, FEW) for _ in range(3)]
    assert [one.status_code for one in reply] == [200, 200, 429]
    assert 1 <= int(reply[2].headers["retry-after"]) <= 30


def test_tokens_per_minute_of_a_key_are_limited(server: RunningServer) -> None:
    assert chat(server, COSTLY, max_tokens=30).status_code == 200
    assert chat(server, COSTLY).json()["error"]["code"] == "tokens_limit"


def test_tokens_of_an_app_are_charged_to_the_key() -> None:
    few = key("few-tokens", tokens_per_minute=10)
    apps = {"chain": {"object": "support.served_apps:chain"}}
    with running_server(apps=apps, keys=[few.settings]) as server:
        assert chat(server, few, model="chain").status_code == 200
        end = time.monotonic() + 10
        while (second := chat(server, few, model="chain")).status_code != 429:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert second.json()["error"]["code"] == "tokens_limit"


def test_rate_limit_refills_over_time() -> None:
    settings = KeySettings.model_validate({**FEW.settings, "requests_per_minute": 60})
    limits = KeyLimits(settings, 0.0)
    assert [limits.begin(0.0) is None for _ in range(61)].count(True) == 60
    assert limits.begin(0.5) is not None
    assert limits.begin(1.5) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Teola-Query", "a b"),
        ("X-Teola-Deadline", "soon"),
        ("X-Teola-Goal", "-1"),
        ("X-Teola-Depth", "2.5"),
        ("X-Teola-Deadline", "inf"),
    ],
)
def test_invalid_teola_headers_get_400(server: RunningServer, name: str, value: str) -> None:
    reply = chat(server, ONE, {name: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == name.lower()


# ------------------------------------------------------------ requests of one query


def test_requests_join_a_query(server: RunningServer) -> None:
    headers = {"X-Teola-Query": "trip-1", "X-Teola-App": "trips", "X-Teola-Depth": "2"}
    first = chat(server, ONE, headers)
    with server.client(ONE.secret) as http:
        http.post("/v1/embeddings", json={"model": "embedder", "input": "x"}, headers=headers)
    assert first.headers["x-teola-query"] == "trip-1"
    live = server.service.live.joined("one", "trip-1")
    assert live is not None
    assert (live.requests, live.app, live.models) == (2, "trips", {"llm": 1, "embedder": 1})
    end, traces = time.monotonic() + 10, list[Any]()
    while not traces:  # it is over a while after its last request
        assert time.monotonic() < end
        time.sleep(0.02)
        traces = [t for t in server.pool.traces if t.query_id == live.trace]
    [trace] = traces
    assert trace.app == "trips"
    assert {span.engine for span in trace.spans} == {"llm", "embedder"}
    assert max(span.depth for span in trace.spans) >= 2
    assert live.seconds is not None and live.seconds < 5


def test_equal_query_names_of_two_tenants_are_separate(server: RunningServer) -> None:
    headers = {"X-Teola-Query": "same"}
    chat(server, ONE, headers)
    chat(server, OTHER, headers)
    one, other = (server.service.live.find(name, "same") for name in ("one", "other"))
    assert one is not None and other is not None and one is not other
    assert one.requests == other.requests == 1


def test_langchain_requests_join_a_query_by_http_client(server: RunningServer) -> None:
    from langchain_openai import ChatOpenAI

    with QueryClient(trust_env=False) as http:
        llm: Any = ChatOpenAI(base_url=server.base, model="llm", api_key=ONE.secret, http_client=http)
        with joining(app="chains", goal=60) as query:
            assert llm.invoke("a").content
            assert [chunk.content for chunk in llm.stream("b")]
    live = server.service.live.find("one", query.query)
    assert live is not None
    assert (live.requests, live.app, live.goal) == (2, "chains", 60)


def test_langchain_works_with_base_url_only(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    class Animal(BaseModel):
        name: str

    monkeypatch.setenv("NO_PROXY", "*")
    llm: Any = ChatOpenAI(base_url=server.base, model="llm", api_key=ONE.secret)  # type: ignore[arg-type]
    assert llm.invoke("a").usage_metadata["total_tokens"] > 0
    assert isinstance(llm.with_structured_output(Animal).invoke("a cow"), Animal)
    tools = llm.bind_tools([Animal], tool_choice="Animal").invoke("a cow").tool_calls
    assert tools[0]["name"] == "Animal"
    vectors = OpenAIEmbeddings(
        base_url=server.base,
        model="embedder",
        api_key=ONE.secret,
        check_embedding_ctx_length=False,  # type: ignore[arg-type]
    )
    assert len(vectors.embed_query("a")) == 32


async def test_llamaindex_works_with_base_url_only(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    monkeypatch.setenv("NO_PROXY", "*")
    llm = OpenAILike(model="llm", api_base=server.base, api_key=ONE.secret, is_chat_model=True)
    assert str(llm.complete("a"))
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat([ChatMessage(content="a")]))
    async with AsyncQueryClient(trust_env=False) as http:
        joined = OpenAILike(
            model="llm", api_base=server.base, api_key=ONE.secret, is_chat_model=True, async_http_client=http
        )
        with joining() as query:
            await joined.achat([ChatMessage(content="a")])
            await joined.achat([ChatMessage(content="b")])
    live = server.service.live.find("one", query.query)
    assert live is not None and live.requests == 2


# ------------------------------------------------------------ admission


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_running_requests_are_limited() -> None:
    admission = Admission(3, 100, Clock())
    first = [admission.admit("a", 10, None) for _ in range(4)]
    assert [isinstance(one, Ticket) for one in first] == [True, True, True, False]
    assert isinstance(first[0], Ticket)
    first[0].end(answered=True)
    first[0].end(answered=True)  # once
    assert admission.running == 2
    refusal = admission.admit("a", 90, None)
    assert isinstance(refusal, AdmissionRefusal) and refusal.reason == "full"


def simulated(goal: float | None, rate: float, seconds: float = 120.0) -> tuple[float, float, int]:
    """Simulate an engine that answers 10 queries a second, one after the other.

    Return the answers per second, the share of them within the goal, and the number of refusals.
    """
    clock = Clock()
    admission, free, waiting = Admission(10_000, 10**9, clock), 0.0, list[tuple[float, Ticket]]()
    within = answered = refusal_count = 0
    step = 1 / rate
    for number in range(int(seconds * rate)):
        clock.now = number * step
        for end, ticket in [one for one in waiting if one[0] <= clock.now]:
            now, clock.now = clock.now, end
            ticket.end(answered=True)
            answered, within = answered + 1, within + (goal is None or end - ticket.began <= goal)
            clock.now = now
        waiting = [one for one in waiting if one[0] > clock.now]
        decision = admission.admit("a", 1, goal)
        if isinstance(decision, AdmissionRefusal):
            assert decision.retry_after >= 1
            refusal_count += 1
        else:
            free = max(free, clock.now) + 0.1
            waiting.append((free, decision))
    return answered / seconds, within / max(1, answered), refusal_count


def test_accepted_requests_meet_their_goal_at_tenfold_load() -> None:
    answers, share, refusal = simulated(goal=2.0, rate=100)
    assert answers > 8  # of 10: the engine is busy
    assert share >= 0.95
    assert refusal > 0


def test_no_request_is_refused_below_capacity() -> None:
    answers, share, refusal = simulated(goal=2.0, rate=5)
    assert refusal == 0
    assert share == 1.0
    assert answers > 4.5


def test_requests_without_goal_are_never_refused_for_it() -> None:
    assert simulated(goal=None, rate=20, seconds=20)[2] == 0


def test_first_requests_are_accepted_before_any_estimate() -> None:
    admission = Admission(1000, 10**6, Clock())
    accepted = [isinstance(admission.admit("new", 1, 0.001), Ticket) for _ in range(FIRST + 3)]
    assert accepted.count(True) == FIRST


def test_query_that_would_miss_its_goal_is_refused_at_once() -> None:
    with (
        running_server(EnginePool.local([sleeping_llm(0.01, requests=1)])) as server,
        ThreadPoolExecutor(16) as threads,
    ):
        who = Key("", {})
        more = {"max_tokens": 20, "ignore_eos": True}
        assert chat(server, who, **more).status_code == 200
        goal = {"X-Teola-Goal": "0.9"}
        answers = list(threads.map(lambda _: chat(server, who, goal, **more), range(24)))
    refusal = [one for one in answers if one.status_code == 429]
    assert 0 < len(refusal) < 24
    assert all(one.json()["error"]["code"] == "goal" and int(one.headers["retry-after"]) >= 1 for one in refusal)
    counts = server.service.admission.counts["llm"]
    assert counts.accepted + counts.refused == 25


def test_burst_is_admitted_by_extrapolating_from_lower_load() -> None:
    """Hundreds come before the first of them is answered: what is taken of them is still in time."""
    clock = Clock()
    admission = Admission(10_000, 10**9, clock)
    for running in range(16):  # eight are answered at a time, each in 0.8 s
        tickets = [admission.admit("a", 1, None) for _ in range(running + 1)]
        clock.now += 0.8 * (1 + running // 8)
        for ticket in tickets:
            assert isinstance(ticket, Ticket)
            ticket.end(answered=True)
    accepted = sum(isinstance(admission.admit("a", 1, 4.0), Ticket) for _ in range(300))
    assert 15 < accepted <= 40  # forty take four seconds
