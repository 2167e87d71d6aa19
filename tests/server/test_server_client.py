"""Tests of the typed client, sync and async, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.service import RunningServer, key, running_server

from teola_plugin.engines.fake import FakeLLM
from teola_plugin.errors import EngineUnavailable, QueryError
from teola_plugin.pool import EnginePool
from teola_plugin.server.client import AsyncTeolaClient, QueryEvent, TeolaClient, joining

ONE = key("one")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    llm = FakeLLM("llm", answer=lambda prompt, _: "said " + prompt.messages[-1].content)
    with running_server(EnginePool.local([llm]), keys=[ONE.settings]) as server:
        yield server


def test_sync_client_submits_follows_and_forgets_queries(server: RunningServer) -> None:
    with TeolaClient(server.url, ONE.secret, trust_env=False) as client:
        first = client.submit("llm", "a b c")
        both = client.submit("llm", "{{x}}!", variables={"x": first}, parameters={"max_tokens": 30})
        assert client.wait(both.id).text == "said said a b c!"
        events = list(client.events(first.id))
        assert "".join(event.text for event in events) == "said a b c"
        assert events[-1].kind == "done"
        assert {one.id for one in client.latest()} >= {first.id, both.id}
        assert client.cancel(first.id).status == "done"
        client.forget(first.id)
        with pytest.raises(QueryError, match="404"):
            client.get(first.id)
        with pytest.raises(QueryError, match="nobody"):
            client.submit("nobody", "x")
        with joining(app="mine") as joined:
            assert client.submit("llm", "x").query == joined.query


def test_client_sends_documents_with_a_query(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<html><body><p>Cows eat grass.")
    with TeolaClient(server.url, ONE.secret, trust_env=False) as client:
        created = client.submit("llm", "What?", documents=[tmp_path / "a.html", {"name": "b", "text": "Hay."}])
        expected = (
            '<document name="a.html">\nCows eat grass.\n</document>\n<document name="b">\nHay.\n</document>\nWhat?'
        )
        assert client.wait(created.id).text == f"said {expected}"
        with pytest.raises(QueryError, match=r"none\.pdf"):
            client.submit("llm", "x", documents=[tmp_path / "none.pdf"])
        with pytest.raises(QueryError, match="no settings"):
            client.submit("llm", "x", settings={"k": 1})


async def test_async_client_submits_and_follows_queries(server: RunningServer) -> None:
    async with AsyncTeolaClient(server.url, ONE.secret, trust_env=False) as client:
        created = await client.submit("llm", [{"role": "user", "content": "x"}])
        assert "".join([event.text async for event in client.events(created.id)]) == "said x"
        assert (await client.wait(created.id)).text == "said x"
        assert [one.id for one in await client.latest(1)] == [created.id]
        assert (await client.cancel(created.id)).over
        await client.forget(created.id)
        with pytest.raises(QueryError, match="404"):
            await client.get(created.id)


def test_client_without_server_raises_engine_unavailable() -> None:
    with TeolaClient("http://127.0.0.1:9", trust_env=False) as client:
        with pytest.raises(EngineUnavailable, match="no server"):
            client.latest()
        with pytest.raises(EngineUnavailable, match="no server"):
            list(client.events("x"))


# ------------------------------------------------------------ streams and replies of any form


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a response, one byte a chunk."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield from (bytes([byte]) for byte in self._content)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for byte in self._content:
            yield bytes([byte])


def read_events(content: bytes) -> list[QueryEvent]:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Chunks(content)))
    with TeolaClient("http://teola", transport=transport) as client:
        return list(client.events("q"))


def read_events_on_a_loop(content: bytes) -> list[QueryEvent]:
    async def read() -> list[QueryEvent]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Chunks(content)))
        async with AsyncTeolaClient("http://teola", transport=transport) as client:
            return [event async for event in client.events("q")]

    return asyncio.run(read())


READERS = [read_events, read_events_on_a_loop]
EVENTS = "id: 1\nevent: delta\ndata: JSON\n\nid: 2\nevent: done\ndata: {}\n\n"
FORMS = {
    "usual": EVENTS,
    "no spaces": EVENTS.replace(": ", ":"),
    "CRLF": EVENTS.replace("\n", "\r\n"),
    "CR": EVENTS.replace("\n", "\r"),
    "byte order mark": "\ufeff" + EVENTS,
    "comments and other fields": ": ping\n\nretry: 5\nfoo: bar\n" + EVENTS,
    "several data lines": EVENTS.replace("JSON", 'JSON\ndata: , "more": 1}').replace("JSON", "CUT"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "é😀"], ids=ascii)
@pytest.mark.parametrize("form", FORMS)
def test_client_reads_event_streams_of_any_valid_form(reader: Callable[..., Any], form: str, mark: str) -> None:
    data = json.dumps({"text": f"oats{mark}hay"}, ensure_ascii=False)
    content = FORMS[form].replace("JSON", data).replace("CUT", data.removesuffix("}"))

    delta, done = reader(content.encode())

    assert delta.text == f"oats{mark}hay"
    assert (delta.id, delta.kind) == ("1", "delta")
    assert (done.id, done.kind) == ("2", "done")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("data", ["<html>", "[]", "null", "[" * 100_000], ids=lambda data: data[:6])
def test_malformed_event_raises_query_error(reader: Callable[..., Any], data: str) -> None:
    with pytest.raises(QueryError, match="an event of the server is no JSON object"):
        reader(f"id: 1\nevent: delta\ndata: {data}\n\n".encode())


REPLIES: dict[str, Any] = {
    "HTML": "<html>",
    "a list": [],
    "null": None,
    "no content": "",
    "no fields": {},
    "a field missing": {"id": "q", "status": "done"},
    "status a number": {"id": "q", "model": "m", "app": "", "status": 5, "created": 0.0, "attempt": 1},
    "answer a text": {
        "id": "q",
        "model": "m",
        "app": "",
        "status": "done",
        "created": 0.0,
        "attempt": 1,
        "answer": "x",
    },
    "data a number": {"data": 5},
    "data of numbers": {"data": [5]},
}


@pytest.mark.parametrize("name", REPLIES)
def test_malformed_query_reply_raises_query_error(name: str) -> None:
    reply = REPLIES[name]
    text = reply if isinstance(reply, str) else json.dumps(reply)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    with TeolaClient("http://teola", transport=transport) as client:
        with pytest.raises(QueryError, match=r"the server's reply is no|the reply of the server is no JSON object"):
            client.get("q")
        with pytest.raises(QueryError, match=r"the server's reply is no|the reply of the server is no JSON object"):
            client.latest()


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"error": "x"}', b"[" * 100_000], ids=lambda it: it[:6])
def test_refusal_of_any_form_raises_query_error(content: bytes) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(503, content=content))
    with TeolaClient("http://teola", transport=transport) as client, pytest.raises(QueryError, match="answered 503"):
        client.get("q")
