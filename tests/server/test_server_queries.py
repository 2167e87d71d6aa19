"""Tests of queries as resources: submitted, awaited, followed with reconnects, cancelled, deleted, kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.service import RunningServer, key, running_server

from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.server.queries.records import EventLog, Record
from teola_plugin.server.queries.store import MemoryStore, PostgresStore, Store

ONE, OTHER = key("one"), key("other")


def echo(prompt: Any, sampling: Any) -> str:
    return " ".join(["slow"] * 400) if "slowly" in prompt.flat() else "said " + prompt.messages[-1].content


def llm() -> FakeLLM:
    curve = {PrimitiveKind.DECODING: Curve.linear(0.0, 0.01), PrimitiveKind.PREFILLING: Curve.linear(0, 0)}
    return FakeLLM("llm", replace(profiles.noop()["llm"], curves=curve), answer=echo)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    apps = {"failing": {"object": "support.served_apps:failing"}}
    with running_server(EnginePool.local([llm()]), apps=apps, keys=[ONE.settings, OTHER.settings]) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client(ONE.secret) as client:
        yield client


def submit(http: httpx.Client, text: str, **more: Any) -> str:
    reply = http.post("/v1/queries", json={"model": "llm", "input": text, **more})
    assert reply.status_code == 202, reply.text
    assert reply.headers["location"] == f"/v1/queries/{reply.json()['id']}"
    return str(reply.json()["id"])


def waited(http: httpx.Client, id: str) -> dict[str, Any]:
    reply: dict[str, Any] = http.get(f"/v1/queries/{id}", params={"wait": 20}).json()
    return reply


def events(http: httpx.Client, id: str, last: str = "", limit: int = 10**6) -> list[tuple[str, str, Any]]:
    """Return id, kind and data of the first `most` events."""
    results: list[tuple[str, str, Any]] = []
    part: dict[str, str] = {}
    headers = {"Last-Event-ID": last} if last else {}
    with http.stream("GET", f"/v1/queries/{id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                part[name] = value
                continue
            results.append((part["id"], part["event"], json.loads(part["data"])))
            if len(results) >= limit:
                break
    return results


def test_submitted_query_is_answered_when_awaited(http: httpx.Client) -> None:
    id = submit(http, "hi", parameters={"max_tokens": 50})
    assert http.get(f"/v1/queries/{id}").json()["status"] in ("queued", "running", "done")
    query = waited(http, id)
    assert query["status"] == "done"
    assert query["answer"]["text"] == "said hi"
    assert query["answer"]["usage"]["completion_tokens"] > 0
    assert query["attempt"] == 1
    assert id in [one["id"] for one in http.get("/v1/queries").json()["data"]]


def test_events_resume_after_a_lost_connection(http: httpx.Client) -> None:
    id = submit(http, "a b c d e f g h")
    started = events(http, id, limit=3)
    rest = events(http, id, last=started[-1][0])
    kinds = [kind for _, kind, _ in started + rest]
    assert kinds[0] == "running"
    assert kinds[-1] == "done"
    assert "reset" not in kinds
    text = "".join(data["text"] for _, kind, data in started + rest if kind == "delta")
    assert text == rest[-1][2]["answer"]["text"] == "said a b c d e f g h"
    assert events(http, id) == events(http, id, last="nonsense") == started + rest


def test_events_of_an_earlier_attempt_are_reset(http: httpx.Client) -> None:
    id = submit(http, "x")
    waited(http, id)
    received = events(http, id, last="0-4")
    assert received[0][1] == "reset"
    assert "".join(data["text"] for _, kind, data in received if kind == "delta") == "said x"


def test_several_clients_follow_one_query(http: httpx.Client, server: RunningServer) -> None:
    id = submit(http, "a b c d e")

    def follow(_: int) -> Any:
        with server.client(ONE.secret) as http_:
            return events(http_, id)

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(follow, range(4)))
    assert all(one == results[0] for one in results)


def test_submitted_query_can_be_cancelled(http: httpx.Client, server: RunningServer) -> None:
    id = submit(http, "slowly")
    assert events(http, id, limit=2)[-1][1] == "delta"
    assert http.post(f"/v1/queries/{id}/cancel").json()["status"] == "cancelled"
    assert http.post(f"/v1/queries/{id}/cancel").json()["status"] == "cancelled"
    assert events(http, id)[-1][1] == "cancelled"
    engine = server.pool.engine("llm")
    end = time.monotonic() + 10
    while engine.load().requests:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_deleted_query_is_forgotten(http: httpx.Client) -> None:
    id = submit(http, "x")
    assert http.delete(f"/v1/queries/{id}").status_code == 204
    assert http.get(f"/v1/queries/{id}").status_code == 404


def test_failed_query_reports_its_error_code(http: httpx.Client) -> None:
    reply = waited(http, str(http.post("/v1/queries", json={"model": "failing", "input": "x"}).json()["id"]))
    assert reply["status"] == "failed"
    assert reply["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(reply)


def test_variables_refer_to_answers_of_unfinished_queries(http: httpx.Client) -> None:
    first = submit(http, "one two three four five six seven")
    both = submit(http, "{{plan}} and {{ word }}", variables={"plan": {"query": first}, "word": "{{plan}} as it is"})
    assert waited(http, both)["answer"]["text"] == "said said one two three four five six seven and {{plan}} as it is"
    slow = submit(http, "slowly")
    waits = submit(http, "{{x}}", variables={"x": {"query": slow}})
    http.post(f"/v1/queries/{slow}/cancel")
    assert "cancelled" in waited(http, waits)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "llm"}, 400, "input"),
        ({"model": "llm", "input": []}, 400, "empty"),
        ({"model": "nobody", "input": "x"}, 404, "nobody"),
        ({"model": "llm", "input": "x", "parameters": {"stream": True}}, 400, "stream"),
        ({"model": "llm", "input": "x", "parameters": {"temperature": "hot"}}, 400, "temperature"),
        ({"model": "llm", "input": "{{y}}", "variables": {"x": "1"}}, 400, "'y'"),
        ({"model": "llm", "input": "{{x}}", "variables": {"x": {"query": "q_none"}}}, 404, "q_none"),
        ({"model": "llm", "input": "{{x}}", "variables": {"x": 3}}, 400, "'x'"),
        ({"model": "llm", "input": "x", "code": "import os"}, 400, "code"),
    ],
)
def test_invalid_submissions_are_refused(http: httpx.Client, body: Any, status: int, message: str) -> None:
    reply = http.post("/v1/queries", json=body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


def test_invalid_parameter_error_names_its_reference(http: httpx.Client) -> None:
    """OpenAI's reference knows nothing of addresses that its protocol has not."""
    ours = http.get("/v1/queries", params={"status": "bogus"})
    theirs = http.post("/v1/embeddings", json={"model": "llm", "input": "x", "encoding_format": "bogus"})
    assert ours.status_code == theirs.status_code == 400
    assert ours.json()["error"]["message"].endswith("see /openapi.json for what this address takes")
    assert "see OpenAI's reference" in theirs.json()["error"]["message"]


def test_tenants_cannot_access_each_others_queries(http: httpx.Client, server: RunningServer) -> None:
    id = submit(http, "mine")
    waited(http, id)
    http.post("/v1/chat/completions", json={"model": "llm", "messages": [{"role": "user", "content": "mine"}]})
    activity = [one["id"] for one in http.get("/v1/activity").json()["data"]]
    assert activity
    with server.client(OTHER.secret) as other:
        for path in (f"/v1/queries/{id}", f"/v1/queries/{id}/events", *(f"/v1/activity/{one}" for one in activity)):
            assert other.get(path).status_code == 404, path
        assert other.post(f"/v1/queries/{id}/cancel").status_code == 404
        other.delete(f"/v1/queries/{id}")
        assert other.get("/v1/queries").json()["data"] == other.get("/v1/activity").json()["data"] == []
        accepted = other.post("/v1/queries", json={"model": "llm", "input": "{{x}}", "variables": {"x": {"query": id}}})
        assert accepted.status_code == 404
        assert other.delete("/v1/tenant").json()["queries"] == 0
    assert waited(http, id)["status"] == "done"


def test_queries_of_a_deleted_tenant_are_forgotten(server: RunningServer) -> None:
    with server.client(OTHER.secret) as other:
        waited(other, submit(other, "x"))
        assert other.delete("/v1/tenant").json()["queries"] == 1
        assert other.get("/v1/queries").json()["data"] == other.get("/v1/activity").json()["data"] == []


def test_page_of_a_query_shows_no_prompt(http: httpx.Client) -> None:
    chat = http.post(
        "/v1/chat/completions", json={"model": "llm", "messages": [{"role": "user", "content": "private"}]}
    )
    id, page = chat.headers["x-teola-query"], None
    for _ in range(1000):  # the pool tells of its end a moment later
        page = http.get(f"/v1/activity/{id}")
        if page.status_code == 200:
            break
        time.sleep(0.02)
    assert page is not None and "<h1>" in page.text
    assert "private" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


# ------------------------------------------------------------ keeping


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return PostgresStore(request.getfixturevalue("postgres_dsn"), f"pool-{time.monotonic_ns()}")


def record(id: str, tenant: str = "one", **more: Any) -> Record:
    return Record(
        id=id, tenant=tenant, model="llm", app="llm", body={"text": "a\0b"}, variables={}, created=1.0, **more
    )


async def test_query_stores_keep_expire_and_delete_records(store: Store) -> None:
    await store.open()
    try:
        await store.put(record("a"))
        await store.put(record("a", tenant="other", status="done"))
        await store.put(record("b", status="done", expires=10.0))
        assert (await store.get("one", "a")) is not None
        assert await store.get("two", "a") is None
        assert [one.id for one in await store.unfinished()] == ["a"]
        await store.put(record("a", status="done", answer={"text": "x"}))
        stored = await store.get("one", "a")
        assert stored is not None and stored.answer == {"text": "x"}
        assert await store.unfinished() == []
        assert await store.expire(9.0) == 0
        assert await store.expire(10.0) == 1
        assert [one.id for one in await store.latest("one", 10)] == ["a"]
        assert await store.delete("one") == 1
        assert await store.get("other", "a") is not None
    finally:
        await store.close()


async def test_restarted_server_reruns_unfinished_queries() -> None:
    store = MemoryStore()
    chat = {"model": "llm", "messages": [{"role": "user", "content": "again"}]}
    base: dict[str, Any] = {
        "tenant": "one",
        "model": "llm",
        "app": "llm",
        "body": chat,
        "variables": {},
        "created": time.time(),
    }
    await store.put(Record(id="begun", status="running", attempt=1, repeatable=True, **base))
    await store.put(Record(id="wrote", status="running", attempt=1, **base))
    await store.put(Record(id="waits", status="queued", **base))
    await store.put(Record(id="gone", status="queued", **{**base, "model": "gone"}))
    keys = [{**ONE.settings, "requests_per_minute": 1}]
    with running_server(EnginePool.local([llm()]), keys=keys, store=store) as server, server.client(ONE.secret) as http:
        queries = {id: waited(http, id) for id in ("begun", "wrote", "waits", "gone")}
        void = events(http, "begun", last="1-5")
    assert {id: (one["status"], one["attempt"]) for id, one in queries.items()} == {
        "begun": ("done", 2),
        "wrote": ("interrupted", 1),
        "waits": ("done", 1),
        "gone": ("interrupted", 0),
    }
    assert [kind for _, kind, _ in void][:2] == ["reset", "running"]


def test_stopped_server_leaves_running_queries_for_the_next() -> None:
    store = MemoryStore()
    with running_server(EnginePool.local([llm()]), store=store, drain=0) as server, server.client() as http:
        id = submit(http, "slowly")
        events(http, id, limit=2)
    [left] = [one for one in store._records.values() if one.id == id]
    assert left.status == "running"


def test_event_ids_give_the_position_to_resume() -> None:
    log = EventLog()
    log.begin(2)
    log.events = [("delta", {})] * 3
    assert log.after("") == (0, False)
    assert log.after("2-2") == (2, False)
    assert log.after("1-2") == (0, True)
    assert log.after("2-9") == (0, True)
    assert log.after("-") == (0, False)
