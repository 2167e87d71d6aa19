"""Tests of an engine that is an OpenAI-compatible server: chats are forwarded unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.api_server import MODEL, ApiServer
from support.service import RunningServer, running_server

from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool


@pytest.fixture(scope="module")
def server(vllm_api: ApiServer) -> Iterator[RunningServer]:
    with running_server(EnginePool.local([OpenAIServer("llm", base_url=vllm_api.base_url, model=MODEL)])) as server:
        yield server


@pytest.mark.vllm
def test_carried_answers_equal_those_of_the_server(server: RunningServer, vllm_api: ApiServer) -> None:
    import openai

    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What do cows eat?"}],
        "temperature": 1.0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "seed": 1,
    }
    with openai.OpenAI(base_url=vllm_api.base_url, api_key="none") as direct, server.openai() as ours:
        expected = direct.chat.completions.create(model=MODEL, **body)
        reply = ours.chat.completions.create(model="llm", **body)
        assert [c.to_dict() for c in reply.choices] == [c.to_dict() for c in expected.choices]
        assert reply.model == "llm"
        assert reply.usage.total_tokens == expected.usage.total_tokens  # type: ignore[union-attr]
        texts = {0: "", 1: ""}
        for chunk in ours.chat.completions.create(model="llm", stream=True, **body):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert list(texts.values()) == [c.message.content for c in expected.choices]
        greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "messages": body["messages"]}
        expected = direct.chat.completions.create(model=MODEL, **greedy)
        answer = ours.responses.create(model="llm", input="What do cows eat?", temperature=0, max_output_tokens=8)
        assert answer.output_text == expected.choices[0].message.content
        text = ours.completions.create(model="llm", prompt="Cows eat", temperature=0, max_tokens=4)
        assert (
            text.choices[0].text
            == direct.completions.create(model=MODEL, prompt="Cows eat", temperature=0, max_tokens=4).choices[0].text
        )


@pytest.mark.vllm
def test_refusal_of_the_carried_server_is_400(server: RunningServer) -> None:
    with server.client() as http:
        body = {"model": "llm", "messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}
        reply = http.post("/v1/chat/completions", json=body)
        late = http.post("/v1/chat/completions", json={**body, "stream": True})
    assert (reply.status_code, late.status_code) == (400, 400)
    assert "logprobs" in reply.json()["error"]["message"]


@pytest.mark.vllm
def test_messages_protocol_answers_as_the_carried_server(server: RunningServer, vllm_api: ApiServer) -> None:
    import anthropic
    import openai

    messages: Any = [{"role": "user", "content": "What do cows eat?"}]
    with openai.OpenAI(base_url=vllm_api.base_url, api_key="none") as direct:
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
        expected = direct.chat.completions.create(**body)
    text = expected.choices[0].message.content or ""
    stop = text.split()[2]
    http_client = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(base_url=server.url, api_key="none", http_client=http_client) as client:
        request: dict[str, Any] = {"model": "llm", "messages": messages, "extra_body": {"temperature": 0}}
        message = client.messages.create(**request, max_tokens=8)
        with client.messages.stream(**request, max_tokens=8, stop_sequences=[stop]) as stream:
            stopped = stream.get_final_message()
        count = client.messages.count_tokens(model="llm", messages=messages)

    assert expected.usage is not None
    assert [block.text for block in message.content] == [text]
    assert message.usage.output_tokens == expected.usage.completion_tokens
    assert count.input_tokens == expected.usage.prompt_tokens
    assert stopped.stop_sequence == stop
    assert "".join(block.text for block in stopped.content) == text[: text.index(stop)]
