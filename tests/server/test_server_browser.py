"""Tests of the pages in a real browser: content, keyboard, light and dark, on a phone, without errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import CHROMIUM, Tab
from support.service import RunningServer, key, running_server, until

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
PAGES = {"recent": "query_", "pool": "embedder", "try": "llm"}
ONE = key("one", operator=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def run_query(server: RunningServer, secret: str = "", **more: Any) -> str:
    with server.client(secret) as http:
        body = {"model": "llm", "messages": [{"role": "user", "content": "hello"}], **more}
        id = str(http.post("/v1/chat/completions", json=body).headers["x-teola-query"])
        until(lambda: http.post(f"/pages/tickets/{id}").status_code == 200)
        return id


def text(tab: Tab, section: str) -> str:
    return str(tab.value(f"document.getElementById({section!r}).innerText"))


@pytest.mark.parametrize("page", PAGES)
def test_each_page_shows_its_own_section(server: RunningServer, tab: Tab, page: str) -> None:
    run_query(server)
    tab.open(f"{server.url}/#{page}")
    tab.until(f"document.getElementById({page!r}).innerText.includes({PAGES[page]!r})")
    assert [name for name in PAGES if tab.value(f"document.getElementById({name!r}).hidden")] == [
        name for name in PAGES if name != page
    ]
    assert tab.value("document.querySelector('nav a[aria-current]').hash") == f"#{page}"


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 1240])
def test_page_fits_the_screen_with_readable_contrast(
    server: RunningServer, tab: Tab, page: str, dark: bool, width: int
) -> None:
    tab.shape(width, 800, dark=dark)
    tab.open(f"{server.url}/#{page}")
    tab.until(f"document.getElementById({page!r}).innerText.includes({PAGES[page]!r})")
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    ink, back = (luminance(tab, f"getComputedStyle(document.body).{which}") for which in ("color", "backgroundColor"))
    assert (ink > back) is dark
    assert (max(ink, back) + 0.05) / (min(ink, back) + 0.05) >= 7


def luminance(tab: Tab, selector: str) -> float:
    """Return the relative luminance of an opaque colour, as WCAG defines it."""
    parts = tab.value(f"{selector}.match(/[0-9.]+/g).slice(0, 3).map(Number)")
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (one / 255 for one in parts)]
    return float(sum(share * one for share, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))


def focused(tab: Tab) -> str:
    return str(tab.value("document.activeElement.id || document.activeElement.innerText"))


def test_question_can_be_sent_by_keyboard_only(server: RunningServer, tab: Tab) -> None:
    tab.open(f"{server.url}/")
    seen = []
    while focused(tab) != "Try":
        tab.press("Tab")
        seen.append(focused(tab))
        assert len(seen) < 10, seen
        assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter")
    tab.until("document.getElementById('model').options.length > 0 && document.activeElement.id === 'main'")
    while focused(tab) != "question":
        tab.press("Tab")
    tab.type("What do lambs eat?")
    while focused(tab) != "send":
        tab.press("Tab")
    tab.press("Enter")
    tab.until("document.getElementById('answer-facts').textContent.includes('tokens')")
    assert tab.value("document.getElementById('answer').textContent.length") > 0
    tab.until("!document.getElementById('answer-query').hidden")
    while focused(tab) != "answer-query":
        tab.press("Tab")
    tab.press("Enter")
    tab.until("location.pathname.startsWith('/pages/queries/') && document.body.innerText.includes('Timeline')")


def test_page_of_a_submitted_query_has_its_answer(server: RunningServer, tab: Tab) -> None:
    with server.client() as http:
        id = http.post("/v1/queries", json={"model": "llm", "input": "<b>hello</b>"}).json()["id"]
        record = http.get(f"/v1/queries/{id}?wait=10").json()
        until(lambda: http.post(f"/pages/tickets/{record['query']}").status_code == 200)
        url = http.post(f"/pages/tickets/{record['query']}").json()["url"]
    for width in (390, 1240):
        tab.shape(width, 800)
        if width == 390:
            tab.open(f"{server.url}{url}")
        page_text = tab.value("document.body.innerText")
        assert record["answer"]["text"].strip()[:40] in page_text
        assert tab.value("document.documentElement.scrollWidth <= innerWidth")
        for part in ("Timeline", "What the answer waited for", f"Answer of {id}"):
            assert part in page_text
    tab.value("""document.querySelector('a[href="/"]').click()""")
    tab.until("location.pathname === '/' && document.body.innerText.includes('Recent queries')")


def test_key_is_requested_and_kept_in_the_tab(tab: Tab) -> None:
    with running_server(keys=[ONE.settings]) as server:
        tab.open(f"{server.url}/")
        tab.until("!document.getElementById('key-form').hidden")
        tab.faults.clear()  # the browser itself tells of a 401
        tab.value("document.getElementById('key').focus()")
        tab.type(ONE.secret)
        tab.press("Enter")
        run_query(server, ONE.secret)
        tab.until("document.getElementById('recent').innerText.includes('query_')", 30)
        assert ONE.secret not in tab.value("document.documentElement.outerHTML")
        assert ONE.secret not in tab.value("location.href")
        tab.value("sessionStorage.clear()")


def test_questions_and_answers_are_never_rendered_as_markup(server: RunningServer, tab: Tab) -> None:
    with server.client() as http:
        http.post(
            "/v1/chat/completions",
            json={"model": "llm", "messages": [{"role": "user", "content": "x"}]},
            headers={"X-Teola-App": "app-1"},
        )
    tab.open(f"{server.url}/#try")
    tab.until("document.getElementById('model').options.length > 0")
    tab.value("document.getElementById('question').value = '<img src=x onerror=document.title=1>'")
    tab.value("document.getElementById('send').click()")
    tab.until("document.getElementById('answer-facts').textContent.includes('s')")
    assert tab.value("document.title") == "teola" and tab.value("document.querySelectorAll('img').length") == 0


def test_form_requires_a_message_and_valid_json_inputs(server: RunningServer, tab: Tab) -> None:
    tab.open(f"{server.url}/#try")
    tab.until("document.getElementById('model').options.length > 0")
    for question, inputs, message in (("", "", "Write a message"), ("", "{no}", "The inputs are no JSON")):
        tab.value(f"document.getElementById('question').value = {question!r}")
        tab.value(f"document.getElementById('inputs').value = {inputs!r}")
        tab.value("document.getElementById('send').click()")
        tab.until(f"document.getElementById('note').textContent.includes({message!r})")
    tab.value("document.getElementById('question').value = 'hello'")
    tab.value("""document.getElementById('inputs').value = '{"question": "lambs"}'""")
    tab.value("document.getElementById('send').click()")
    tab.until("document.getElementById('answer-facts').textContent.includes('tokens')")
    assert tab.value("document.getElementById('note').textContent") == ""


def test_pool_page_updates_live(server: RunningServer, tab: Tab) -> None:
    tab.open(f"{server.url}/#pool")
    tab.until("document.getElementById('figures').innerText.includes('accepted')")
    before = int(
        tab.value(
            "[...document.querySelectorAll('#figures div')]"
            ".find(one => one.innerText.includes('accepted')).querySelector('dd').innerText"
        )
    )
    run_query(server)
    tab.until(f"document.getElementById('figures').innerText.includes('{before + 1}')", 10)


def test_screenshot_of_a_page_is_saved(server: RunningServer, tab: Tab, tmp_path: Path) -> None:
    tab.open(f"{server.url}/#pool")
    tab.save_screenshot(tmp_path / "pool.png")
    assert (tmp_path / "pool.png").stat().st_size > 1000
