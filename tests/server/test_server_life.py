"""Tests of the server apart from answers: ids, headers, hosts, sizes, lost clients, shutdown, TLS, the command."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from support.service import RunningServer, chat_during_shutdown, running_server, slow_llm, until

from teola_plugin.cli.main import main
from teola_plugin.engines.fake import fake_engines
from teola_plugin.pool import EnginePool
from teola_plugin.server.app import listening, run
from teola_plugin.server.errors import HttpError
from teola_plugin.server.live_queries import RequestSession
from teola_plugin.server.queries.store import MemoryStore
from teola_plugin.server.routes.answering import SessionResponse, while_connected
from teola_plugin.server.service import Service
from teola_plugin.server.settings import ServerSettings

CHAT = {"model": "llm", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(max_body=20_000) as server:
        yield server


def test_health_ready_and_version_are_reported(server: RunningServer) -> None:
    with server.client() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").status_code == 200
        assert sorted(http.get("/version").json()["engines"]) == ["embedder", "llm", "reranker", "store"]


def test_answers_have_ids_and_security_headers(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "mine-1"})
        other = http.get("/v1/models", headers={"X-Request-ID": "no spaces\there"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.headers["x-teola-query"].startswith("query_")
    assert other.headers["x-request-id"].startswith("req_")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert "server" not in reply.headers


def test_server_without_keys_refuses_other_hosts(server: RunningServer) -> None:
    with server.client() as http:
        assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
        assert http.get("/v1/models", headers={"Host": "localhost:1234"}).status_code == 200


def test_answers_are_sent_without_nagle_delay(server: RunningServer) -> None:
    """Small pieces do not wait until the client has acknowledged the one before (Nagle's algorithm): it takes 40 ms."""
    with server.client() as http:
        http.get("/health")
        (connection,) = server.server.server_state.connections
        sent_from = connection.transport.get_extra_info("socket")
        assert sent_from.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_head_and_body_of_an_answer_are_one_piece(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        for _ in range(5):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw.recv(1 << 16).endswith(b'{"status":"ok"}')


def test_large_answer_is_complete_and_ordered(server: RunningServer) -> None:
    body = {"model": "embedder", "input": [f"text {number}" for number in range(400)]}
    with server.client() as http:
        data = http.post("/v1/embeddings", json=body).json()["data"]
        assert [one["index"] for one in data] == list(range(400))
        second = http.post("/v1/embeddings", json=body, headers={"Connection": "close"})
        assert second.json()["data"] == data


def test_query_ends_after_its_answer_is_sent(server: RunningServer) -> None:
    steps: list[str] = []

    class Told:
        query = SimpleNamespace(id="query_1")

        def end(self, outcome: str) -> None:
            steps.append(outcome)

    async def send(message: Any) -> None:
        steps.append(message["type"])

    asyncio.run(SessionResponse(cast(RequestSession, Told()), {"answer": 1})({"type": "http"}, None, send))  # type: ignore[arg-type]
    assert steps == ["http.response.start", "http.response.body", "done"]


def test_disconnect_and_cancellation_both_stop_the_request() -> None:
    """The work runs in the task of the request, which is told to stop for either reason."""
    left_event, statuses = asyncio.Event(), list[str]()

    class Left:
        async def receive(self) -> dict[str, str]:
            await left_event.wait()
            return {"type": "http.disconnect"}

    async def work(*, stubborn: bool) -> str:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            statuses.append("told")
            if not stubborn:
                raise
        return "an answer"

    async def send_request(*, stubborn: bool, leaves: bool) -> int | str:
        task = asyncio.ensure_future(while_connected(cast(Any, Left()), work(stubborn=stubborn)))
        await asyncio.sleep(0.01)
        left_event.set() if leaves else task.cancel()
        try:
            return await task
        except HttpError as error:
            return error.status
        except asyncio.CancelledError:
            return "cancelled"
        finally:
            left_event.clear()

    async def main() -> None:
        assert await send_request(stubborn=False, leaves=True) == 499
        assert await send_request(stubborn=True, leaves=True) == 499
        assert await send_request(stubborn=False, leaves=False) == "cancelled"
        assert len(statuses) == 3
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_answer_is_sent_before_the_query_is_closed(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is on its way before the server closes the query, counts it and logs it."""
    answered, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(server.service.live, "on_end", lambda _: waited.append(answered.wait(10)))
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json={"model": "llm", "messages": [{"role": "user", "content": "x"}]})
        answered.set()
    assert reply.status_code == 200
    until(lambda: waited)
    assert waited == [True]


def test_startup_objects_are_frozen_for_the_garbage_collector() -> None:
    """A look through all that frameworks load takes as long as many answers, and everybody waits for it."""
    seen: list[int] = []
    settings = ServerSettings.model_validate({"port": 0, "log": "off"})

    def ready() -> None:
        seen.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    before = gc.get_freeze_count()
    with EnginePool.local(fake_engines()) as pool, listening(settings) as bound:
        run(Service(pool, settings, {}), MemoryStore(), bound, ready)
    assert seen[0] > before + 10_000
    assert gc.get_freeze_count() <= before


def test_too_large_body_gets_413(server: RunningServer) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    with server.client() as http:
        assert http.post("/v1/chat/completions", content=b" " * 30_000).status_code == 413
        reply = http.post("/v1/chat/completions", content=parts(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 413
    assert "larger than 20000 bytes" in reply.json()["error"]["message"]


def test_body_of_another_content_type_gets_400(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/chat/completions", content='{"model": "llm"}', headers={"Content-Type": "text/plain"})
    assert reply.status_code == 400


def test_metrics_are_in_prometheus_format(server: RunningServer) -> None:
    with server.client() as http:
        http.post("/v1/chat/completions", json=CHAT)
        text = http.get("/metrics").text
    assert 'teola_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert 'teola_queries_accepted_total{app="llm"}' in text
    assert 'teola_primitives_total{app="llm"' in text
    assert 'teola_engine_running{engine="llm"}' in text


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_cancels_the_query(stream: bool) -> None:
    engine = slow_llm()
    with running_server(EnginePool.local([engine])) as server:
        with server.client() as http:
            if stream:
                with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post("/v1/chat/completions", json=CHAT, timeout=0.3)
        until(lambda: not engine.load().requests and not server.service.live.running)
        assert server.service.live.ended_queries[-1].status == "cancelled"
        assert server.service.admission.running == 0


def test_running_requests_finish_before_the_server_stops() -> None:
    with (
        running_server(EnginePool.local([slow_llm(0.01)])) as server,
        chat_during_shutdown(server, {**CHAT, "max_tokens": 100}),
    ):
        pass


def test_internal_error_shows_only_its_request_id(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(type(server.service.models["llm"]), "answer", broken)
    with caplog.at_level(logging.ERROR, "teola_plugin.server"), server.client() as http:
        reply = http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "seen"})
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert "seen" in reply.json()["error"]["message"]
    assert "seen" in caplog.text
    assert server.service.admission.running == 0


def test_failing_engine_is_reported_in_the_stream_or_status() -> None:
    from teola_plugin.engines.fake import Faults

    engine = slow_llm(0.01)
    engine.faults = Faults(die_after=0)
    with running_server(EnginePool.local([engine])) as server, server.client() as http:
        reply = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert reply.status_code in (502, 503) or "error" in reply.text
        assert server.service.admission.running == 0


# ------------------------------------------------------------ the command


POOL = "engines:\n  llm: {kind: fake}\n  embedder: {kind: fake}\nserver: {port: 0, store: memory}\n"


def test_serve_command_runs_until_sigterm(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(POOL)
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        hello = process.stdout.readline()
        url = hello.split()[-1]
        try:
            assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
            assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, trust_env=False).status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "route=/v1/chat/completions status=200" in errors
    assert "hello" not in errors  # of what was asked, nothing is logged


def test_json_log_setting_makes_every_line_json(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(POOL.replace("store: memory", "store: memory, log: json"))
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        try:
            httpx.post(f"{url}/v1/chat/completions", json=CHAT, trust_env=False)
            httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "model": "nowhere"}, trust_env=False)
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
    lines_ = [json.loads(line) for line in errors.splitlines()]
    assert [one["status"] for one in lines_] == [200, 404]
    assert lines_[0]["query"].startswith("query_") and lines_[0]["request"].startswith("req_")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("server: {host: 0.0.0.0}", "teola key"),
        ("server: {prot: 1}", "line 2: server.prot: there is no such setting"),
        ("apps: {llm: {object: 'a:b'}}", "llm is an app and an engine"),
        ("apps: {rag: {object: 'nowhere'}}", "apps.rag.object"),
        ("apps: {rag: {object: 'no_such_module:chain'}}", "no_such_module"),
        ("server: {certificate: a.pem, private_key: b.pem}", "a.pem"),
        ("server: {keys: [{name: a, hash: 'plain'}]}", "hash"),
    ],
)
def test_invalid_settings_file_is_reported(tmp_path: Path, capsys: Any, setting: str, message: str) -> None:
    (tmp_path / "pool.yaml").write_text(f"engines: {{llm: {{kind: fake}}}}\n{setting}\n")
    assert main(["serve", str(tmp_path / "pool.yaml"), "--port", "0"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "'plain'" not in errors


def test_occupied_port_is_reported(tmp_path: Path, capsys: Any, server: RunningServer) -> None:
    (tmp_path / "pool.yaml").write_text("engines: {llm: {kind: fake}}\n")
    assert main(["serve", str(tmp_path / "pool.yaml"), "--port", server.url.rpartition(":")[2]]) == 1
    assert "--port" in capsys.readouterr().err


def test_service_file_is_also_a_pool_file(tmp_path: Path) -> None:
    from teola_plugin.cluster.config import PoolConfig

    (tmp_path / "pool.yaml").write_text(POOL)
    assert list(PoolConfig.read(tmp_path / "pool.yaml").engines) == ["llm", "embedder"]


def test_missing_server_extra_names_the_install_command(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    (tmp_path / "pool.yaml").write_text(POOL)
    assert main(["serve", str(tmp_path / "pool.yaml")]) == 1
    assert "pip install '.[server]'" in capsys.readouterr().err


def test_importing_the_settings_needs_no_server_packages() -> None:
    look = "print([m for m in ('fastapi', 'uvicorn', 'ray') if m in sys.modules])"
    code = f"import sys, teola_plugin.server.settings; {look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
