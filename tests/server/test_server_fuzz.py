"""Whatever is sent, the server answers, and never with a fault of its own; strangers get nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.service import Served, key, served

ONE, OTHER = key("one"), key("other")
LONG = bool(os.environ.get("TEOLA_TEST_LONG"))

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "llm",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 3,
        "stop": ["a"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "tool_choice": "auto",
        "stream": False,
        "n": 1,
    },
    "/v1/completions": {"model": "llm", "prompt": ["x"], "max_tokens": 3},
    "/v1/embeddings": {"model": "embedder", "input": ["x"], "encoding_format": "float"},
    "/v1/rerank": {"model": "reranker", "query": "x", "documents": ["x", {"text": "y"}], "top_n": 1},
    "/v1/responses": {
        "model": "llm",
        "input": [{"role": "user", "content": "x"}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/queries": {"model": "llm", "input": "{{x}}", "variables": {"x": "y"}, "parameters": {"max_tokens": 3}},
}
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
ANY = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for at, inner in items:
        yield from places(inner, (*path, at))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


@settings(max_examples=400 if LONG else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_that_is_sent_is_a_fault(server: Served, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(VALID)))
    body = VALID[path]
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(list(places(body))))
        body = changed(body, where, data.draw(ANY))
    text = json.dumps(body)
    with server.client() as http:
        found = http.post(path, content=text, headers={"Content-Type": "application/json"})
    assert found.status_code < 500, (path, text, found.text)
    if found.status_code >= 400:
        assert sorted(found.json()["error"]) == ["code", "message", "param", "type"]


def test_strangers_get_nothing() -> None:
    """Of a hundred tries at somebody else's queries and traces, none succeeds; of ten thousand in the long run."""
    rng = random.Random(1)
    with served(keys=[ONE.settings, OTHER.settings]) as server, server.client(ONE.secret) as mine:
        ids = [mine.post("/v1/queries", json={"model": "llm", "input": f"secret {i}"}).json()["id"] for i in range(20)]
        for id in ids:
            assert mine.get(f"/v1/queries/{id}", params={"wait": 20}).json()["status"] == "done"
        traced = [one["id"] for one in mine.get("/v1/activity").json()["data"]]
        with server.client(OTHER.secret) as other:
            for _ in range(10_000 if LONG else 100):
                found = attempt(other, rng.choice(ids + traced), rng)
                assert "secret" not in found.text
                assert found.status_code in (404, 204, 202) or found.json().get("data") == []
        assert len(mine.get("/v1/queries").json()["data"]) == 20
        assert {one["status"] for one in mine.get("/v1/queries").json()["data"]} == {"done"}


def attempt(http: httpx.Client, id: str, rng: random.Random) -> httpx.Response:
    name = rng.choice([id, id.upper(), f"{id}%00", f"one%2f{id}", f"..%2f{id}", f"{id}%20"])
    match rng.randrange(8):
        case 0:
            return http.get(f"/v1/queries/{name}")
        case 1:
            return http.get(f"/v1/queries/{name}/events", headers={"Last-Event-ID": "1-0"})
        case 2:
            return http.post(f"/v1/queries/{name}/cancel")
        case 3:
            return http.delete(f"/v1/queries/{name}")
        case 4:
            return http.get(f"/v1/activity/{name}")
        case 5:
            return http.post(f"/pages/tickets/{name}")
        case 6:
            asked = {"model": "llm", "input": "{{x}}", "variables": {"x": {"query": id}}}
            return http.post("/v1/queries", json=asked)
    return http.get(rng.choice(["/v1/queries", "/v1/activity"]))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_over_tls(tmp_path: Path) -> None:
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(private), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    with served(certificate=str(certificate), private_key=str(private)) as server:
        import ssl

        trusted = ssl.create_default_context(cafile=str(certificate))
        found = httpx.get(server.url.replace("http:", "https:") + "/ready", verify=trusted, trust_env=False)
    assert found.status_code == 200
    assert "max-age" in found.headers["strict-transport-security"]
