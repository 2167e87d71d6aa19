"""Tests of two tenants on one server: neither reaches anything of the other by any route.

A tenant that is deleted leaves nothing behind.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from support.leftovers import reference_paths
from support.service import RunningServer, key, running_server, until

from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.runtime import local
from teola_plugin.server.queries.store import MemoryStore, PostgresStore, Store

LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
ATTEMPTS = 10_000 if LONG else 400
ONE, OTHER = key("one"), key("other")
THIRD = key("one/x")
APPS = {
    "notes": {"object": "support.served_apps:keeps_documents"},
    "reading": {"object": "support.served_apps:reads_documents"},
    "chain": {"object": "support.served_apps:chain"},
    "chatting": {"object": "support.served_apps:chat_engine"},
    "talk": {"object": "support.served_apps:remembers"},
}


def answer(prompt: Any, sampling: Any) -> str:
    text = " ".join(one.content for one in prompt.messages) + (prompt.text or "")
    return "slow " * 2000 if "slowly" in text else f"heard {text}"


def llm(drafts: str = "off") -> FakeLLM:
    curve = {PrimitiveKind.DECODING: Curve.linear(0.0, 0.0005), PrimitiveKind.PREFILLING: Curve.linear(0, 0)}
    profile = replace(profiles.noop()["llm"], curves=curve, max_requests=64, prefix_caching=True)
    return FakeLLM("llm", profile, answer, drafts="auto" if drafts == "off" else {"tokens": 4})


@dataclass
class Tenant:
    """The data of one tenant on the server. All of it contains a mark."""

    http: httpx.Client
    mark: str = field(default_factory=lambda: f"mark{secrets.token_hex(6)}")
    ids: dict[str, list[str]] = field(default_factory=dict)

    def text(self, more: str = "") -> str:
        return f"{self.mark} {more or 'keeps this to itself, whoever may ask for it, now and at any other time'}"

    def add(self, kind: str, id: str) -> None:
        self.ids.setdefault(kind, []).append(id)

    def submit(self, **query: Any) -> str:
        reply = self.http.post("/v1/queries", json={"model": "llm", "input": self.text(), **query})
        assert reply.status_code == 202, reply.text
        self.add("query", reply.json()["id"])
        self.add("live", reply.json()["query"])
        return str(reply.json()["id"])

    def chat(self, headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        body = {"model": "llm", "messages": [{"role": "user", "content": self.text()}], **more}
        reply = self.http.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        self.add("live", reply.headers["x-teola-query"])
        message: dict[str, Any] = reply.json()
        self.add("response", message["id"])
        return message


def settled(owner: Tenant) -> Tenant:
    """Create queries, files, rows, threads, conversations, traces and streams of a tenant."""
    done = owner.submit()
    owner.submit(input="{{x}}", variables={"x": {"query": done}})
    owner.submit(model="reading", documents=[{"name": owner.mark, "text": owner.text()}], settings={"found.k": 1})
    stored = owner.submit(model="notes", documents=[{"name": owner.mark, "text": owner.text()}])
    file = owner.http.post("/v1/files", files={"file": (f"{owner.mark}.txt", owner.text().encode())})
    owner.add("file", file.json()["id"])
    owner.submit(documents=[{"file_id": file.json()["id"]}])
    owner.submit(model="chain", input=owner.text())
    for id in list(owner.ids["query"]):
        reply = owner.http.get(f"/v1/queries/{id}", params={"wait": 20}).json()
        assert reply["status"] == "done", reply
    assert owner.mark in owner.http.get(f"/v1/queries/{stored}").text
    owner.chat({"X-Teola-Query": f"trip-{owner.mark[-4:]}"})
    owner.chat(model="chatting")
    owner.chat(model="talk", metadata={"thread_id": "thread"})
    owner.add("thread", "thread")
    response = owner.http.post("/v1/responses", json={"model": "llm", "input": owner.text()})
    owner.add("response", response.json()["id"])
    owner.add("request", response.headers["x-request-id"])
    owner.submit(input=f"slowly {owner.mark}", parameters={"max_tokens": 2000})  # under way all the time
    owner.ids["query"].remove(running := owner.ids["query"][-1])
    owner.add("running", running)
    return owner


@pytest.fixture
def server() -> Iterator[RunningServer]:
    pool = EnginePool.local([llm(), FakeEmbedder(), FakeReranker(), FakeStore()])
    with running_server(pool, apps=APPS, keys=[ONE.settings, OTHER.settings, THIRD.settings]) as server:
        yield server


def routes(server: RunningServer) -> list[tuple[str, str]]:
    """Return method and path of all routes of the server, including those that its schema leaves out."""
    results = [one for one in server.server.config.app.routes if isinstance(one, APIRoute)]
    return sorted((method, one.path) for one in results for method in one.methods)


# ------------------------------------------------------------ attempts


class Thief:
    """A client that knows all ids of another tenant, and tries them everywhere."""

    def __init__(self, http: httpx.Client, of: Tenant, routes: list[tuple[str, str]], rng: random.Random) -> None:
        self.http, self.of, self.rng = http, of, rng
        self.routes = [one for one in routes if "{" in one[1] and "name" not in one[1]]
        self.tried: dict[str, int] = {}
        self.own = set[str]()
        """Names that it has given to queries of its own."""

    def attempt(self) -> None:
        kind = self.rng.choice(["route"] * 6 + ["list", "body", "body", "header", "content", "thread"])
        where, reply = getattr(self, f"_{kind}")()
        self.tried[where] = self.tried.get(where, 0) + 1
        assert reply.status_code < 500, (where, reply.text)
        assert self.of.mark not in reply.text, (where, reply.text)
        assert reply.status_code != 403, (where, reply.text)

    def _id(self, *kinds: str) -> str:
        ids = [id for kind, ids_ in self.of.ids.items() for id in ids_ if not kinds or kind in kinds]
        return self.rng.choice(ids)

    def _route(self) -> tuple[str, httpx.Response]:
        """Send another tenant's id and an unknown id of the same form to a route. Both must get the same reply."""
        method, path = self.rng.choice(self.routes)
        id = self._id()
        spelled = self.rng.choice(
            [id, id, id, id.upper(), f"{id}%00", f"one%2f{id}", f"..%2f{id}", f"{id}%20", f"%2e/{id}"]
        )
        nobodys = id[:-8] + secrets.token_hex(4)
        more: dict[str, Any] = {"json": {"value": None}} if path.endswith("resume") else {}
        headers = {"Last-Event-ID": self.rng.choice(["", "1-0", "1-5"])}
        reply = self.http.request(method, path.replace("{id}", spelled), headers=headers, **more)
        if id in self.own:
            return f"{method} {path}", reply
        assert reply.status_code in (404, 405, 204, 307) or reply.json().get("data") == [], (method, path, reply.text)
        if spelled == id:
            other = self.http.request(method, path.replace("{id}", nobodys), headers=headers, **more)
            assert message_without_id(reply, id) == message_without_id(other, nobodys), (method, path)
        return f"{method} {path}", reply

    def _list(self) -> tuple[str, httpx.Response]:
        path = self.rng.choice(["/v1/queries", "/v1/activity", "/v1/files", "/v1/models", "/version", "/health"])
        reply = self.http.get(
            path, params={"limit": 500, **({"after": self._id("file")} if path == "/v1/files" else {})}
        )
        return path, reply

    def _body(self) -> tuple[str, httpx.Response]:
        """Send another tenant's ids in a body."""
        post, id = self.http.post, self._id()
        match self.rng.randrange(5):
            case 0:
                body = {"model": "llm", "input": "{{x}}", "variables": {"x": {"query": id}}}
                where, reply = "variable", post("/v1/queries", json=body)
            case 1:
                body = {"model": self.rng.choice(["llm", "reading"]), "input": "x", "documents": [{"file_id": id}]}
                where, reply = "document", post("/v1/queries", json=body)
            case 2:
                part = {"type": "file", "file": {"file_id": id}}
                body = {"model": "llm", "messages": [{"role": "user", "content": [part]}]}
                where, reply = "file of a chat", post("/v1/chat/completions", json=body)
            case 3:
                body = {
                    "model": "llm",
                    "input": [{"role": "user", "content": [{"type": "input_file", "file_id": id}]}],
                }
                where, reply = "file of a response", post("/v1/responses", json=body)
            case _:
                body = {"model": "llm", "input": "x", "previous_response_id": id}
                where, reply = "previous response", post("/v1/responses", json=body)
        assert reply.status_code == (400 if where == "previous response" else 404), (where, reply.text)
        return where, reply

    def _header(self) -> tuple[str, httpx.Response]:
        """Send a query with the same name as another tenant's. It must be a separate query."""
        headers = {"X-Teola-Query": self._id("live"), "X-Request-ID": self._id("request")}
        self.own.add(headers["X-Teola-Query"])
        body = {"model": "llm", "messages": [{"role": "user", "content": "what is it?"}], "max_tokens": 5}
        return "name of a query", self.http.post("/v1/chat/completions", json=body, headers=headers)

    def _content(self) -> tuple[str, httpx.Response]:
        """Ask for what the other tenant asked, received or indexed, by apps and through caches."""
        model = self.rng.choice(["notes", "reading", "llm", "chatting"])
        documents = [{"text": "hay"}] if model in ("notes", "reading") else []
        body = {"model": model, "input": "keeps this to itself, whoever may ask for it", "documents": documents}
        id = self.http.post("/v1/queries", json=body).json()["id"]
        reply = self.http.get(f"/v1/queries/{id}", params={"wait": 20})
        assert reply.json()["status"] == "done", reply.text
        return f"content of {model}", reply

    def _thread(self) -> tuple[str, httpx.Response]:
        thread = self.rng.choice(
            ["thread", "../one/talk/thread", "one/talk/thread", "%2e%2e/one/talk/thread", "x/talk/thread"]
        )
        body = {"model": "talk", "messages": [{"role": "user", "content": "again"}], "metadata": {"thread_id": thread}}
        return "thread", self.http.post("/v1/chat/completions", json=body)


def message_without_id(reply: httpx.Response, id: str) -> Any:
    """Return what an answer says, without what depends on the id."""
    return reply.status_code, reply.text.replace(id, "ID")


def test_random_attacks_reach_no_data_of_another_tenant(server: RunningServer) -> None:
    """Seeded: `TEOLA_TEST_SEED`. Ten thousand attempts in the long run."""
    rng = random.Random(int(os.environ.get("TEOLA_TEST_SEED", "1")))
    with server.client(ONE.secret) as one, server.client(OTHER.secret) as two, server.client(THIRD.secret) as three:
        owner, rest = settled(Tenant(one)), [two, three]
        thieves = [Thief(http, owner, routes(server), rng) for http in rest]
        before = seen(owner)
        for number in range(ATTEMPTS):
            thieves[number % 2].attempt()
        after = seen(owner)
        assert after["activity"].items() <= before["activity"].items()  # the latest thousand of all tenants are kept
        assert {**after, "activity": None} == {**before, "activity": None}
        tried = {where for thief in thieves for where in thief.tried}
        known_routes = {f"{method} {path}" for method, path in thieves[0].routes}
        assert tried >= known_routes | {"variable", "document", "name of a query", "thread", "previous response"}
        assert len(known_routes) >= 9
        running = owner.ids["running"][0]
        assert one.get(f"/v1/queries/{running}").json()["status"] in ("running", "done")


def seen(owner: Tenant) -> dict[str, Any]:
    """Return everything of a tenant that it sees itself."""
    queries = {
        one["id"]: one["answer"]
        for one in owner.http.get("/v1/queries").json()["data"]
        if one["id"] in owner.ids["query"]
    }
    activity = {one["id"]: one["requests"] for one in owner.http.get("/v1/activity").json()["data"]}
    files = [owner.http.get(f"/v1/files/{id}/content").text for id in owner.ids["file"]]
    return {"queries": queries, "activity": activity, "files": files}


def test_tenants_share_no_cache_and_no_drafts() -> None:
    """The same prompt: cached for who has sent it, drafted from the outputs of nobody else."""
    engine = llm("on")
    with running_server(EnginePool.local([engine]), keys=[ONE.settings, OTHER.settings]) as server:
        clients = [server.client(secret) for secret in (ONE.secret, OTHER.secret)]
        one, two = (Tenant(http, "the same " * 30) for http in clients)

        def cached(tenant: Tenant) -> int:
            results: int = tenant.chat(temperature=0)["usage"]["prompt_tokens_details"]["cached_tokens"]
            return results

        assert (cached(one), cached(one) > 0, cached(two)) == (0, True, 0)
        until(lambda: len(server.pool.traces) == 3)
        drafted = [sum(span.drafted for span in trace.spans) for trace in server.pool.traces]
        assert drafted[1] > 0
        one.http.delete("/v1/tenant")
        assert cached(one) == 0
        assert cached(two) > 0
        for http in clients:
            http.close()


# ------------------------------------------------------------ forgetting


@pytest.mark.parametrize("stored", ["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_cache_of_forgotten_tenant_is_not_hit_after_a_restart(stored: str, request: pytest.FixtureRequest) -> None:
    """The engine stays, as that of a shared pool does; the server and its connections are new ones."""
    engine, store, name = llm("on"), MemoryStore(), f"pool-{time.monotonic_ns()}"
    keys, mark = [ONE.settings, OTHER.settings], "the same " * 30

    def opened() -> Store:
        return store if stored == "memory" else PostgresStore(request.getfixturevalue("postgres_dsn"), name)

    def cached(*, forget: bool = False) -> dict[str, bool]:
        """Whose prompt was met in the cache."""
        with running_server(EnginePool.local([engine]), keys=keys, store=opened()) as server:
            clients = {one.settings["name"]: server.client(one.secret) for one in (ONE, OTHER)}
            usages = {who: Tenant(http, mark).chat(temperature=0)["usage"] for who, http in clients.items()}
            if forget:
                assert clients["one"].delete("/v1/tenant").status_code == 200
            for http in clients.values():
                http.close()
            return {who: usage["prompt_tokens_details"]["cached_tokens"] > 0 for who, usage in usages.items()}

    assert cached() == {"one": False, "other": False}
    assert cached(forget=True) == {"one": True, "other": True}
    assert cached() == {"one": False, "other": True}
    assert cached() == {"one": True, "other": True}  # under the name that it has since then


@pytest.mark.parametrize("stored", ["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_no_data_of_a_forgotten_tenant_remain(stored: str, request: pytest.FixtureRequest) -> None:
    """Neither in what its key can ask for, nor in rows, nor anywhere in the process that the server leads to."""
    store: Store = MemoryStore()
    dsn = request.getfixturevalue("postgres_dsn") if stored == "postgres" else ""
    if dsn:
        store = PostgresStore(dsn, f"pool-{time.monotonic_ns()}")
    engines = [llm(), FakeEmbedder(), FakeReranker(), FakeStore()]
    keys = [ONE.settings, OTHER.settings]
    with (
        running_server(EnginePool.local(engines), apps=APPS, keys=keys, store=store) as server,
        server.client(ONE.secret) as one,
        server.client(OTHER.secret) as two,
    ):
        mine, theirs = settled(Tenant(one)), settled(Tenant(two))
        thread = threading.Thread(target=follow, args=(server, mine.ids["running"][0]))
        thread.start()
        state = server.server.config.app.state
        rows = pool_rows(server)
        assert reference_paths(mine.mark, server.service, server.pool, state) and len(rows) == 2
        reply = one.delete("/v1/tenant").json()
        assert reply["queries"] == len(mine.ids["query"]) + 1 and reply["files"] >= 1
        thread.join(20)
        assert not thread.is_alive()
        for path in ("/v1/queries", "/v1/activity", "/v1/files"):
            assert one.get(path).json()["data"] == []
        left = ["?"]

        def nothing_left() -> bool:
            left[:] = reference_paths(mine.mark, server.service, server.pool, state, local._text, local._view)
            return not left

        try:
            until(nothing_left, 10)  # what was under way has a moment to end
        except AssertionError:
            raise AssertionError(left[:5]) from None
        assert pool_rows(server) < rows
        if dsn:
            assert rows_with(dsn, mine.mark) == []
            assert rows_with(dsn, theirs.mark) != []
        thief = Thief(one, mine, routes(server), random.Random(1))
        for _ in range(60):
            thief.attempt()
        assert len(theirs.http.get("/v1/queries").json()["data"]) == len(theirs.ids["query"]) + 1
        assert seen(theirs)["files"]


def follow(server: RunningServer, id: str) -> None:
    with server.client(ONE.secret) as http, http.stream("GET", f"/v1/queries/{id}/events") as events:
        for _ in events.iter_lines():
            pass


def pool_rows(server: RunningServer) -> set[str]:
    return set(server.pool.admin("store", "collections").result(10))


def rows_with(dsn: str, mark: str) -> list[Any]:
    """Return the rows of all tables of the server that contain the mark."""
    import psycopg

    with psycopg.connect(dsn) as connection:
        names = connection.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'teola_server%'").fetchall()
        assert len(names) >= 2
        texts = [f"SELECT '{name}' FROM {name} AS t WHERE t::text LIKE %s" for (name,) in names]
        return [row for text in texts for row in connection.execute(text.encode(), (f"%{mark}%",)).fetchall()]
