"""Tests of queries from the pages in a real browser: documents, settings, and answers to graphs that wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import CHROMIUM, Tab
from support.pdfs import with_text
from support.service import RunningServer, key, running_server

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
ONE = key("one")
APPS: dict[str, dict[str, Any]] = {
    "reading": {"object": "support.served_apps:reads_documents"},
    "chain": {"object": "support.served_apps:chain"},
    **{
        name: {"object": f"support.stopping_graphs:{name}", "input": "text", "output": "answer", "checkpoints": True}
        for name in ("asking", "asking_before", "asking_twice")
    },
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    (tmp_path / "notes").touch()
    monkeypatch.setenv("TEOLA_TEST_NOTES", str(tmp_path / "notes"))
    with running_server(apps=APPS) as server:
        yield server


def trying(server: RunningServer, tab: Tab, model: str) -> None:
    tab.open("about:blank#")
    tab.open(f"{server.url}/#try")
    tab.until(f"[...document.getElementById('model').options].some(one => one.value === {model!r})")
    if tab.value("document.getElementById('model').value") != model:
        tab.value(f"document.getElementById('model').value = {model!r}")
        tab.value("document.getElementById('model').dispatchEvent(new Event('change'))")


def fill(tab: Tab, **values: str) -> None:
    for name, value in values.items():
        tab.value(f"document.getElementById({name!r}).value = {json.dumps(value)}")


def files(tab: Tab, *files_: tuple[str, str, bytes]) -> None:
    """Choose files in the page, each given by name, type and content."""
    scripts = [f"new File([new Uint8Array({list(data)})], {name!r}, {{type: {kind!r}}})" for name, kind, data in files_]
    tab.value(
        f"(() => {{ const all = new DataTransfer(); for (const one of [{', '.join(scripts)}]) all.items.add(one); "
        "document.getElementById('documents').files = all.files; })()"
    )


def last_query(server: RunningServer) -> dict[str, Any]:
    """Return the latest submitted query."""
    with server.client() as http:
        reply: dict[str, Any] = http.get("/v1/queries?limit=1").json()["data"][0]
    return reply


def visible(tab: Tab, id: str) -> bool:
    return bool(tab.value(f"document.getElementById({id!r}).checkVisibility()"))


def test_documents_and_settings_are_sent_with_a_query(server: RunningServer, tab: Tab) -> None:
    trying(server, tab, "reading")
    tab.until("document.getElementById('documents').checkVisibility()")
    assert visible(tab, "settings") and visible(tab, "more")
    text = b"Lambs eat oats. " * 30
    page = b"<!doctype html><title>b</title><p>Cows eat grass."
    files(
        tab,
        ("a.txt", "text/plain", text),
        ("b.html", "text/html", page),
        ("c.pdf", "application/pdf", with_text("Goats eat hay.")),
    )
    tab.value("document.getElementById('settings').open = true")
    tab.value("document.getElementById('set-found.k').value = '3'")
    fill(tab, **{"question": "What do lambs eat?", "set-answer.stop": "one\ntwo"})
    tab.value("document.getElementById('set-answer.mode').value = JSON.stringify('refine')")
    tab.value("document.getElementById('send').click()")
    tab.until("document.getElementById('answer-facts').textContent.includes('tokens')")
    [(_, record)] = server.server.config.app.state.queries.store._records.items()
    assert record.status == "done"
    assert record.body["metadata"]["config"] == {"found.k": 3, "answer.stop": ["one", "two"], "answer.mode": "refine"}
    parts = record.body["messages"][0]["content"]
    assert len([part for part in parts if part["type"] == "file"]) == 3


def test_invalid_setting_is_reported_on_the_form(server: RunningServer, tab: Tab) -> None:
    trying(server, tab, "reading")
    tab.until("document.getElementById('set-found.k') !== null")
    fill(tab, **{"question": "What?", "set-found.k": "0"})
    tab.value("document.getElementById('send').click()")
    tab.until("document.getElementById('note').textContent.includes('found.k')")
    assert tab.value("document.activeElement.id") == "set-found.k" and visible(tab, "set-found.k")
    with server.client() as http:
        assert http.get("/v1/queries").json()["data"] == []


def test_form_hides_inputs_that_the_app_does_not_take(server: RunningServer, tab: Tab) -> None:
    trying(server, tab, "chain")
    tab.until("document.getElementById('more').checkVisibility()")
    tab.until("!document.getElementById('documents').checkVisibility()")
    assert not visible(tab, "settings")
    trying(server, tab, "llm")
    tab.until("document.getElementById('documents').checkVisibility()")
    assert not visible(tab, "settings") and not visible(tab, "more")
    files(tab, ("a.txt", "text/plain", b"Lambs eat oats."))
    fill(tab, question="What do lambs eat?")
    tab.value("document.getElementById('send').click()")
    tab.until("document.getElementById('answer-facts').textContent.includes('tokens')")
    assert last_query(server)["status"] == "done"


def test_unreadable_document_is_reported_on_the_form(server: RunningServer, tab: Tab) -> None:
    trying(server, tab, "reading")
    tab.until("document.getElementById('documents').checkVisibility()")
    files(tab, ("a.pdf", "application/pdf", b"no pdf at all"))
    fill(tab, question="What?")
    tab.value("document.getElementById('send').click()")
    tab.until("document.getElementById('note').textContent.includes('a.pdf')")
    tab.faults.clear()  # the browser itself tells of a 400


def test_running_query_can_be_stopped_on_the_page(tab: Tab) -> None:
    with running_server(apps={"waiting": {"object": "support.served_apps:waiting"}}) as server:
        trying(server, tab, "waiting")
        fill(tab, question="hello")
        tab.value("document.getElementById('send').click()")
        tab.until("!document.getElementById('stop').disabled && document.getElementById('answer-page').hash.length > 8")
        tab.value("document.getElementById('stop').click()")
        tab.until("document.getElementById('note').textContent === 'Stopped.'")
        with server.client() as http:
            assert http.get(f"/v1/queries/{last_query(server)['id']}?wait=10").json()["status"] == "cancelled"


def focused(tab: Tab) -> str:
    return str(tab.value("document.activeElement.id"))


def test_interrupted_graph_is_resumed_by_keyboard_only(server: RunningServer, tab: Tab) -> None:
    """The test goes from the question to the answer, and checks that the graph got the reply."""
    trying(server, tab, "asking")
    fill(tab, question="paint it")
    tab.value("document.getElementById('question').focus()")
    while focused(tab) != "send":
        tab.press("Tab")
    tab.press("Enter")
    tab.until("location.hash.startsWith('#query/') && document.getElementById('reply-0') !== null")
    assert "may I?" in tab.value("document.getElementById('query-form').innerText")
    tab.until("document.activeElement.id === 'main'")
    while focused(tab) != "reply-0":
        tab.press("Tab")
    tab.type("yes, <b>do</b>")
    while focused(tab) != "query-send":
        tab.press("Tab")
    tab.press("Enter")
    tab.until("document.getElementById('query-text').innerText === 'paint it: yes, <b>do</b>'")
    assert not visible(tab, "query-waiting") and not visible(tab, "query-cancel")
    assert tab.value("document.querySelectorAll('#query b').length") == 0
    assert last_query(server)["status"] == "done"


def test_page_refresh_keeps_the_text_being_typed(server: RunningServer, tab: Tab) -> None:
    """The page looks again every two seconds; an empty answer is none; what is no JSON is said so."""
    with server.client() as http:
        id = http.post("/v1/queries", json={"model": "asking", "input": "paint it"}).json()["id"]
        assert http.get(f"/v1/queries/{id}?wait=10").json()["status"] == "waiting"
    tab.open(f"{server.url}/#recent")
    tab.until(f"document.getElementById('waiting-queries').innerText.includes({id!r})")
    tab.value("document.querySelector('#waiting-queries a').click()")
    tab.until("document.getElementById('reply-0') !== null")
    tab.value("document.getElementById('query-send').click()")
    tab.until("document.getElementById('note').textContent.includes('Write an answer')")
    fill(tab, **{"reply-0": "{no"})
    tab.value("document.getElementById('json-0').checked = true")
    tab.value("document.getElementById('query-send').click()")
    tab.until("document.getElementById('note').textContent.includes('no JSON')")
    tab.value("window.before = performance.now()")
    tab.until("performance.now() - window.before > 2500")
    assert tab.value("document.getElementById('reply-0').value") == "{no"
    fill(tab, **{"reply-0": '{"leave": true}'})
    tab.value("document.getElementById('query-send').click()")
    tab.until("document.getElementById('query-text').innerText.includes(\"{'leave': True}\")")


def test_form_shows_two_interrupts_or_a_plain_resume(server: RunningServer, tab: Tab) -> None:
    with server.client() as http:
        ids = [
            http.post("/v1/queries", json={"model": m, "input": "x"}).json()["id"]
            for m in ("asking_twice", "asking_before")
        ]
        for id in ids:
            assert http.get(f"/v1/queries/{id}?wait=10").json()["status"] == "waiting"
        tab.open(f"{server.url}/#query/{ids[0]}")
        tab.until("document.getElementById('reply-1') !== null")
        fill(tab, **{"reply-0": "red", "reply-1": "blue"})
        tab.value("document.getElementById('query-send').click()")
        tab.until("document.getElementById('query-text').innerText.length > 3")
        assert set(tab.value("document.getElementById('query-text').innerText").split()) == {"red", "blue"}
        tab.value(f"location.hash = 'query/{ids[1]}'")
        tab.until("document.getElementById('query-leave').checkVisibility()")
        assert tab.value("document.getElementById('query-send').textContent") == "Go on"
        tab.value("document.getElementById('query-send').click()")
        tab.until("document.getElementById('query-text').innerText === 'x: nobody asked'")


def test_query_of_another_tenant_cannot_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tab: Tab) -> None:
    (tmp_path / "notes").touch()
    monkeypatch.setenv("TEOLA_TEST_NOTES", str(tmp_path / "notes"))
    other = key("other")
    with running_server(apps=APPS, keys=[ONE.settings, other.settings]) as server:
        with server.client(ONE.secret) as http:
            id = http.post("/v1/queries", json={"model": "asking", "input": "x"}).json()["id"]
            assert http.get(f"/v1/queries/{id}?wait=10").json()["status"] == "waiting"
        tab.open(f"{server.url}/")
        for secret, message in ((other.secret, "there is no query"), (ONE.secret, "")):
            tab.value(f"sessionStorage.setItem('teola-key', {secret!r})")
            tab.open("about:blank#")
            tab.open(f"{server.url}/#query/{id}")
            if message:
                tab.until(f"document.getElementById('note').textContent.includes({message!r})")
                assert not visible(tab, "query-waiting")
        tab.faults.clear()  # the browser itself tells of a 401 and a 404
        tab.until("document.getElementById('reply-0') !== null")
        tab.value("sessionStorage.clear()")
        tab.open("about:blank#")


@pytest.mark.parametrize(("width", "dark"), [(320, False), (390, True), (1240, False)])
def test_forms_fit_the_screen_width(server: RunningServer, tab: Tab, width: int, dark: bool) -> None:
    tab.shape(width, 800, dark=dark)
    trying(server, tab, "reading")
    tab.until("document.getElementById('set-found.k') !== null")
    tab.value("document.getElementById('settings').open = true")
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    with server.client() as http:
        id = http.post("/v1/queries", json={"model": "asking", "input": "x" * 200}).json()["id"]
    tab.value(f"location.hash = 'query/{id}'")
    tab.until("document.getElementById('reply-0') !== null")
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    assert tab.value(
        "[...document.querySelectorAll('#query textarea, #query button')]"
        ".every(one => one.labels.length || one.innerText)"
    )
