"""The typed client, sync and async, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service import Served, key, served

from teola_plugin.engines.fake import FakeLLM
from teola_plugin.errors import EngineUnavailable, QueryError
from teola_plugin.pool import EnginePool
from teola_plugin.server.client import AsyncTeolaClient, TeolaClient, joining

ONE = key("one")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = FakeLLM("llm", answer=lambda prompt, _: "said " + prompt.messages[-1].content)
    with served(EnginePool.local([llm]), keys=[ONE.settings]) as found:
        yield found


def test_the_client(server: Served) -> None:
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


def test_the_client_sends_documents(server: Served, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<html><body><p>Cows eat grass.")
    with TeolaClient(server.url, ONE.secret, trust_env=False) as client:
        made = client.submit("llm", "What?", documents=[tmp_path / "a.html", {"name": "b", "text": "Hay."}])
        wanted = '<document name="a.html">\nCows eat grass.\n</document>\n<document name="b">\nHay.\n</document>\nWhat?'
        assert client.wait(made.id).text == f"said {wanted}"
        with pytest.raises(QueryError, match=r"none\.pdf"):
            client.submit("llm", "x", documents=[tmp_path / "none.pdf"])
        with pytest.raises(QueryError, match="no settings"):
            client.submit("llm", "x", settings={"k": 1})


async def test_the_client_for_a_loop(server: Served) -> None:
    async with AsyncTeolaClient(server.url, ONE.secret, trust_env=False) as client:
        made = await client.submit("llm", [{"role": "user", "content": "x"}])
        assert "".join([event.text async for event in client.events(made.id)]) == "said x"
        assert (await client.wait(made.id)).text == "said x"
        assert [one.id for one in await client.latest(1)] == [made.id]
        assert (await client.cancel(made.id)).over
        await client.forget(made.id)
        with pytest.raises(QueryError, match="404"):
            await client.get(made.id)


def test_no_server() -> None:
    with TeolaClient("http://127.0.0.1:9", trust_env=False) as client:
        with pytest.raises(EngineUnavailable, match="no server"):
            client.latest()
        with pytest.raises(EngineUnavailable, match="no server"):
            list(client.events("x"))
