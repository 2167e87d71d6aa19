"""Tests of `teola serve --connect`, a process that puts a shared pool behind one address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import served_apps

from teola_plugin.engines.fake import fake_engines
from teola_plugin.pool import EnginePool
from teola_plugin.server.client import TeolaClient

TESTS = Path(__file__).parents[1]
APPS = {name: {"object": f"support.served_apps:{name}"} for name in ("chain", "graph", "template", "query_engine")}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url(fakes_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server on the pool `fakes`. Return its address."""
    folder = tmp_path_factory.mktemp("served")
    pool = {"name": "fakes", "engines": {"llm": {"kind": "fake"}}, "apps": APPS}
    (folder / "pool.yaml").write_text(json.dumps({**pool, "server": {"port": 0, "store": "memory", "log": "off"}}))
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml", "--connect", fakes_address]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "PYTHONPATH": path}
        )
    try:
        assert process.stdout is not None
        hello = process.stdout.readline()
        assert hello.startswith("serving "), (folder / "log").read_text()
        yield hello.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as made:
        yield made


@pytest.fixture
def client(url: str) -> Iterator[TeolaClient]:
    with TeolaClient(url, trust_env=False, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def local() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as pool:
        yield pool


def chat(http: httpx.Client, model: str, text: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return http.post("/v1/chat/completions", json=body)


def text_of(found: httpx.Response) -> str:
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def test_served_models_are_the_engines_of_the_pool(http: httpx.Client) -> None:
    found = {one["id"]: one["kind"] for one in http.get("/v1/models").json()["data"]}
    assert found == {
        **dict.fromkeys(APPS, "app"),
        "llm": "chat",
        "embedder": "embedding",
        "slow": "embedding",
        "wide": "embedding",
        "reranker": "reranking",
    }


def test_served_engines_answer_as_a_local_pool(http: httpx.Client, local: EnginePool) -> None:
    from teola_plugin.langchain import ChatTeola, TeolaEmbeddings

    wanted = ChatTeola(pool=local, max_tokens=12).invoke("oats").content
    assert text_of(chat(http, "llm", "oats", max_tokens=12, temperature=0)) == wanted
    streamed = chat(http, "llm", "oats", max_tokens=12, temperature=0, stream=True)
    pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in pieces if one["choices"]) == wanted
    vectors = http.post("/v1/embeddings", json={"model": "embedder", "input": ["oats", "hay"]}).json()["data"]
    assert [one["embedding"] for one in vectors] == [
        pytest.approx(one) for one in TeolaEmbeddings(pool=local).embed_documents(["oats", "hay"])
    ]
    ranked = http.post("/v1/rerank", json={"model": "reranker", "query": "oats", "documents": ["hay", "oats"]}).json()
    assert ranked["results"][0]["index"] == 1


def test_served_apps_answer_as_a_local_pool(http: httpx.Client, local: EnginePool) -> None:
    deployed = served_apps.template().deploy(local)
    assert text_of(chat(http, "chain", "cows")) == served_apps.chain(local).invoke({"topic": "cows"})
    assert text_of(chat(http, "template", "cows")) == deployed.run({"topic": "cows"}).answer
    found = chat(http, "query_engine", "What do cows eat?")
    assert text_of(found) == str(served_apps.query_engine(local).query("What do cows eat?"))
    assert found.json()["usage"]["prompt_tokens"] > 0
    assert text_of(chat(http, "graph", "cows"))


def test_queries_refer_to_unfinished_answers_of_engines_and_apps(client: TeolaClient) -> None:
    """Queries refer to answers that are not there yet, of engines and of apps."""
    first = client.submit("chain", "cows")
    second = client.submit("llm", "{{plan}} or {{ other }}", variables={"plan": first, "other": "hay"})
    third = client.submit("template", "{{both}}", variables={"both": second})
    many = [client.submit("llm", f"{i} {{{{x}}}}", variables={"x": third}) for i in range(12)]
    ended = [client.wait(one.id) for one in (first, second, third, *many)]
    assert {one.status for one in ended} == {"done"}
    by_hand = client.wait(client.submit("llm", f"{ended[0].text} or hay").id)
    assert by_hand.text == ended[1].text
    assert client.wait(client.submit("template", ended[1].text).id).text == ended[2].text


def test_client_disconnect_cancels_the_query(http: httpx.Client, client: TeolaClient, shared: EnginePool) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/embeddings", json={"model": "slow", "input": ["x"] * 200}, timeout=0.2)
    end = time.monotonic() + 20
    while any(one["status"] == "running" for one in http.get("/v1/activity").json()["data"]):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "cancelled" in {one["status"] for one in http.get("/v1/activity").json()["data"]}


def test_activity_and_metrics_show_the_query(http: httpx.Client) -> None:
    id = chat(http, "chain", "hens").headers["x-teola-query"]
    end = time.monotonic() + 20
    while (page := http.get(f"/v1/activity/{id}")).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "llm" in page.text and "hens" not in page.text
    assert 'teola_primitives_total{app="chain"' in http.get("/metrics").text
    assert http.delete("/v1/tenant").status_code == 200
    assert http.get("/v1/activity").json()["data"] == []
