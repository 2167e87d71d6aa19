"""Tests that goals and deadlines count from the first byte of a request, so that slow uploads count, too."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.service import RunningServer, running_server, slow_llm, until

from teola_plugin.pool import EnginePool
from teola_plugin.server.admission import Admission, AdmissionRefusal, Ticket

SLOWLY = 0.4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def running_queries(server: RunningServer) -> set[Any]:
    """Return the connections whose request's first byte the server has."""
    return {one for one in tuple(server.server.server_state.connections) if "teola.began" in (one.scope or {})}  # type: ignore[union-attr]


def asked_slowly(
    server: RunningServer, path: str, headers: dict[str, str], **body: Any
) -> tuple[int, dict[str, Any], str]:
    """Send a request slowly. Return status, answer and query."""
    content = json.dumps({"model": "llm", **body}).encode()
    fields = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    address = server.url.removeprefix("http://").split(":")
    before = running_queries(server)
    with socket.create_connection((address[0], int(address[1])), timeout=20) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n".encode())
        until(lambda: running_queries(server) - before)
        time.sleep(SLOWLY / 2)
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + content[:10])
        time.sleep(SLOWLY / 2)
        connection.sendall(content[10:])
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    first, _, rest = answer.partition(b"\r\n\r\n")
    query = next((one for one in first.decode().splitlines() if one.lower().startswith("x-teola-query")), "")
    return int(first.split()[1]), json.loads(rest), query.partition(": ")[2]


MESSAGES = [{"role": "user", "content": "hello"}]


def test_goal_includes_time_to_receive_the_request(server: RunningServer) -> None:
    before = server.service.admission.counts["llm"].within_goal if server.service.admission.counts else 0
    headers = {"X-Teola-Goal": f"{0.9 * SLOWLY:g}"}
    status, _, id = asked_slowly(server, "/v1/chat/completions", headers, messages=MESSAGES)
    assert status == 200
    until(lambda: server.service.live.find("anonymous", id))
    with server.client() as http:
        [query] = [one for one in http.get("/v1/activity").json()["data"] if one["id"] == id]
    assert query["seconds"] >= SLOWLY and query["within_goal"] is False
    assert time.time() - query["began"] >= SLOWLY
    until(lambda: server.service.admission.counts["llm"].answered)
    assert server.service.admission.counts["llm"].within_goal == before


def test_deadline_passed_while_receiving_gets_504(server: RunningServer) -> None:
    headers = {"X-Teola-Deadline": f"{0.9 * SLOWLY:g}"}
    status, reply, _ = asked_slowly(server, "/v1/chat/completions", headers, messages=MESSAGES)
    assert (status, reply["error"]["code"]) == (504, "deadline_exceeded")


def test_goal_of_submitted_query_includes_receiving_time(server: RunningServer) -> None:
    headers = {"X-Teola-Goal": f"{0.9 * SLOWLY:g}"}
    status, reply, _ = asked_slowly(server, "/v1/queries", headers, input="hello")
    assert status == 202
    with server.client() as http:
        done = http.get(f"/v1/queries/{reply['id']}?wait=10").json()
    assert done["seconds"] >= SLOWLY and done["within_goal"] is False


def test_reused_connection_times_each_request_from_its_first_byte(server: RunningServer) -> None:
    with server.client() as http:
        for _ in range(2):
            began = time.monotonic()
            id = http.post("/v1/chat/completions", json={"model": "llm", "messages": MESSAGES}).headers["x-teola-query"]
            took = time.monotonic() - began
            time.sleep(SLOWLY)
        until(lambda: server.service.live.find("anonymous", id))
        [query] = [one for one in http.get("/v1/activity").json()["data"] if one["id"] == id]
    assert query["seconds"] <= took


def test_request_without_time_left_for_its_goal_is_refused() -> None:
    """It is refused if other requests run. On an idle server it is tried."""
    with running_server(EnginePool.local([slow_llm(0.01)])) as server, server.client() as http:
        body = {"model": "llm", "input": "x", "parameters": {"max_tokens": 20}}
        for id in [http.post("/v1/queries", json=body).json()["id"] for _ in range(4)]:
            assert http.get(f"/v1/queries/{id}?wait=10").json()["status"] == "done"
        slow = http.post("/v1/queries", json={**body, "parameters": {"max_tokens": 180}}).json()
        headers = {"X-Teola-Goal": f"{SLOWLY + 0.05:g}"}
        status, reply, _ = asked_slowly(server, "/v1/chat/completions", headers, messages=MESSAGES, max_tokens=20)
        assert (status, reply["error"]["code"]) == (429, "goal")
        http.delete(f"/v1/queries/{slow['id']}")


def test_admission_adds_elapsed_time_to_the_prediction() -> None:
    now = [100.0]
    admission = Admission(1000, 10**6, lambda: now[0])

    def ask(goal: float, since: float) -> Ticket | AdmissionRefusal:
        return admission.admit("a", 1, goal, since)

    first = [ask(9, 100.0) for _ in range(6)]
    now[0] = 101.0
    for one in first:
        assert isinstance(one, Ticket)
        one.end(answered=True)
    parallel = ask(9, 101.0)
    assert isinstance(parallel, Ticket)
    predicted = admission.predicted("a") or 0.0
    assert predicted > 0
    refusal = ask(predicted + 0.1, 100.5)
    assert isinstance(refusal, AdmissionRefusal) and refusal.predicted == pytest.approx(predicted + 0.5)
    assert isinstance(ask(predicted + 0.1, 101.0), Ticket)
    now[0] = 102.0
    before = admission.counts["a"].within_goal
    parallel.end(answered=True)
    assert admission.counts["a"].within_goal == before + 1
