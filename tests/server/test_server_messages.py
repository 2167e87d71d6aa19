"""Tests of Anthropic's protocol on engines and apps: with its own client, `ChatAnthropic` and plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.service import RunningServer, key, running_server, slow_llm, until

from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, Faults
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt, Sampling
from teola_plugin.server.errors import HttpError, to_anthropic
from teola_plugin.server.wire.answers import Answer, Delta, ToolCall, Usage
from teola_plugin.server.wire.messages import MessagesRequest, MessageWriter

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "default": None}},
        "required": ["city"],
    },
}
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
HELLO: list[Any] = [{"role": "user", "content": "hi there"}]
PIXEL = "iVBORw0KGgo="


def write_answer(prompt: Prompt, sampling: Sampling) -> str:
    """Return what the tests' LLM writes: a call where it may, JSON where it must, else the messages that it gets."""
    if prompt.tools and "call" in prompt.flat():
        return f"Let me see. <tool_call>{CALL}</tool_call>"
    if sampling.json_schema:
        return CALL if '"arguments"' in sampling.json_schema else json.dumps({"city": "Oslo"})
    return " | ".join(f"{message.role}: {message.content}" for message in prompt.messages)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    profile = replace(profiles.noop()["llm"], prefix_caching=True)
    apps = {name: {"object": f"support.served_apps:{name}"} for name in ("chain", "graph", "echoing_graph", "failing")}
    with running_server(
        EnginePool.local([FakeLLM("llm", profile, answer=write_answer), FakeEmbedder()]), apps=apps
    ) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(server.url) as client:
        yield client


def anthropic_client(url: str, **options: Any) -> anthropic.Anthropic:
    http_client = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=url, max_retries=0, http_client=http_client, **{"api_key": "none", **options})


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def events_of(server: RunningServer, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and data of each event of a stream, as they are on the wire."""
    with server.client() as http:
        reply = http.post("/v1/messages", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [
        (lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: ")))
        for lines in (event.split("\n") for event in reply.text.strip().split("\n\n"))
    ]


# ------------------------------------------------------------ messages


def test_message_has_the_answer_and_its_usage(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="llm", max_tokens=50, system="be kind", messages=HELLO)

    assert text_of(message) == "system: be kind | user: hi there"
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0
    assert message._request_id is not None


def test_cached_tokens_are_not_among_the_input_tokens(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "long " * 200}]
    first = client.messages.create(model="llm", max_tokens=5, messages=messages).usage

    second = client.messages.create(model="llm", max_tokens=5, messages=messages).usage

    assert second.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_whole_conversation_reaches_the_engine(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo", "day": None}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    system: list[Any] = [{"type": "text", "text": "s1 "}, {"type": "text", "text": "s2"}]

    message = client.messages.create(model="llm", max_tokens=200, system=system, messages=messages)

    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo", "day": None}})
    texts = ["system: s1 s2", "user: a", f"assistant: b\n{call}", "tool: rain", "tool: error", "user: c"]
    assert text_of(message) == " | ".join(texts)


def test_cut_answer_has_stop_reason_max_tokens(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="llm", max_tokens=2, messages=HELLO)

    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 2


def test_stop_sequence_that_ended_the_answer_is_named(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "one STOP two"}]

    message = client.messages.create(model="llm", max_tokens=50, messages=messages, stop_sequences=["never", "STOP"])

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert text_of(message) == "user: one "
    with client.messages.stream(model="llm", max_tokens=50, messages=messages, stop_sequences=["STOP"]) as stream:
        assert stream.get_final_message().stop_sequence == "STOP"


def test_sampling_parameters_reach_the_engine(server: RunningServer, client: anthropic.Anthropic) -> None:
    engine: Any = server.pool.engine("llm")
    original, samplings = engine._answer, list[Sampling]()
    engine._answer = lambda prompt, sampling: samplings.append(sampling) or "x"
    try:
        parameters = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 3}
        client.messages.create(
            model="llm", max_tokens=9, messages=HELLO, stop_sequences=["a", "b"], extra_body=parameters
        )
        client.messages.create(model="llm", max_tokens=9, messages=HELLO)
    finally:
        engine._answer = original

    sampling, default = samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.25, 0.5, 7, 3)
    assert (sampling.max_tokens, sampling.stop) == (9, ("a", "b"))
    assert default.temperature == 1.0


def test_json_schema_is_followed(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}

    message = client.messages.create(
        model="llm",
        max_tokens=50,
        messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )

    assert json.loads(text_of(message)) == {"city": "Oslo"}


def test_document_is_read_by_the_server(client: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "text/plain", "data": base64.b64encode(b"Lambs eat oats.").decode()}
    blocks = [
        {"type": "document", "title": "lambs", "source": source},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Cows eat grass."}},
        {"type": "document", "source": {"type": "content", "content": "Owls eat mice."}},
    ]
    messages: list[Any] = [{"role": "user", "content": blocks}]

    text = text_of(client.messages.create(model="llm", max_tokens=200, messages=messages))

    assert '<document name="lambs">\nLambs eat oats.' in text
    assert "Cows eat grass." in text
    assert "Owls eat mice." in text


# ------------------------------------------------------------ streams


def test_stream_has_the_events_of_the_protocol_in_their_order(server: RunningServer) -> None:
    body = {"model": "llm", "max_tokens": 50, "messages": HELLO}

    events = events_of(server, body)

    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(data["type"] == name for name, data in events)
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == "user: hi there"
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_streamed_message_equals_whole_message(client: anthropic.Anthropic) -> None:
    for text in ("hi there", "call"):
        messages: list[Any] = [{"role": "user", "content": text}]
        body: dict[str, Any] = {"model": "llm", "max_tokens": 60, "messages": messages, "tools": [TOOL]}
        whole = client.messages.create(**body)

        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()

        assert text_of(streamed) == text_of(whole)
        assert [block.type for block in streamed.content] == [block.type for block in whole.content]
        assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        read = [one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (whole, streamed)]
        assert read[0] == read[1] > 0


async def test_async_anthropic_client_works(server: RunningServer) -> None:
    http_client = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0, http_client=http_client
    ) as client:
        message = await client.messages.create(model="llm", max_tokens=50, messages=HELLO)
        async with client.messages.stream(model="llm", max_tokens=50, messages=HELLO) as stream:
            texts = [text async for text in stream.text_stream]

    assert text_of(message) == "".join(texts) == "user: hi there"
    assert len(texts) > 2


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_cancels_its_request(stream: bool) -> None:
    with running_server(EnginePool.local([slow_llm()])) as server:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False)
        ) as client:
            reply = client.messages.create(model="llm", max_tokens=500, messages=HELLO, stream=stream)
            task = asyncio.ensure_future(reply)
            await asyncio.to_thread(until, lambda: server.service.live.running)
            if stream:
                await (await task).close()
            else:
                task.cancel()
            await asyncio.to_thread(until, lambda: not server.service.live.running)

        assert server.service.live.ended_queries[-1].status == "cancelled"


# ------------------------------------------------------------ tools


def test_tool_call_and_its_result_round_trip(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "call"}]
    message = client.messages.create(model="llm", max_tokens=60, messages=messages, tools=[TOOL])

    text, call = message.content
    assert (text.type, call.type, message.stop_reason) == ("text", "tool_use", "tool_use")
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert text_of(client.messages.create(model="llm", max_tokens=90, messages=messages)).endswith("tool: rain")


def test_streamed_tool_call_has_its_input(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "call"}]

    events = events_of(server, {"model": "llm", "max_tokens": 60, "messages": messages, "tools": [TOOL]})

    starts = [data for name, data in events if name == "content_block_start"]
    deltas = [data for name, data in events if name == "content_block_delta" and data["index"] == 1]
    stops = [data["index"] for name, data in events if name == "content_block_stop"]
    assert [data["index"] for data in starts] == stops == [0, 1]
    assert starts[1]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
    assert {data["delta"]["type"] for data in deltas} == {"input_json_delta"}
    assert json.loads("".join(data["delta"]["partial_json"] for data in deltas)) == {"city": "Oslo"}
    assert [name for name, _ in events].count("ping") == 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_required_tool_choice_gives_a_tool_call(client: anthropic.Anthropic, choice: Any) -> None:
    message = client.messages.create(model="llm", max_tokens=60, messages=HELLO, tools=[TOOL], tool_choice=choice)

    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"


def test_tool_choice_none_gives_no_tool_call(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "none"}

    message = client.messages.create(model="llm", max_tokens=60, messages=HELLO, tools=[TOOL], tool_choice=choice)

    assert text_of(message) == "user: hi there"


def test_malformed_tool_call_raises_unless_cut_by_length() -> None:
    writer = MessageWriter(MessagesRequest(model="llm", max_tokens=5, messages=HELLO), "req_1")
    call = ToolCall("t1", "weather", '{"city": "Os')

    cut = writer.to_json(Answer("", "length", Usage(3, 5), (call,)))

    assert (cut["content"], cut["stop_reason"]) == ([], "max_tokens")
    with pytest.raises(Exception, match="no JSON object"):
        writer.to_json(Answer("", "tool_calls", Usage(3, 5), (call,)))


def test_clients_loop_over_calls_of_tools(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    messages: list[Any] = [{"role": "user", "content": "call"}]
    runner = client.beta.messages.tool_runner(
        model="llm",
        max_tokens=90,
        messages=messages,
        tools=[weather],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        max_iterations=2,
    )

    turns = [[block.type for block in message.content] for message in runner]

    assert turns == [["text", "tool_use"], ["text", "tool_use"]]


def test_client_parses_answers_by_their_schema(client: anthropic.Anthropic) -> None:
    class City(pydantic.BaseModel):
        city: str

    message = client.messages.parse(model="llm", max_tokens=50, messages=HELLO, output_format=City)

    assert message.parsed_output == City(city="Oslo")


# ------------------------------------------------------------ counting, models


def test_count_of_tokens_is_that_of_the_message(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "llm", "system": "be kind", "messages": HELLO, "tools": [TOOL]}

    count = client.messages.count_tokens(**body).input_tokens

    usage = client.messages.create(**body, max_tokens=50).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_tokens_of_an_app_are_not_counted(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="writes its prompts itself"):
        client.messages.count_tokens(model="graph", messages=HELLO)


def test_model_list_follows_the_anthropic_protocol(server: RunningServer, client: anthropic.Anthropic) -> None:
    names = [model.id for model in client.models.list()]

    assert {"llm", "embedder", "graph"} <= set(names)
    assert client.models.retrieve("llm").display_name == "llm"
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")
    with server.client() as http:
        assert http.get("/v1/models").json()["object"] == "list"  # for clients of OpenAI as before


# ------------------------------------------------------------ apps


def test_app_answers_over_messages_protocol(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="chain", max_tokens=50, messages=[{"role": "user", "content": "cows"}])
    with client.messages.stream(model="chain", max_tokens=50, messages=[{"role": "user", "content": "cows"}]) as stream:
        streamed = stream.get_final_message()

    assert text_of(message) == text_of(streamed) != ""
    assert message.usage.output_tokens == streamed.usage.output_tokens > 0


def test_graph_gets_roles_calls_and_results(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "b"}]},
    ]

    message = client.messages.create(model="echoing_graph", max_tokens=5, messages=messages)

    human, answer, result = json.loads(text_of(message))
    assert human[:2] == ["human", "a"]
    assert answer[4] == [{"name": "look", "args": {"x": 1}, "id": "t1", "type": "tool_call"}]
    assert (result[0], result[1], result[3]) == ("tool", "b", "t1")


def test_input_of_an_app_is_read_from_metadata(client: anthropic.Anthropic) -> None:
    metadata: Any = {"inputs": json.dumps({"topic": "cows"}), "user_id": "u1"}

    message = client.messages.create(model="chain", max_tokens=50, messages=HELLO, metadata=metadata)

    assert text_of(message) == text_of(
        client.messages.create(model="chain", max_tokens=50, messages=[{"role": "user", "content": "cows"}])
    )


def test_exception_of_an_app_is_not_sent(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.InternalServerError) as raised:
        client.messages.create(model="failing", max_tokens=5, messages=HELLO)

    assert raised.value.status_code == 500
    assert raised.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert "ZeroDivisionError" not in str(raised.value)


# ------------------------------------------------------------ an OpenAI-compatible server


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("tools"):
            function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
            return {"content": "I see.", "tool_calls": [{"id": "t1", "type": "function", "function": function}]}
        return {"status": 429} if "refuse" in json.dumps(body) else {"content": "an answer"}

    with openai_stub(reply) as stub:
        yield stub


@pytest.fixture(scope="module")
def carried(stub: OpenAIStub) -> Iterator[RunningServer]:
    with running_server(EnginePool.local([OpenAIServer("llm", base_url=stub.base_url, model=MODEL)])) as server:
        yield server


def test_images_are_passed_to_a_server_that_takes_them(carried: RunningServer, stub: OpenAIStub) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]
    with anthropic_client(carried.url) as client:
        message = client.messages.create(
            model="llm", max_tokens=50, messages=messages, metadata={"user_id": "u1"}, stop_sequences=["x"]
        )

    assert text_of(message) == "an answer"
    body = stub.requests[-1][1]
    assert body["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            ],
        }
    ]
    assert (body["max_tokens"], body["stop"], body["user"]) == (50, ["x"], "u1")
    assert not {"metadata", "system", "stop_sequences", "tool_choice"} & set(body)


def test_tool_calls_of_a_carried_server_are_passed_on(carried: RunningServer, stub: OpenAIStub) -> None:
    body: dict[str, Any] = {"model": "llm", "max_tokens": 50, "messages": HELLO, "tools": [TOOL]}
    with anthropic_client(carried.url) as client:
        whole = client.messages.create(**body, tool_choice={"type": "any"})
        sent = stub.requests[-1][1]
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()

    for message in (whole, streamed):
        text, call = message.content
        assert (text.type, call.type) == ("text", "tool_use")
        assert (call.id, call.input, message.stop_reason) == ("t1", {"city": "Oslo"}, "tool_use")
    function = {"name": "weather", "description": "of a city", "parameters": TOOL["input_schema"]}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert sent["tool_choice"] == "required"


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_of_a_server_keeps_its_status(carried: RunningServer, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "refuse"}]
    with anthropic_client(carried.url) as client, pytest.raises(anthropic.RateLimitError) as raised:
        client.messages.create(model="llm", max_tokens=5, messages=messages, stream=stream)

    assert raised.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]


# ------------------------------------------------------------ what is wrong


def message_body(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "llm", "max_tokens": 5, "messages": HELLO, **changes}
    return {name: value for name, value in body.items() if value is not ...}


def with_block(**block: Any) -> dict[str, Any]:
    return message_body(messages=[{"role": "user", "content": [block]}])


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        (message_body(max_tokens=...), 400, "invalid_request_error", "max_tokens"),
        (message_body(max_tokens=0), 400, "invalid_request_error", "max_tokens"),
        (message_body(messages=[]), 400, "invalid_request_error", "messages"),
        (message_body(model="nobody"), 404, "not_found_error", "nobody"),
        (message_body(model="embedder"), 400, "invalid_request_error", "kind embedding"),
        (message_body(temperature=1.5), 400, "invalid_request_error", "temperature"),
        (message_body(max_completion_tokens=5), 400, "invalid_request_error", "max_completion_tokens"),
        (message_body(temprature=1), 400, "invalid_request_error", "temprature"),
        (message_body(thinking={"type": "enabled", "budget_tokens": 1024}), 400, "invalid_request_error", "thinking"),
        (
            message_body(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
            400,
            "invalid_request_error",
            "context_management",
        ),
        (message_body(mcp_servers=[{"type": "url"}]), 400, "invalid_request_error", "mcp_servers"),
        (message_body(tools=[{"type": "web_search_20250305"}]), 400, "invalid_request_error", "web_search"),
        (message_body(tools=[{"name": "x"}]), 400, "invalid_request_error", "input_schema"),
        (message_body(tools=[TOOL], tool_choice={"type": "some"}), 400, "invalid_request_error", "tool_choice"),
        (message_body(tool_choice={"type": "tool", "name": "x"}), 400, "invalid_request_error", "x"),
        (message_body(model="graph", tools=[TOOL]), 400, "invalid_request_error", "takes no tools"),
        (message_body(messages=[{"role": "king", "content": "x"}]), 400, "invalid_request_error", "messages.0.role"),
        (message_body(messages=[{"role": "user"}]), 400, "invalid_request_error", "messages.0.content"),
        (
            message_body(messages=[*HELLO, {"role": "assistant", "content": "and"}]),
            400,
            "invalid_request_error",
            "not continued",
        ),
        (with_block(**IMAGE), 400, "invalid_request_error", "takes text only"),
        (with_block(type="video"), 400, "invalid_request_error", "messages.0.content.0"),
        (with_block(type="tool_result", content="x"), 400, "invalid_request_error", "tool_use_id"),
        (with_block(type="text", text="\ud800"), 400, "invalid_request_error", "surrogate"),
        (
            with_block(type="document", source={"type": "text", "data": "x"}, citations={"enabled": True}),
            400,
            "invalid_request_error",
            "citations",
        ),
    ],
)
def test_errors_follow_the_anthropic_protocol(
    server: RunningServer, body: dict[str, Any], status: int, kind: str, text: str
) -> None:
    for stream in (False, True):
        with server.client() as http:
            content = json.dumps({**body, "stream": stream})
            reply = http.post("/v1/messages", content=content, headers={"Content-Type": "application/json"})
        error = reply.json()
        assert (reply.status_code, error["type"]) == (status, "error"), reply.text
        assert sorted(error) == ["error", "request_id", "type"]
        assert error["error"]["type"] == kind
        assert text in error["error"]["message"]
        assert error["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


def test_malformed_json_body_gets_400(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/messages", content="{", headers={"Content-Type": "application/json"})
        other_method = http.get("/v1/messages")

    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert (other_method.status_code, other_method.json()["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("status", "code", "expected", "kind"),
    [
        (401, None, 401, "authentication_error"),
        (403, None, 403, "permission_error"),
        (413, None, 413, "request_too_large"),
        (429, "rate_limit", 429, "rate_limit_error"),
        (429, "engine_overloaded", 529, "overloaded_error"),
        (503, None, 529, "overloaded_error"),
        (504, None, 504, "timeout_error"),
        (502, None, 502, "api_error"),
    ],
)
def test_http_errors_map_to_anthropic_error_types(status: int, code: str | None, expected: int, kind: str) -> None:
    status, body = to_anthropic(HttpError(status, "no.", code=code), "req_1")

    assert (status, body["error"]["type"]) == (expected, kind)


def test_error_in_a_stream_is_its_last_event() -> None:
    faults = Faults(fail_on=lambda _: True, retryable=False)
    engine = FakeLLM("llm", answer=lambda *_: "one two three four", faults=faults)
    with (
        running_server(EnginePool.local([engine])) as server,
        anthropic_client(server.url) as client,
        pytest.raises(anthropic.APIError) as raised,
        client.messages.stream(model="llm", max_tokens=50, messages=HELLO) as stream,
    ):
        list(stream)

    assert raised.value.body["type"] == "error"  # type: ignore[index]


def test_error_event_follows_the_anthropic_protocol() -> None:
    writer = MessageWriter(MessagesRequest(model="llm", max_tokens=5, messages=HELLO), "req_1")
    lines = [*writer.begin_events(), *writer.events_of(Delta(text="a"))]

    last = writer.failure_event(HttpError(504, "too late.", code="deadline_exceeded"))

    assert len(lines) == 4
    name, data = last.strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "timeout_error"


# ------------------------------------------------------------ keys, limits, queries


def test_keys_limits_and_headers_apply_to_messages() -> None:
    one, small = key("one"), key("small", max_output_tokens=2, requests_per_minute=1)
    with running_server(keys=[one.settings, small.settings]) as server:
        with anthropic_client(server.url, api_key=one.secret) as client:  # sent as x-api-key
            headers = {"X-Teola-Query": "trip", "X-Request-ID": "mine"}
            reply = client.messages.with_raw_response.create(
                model="llm", max_tokens=5, messages=HELLO, extra_headers=headers
            )
            assert (reply.headers["x-teola-query"], reply.headers["request-id"]) == ("trip", "mine")
            with pytest.raises(anthropic.BadRequestError, match="x-teola-deadline"):
                client.messages.create(
                    model="llm", max_tokens=5, messages=HELLO, extra_headers={"X-Teola-Deadline": "soon"}
                )
        with anthropic_client(server.url, api_key=None, auth_token=small.secret) as client:  # sent as a bearer token
            assert client.messages.create(model="llm", max_tokens=50, messages=HELLO).usage.output_tokens == 2
            with pytest.raises(anthropic.RateLimitError) as limited:
                client.messages.create(model="llm", max_tokens=5, messages=HELLO)
            assert int(limited.value.response.headers["retry-after"]) > 0
        with anthropic_client(server.url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(model="llm", max_tokens=5, messages=HELLO)
            with pytest.raises(anthropic.AuthenticationError):
                client.models.list()


def test_missed_deadline_is_a_timeout_error() -> None:
    headers = {"X-Teola-Deadline": "0.2"}
    with (
        running_server(EnginePool.local([slow_llm()])) as server,
        anthropic_client(server.url) as client,
        pytest.raises(anthropic.APIStatusError) as raised,
    ):
        client.messages.create(model="llm", max_tokens=500, messages=HELLO, extra_headers=headers)

    assert raised.value.status_code == 504
    assert raised.value.body["error"]["type"] == "timeout_error"  # type: ignore[index]


def test_cross_origin_messages_request_gets_403(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False, headers={"Origin": "https://evil.example"}) as http:
        reply = http.post("/v1/messages", json=message_body())

    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "permission_error")


# ------------------------------------------------------------ LangChain, the documentation


def test_messages_snippet_of_the_documentation_runs(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "server-clients.md").read_text()
    [snippet] = [block for block in re.findall(r"(?ms)^```text\n(.*?)^```$", text) if "import anthropic" in block]

    exec(snippet.replace("http://127.0.0.1:8000", server.url), {})

    assert capsys.readouterr().out.startswith("user: Hello ")


def test_langchain_chat_anthropic_works(server: RunningServer) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    llm = ChatAnthropic(base_url=server.url, api_key="none", model="llm", max_tokens=60, temperature=0)  # type: ignore[call-arg, arg-type]

    answer = llm.invoke([SystemMessage("be kind"), HumanMessage("hi")])
    chunks = list(llm.stream("hi there"))
    called = llm.bind_tools([TOOL]).invoke("call")
    after = llm.invoke([HumanMessage("call"), called, ToolMessage("rain", tool_call_id=called.tool_calls[0]["id"])])

    assert answer.text == "system: be kind | user: hi"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chunks) == "user: hi there"
    assert sum(chunk.usage_metadata["input_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    assert called.tool_calls[0]["args"] == {"city": "Oslo"}
    assert after.text.endswith("tool: rain")
