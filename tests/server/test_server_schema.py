"""Tests of the whole API from its own schema, over real HTTP: no request causes an internal error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from support.service import RunningServer, key, running_server

schemathesis = pytest.importorskip("schemathesis", reason="it comes with the extra dev")

LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
EXAMPLES = 300 if LONG else 3
"""Of each operation, of each mode."""
ONE = key("one", operator=True)
APPS = {
    "chain": {"object": "support.served_apps:chain"},
    "reading": {"object": "support.served_apps:reads_documents"},
}
UNLIKE_JSON = ("/metrics", "/v1/activity/{id}", "/v1/files/{id}/content", "/v1/queries/{id}/events")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    documents = {"seconds": 5, "urls": {"hosts": ["docs.example.org"]}}
    with running_server(apps=APPS, keys=[ONE.settings], documents=documents) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client(ONE.secret) as client:
        yield client


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def operations(schema: Any) -> list[Any]:
    return [operation.ok() for operation in schema.get_all_operations()]


def new_id(http: httpx.Client, path: str) -> str:
    """Create a file or a query, and return its id."""
    if "/files/" in path:
        return str(http.post("/v1/files", files={"file": ("a.txt", b"text")}).json()["id"])
    query = http.post("/v1/queries", json={"model": "llm", "input": "x"}).json()
    return str(query["query" if "/activity/" in path else "id"])


def test_every_route_is_in_the_schema(schema: Any) -> None:
    paths = {one.path for one in operations(schema)}
    assert {"/v1/messages", "/v1/messages/count_tokens"} <= paths
    assert {"/v1/chat/completions", "/v1/files", "/v1/files/{id}", "/v1/queries", "/v1/tenant", "/v1/rerank"} <= paths
    assert len(operations(schema)) >= 20


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_generated_requests_cause_no_server_error(
    server: RunningServer, http: httpx.Client, schema: Any, mode: str
) -> None:
    """`positive`: requests that fit the schema; `negative`: those that do not."""
    seen = list[int]()
    for operation in operations(schema):
        if mode == "positive" or operation.body or operation.query or operation.path_parameters:
            with suppress(Unsatisfiable):  # an id may be any text: nothing does not fit
                tried(http, operation, schemathesis.GenerationMode(mode), seen)
    assert len(seen) >= 5 * EXAMPLES
    assert 400 in seen
    assert http.get("/ready").status_code == 200


def tried(http: httpx.Client, operation: Any, mode: Any, seen: list[int]) -> None:
    """Send requests of one operation. Half of those with an id name something that exists."""

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(int(os.environ.get("TEOLA_TEST_SEED", "1")))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if "id" in (case.path_parameters or {}) and len(seen) % 2:
            case.path_parameters["id"] = new_id(http, operation.path)
        reply = case.call(headers={"Authorization": f"Bearer {ONE.secret}"}, timeout=30)
        seen.append(reply.status_code)
        assert reply.status_code < 500, (operation.label, case.as_curl_command(), reply.text)
        if reply.status_code >= 400:
            of_anthropic = operation.path.startswith("/v1/messages")
            names = ["message", "type"] if of_anthropic else ["code", "message", "param", "type"]
            assert sorted(reply.json()["error"]) == names, operation.label
        elif operation.path not in UNLIKE_JSON and reply.headers.get("content-type") == "application/json":
            reply.json()

    check()
