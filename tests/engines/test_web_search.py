"""Tests of web search: the protocol of each service, retries, hidden keys, and full text in PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fixed_replies import JSON_VALUES
from support.search_stub import KEY, PAGES, SearchStub, search_stub

from teola_plugin.engines.base import Engine
from teola_plugin.engines.conformance import EngineConformance, collect, ends
from teola_plugin.engines.fake import FakeTools, FakeWebSearch
from teola_plugin.engines.fulltext import FullTextSearch, read_documents
from teola_plugin.engines.profiles import tools, web_search
from teola_plugin.engines.websearch import SERVICES, SearchService, WebSearchEngine
from teola_plugin.engines.websearch.engine import wait_of
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import CallTool, Chunk, Done, Request, SearchText
from teola_plugin.runtime.claims import ClaimRule, EngineFingerprint, request_key, rule_of
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind
DOCUMENTS = [{"url": url, "title": title, "text": text} for url, title, text in PAGES]


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[SearchStub]:
    with search_stub() as stub:
        yield stub


@pytest.fixture
def stub(shared_stub: SearchStub) -> SearchStub:
    shared_stub.requests.clear()
    shared_stub.statuses.clear()
    shared_stub.go.clear()
    shared_stub.most_at_once = 0
    return shared_stub


def engine_of(service: str, stub: SearchStub, **options: Any) -> WebSearchEngine:
    key = {} if service == "searxng" else {"api_key": KEY}
    return WebSearchEngine("web", service=service, base_url=stub.url, **key, **options)


async def outcomes(engine: Engine, *payloads: Any) -> list[Any]:
    """Return the value or the error of each payload, in order."""
    batch = [Request(f"w{n}-{id(one)}", K.SEARCHING, one) for n, one in enumerate(payloads)]
    await engine.start()
    try:
        found = ends(await collect(engine, batch), batch)
    finally:
        await engine.stop()
    return [end.value if isinstance(end := found[one.id], Done) else end.error for one in batch]


class _Searches(EngineConformance):
    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        return [SearchText("what do lambs eat", 2), SearchText("ivy", 1)]


class _Web(_Searches):
    service = ""

    @pytest.fixture(autouse=True)
    def _stub(self, stub: SearchStub) -> None:
        self.stub = stub

    async def make(self) -> Engine:
        return engine_of(self.service, self.stub)


class TestSearxng(_Web):
    service = "searxng"


class TestBrave(_Web):
    service = "brave"


class TestTavily(_Web):
    service = "tavily"


class TestFakeWebSearch(_Searches):
    async def make(self) -> Engine:
        return FakeWebSearch("web", web_search(0.5), [text for *_, text in PAGES])

    def run(self, work: Any) -> Any:
        return run_virtual(work)


class TestFakeTools(EngineConformance):
    async def make(self) -> Engine:
        return FakeTools("tools", {"shout": str.upper, "add": lambda a, b: a + b}, tools(0.5))

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        return [CallTool("add", {"a": 1, "b": 2}), CallTool("add", {"a": 2, "b": 2}, read_only=True)]

    def run(self, work: Any) -> Any:
        return run_virtual(work)


@pytest.mark.postgres
class TestFullText(_Searches):
    @pytest.fixture(autouse=True)
    def _dsn(self, postgres_dsn: str) -> None:
        self.dsn = postgres_dsn

    async def make(self) -> Engine:
        return FullTextSearch("web", DOCUMENTS, dsn=self.dsn)


# ------------------------------------------------------------ the services' forms


@pytest.mark.parametrize("service", SERVICES)
@given(answer=JSON_VALUES, listed=st.lists(st.fixed_dictionaries({"url": JSON_VALUES, "score": JSON_VALUES})))
def test_any_reply_gives_hits_or_a_value_error(service: str, answer: Any, listed: list[Any]) -> None:
    for one in (answer, {"results": answer}, {"results": listed}, {"type": "search", "web": {"results": listed}}):
        try:
            hits = SERVICES[service].hits(one, 3)
        except ValueError:
            continue
        assert all(isinstance(hit.score, int | float) for hit in hits)


@pytest.mark.parametrize("header", ["nan", "inf", "soon", "9" * 400, "Wed, 99 Foo", "1e400"])
def test_invalid_retry_after_uses_the_default_delay(header: str) -> None:
    assert wait_of({"retry-after": header}, 1) == 1.0


@pytest.mark.parametrize("service", SERVICES)
async def test_hits_are_the_same_for_every_service(service: str, stub: SearchStub) -> None:
    [hits, nothing] = await outcomes(engine_of(service, stub), SearchText("oats", 2), SearchText("nothing", 2))
    assert [hit.id for hit in hits] == [url for url, *_ in PAGES[:2]] and nothing == ()
    assert [hit.metadata["title"] for hit in hits] == ["Oats", "Ivy"]
    assert hits[0].metadata["source"] == hits[0].id and hits[0].score > hits[1].score
    assert ("farmers' lambs" in hits[0].text) == (service == "brave"), "Brave's texts are HTML"


async def test_requests_follow_the_format_of_each_service(stub: SearchStub) -> None:
    for service in SERVICES:
        await outcomes(engine_of(service, stub, options={"language": "de"}), SearchText("oats & ivy", 3))
    of_searxng, of_brave, of_tavily = stub.requests
    assert of_searxng[:3] == ("GET", "/search", {"language": "de", "q": "oats & ivy", "format": "json"})
    assert of_brave[:2] == ("GET", "/res/v1/web/search") and of_brave[2]["count"] == "3"
    assert of_brave[3]["x-subscription-token"] == KEY
    assert of_tavily[:3] == ("POST", "/search", {"language": "de", "query": "oats & ivy", "max_results": 3})
    assert of_tavily[3]["authorization"] == f"Bearer {KEY}"


async def test_searches_of_a_batch_run_concurrently_up_to_max_requests(stub: SearchStub) -> None:
    searches = [SearchText(f"slowly {n}") for n in range(6)]
    engine = engine_of("searxng", stub, max_requests=3)

    async def let_go() -> None:
        while stub.most_at_once < 3:
            await asyncio.sleep(0.01)
        stub.go.set()

    found, _ = await asyncio.gather(outcomes(engine, *searches), let_go())
    assert all(len(hits) == 3 for hits in found) and stub.most_at_once == 3


# ------------------------------------------------------------ refusals


async def test_search_is_retried_after_the_services_delay(stub: SearchStub) -> None:
    stub.statuses = [(429, {"Retry-After": "0.3"}), (503, {"Retry-After": "0"})]
    begun = time.monotonic()
    [hits] = await outcomes(engine_of("tavily", stub), SearchText("oats"))
    assert len(hits) == 3 and len(stub.requests) == 3 and time.monotonic() - begun >= 0.3


async def test_search_is_retried_after_braves_rate_limit_reset(stub: SearchStub) -> None:
    stub.statuses = [(429, {"X-RateLimit-Reset": "0, 1419704"})]
    [hits] = await outcomes(engine_of("brave", stub), SearchText("oats"))
    assert len(hits) == 3


async def test_search_fails_if_retry_delay_is_too_long(stub: SearchStub) -> None:
    stub.statuses = [(429, {"Retry-After": "3600"})]
    [error] = await outcomes(engine_of("tavily", stub), SearchText("oats"))
    assert isinstance(error, EngineError) and not error.retryable and len(stub.requests) == 1
    assert "3600 s" in error.hint


async def test_cut_connection_is_retried_and_then_fails(stub: SearchStub) -> None:
    stub.statuses = [(0, {})]
    [hits] = await outcomes(engine_of("searxng", stub), SearchText("oats"))
    assert len(hits) == 3
    stub.statuses = [(0, {})] * 2
    [error] = await outcomes(engine_of("searxng", stub, attempts=2), SearchText("oats"))
    assert "could not be reached" in str(error) and not error.retryable


async def test_refusal_is_not_retried_and_hides_the_key(stub: SearchStub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for service, status in (("brave", 422), ("tavily", 401), ("tavily", 432)):
        stub.requests.clear()
        stub.statuses = [(status, {})]
        engine = engine_of(service, stub)
        [error] = await outcomes(engine, SearchText("oats"))
        assert str(status) in error.message and error.hint and len(stub.requests) == 1
        shown = [str(error), repr(error), repr(engine), repr(vars(engine)), str(error.__dict__), caplog.text]
        assert KEY not in "".join(shown) and KEY.encode() not in pickle.dumps(engine)
        assert KEY.encode() not in pickle.dumps(error)


async def test_malformed_answer_fails_only_its_search(stub: SearchStub) -> None:
    [error, hits] = await outcomes(engine_of("searxng", stub), SearchText("nonsense"), SearchText("oats"))
    assert isinstance(error, EngineError) and len(hits) == 3


async def test_late_answer_fails_with_the_timeout(stub: SearchStub) -> None:
    [error] = await outcomes(engine_of("searxng", stub, timeout=0.2, attempts=1), SearchText("slowly"))
    assert "0.2 s" in error.message and "timeout" in error.hint


@pytest.mark.parametrize("payload", [SearchText(""), SearchText("oats", 0), SearchText("oats", 21), "oats"])
async def test_invalid_searches_fail_without_a_request(payload: Any, stub: SearchStub) -> None:
    [error] = await outcomes(engine_of("tavily", stub), payload)
    assert isinstance(error, EngineError) and not stub.requests


def test_key_is_read_from_the_environment(stub: SearchStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TAVILY_API_KEY", "SEARXNG_URL"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(RegistrationError, match="TAVILY_API_KEY"):
        WebSearchEngine(service="tavily")
    with pytest.raises(RegistrationError, match="SEARXNG_URL"):
        WebSearchEngine(service="searxng")
    with pytest.raises(RegistrationError, match="did you mean 'tavily'"):
        WebSearchEngine(service="tavly")
    monkeypatch.setenv("TAVILY_API_KEY", KEY)
    engine = WebSearchEngine(service="tavily", base_url=stub.url)
    [hits] = asyncio.run(outcomes(pickle.loads(pickle.dumps(engine)), SearchText("oats")))
    assert len(hits) == 3 and stub.requests[0][3]["authorization"] == f"Bearer {KEY}"


async def test_credentials_in_the_address_are_used_and_hidden(stub: SearchStub) -> None:
    address = stub.url.replace("http://", "http://user:hidden@")
    engine = WebSearchEngine(base_url=address)
    await outcomes(engine, SearchText("oats"))
    assert stub.requests[0][3]["authorization"].startswith("Basic ")
    assert "hidden" not in repr(engine) + str(dict(engine.versions())) and b"hidden" not in pickle.dumps(engine)


def test_custom_service_is_a_dataclass_with_public_fields() -> None:
    assert {"name", "ask", "results"} <= {one.name for one in fields(SearchService)}


# ------------------------------------------------------------ full text


@pytest.mark.postgres
async def test_full_text_matches_any_word_and_ranks_titles_first(postgres_dsn: str) -> None:
    documents = [Chunk("a", "Lambs like hay."), {"url": "b", "title": "Lambs", "text": "Small sheep."}, "Walls."]
    engine = FullTextSearch("web", documents, dsn=postgres_dsn)
    lambs, none = await outcomes(engine, SearchText("What would a lamb really say?"), SearchText("the of"))
    assert [hit.id for hit in lambs] == ["b", "a"] and none == ()
    assert lambs[0].metadata == {"source": "b", "title": "Lambs"}


@pytest.mark.postgres
async def test_full_text_engines_search_only_their_documents(postgres_dsn: str) -> None:
    one = FullTextSearch("web", ["only oats here"], dsn=postgres_dsn)
    other = FullTextSearch("web", ["oats, and more oats"], dsn=postgres_dsn)
    again = FullTextSearch("web", ["only oats here"], dsn=postgres_dsn)
    found = [(await outcomes(engine, SearchText("oats")))[0] for engine in (one, other, again)]
    assert [len(hits) for hits in found] == [1, 1, 1] and found[0] == found[2] != found[1]


def test_search_documents_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "oats.md").write_text("Oats.")
    (tmp_path / "notes.bin").write_text("no text")
    lines = tmp_path / "pages.jsonl"
    lines.write_text('{"url": "x", "title": "X", "text": "ten"}\n\n{"text": "no address"}\n')
    assert [chunk.id for chunk in read_documents(tmp_path)] == ["oats.md"]
    first, second = read_documents(lines)
    assert first == Chunk("x", "ten", {"source": "x", "title": "X"}) and second.id.startswith("text:")
    lines.write_text('{"url": "x"}\n')
    with pytest.raises(RegistrationError, match="line 1"):
        read_documents(lines)
    with pytest.raises(RegistrationError, match="cannot be read"):
        read_documents(tmp_path / "none")
    with pytest.raises(RegistrationError, match="two documents"):
        FullTextSearch("web", [Chunk("a", "1"), Chunk("a", "2")], dsn="unused")


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=ascii)
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"], ids=ascii)
def test_jsonl_lines_end_at_line_feeds_only(tmp_path: Path, mark: str, end: str) -> None:
    pages = tmp_path / "pages.jsonl"
    lines = [json.dumps({"text": f"oats{mark}{n}"}, ensure_ascii=False) for n in range(2)]
    pages.write_bytes(("\ufeff" + end.join(lines) + end).encode())

    chunks = read_documents(pages)

    assert [chunk.text for chunk in chunks] == [f"oats{mark}0", f"oats{mark}1"]


# ------------------------------------------------------------ how often


def test_search_and_tool_requests_have_claim_rules_and_keys() -> None:
    engine = EngineFingerprint("web")
    assert rule_of(SearchText("oats")) is rule_of(CallTool("look", {}, read_only=True)) is ClaimRule.ONCE_PER_CALLER
    assert rule_of(CallTool("send", {})) is ClaimRule.ALONE and request_key(engine, "", CallTool("send", {})) is None
    assert request_key(engine, "", SearchText("oats", 4)) != request_key(engine, "", SearchText("oats", 5))
    one, other = ({"n": 1}, {"n": True})
    assert request_key(engine, "", CallTool("look", one, True)) != request_key(
        engine, "", CallTool("look", other, True)
    )
