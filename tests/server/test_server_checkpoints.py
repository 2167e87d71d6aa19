"""Tests of graphs with checkpoints: they stop for a question and continue later, also after a crash."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.service import Key, RunningServer, key, running_server, until

from teola_plugin.errors import RegistrationError
from teola_plugin.server.client import TeolaClient
from teola_plugin.server.queries.records import Record
from teola_plugin.server.queries.store import MemoryStore, PostgresStore, Store

ONE, OTHER = key("one"), key("one/x")
APPS = {
    name: {"object": f"support.stopping_graphs:{name}", "input": "text", "output": "answer", "checkpoints": True}
    for name in ("steps", "asking", "asking_before", "asking_twice")
}


in_postgres = [
    pytest.mark.postgres,
    pytest.mark.skipif(not find_spec("langgraph.checkpoint.postgres"), reason="extra `checkpoints`"),
]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "notes"
    file.touch()
    monkeypatch.setenv("TEOLA_TEST_NOTES", str(file))
    return file


@pytest.fixture(params=["memory", pytest.param("postgres", marks=in_postgres)])
def store(request: pytest.FixtureRequest) -> Store:
    name = f"pool {time.monotonic_ns()}"
    if request.param == "memory":
        return MemoryStore(name)
    return PostgresStore(request.getfixturevalue("postgres_dsn"), name)


@pytest.fixture
def server(store: Store, notes: Path) -> Iterator[RunningServer]:
    with running_server(apps=APPS, store=store, keys=[ONE.settings, OTHER.settings]) as server:
        yield server


def asking(server: RunningServer, who: Key = ONE) -> TeolaClient:
    return TeolaClient(server.url, who.secret, trust_env=False)


@pytest.fixture
def client(server: RunningServer) -> Iterator[TeolaClient]:
    with asking(server) as client:
        yield client


def ran(notes: Path, text: str) -> list[str]:
    """Return the names of the nodes that ran for this text, in order."""
    return [name for name, noted in (line.split(" ", 1) for line in notes.read_text().splitlines()) if noted == text]


def test_interrupted_graph_resumes_with_an_answer(client: TeolaClient, notes: Path) -> None:
    id = client.submit("asking", "paint it").id
    events = list(client.events(id))
    assert [event.kind for event in events] == ["running", "waiting"]
    query = client.wait(id)
    assert (query.status, query.rests, query.over) == ("waiting", True, False)
    assert query.waiting is not None
    [interrupt] = query.waiting["interrupts"]
    assert interrupt["value"] == {"question": "may I?", "plan": "a plan"}
    client.resume(id, "yes")
    query = client.wait(id)
    assert (query.status, query.text, query.attempt, query.waiting) == ("done", "paint it: yes", 1, None)
    second = list(client.events(id))
    assert second[: len(events)] == events  # what was told stays so
    assert [event.kind for event in second[len(events) :]] == ["running", "delta", "done"]
    assert list(client.events(id, last=events[-1].id)) == second[len(events) :]
    assert ran(notes, "paint it") == ["plan", "answer"]


def test_graph_paused_before_a_node_resumes_without_value(
    client: TeolaClient, server: RunningServer, notes: Path
) -> None:
    id = client.submit("asking_before", "x").id
    query = client.wait(id)
    assert query.waiting is not None
    assert (query.waiting["next"], query.waiting["interrupts"]) == (["answer"], [])
    with server.client(ONE.secret) as http:
        refusal = http.post(f"/v1/queries/{id}/resume", json={"value": "yes"})
        assert (refusal.status_code, "send no value" in refusal.text) == (400, True)
    client.resume(id)
    assert client.wait(id).text == "x: nobody asked"
    assert ran(notes, "x") == ["plan", "answer"]


def test_several_interrupts_are_answered_one_by_one(client: TeolaClient, server: RunningServer) -> None:
    id = client.submit("asking_twice", "x").id
    query = client.wait(id)
    assert query.waiting is not None
    ids = {one["value"]: one["id"] for one in query.waiting["interrupts"]}
    with server.client(ONE.secret) as http:
        for value in (None, "yes", {}, {"no such": 1}):
            assert http.post(f"/v1/queries/{id}/resume", json={"value": value}).status_code == 400
    client.resume(id, {ids["one?"]: "first"})
    assert client.wait(id).status == "waiting"
    client.resume(id, {ids["other?"]: "second"})
    assert client.wait(id).text == "first second"


def test_only_waiting_queries_of_the_tenant_are_resumed(client: TeolaClient, server: RunningServer) -> None:
    done = client.wait(client.submit("steps", "x").id)
    waits = client.wait(client.submit("asking", "x").id)
    with server.client(ONE.secret) as http, server.client(OTHER.secret) as other:
        assert http.post(f"/v1/queries/{done.id}/resume", json={}).status_code == 409
        assert other.post(f"/v1/queries/{waits.id}/resume", json={"value": "yes"}).status_code == 404
        assert http.post(f"/v1/queries/{waits.id}/cancel").json()["status"] == "cancelled"
        assert http.post(f"/v1/queries/{waits.id}/resume", json={"value": "yes"}).status_code == 409


def test_variables_wait_for_interrupted_queries(client: TeolaClient) -> None:
    first = client.submit("asking", "x")
    both = client.submit("llm", "{{plan}}", variables={"plan": first})
    assert client.wait(first.id).status == "waiting"
    assert client.get(both.id, wait=0.1).status == "queued"
    client.resume(first.id, "yes")
    assert client.wait(both.id).status == "done"


def test_interrupted_chat_resumes_by_thread_id(server: RunningServer, notes: Path) -> None:
    chat: dict[str, Any] = {"model": "asking", "messages": [{"role": "user", "content": "x"}]}
    with server.client(ONE.secret) as http:
        reply = http.post("/v1/chat/completions", json=chat)
        [interrupt] = reply.json()["teola"]["waiting"]["interrupts"]
        assert interrupt["value"]["question"] == "may I?"
        thread = reply.headers["x-teola-query"]
        resumption = {**chat, "metadata": {"thread_id": thread, "resume": "yes"}}
        with server.client(OTHER.secret) as other:  # whose thread of that name is another one
            assert "x: yes" not in other.post("/v1/chat/completions", json=resumption).text
        assert http.post("/v1/chat/completions", json=resumption).json()["choices"][0]["message"]["content"] == "x: yes"
        nowhere = http.post("/v1/chat/completions", json={**chat, "metadata": {"resume": "yes"}})
        assert nowhere.status_code == 400


def threads(server: RunningServer) -> set[str]:
    saver = server.service.models["asking"].fast.checkpointer  # type: ignore[attr-defined]

    async def found() -> set[str]:
        return {one.config["configurable"]["thread_id"] async for one in saver.alist(None)}

    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(found(), server.loop).result(20)


def test_forgetting_queries_deletes_their_checkpoints(server: RunningServer, client: TeolaClient) -> None:
    ids = [client.wait(client.submit("asking", f"number {i}").id).id for i in range(3)]
    with asking(server, OTHER) as other:
        stored = other.wait(other.submit("asking", "kept").id).id
        assert threads(server) == {f"one/asking/{id}" for id in ids} | {f"one%2Fx/asking/{stored}"}
        client.forget(ids[0])
        assert len(threads(server)) == 3
        with server.client(ONE.secret) as http:
            assert http.delete("/v1/tenant").json()["queries"] == 2
        assert threads(server) == {f"one%2Fx/asking/{stored}"}
        other.resume(stored, "yes")
        assert other.wait(stored).text == "kept: yes"


@in_postgres[0]
@in_postgres[1]
def test_unanswered_interrupt_expires(postgres_dsn: str, notes: Path) -> None:
    store = PostgresStore(postgres_dsn, f"pool {time.monotonic_ns()}")
    with running_server(apps=APPS, store=store, keep=0.8) as server, server.client() as http:
        id = http.post("/v1/queries", json={"model": "asking", "input": "x"}).json()["id"]
        assert http.get(f"/v1/queries/{id}", params={"wait": 10}).json()["status"] == "waiting"
        until(lambda: http.get(f"/v1/queries/{id}").status_code == 404, 20)
        until(lambda: not threads(server), 20)


# ------------------------------------------------------------ crashes


def stored_record(id: str, model: str, **more: Any) -> Record:
    body = {"model": model, "messages": [{"role": "user", "content": id}], "metadata": {}}
    fields: dict[str, Any] = {"status": "running", "attempt": 1, "created": 1.0, "variables": {}, **more}
    return Record(id=id, tenant="one", model=model, app=model, body=body, **fields)


def test_waiting_queries_survive_a_server_restart(store: Store, notes: Path) -> None:
    options: dict[str, Any] = {"apps": APPS, "keys": [ONE.settings]}
    with running_server(store=store, **options) as server, asking(server) as client:
        ids = [client.wait(client.submit(name, "x").id).id for name in ("asking", "asking_before")]
        last = list(client.events(ids[0]))[-1]
    if isinstance(store, MemoryStore):  # its checkpoints are gone: nothing goes on
        return
    second = PostgresStore(store.dsn, store.pool)
    with running_server(store=second, **options) as server, asking(server) as client, server.client(ONE.secret) as http:
        assert {client.get(id).status for id in ids} == {"waiting"}
        assert ran(notes, "x") == ["plan", "plan"]
        event_lines = http.get(f"/v1/queries/{ids[0]}/events", headers={"Last-Event-ID": last.id}).text.splitlines()
        assert [line for line in event_lines if line.startswith("event")] == ["event: reset", "event: waiting"]
        client.resume(ids[0], "yes")
        client.resume(ids[1])
        assert [client.wait(id).text for id in ids] == ["x: yes", "x: nobody asked"]
        assert [client.wait(id).attempt for id in ids] == [2, 2]
    assert ran(notes, "x") == ["plan", "plan", "answer", "answer"]


@in_postgres[0]
@in_postgres[1]
def test_queries_resume_from_checkpoints_after_a_crash(
    postgres_dsn: str, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops while the second of three nodes runs, and the records that a crash would have left."""
    name = f"pool {time.monotonic_ns()}"
    options: dict[str, Any] = {"apps": APPS, "keys": [ONE.settings]}
    monkeypatch.setenv("TEOLA_TEST_SECONDS", "60")
    store = PostgresStore(postgres_dsn, name)
    with running_server(store=store, drain=0, **options) as server, asking(server) as client:
        runs = client.submit("steps", "runs").id
        asks = {n: client.wait(client.submit(n, n).id) for n in ("asking", "asking_before")}
        while "work" not in ran(notes, "runs"):
            client.get(runs, wait=0.02)
    monkeypatch.setenv("TEOLA_TEST_SECONDS", "0")

    async def crashed() -> None:
        """What it waits for had not been written down yet; of one, somebody had said that it may go on."""
        store = PostgresStore(postgres_dsn, name)
        await store.open()
        for one in asks.values():
            stored = await store.get("one", one.id)
            assert stored is not None
            await store.put(replace(stored, status="running", waiting=None, expires=None))
        [record] = [await store.get("one", asks["asking_before"].id)]
        assert record is not None
        await store.put(replace(record, id="other", status="running"))
        await store.put(stored_record("never begun", "steps"))
        await store.put(stored_record("queued", "steps", status="queued", attempt=0))
        await store.close()

    asyncio.run(crashed())
    with running_server(store=PostgresStore(postgres_dsn, name), **options) as server, asking(server) as client:
        queries = {id: client.wait(id) for id in (runs, "never begun", "queued", "other")}
        assert {id: one.status for id, one in queries.items()} == {
            runs: "done",
            "never begun": "interrupted",  # no checkpoint of it: whether it has written something nobody knows
            "queued": "done",
            "other": "interrupted",  # the thread is another query's
        }
        assert queries[runs].text.startswith("runs as ")
        assert queries[runs].attempt == 2
        assert {client.wait(one.id).status for one in asks.values()} == {"waiting"}  # nobody has said yes
        client.resume(asks["asking"].id, "yes")
        assert client.wait(asks["asking"].id).text == "asking: yes"
    assert ran(notes, "runs") == ["plan", "work", "work", "answer"]
    assert ran(notes, "asking") == ["plan", "answer"]
    assert ran(notes, "asking_before") == ["plan"]


# ------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("object", "message"),
    [("support.stopping_graphs:checkpointed", "of its own"), ("support.served_apps:chain", "is no graph")],
)
def test_checkpoints_of_unsupported_apps_raise(object: str, message: str, notes: Path) -> None:
    with (
        pytest.raises(RegistrationError, match=message),
        running_server(apps={"x": {"object": object, "checkpoints": True}}),
    ):
        pass


def test_app_with_own_checkpointer_can_be_resumed(notes: Path) -> None:
    apps = {"own": {"object": "support.stopping_graphs:checkpointed", "input": "text", "output": "answer"}}
    with running_server(apps=apps) as server, server.client() as http:
        id = http.post("/v1/queries", json={"model": "own", "input": "x"}).json()["id"]
        assert http.get(f"/v1/queries/{id}", params={"wait": 10}).json()["status"] == "waiting"
        assert http.post(f"/v1/queries/{id}/resume", json={"value": "yes"}).status_code == 202
        assert http.get(f"/v1/queries/{id}", params={"wait": 10}).json()["answer"]["text"] == "x: yes"
        assert http.delete("/v1/tenant").json()["queries"] == 1
        saver = server.service.models["own"].fast.checkpointer  # type: ignore[attr-defined]
        assert list(saver.list(None)) == []
