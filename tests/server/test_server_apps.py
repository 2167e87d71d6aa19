"""Tests of apps as models of the API: their answers are those that they give without the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support import served_apps
from support.service import RunningServer, running_server, until

from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import RegistrationError
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.pool import EnginePool
from teola_plugin.server.traces import whole_trace

NAMES = (
    "chain", "two_keys", "model", "graph", "query_engine", "streaming_engine", "chat_engine", "workflow",
    "template", "failing", "waiting",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    apps = {name: {"object": f"support.served_apps:{name}"} for name in NAMES}
    apps["talking_graph"] = {"object": "support.served_apps:graph", "stream_node": "answer"}
    with running_server(apps=apps, goal=None) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def plain() -> Iterator[EnginePool]:
    """Return another pool of the same engines, for the same objects without the server."""
    with EnginePool.local(fake_engines()) as pool:
        yield pool


def chat_body(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": text}], **more}


def streamed(client: Any, name: str, text: str) -> tuple[list[str], str]:
    pieces, reason = [], ""
    for chunk in client.chat.completions.create(**chat_body(name, text), stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
        reason = chunk.choices[0].finish_reason or reason
    return [piece for piece in pieces if piece], reason


def text_of(client: Any, name: str, text: str, **more: Any) -> str:
    reply: str = client.chat.completions.create(**chat_body(name, text, **more)).choices[0].message.content
    return reply


def expected(name: str, pool: EnginePool) -> str:
    """Return the original's answer to "cows"."""
    obj = getattr(served_apps, name)(pool)
    match name:
        case "chain":
            return str(obj.invoke({"topic": "cows"}))
        case "model":
            return str(obj.invoke([("user", "cows")]).content)
        case "graph":
            return str(asyncio.run(obj.ainvoke({"messages": [("user", "cows")]}))["messages"][-1].content)
        case "query_engine" | "streaming_engine":
            return str(obj.query("cows"))
        case "chat_engine":
            return str(obj.chat("cows"))

    async def run() -> str:
        return str(await obj.run(input="cows"))

    return asyncio.run(run())


@pytest.mark.parametrize(
    "name", ["chain", "model", "graph", "query_engine", "streaming_engine", "chat_engine", "workflow"]
)
def test_served_app_answers_as_the_original(client: Any, plain: EnginePool, name: str) -> None:
    wanted = expected(name, plain)
    assert wanted
    assert text_of(client, name, "cows") == wanted
    pieces, reason = streamed(client, name, "cows")
    assert "".join(pieces) == wanted
    assert reason == "stop"
    assert client.responses.create(model=name, input="cows").output_text == wanted


def test_apps_are_listed_as_models(client: Any) -> None:
    kinds = {m.id: m.kind for m in client.models.list()}
    assert kinds["chain"] == "app"
    assert kinds["llm"] == "chat"


def test_streaming_apps_answer_in_several_chunks(client: Any) -> None:
    for name in ("chain", "streaming_engine", "chat_engine", "talking_graph"):
        assert len(streamed(client, name, "cows")[0]) > 2, name
    assert "".join(streamed(client, "talking_graph", "cows")[0]) == text_of(client, "graph", "cows")


def test_workflow_template_is_served_as_an_app(client: Any, plain: EnginePool) -> None:
    deployed = served_apps.template().deploy(plain)
    expected = deployed.run({"topic": "cows"}).answer
    assert text_of(client, "template", "cows") == expected
    pieces, _ = streamed(client, "template", "cows")
    assert "".join(pieces) == expected
    assert len(pieces) > 2
    short = {"inputs": {"topic": "cows"}, "config": {"poem.max_tokens": 2}}
    cut = deployed.run({"topic": "cows"}, {"poem.max_tokens": 2}).answer
    assert text_of(client, "template", "-", extra_body={"metadata": short}) == cut != expected


def test_app_inputs_are_read_from_metadata(client: Any, plain: EnginePool) -> None:
    inputs = {"one": "salt", "other": "pepper"}
    expected = served_apps.two_keys(plain).invoke(inputs).content
    assert text_of(client, "two_keys", "-", metadata={"inputs": json.dumps(inputs)}) == expected
    assert text_of(client, "two_keys", "-", extra_body={"metadata": {"inputs": inputs}}) == expected


def test_app_gets_the_message_history(client: Any, plain: EnginePool) -> None:
    turns = [("user", "cows"), ("assistant", "eat grass"), ("user", "and sheep")]
    expected = served_apps.model(plain).invoke(turns).content
    messages = [{"role": role, "content": text} for role, text in turns]
    assert client.chat.completions.create(model="model", messages=messages).choices[0].message.content == expected


def test_answer_of_query_engine_has_sources(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=chat_body("query_engine", "what do cows eat")).json()
    assert "grass" in reply["teola"]["sources"][0]["text"]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("two_keys", {}, "metadata.inputs"),
        ("chain", {"n": 2}, "one answer"),
        ("chain", {"tools": [{"type": "function", "function": {"name": "x"}}]}, "takes no tools"),
        ("chain", {"metadata": {"inputs": "{"}}, "not JSON"),
    ],
)
def test_invalid_app_inputs_get_400(server: RunningServer, name: str, more: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        with server.client() as http:
            reply = http.post("/v1/chat/completions", json=chat_body(name, "x", stream=stream, **more))
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]


def test_exception_of_an_app_is_logged_and_not_sent(server: RunningServer, caplog: Any) -> None:
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=chat_body("failing", "x"))
        late = http.post("/v1/chat/completions", json=chat_body("failing", "x", stream=True))
    assert (reply.status_code, late.status_code) == (500, 500)
    assert "secret" not in reply.text + late.text
    assert "secret of x" in caplog.text


def test_deadline_stops_an_app(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=chat_body("waiting", "x"), headers={"X-Teola-Deadline": "0.2"})
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"


def test_app_runs_as_one_query(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=chat_body("chain", "hens"), headers={"X-Teola-App": "poems"})
    live = server.service.live.find("anonymous", reply.headers["x-teola-query"])
    assert live is not None
    until(lambda: any(t.query_id == live.trace for t in server.pool.traces))  # told after the answer
    [trace] = [t for t in server.pool.traces if t.query_id == live.trace]
    assert trace.app == "poems"
    assert len([s for s in trace.spans if s.kind in ("PREFILLING", "FULL_PREFILLING", "GENERATION")]) >= 2
    assert any(s.kind == "PARTIAL_PREFILLING" for s in trace.spans) or len(trace.spans) >= 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["chain", "model", "graph", "query_engine", "chat_engine", "workflow", "template"])
def test_usage_and_trace_of_an_app_agree(server: RunningServer, name: str, stream: bool) -> None:
    """Tokens in its answer; the primitives that ran, on which engine, in the trace of its query."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with server.client() as http:
        response = http.post("/v1/chat/completions", json=chat_body(name, "goats", **options))
    usage_line = [line for line in response.text.splitlines() if '"usage":{' in line][-1].removeprefix("data: ")
    usage = json.loads(usage_line)["usage"]
    id = response.headers["x-teola-query"]
    until(lambda: server.service.live.find("anonymous", id))  # it ends on the server's own thread
    live = server.service.live.find("anonymous", id)
    assert live is not None
    until(lambda: whole_trace(server.pool.runtime.recorder.get, live) is not None)
    trace = whole_trace(server.pool.runtime.recorder.get, live)
    assert trace is not None
    ran = [span for span in trace.spans if span.engine == "llm" and span.done is not None]
    assert ran
    assert usage["total_tokens"] == sum(span.tokens + span.written for span in ran)
    assert usage["completion_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_traces_of_nested_queries_are_merged() -> None:
    """One of them is the trace; several stand beside one another, under names of their own."""
    spans = [Span("q", "a", name, "TOOL", at, engine="x", parents=("one",)) for at, name in enumerate(("one", "two"))]
    inner = [QueryTrace(f"q{i}", "a", 1.0, 2.0, tuple(spans)) for i in range(2)]
    app_trace = QueryTrace("own", "app", 0.0, 3.0)
    live: Any = SimpleNamespace(trace="own", traces=["q0"])
    traces_by_id = {trace.query_id: trace for trace in (app_trace, *inner)}
    one = whole_trace(traces_by_id.get, live)
    assert one is not None
    assert (one.query_id, one.app, one.seconds, one.spans) == ("own", "app", 3.0, inner[0].spans)
    live.traces.append("q1")
    both = whole_trace(traces_by_id.get, live)
    assert both is not None
    assert [(s.primitive, s.parents) for s in both.spans] == [
        ("1/one", ("1/one",)), ("2/one", ("2/one",)), ("1/two", ("1/one",)), ("2/two", ("2/one",)),
    ]  # fmt: skip
    live.trace = "gone"
    assert whole_trace(traces_by_id.get, live) is None


@pytest.mark.parametrize("name", ["NO_APP", "nothing"])
def test_invalid_app_object_raises_with_a_hint(name: str) -> None:
    with (
        pytest.raises((RegistrationError, Exception), match=r"Next: "),
        running_server(apps={"x": {"object": f"support.served_apps:{name}"}}),
    ):
        pass
