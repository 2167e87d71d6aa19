"""Tests with random requests: the server answers each without an internal error, and strangers get nothing."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.service import RunningServer, in_process, key, running_server

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
    "/v1/messages": {
        "model": "llm",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/queries": {"model": "llm", "input": "{{x}}", "variables": {"x": "y"}, "parameters": {"max_tokens": 3}},
}
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
ANY = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all places in a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for at, inner in items:
        yield from paths_in(inner, (*path, at))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


FULL: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        VALID["/v1/chat/completions"]
        | {
            "stream_options": {"include_usage": True},
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "description": "d",
                        "strict": True,
                        "parameters": {
                            "type": "object",
                            "properties": {"x": {"$ref": "#/$defs/x"}},
                            "required": ["x"],
                            "$defs": {"x": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}]}}},
                        },
                    },
                }
            ],
        },
        {
            "model": "llm",
            "messages": [
                {"role": "system", "content": "s", "name": "n"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": "c",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]},
            ],
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 1,
            "seed": 1,
            "max_completion_tokens": 3,
            "logit_bias": {},
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "logprobs": False,
            "top_logprobs": 0,
            "parallel_tool_calls": True,
            "store": False,
            "metadata": {"a": "b"},
            "user": "u",
        },
    ],
    "/v1/completions": [
        {
            "model": "llm",
            "prompt": ["x", "y"],
            "n": 2,
            "max_tokens": 3,
            "stop": ["a"],
            "seed": 1,
            "echo": False,
            "stream_options": {"include_usage": True},
            "best_of": 1,
            "suffix": "",
        },
    ],
    "/v1/embeddings": [VALID["/v1/embeddings"] | {"user": "u", "dimensions": 16, "input_type": "query"}],
    "/v1/rerank": [VALID["/v1/rerank"] | {"return_documents": True}],
    "/v1/responses": [
        {
            "model": "llm",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
            ],
            "instructions": "i",
            "max_output_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.5,
            "metadata": {"a": "b"},
            "tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        },
    ],
    "/v1/messages": [
        {
            "model": model,
            "max_tokens": 3,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "thinking", "thinking": "x", "signature": "s"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": None}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
                        {"type": "document", "source": {"type": "text", "data": "x"}, "title": "n"},
                    ],
                },
            ],
            **more,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 1,
            "stop_sequences": ["a"],
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            "service_tier": "auto",
            "metadata": {"user_id": "u", "a": "b"},
        }
        for model, more in (
            ("graph", {}),
            (
                "llm",
                {
                    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
                    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
                },
            ),
        )
    ],
    "/v1/queries": [
        VALID["/v1/queries"] | {"metadata": {"a": "b"}, "user": "u", "documents": []},
        {"model": "graph", "inputs": {"messages": [{"role": "user", "content": "x"}]}},
        {"model": "chain", "inputs": {"topic": "x"}, "metadata": {"thread_id": "t"}},
        {"model": "template", "inputs": {"topic": "x"}, "settings": {"poem.max_tokens": 2}},
        {"model": "reading", "input": "x", "documents": [{"name": "n", "text": "t"}]},
    ],
}
"""More that is right, with most names that each address takes."""
FULL["/v1/chat/completions"] += [
    {"model": app, "messages": FULL["/v1/chat/completions"][1]["messages"], "metadata": {"thread_id": "t", "a": None}}
    for app in ("chain", "model", "graph", "query_engine", "chat_engine", "workflow", "template")
]
BAD = st.sampled_from(
    [
        *(
            None,
            "",
            "\ud800",
            "x\udfff",
            0,
            -1,
            2**63,
            10**400,
            -(2**70),
            0.5,
            float("nan"),
            float("inf"),
            -0.0,
            True,
            False,
        ),
        *([], {}, [None], [[]], ["\ud800"], {"\ud800": 1}, {"type": None}, {"a": None}, "null", "{", "[" * 5000),
        *({"$ref": "#"}, {"$ref": "#/$defs/x"}, {"$ref": 1}, {"type": "text", "text": None}, "auto", "required"),
    ]
)


def error_shape(path: str) -> list[str]:
    """Return the names in the errors of an address, in the form of its protocol."""
    return ["message", "type"] if path.startswith("/v1/messages") else ["code", "message", "param", "type"]


def nested(depth: int) -> Any:
    value: Any = "x"
    for number in range(depth):
        value = [value] if number % 2 else {"properties": value}
    return value


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    apps = ("chain", "model", "graph", "query_engine", "chat_engine", "workflow", "template")
    objects = {name: {"object": f"support.served_apps:{name}"} for name in apps}
    with in_process(apps={**objects, "reading": {"object": "support.served_apps:reads_documents"}}) as client:
        yield client


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    return http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def assert_no_fault(response: httpx.Response, request_body: object) -> None:
    assert response.status_code < 500, (request_body, response.text)
    if response.status_code >= 400:
        assert sorted(response.json()["error"]) == error_shape(response.url.path), request_body


@settings(max_examples=400 if LONG else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_requests_never_cause_a_server_error(server: RunningServer, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(VALID)))
    body = VALID[path]
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(list(paths_in(body))))
        body = changed(body, where, data.draw(ANY))
    text = json.dumps(body)
    with server.client() as http:
        reply = http.post(path, content=text, headers={"Content-Type": "application/json"})
    assert reply.status_code < 500, (path, text, reply.text)
    if reply.status_code >= 400:
        assert sorted(reply.json()["error"]) == error_shape(path)


@pytest.mark.parametrize("path", sorted(FULL))
@settings(max_examples=600 if LONG else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutations_of_full_bodies_never_cause_a_server_error(
    http: httpx.Client, path: str, data: st.DataObject
) -> None:
    body = data.draw(st.sampled_from(FULL[path]))
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(list(paths_in(body))))
        body = changed(body, where, data.draw(BAD | ANY | st.integers(100, 400).map(nested)))
    if isinstance(body, dict) and "queries" not in path and data.draw(st.booleans()):
        body = {**body, "stream": True}

    response = post(http, path, body)

    assert_no_fault(response, body)
    assert '"code":"internal_error"' not in response.text, body
    if response.status_code == 202:
        query = http.get(f"/v1/queries/{response.json()['id']}", params={"wait": 20}).json()
        assert (query["error"] or {}).get("code") != "internal_error", (body, query)


def optional_places(path: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the optional names in a body that are no data of the client's own."""
    own_data = {"metadata", "inputs", "variables", "settings", "schema", "$defs", "properties", "parameters"}
    own_data |= {"input", "input_schema"} if path == "/v1/messages" else set()
    own_data -= {"parameters"} if path == "/v1/queries" else set()
    required = {"model", "messages", "prompt", "input", "query", "documents", "role", "type", "name", "text"}
    return [
        where
        for where in paths_in(body)
        if where and isinstance(where[-1], str) and where[-1] not in required and not own_data & set(where[:-1])
    ]


def without(value: Any, where: tuple[Any, ...]) -> Any:
    if len(where) == 1:
        return {name: inner for name, inner in value.items() if name != where[0]}
    return changed(value, where[:1], without(value[where[0]], where[1:]))


BODIES = [(path, number) for path in sorted(FULL) for number in range(len(FULL[path]))]


@pytest.mark.parametrize(("path", "number"), BODIES)
def test_null_field_equals_missing_field(http: httpx.Client, path: str, number: int) -> None:
    body = FULL[path][number]
    for where in optional_places(path, body):
        by_null = post(http, path, changed(body, where, None))
        left_out = post(http, path, without(body, where))

        assert by_null.status_code in (200, 202, 400), (where, by_null.text)
        assert by_null.status_code == left_out.status_code, (where, by_null.text, left_out.text)
        assert error_text(by_null) == error_text(left_out), where


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stream_has_no_usage_if_the_option_is_null(http: httpx.Client, path: str, options: Any) -> None:
    response = post(http, path, VALID[path] | {"stream": True, "stream_options": options})

    assert response.status_code == 200
    assert '"usage"' not in response.text


def error_text(response: httpx.Response) -> str:
    """Return the body without ids and times."""
    text = re.sub(r'"(created\w*|ended|seconds)":[^,}]*', "", response.text)
    return re.sub(r"\b(chatcmpl|cmpl|resp|req|msg|fc|call|query|q|rerank|file)[-_][0-9a-f]{12,}", "", text)


NO_OBJECTS = [
    *(b"", b"null", b"[]", b'"x"', b"1", b"{", b"\xff\xfe", b'{"model": "\xed\xa0\x80"}', b"[" * 100_000),
    *(b'{"a":' * 50_000, b'{"model": NaN}', b'{"model": 1e999}'),
    b'{"model": "llm", "model": "llm", "seed": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("content", NO_OBJECTS)
@pytest.mark.parametrize(
    "type", ["application/json", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""]
)
@pytest.mark.parametrize(
    "path", [*sorted(FULL), "/v1/files", "/v1/queries/x/resume", "/v1/queries/x/cancel", "/pages/tickets/x"]
)
def test_non_object_body_is_refused(http: httpx.Client, path: str, type: str, content: bytes) -> None:
    response = http.post(path, content=content, headers={"Content-Type": type} if type else {})

    assert 400 <= response.status_code < 500, response.text
    assert sorted(response.json()["error"]) == error_shape(path)


def test_other_tenant_gets_no_query_or_trace() -> None:
    """None of a hundred tries at another tenant's queries and traces succeeds. The long version makes ten thousand."""
    rng = random.Random(1)
    with running_server(keys=[ONE.settings, OTHER.settings]) as server, server.client(ONE.secret) as mine:
        ids = [mine.post("/v1/queries", json={"model": "llm", "input": f"secret {i}"}).json()["id"] for i in range(20)]
        for id in ids:
            assert mine.get(f"/v1/queries/{id}", params={"wait": 20}).json()["status"] == "done"
        traced = [one["id"] for one in mine.get("/v1/activity").json()["data"]]
        with server.client(OTHER.secret) as other:
            for _ in range(10_000 if LONG else 100):
                reply = attempt(other, rng.choice(ids + traced), rng)
                assert "secret" not in reply.text
                assert reply.status_code in (404, 204, 202) or reply.json().get("data") == []
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
            body = {"model": "llm", "input": "{{x}}", "variables": {"x": {"query": id}}}
            return http.post("/v1/queries", json=body)
    return http.get(rng.choice(["/v1/queries", "/v1/activity"]))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_server_answers_over_tls(tmp_path: Path) -> None:
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(private), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    with running_server(certificate=str(certificate), private_key=str(private)) as server:
        import ssl

        trusted = ssl.create_default_context(cafile=str(certificate))
        reply = httpx.get(server.url.replace("http:", "https:") + "/ready", verify=trusted, trust_env=False)
    assert reply.status_code == 200
    assert "max-age" in reply.headers["strict-transport-security"]
