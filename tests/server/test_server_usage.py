"""Tests of the token usage in answers of apps: of the pool's calls, and of other models if they report it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import openai_stub, telling_models
from support.service import RunningServer, key, running_server, until
from support.telling_models import TOOK

from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool
from teola_plugin.server.traces import whole_trace

OWN = {  # calls of models outside the pool that tell
    "two_own": 2, "streams_own": 1, "silent": 0, "passes_on": 0, "passes_on_own": 1, "fails_first": 1, "in_a_graph": 2,
    "two_prompts": 2,
}  # fmt: skip
ONE = key("one", tokens_per_minute=100_000)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    apps = {name: {"object": f"support.telling_models:{name}"} for name in OWN}
    with running_server(apps=apps, keys=[ONE.settings], goal=None) as server:
        yield server


def usage_of(server: RunningServer, name: str, *, stream: bool) -> tuple[dict[str, Any], str]:
    """Return the usage that an answer has, and its query's id."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"model": name, "messages": [{"role": "user", "content": "goats"}], **options}
    with server.client(ONE.secret) as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    line = [line for line in response.text.splitlines() if '"usage":{' in line][-1].removeprefix("data: ")
    usage: dict[str, Any] = json.loads(line)["usage"]
    return usage, response.headers["x-teola-query"]


def of_the_pool(server: RunningServer, id: str) -> int:
    """Return the tokens of the calls that reached an engine, from the query's trace."""
    until(lambda: server.service.live.find("one", id))
    live = server.service.live.find("one", id)
    assert live is not None
    until(lambda: whole_trace(server.pool.runtime.recorder.get, live) is not None)
    trace = whole_trace(server.pool.runtime.recorder.get, live)
    assert trace is not None
    return sum(span.tokens + span.written for span in trace.spans if span.engine == "llm" and span.done is not None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_models_outside_the_pool_are_counted_once(server: RunningServer, name: str, stream: bool) -> None:
    usage, id = usage_of(server, name, stream=stream)
    prompt, cached, answer = TOOK
    assert usage["total_tokens"] == of_the_pool(server, id) + OWN[name] * (prompt + answer)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= OWN[name] * cached
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_tokens_of_outside_models_are_charged_to_the_key() -> None:
    few = key("few", tokens_per_minute=60)
    apps = {"streams_own": {"object": "support.telling_models:streams_own"}}
    with running_server(apps=apps, keys=[few.settings]) as server, server.client(few.secret) as http:
        body = {"model": "streams_own", "messages": [{"role": "user", "content": "goats"}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert http.post("/v1/chat/completions", json=body).json()["error"]["code"] == "tokens_limit"


@pytest.mark.parametrize("stream", [False, True])
def test_model_bound_to_an_engine_is_counted_once(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The model's messages report the usage as well, because its own code reads the engine's reply."""
    openai = pytest.importorskip("langchain_openai")
    with openai_stub.openai_stub() as stub:
        own_model = openai.ChatOpenAI(
            base_url=stub.base_url, api_key="none", model=openai_stub.MODEL, max_retries=0, stream_usage=True
        )
        monkeypatch.setattr(telling_models, "bound", own_model, raising=False)
        path = "support.telling_models:bound"
        apps = {"bound": {"object": path, "bind": {path: "llm"}}}
        engine = OpenAIServer("llm", base_url=stub.base_url, model=openai_stub.MODEL)
        with running_server(EnginePool.local([engine]), apps=apps, keys=[ONE.settings]) as server:
            usage, _ = usage_of(server, "bound", stream=stream)
            [(_, body)] = stub.requests
    assert usage["prompt_tokens"] == 5, body
