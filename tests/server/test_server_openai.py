"""Tests of OpenAI's protocol on engines of the pool, by the official client and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.service import RunningServer, running_server

from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt, Sampling

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


def chat_body(content: Any, **more: Any) -> dict[str, Any]:
    """Return the body of a chat of one message."""
    return {"model": "llm", "messages": [{"role": "user", "content": content}], **more}


def answer(prompt: Prompt, sampling: Sampling) -> str:
    """Return what the tests' LLM writes: a call where it may call, JSON where it must, else words of its own prompt."""
    if prompt.tools and "call" in prompt.flat():
        return f"Let me see. <tool_call>{CALL}</tool_call>"
    if sampling.json_schema:
        return json.dumps({"city": "Oslo", "people": 7})
    if prompt.messages:
        return "you said: " + " | ".join(m.content for m in prompt.messages if m.role != "assistant")
    return f"and then {prompt.text}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    profile = replace(profiles.noop()["llm"], prefix_caching=True)
    pool = EnginePool.local([FakeLLM("llm", profile, answer=answer), FakeEmbedder(), FakeReranker()])
    with running_server(pool) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with server.openai() as client:
        yield client


def test_engines_are_listed_as_models(client: Any) -> None:
    assert sorted(m.id for m in client.models.list()) == ["embedder", "llm", "reranker"]
    assert client.models.retrieve("llm").owned_by == "teola"


def test_chat_has_text_usage_and_finish_reason(client: Any) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    reply = client.chat.completions.create(model="llm", messages=messages)
    [choice] = reply.choices
    assert choice.message.content == "you said: be kind | hi"
    assert choice.finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 0
    second = client.chat.completions.create(model="llm", messages=[{"role": "user", "content": "hi " * 200}])
    second = client.chat.completions.create(model="llm", messages=[{"role": "user", "content": "hi " * 200}])
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_streamed_chat_equals_whole_chat(client: Any) -> None:
    body: dict[str, Any] = {"model": "llm", "messages": [{"role": "user", "content": "a b c d e f"}]}
    text = client.chat.completions.create(**body).choices[0].message.content
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert len(chunks) > 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert all(c.usage is None for c in chunks)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


def test_several_choices_are_answered_and_streamed(client: Any) -> None:
    body: dict[str, Any] = {"model": "llm", "messages": [{"role": "user", "content": "x"}], "n": 3}
    assert [c.message.content for c in client.chat.completions.create(**body).choices] == ["you said: x"] * 3
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {"you said: x"}


def test_cut_answer_has_finish_reason_length(client: Any) -> None:
    reply = client.chat.completions.create(
        model="llm", messages=[{"role": "user", "content": "long " * 9}], max_completion_tokens=2
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 2


def test_tool_calls_and_results_round_trip(client: Any) -> None:
    body: dict[str, Any] = {"model": "llm", "messages": [{"role": "user", "content": "call"}], "tools": [TOOL]}
    message = client.chat.completions.create(**body).choices[0]
    assert message.finish_reason == "tool_calls"
    assert message.message.content == "Let me see."
    [call] = message.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Let me see."
    [tool_calls] = [c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls]
    assert tool_calls[0].function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    done = [*body["messages"], message.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert "rain" in client.chat.completions.create(model="llm", messages=done).choices[0].message.content


def test_required_tool_call_follows_its_schema(server: RunningServer, client: Any) -> None:
    seen: list[Sampling] = []
    engine: Any = server.pool.engine("llm")
    before = engine._answer
    engine._answer = lambda prompt, sampling: seen.append(sampling) or CALL
    try:
        reply = client.chat.completions.create(
            model="llm", messages=[{"role": "user", "content": "?"}], tools=[TOOL], tool_choice="required"
        )
    finally:
        engine._answer = before
    assert reply.choices[0].message.tool_calls[0].function.name == "weather"
    assert json.loads(seen[0].json_schema)["properties"]["name"] == {"enum": ["weather"]}


def test_json_schema_answer_is_parsed_by_the_client(client: Any) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        people: int

    reply = client.chat.completions.parse(
        model="llm", messages=[{"role": "user", "content": "?"}], response_format=City
    )
    assert reply.choices[0].message.parsed == City(city="Oslo", people=7)


def test_completions_answer_several_prompts(client: Any) -> None:
    reply = client.completions.create(model="llm", prompt=["one", "two"], n=2, max_tokens=50)
    assert [c.text for c in reply.choices] == ["and then one"] * 2 + ["and then two"] * 2
    chunks = list(client.completions.create(model="llm", prompt="one", stream=True, max_tokens=50))
    assert "".join(c.choices[0].text for c in chunks) == "and then one"
    assert len(client.completions.create(model="llm", prompt="one " * 30).choices[0].text) < 100  # 16 tokens


def test_embeddings_have_base64_and_float_form(server: RunningServer, client: Any) -> None:
    reply = client.embeddings.create(model="embedder", input=["a cow", "a sheep"])  # comes as base64
    plain = client.embeddings.create(model="embedder", input="a cow", encoding_format="float")
    assert reply.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert len(reply.data) == 2
    assert reply.usage.total_tokens > 0


def test_rerank_returns_top_documents(server: RunningServer) -> None:
    body = {"model": "reranker", "query": "red cow", "documents": ["a sheep", {"text": "a red cow"}, "a cow"]}
    with server.client() as http:
        reply = http.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": True}).json()
    assert [one["index"] for one in reply["results"]] == [1, 2]
    assert reply["results"][0]["document"] == {"text": "a red cow"}
    assert reply["results"][0]["relevance_score"] > reply["results"][1]["relevance_score"]


def test_responses_answer_text_and_history(client: Any) -> None:
    reply = client.responses.create(model="llm", instructions="be kind", input="hi")
    assert reply.output_text == "you said: be kind | hi"
    assert reply.status == "completed"
    assert reply.usage.total_tokens > 0
    turns: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    turns += [{"role": "assistant", "content": "b"}]
    assert client.responses.create(model="llm", input=[*turns, {"role": "user", "content": "c"}]).output_text.endswith(
        "a | c"
    )


def test_streamed_responses_equal_the_final_one(client: Any) -> None:
    with client.responses.stream(model="llm", input="a b c d") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "you said: a b c d"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == final.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [e.sequence_number for e in events] == sorted(e.sequence_number for e in events)


def test_responses_call_tools_and_take_results(client: Any) -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    reply = client.responses.create(model="llm", input="call", tools=[tool])
    [call] = [item for item in reply.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Oslo"}
    after = [
        {"role": "user", "content": "thanks"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert "rain" in client.responses.create(model="llm", input=after).output_text
    with client.responses.stream(model="llm", input="call", tools=[tool]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]


# ------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, 404, "nobody"),
        ("chat/completions", {"model": "embedder", "messages": [{"role": "user", "content": "x"}]}, 400, "llm"),
        ("chat/completions", {"model": "llm", "messages": []}, 400, "messages"),
        ("chat/completions", {"model": "llm", "messages": [{"role": "king", "content": "x"}]}, 400, "role"),
        (
            "chat/completions",
            chat_body("x", logprobs=True),
            400,
            "logprobs",
        ),
        (
            "chat/completions",
            chat_body("x", temprature=1),
            400,
            "temprature",
        ),
        ("chat/completions", chat_body("\ud800"), 400, "surrogate"),
        (
            "chat/completions",
            {
                "model": "llm",
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            },
            400,
            "image_url",
        ),
        ("completions", {"model": "llm", "prompt": [1, 2]}, 400, "tokens"),
        ("embeddings", {"model": "embedder", "input": []}, 400, "empty"),
        ("embeddings", {"model": "embedder", "input": "x", "dimensions": 3}, 400, "dimensions"),
        ("rerank", {"model": "reranker", "query": "x", "documents": ["y"] * 3000}, 400, "3000"),
        ("responses", {"model": "llm", "input": "x", "previous_response_id": "resp_1"}, 400, "conversation"),
        ("responses", {"model": "llm", "input": [{"type": "computer_call"}]}, 400, "computer_call"),
        ("nowhere", {}, 404, "openapi"),
    ],
)
def test_errors_follow_the_openai_protocol(
    server: RunningServer, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    with server.client() as http:
        reply = http.post(f"/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert message in error["message"]


def test_malformed_json_body_gets_400(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/chat/completions", content="{", headers={"Content-Type": "application/json"})
        deep = http.post("/v1/chat/completions", content="[" * 100_000, headers={"Content-Type": "application/json"})
    assert (reply.status_code, deep.status_code) == (400, 400)


def test_too_long_prompt_gets_400(server: RunningServer) -> None:
    engine = FakeLLM("llm")
    engine._profile = replace(engine.profile, max_request_size=10)
    with running_server(EnginePool.local([engine])) as small, small.client() as http:
        body = {"model": "llm", "messages": [{"role": "user", "content": "word " * 50}]}
        for request_body in (body, {**body, "stream": True}):
            reply = http.post("/v1/chat/completions", json=request_body)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "context_length_exceeded"
