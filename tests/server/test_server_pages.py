"""Tests of the pages, in a real browser if one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

import httpx
import pytest
from support.service import RunningServer, key, running_server, until

from teola_plugin.server.queries.records import Record
from teola_plugin.server.routes.pages import answers

PAGES = Path(__file__).parents[2] / "server" / "pages"
ONE, OTHER = key("one", operator=True), key("other")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def test_pages_load_no_external_resources(server: RunningServer) -> None:
    with server.client() as http:
        page = http.get("/")
        assert page.status_code == 200
        for name in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
            assert http.get(name).status_code == 200, name
        assert http.get("/pages/page.html").status_code == http.get("/pages/..%2fapp.py").status_code == 404
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for file in PAGES.iterdir():
        assert not re.search(r"https?://|innerHTML|eval\(", file.read_text() if file.is_file() else "")


def run_query(server: RunningServer, secret: str = "") -> str:
    with server.client(secret) as http:
        body = {"model": "llm", "messages": [{"role": "user", "content": "a secret"}]}
        return str(http.post("/v1/chat/completions", json=body).headers["x-teola-query"])


def test_query_page_opens_with_a_single_use_ticket() -> None:
    with running_server(keys=[ONE.settings, OTHER.settings]) as server, server.client(ONE.secret) as http:
        id = run_query(server, ONE.secret)
        for _ in range(1000):
            if (ticket := http.post(f"/pages/tickets/{id}")).status_code == 200:
                break
            time.sleep(0.02)
        with server.client() as nobody:
            page = nobody.get(ticket.json()["url"])
            second = nobody.get(ticket.json()["url"])
            assert nobody.post(f"/pages/tickets/{id}").status_code == 401
        assert page.status_code == 200
        assert "a secret" not in page.text
        assert "sandbox" in page.headers["content-security-policy"]
        assert second.status_code == 404
        with server.client(OTHER.secret) as other:
            assert other.post(f"/pages/tickets/{id}").status_code == 404
            assert other.get("/pages/pool").status_code == 403
        reply = http.get("/pages/pool").json()
        assert [one["name"] for one in reply["engines"]] == ["embedder", "llm", "reranker", "store"]
        assert reply["figures"]["accepted"] == 1


def page_of(server: RunningServer, http: httpx.Client, id: str) -> str:
    until(lambda: http.post(f"/pages/tickets/{id}").status_code == 200)
    return http.get(http.post(f"/pages/tickets/{id}").json()["url"]).text


def test_page_of_submitted_query_shows_its_stored_answer(server: RunningServer) -> None:
    with server.client() as http:
        id = http.post("/v1/queries", json={"model": "llm", "input": "<i>hello</i>"}).json()["id"]
        record = http.get(f"/v1/queries/{id}?wait=10").json()
        page = page_of(server, http, record["query"])
        assert f"Answer of {id}" in page and escape(record["answer"]["text"]) in page
        http.delete(f"/v1/queries/{id}")
        assert escape(record["answer"]["text"]) not in page_of(server, http, record["query"])


def test_sources_and_errors_are_escaped_on_the_page() -> None:
    fields = {"tenant": "t", "model": "m", "app": "m", "body": {}, "variables": {}, "created": 0.0}
    done = Record("q_1", **fields, answer={"text": "<b>", "sources": [{"text": "<script>"}, "two", {"id": 3}]})
    failed = Record("q_2", **fields, error={"message": "<b> broke"})
    sections = dict(answers([done, failed, Record("q_3", **fields)]))
    assert list(sections) == ["Answer of q_1", "Sources", "Error of q_2"]
    assert (
        sections["Answer of q_1"] == "<pre>&lt;b&gt;</pre>" and sections["Error of q_2"] == "<pre>&lt;b&gt; broke</pre>"
    )
    assert sections["Sources"].count("<details>") == 3 and "<script>" not in sections["Sources"]


def test_waiting_query_is_listed_and_its_page_links_the_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of it, before and behind the answer, is a query with a page of its own."""
    (tmp_path / "notes").touch()
    monkeypatch.setenv("TEOLA_TEST_NOTES", str(tmp_path / "notes"))
    app = {"object": "support.stopping_graphs:asking", "input": "text", "output": "answer", "checkpoints": True}
    with running_server(apps={"asking": app}) as server, server.client() as http:
        id = http.post("/v1/queries", json={"model": "asking", "input": "<b>paint"}).json()["id"]
        record = http.get(f"/v1/queries/{id}?wait=10").json()
        assert [one["id"] for one in http.get("/v1/queries?status=waiting").json()["data"]] == [id]
        page = page_of(server, http, record["query"])
        assert f"{id} waits" in page and "may I?" in page and f'href="/#query/{id}"' in page
        http.post(f"/v1/queries/{id}/resume", json={"value": "<i>yes"})
        record = http.get(f"/v1/queries/{id}?wait=10").json()
        assert record["status"] == "done"
        assert http.get("/v1/queries?status=waiting").json()["data"] == []
        assert [one["id"] for one in http.get("/v1/queries?status=done").json()["data"]] == [id]
        page = page_of(server, http, record["query"])
        assert f"Answer of {id}" in page and "&lt;b&gt;paint: &lt;i&gt;yes" in page and f"{id} waits" not in page
        assert http.get("/v1/queries?status=nonsense").status_code == 400


def test_cross_origin_requests_are_refused_without_keys(server: RunningServer) -> None:
    """A form of any site is sent without asking, also to this machine: as text, or with files."""
    chat = {"model": "llm", "messages": [{"role": "user", "content": "hello"}]}
    with server.client() as http:
        before = len(http.get("/v1/activity").json()["data"])
        for origin in (
            "https://evil.example",
            "http://127.0.0.1:1",
            "null",
            server.url.replace("127.0.0.1", "localhost"),
        ):
            for path, body in (
                ("/v1/chat/completions", {"json": chat}),
                ("/v1/queries", {"files": {"query": (None, '{"model": "llm", "input": "hello"}')}}),
                ("/v1/queries/q_1/resume", {"json": {}}),
                ("/v1/files", {"files": {"file": b"text"}}),
            ):
                reply = http.post(path, headers={"Origin": origin}, **body)  # type: ignore[arg-type]
                assert (reply.status_code, reply.json()["error"]["code"]) == (403, "cross_origin"), (origin, path)
        assert len(http.get("/v1/activity").json()["data"]) == before
        assert http.post("/v1/chat/completions", json=chat, headers={"Origin": server.url}).status_code == 200
    with running_server(keys=[ONE.settings]) as guarded, guarded.client(ONE.secret) as http:
        elsewhere = {"Origin": "https://app.example"}  # which has been given a key
        assert http.post("/v1/chat/completions", json=chat, headers=elsewhere).status_code == 200


def test_page_names_batch_partners_of_the_own_tenant_only() -> None:
    with running_server(keys=[ONE.settings, OTHER.settings]) as server:
        ids = [run_query(server, secret) for secret in (ONE.secret, ONE.secret, OTHER.secret)]
        until(lambda: len(server.service.traces) == 3)
        first, mate, foreign = (
            server.service.live.find(t, i) for t, i in zip(("one", "one", "other"), ids, strict=True)
        )
        assert first is not None and mate is not None and foreign is not None
        for query in (first, mate, foreign):  # as if they had run in one batch
            trace = server.service.traces.get(query.trace)
            assert trace is not None
            spans = tuple(replace(span, replica="0", batch=99, started=0.0, done=1.0) for span in trace.spans)
            server.service.traces.query_ended(replace(trace, spans=spans))
        with server.client(ONE.secret) as http:
            page = page_of(server, http, first.id)
    mates = page.partition("Batch-mates")[2]
    assert mate.id in mates and foreign.id not in page


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("page", "message"), [("recent", "query_"), ("pool", "embedder"), ("try", ">llm<")])
def test_browser_renders_the_pages(server: RunningServer, tmp_path: Path, page: str, message: str) -> None:
    run_query(server)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"{server.url}/#{page}"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=90).stdout
    section = output.partition(f'<section id="{page}"')[2].partition("</section>")[0]
    assert message in section
    assert "hidden" not in section.partition(">")[0]
