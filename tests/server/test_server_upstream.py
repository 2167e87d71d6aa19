"""Tests of replies from the server behind an engine: malformed ones become 502, and any text becomes valid JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fixed_replies import (
    CHUNKS,
    COMPLETION,
    JSON_VALUES,
    MODEL,
    TOOL_COMPLETION,
    FixedReplies,
    chunk,
    fixed_replies,
    mutations,
)
from support.service import RunningServer, running_server

from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.event_streams import ServerSentEvent, read_events
from teola_plugin.pool import EnginePool


@pytest.fixture(scope="module")
def upstream() -> Iterator[FixedReplies]:
    with fixed_replies() as replies:
        yield replies


@pytest.fixture(scope="module")
def server(upstream: FixedReplies) -> Iterator[RunningServer]:
    engine = OpenAIServer("llm", base_url=upstream.base_url, model=MODEL, timeout=10.0)
    with running_server(EnginePool.local([engine])) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


MESSAGES = [{"role": "user", "content": "What do horses eat?"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "llm", "messages": MESSAGES},
    "/v1/responses": {"model": "llm", "input": "What do horses eat?"},
    "/v1/completions": {"model": "llm", "prompt": "Horses eat"},
}


def post(http: httpx.Client, path: str, *, stream: bool) -> httpx.Response:
    return http.post(path, json={**REQUESTS[path], "stream": stream})


def events_in(response: httpx.Response) -> list[ServerSentEvent]:
    return list(read_events([response.content]))


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


MALFORMED: dict[str, Any] = {
    "HTML": "<html>",
    "empty": "",
    "too deep": "[" * 100_000,
    "a deep field": '{"choices": [{"message": {"content": "x"}, "logprobs": ' + "[" * 900 + "]" * 900 + "}]}",
    "null": None,
    "a list": [],
    "choices missing": {},
    "choices null": {"choices": None},
    "choices empty": {"choices": []},
    "choice null": {"choices": [None]},
    "second choice null": {"choices": [*COMPLETION["choices"], None]},
    "message null": {"choices": [{"message": None}]},
    "content a number": {"choices": [{"message": {"content": 5}}]},
    "tool_calls a text": {"choices": [{"message": {"tool_calls": "x"}}]},
    "tool call without a function": {"choices": [{"message": {"tool_calls": [{"id": "1"}]}}]},
    "usage a text": {**COMPLETION, "usage": "x"},
    "count a text": {**COMPLETION, "usage": {"prompt_tokens": "x"}},
    "an error": {"error": {"message": "out of memory"}},
    "NaN": '{"choices": [{"message": {"content": "x"}, "logprobs": NaN}]}',
    "infinity": '{"choices": [{"message": {"content": "x"}, "logprobs": 1e999}]}',
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_reply_is_502(http: httpx.Client, upstream: FixedReplies, path: str, name: str) -> None:
    upstream.reply_with(MALFORMED[name])

    answer = post(http, path, stream=False)

    assert answer.status_code == 502
    assert upstream.base_url in answer.json()["error"]["message"]


MALFORMED_CHUNKS: dict[str, list[Any]] = {
    "no events": [],
    "HTML": ["<html>"],
    "null": ["null"],
    "a list": [[]],
    "choices missing": [{}],
    "choices null": [{"choices": None}],
    "only usage": [CHUNKS[-1]],
    "choice null": [{"choices": [None]}],
    "delta a text": [chunk("x")],
    "content a number": [chunk({"content": 5})],
    "tool_calls a text": [chunk({"tool_calls": "x"})],
    "index a text": [{"choices": [{"index": "x", "delta": {}}]}],
    "usage a text": [chunk({"content": "x"}, usage="x")],
    "an error": [{"error": {"message": "out of memory"}}],
    "NaN": ['{"choices": [{"delta": {"content": "x"}, "logprobs": NaN}]}'],
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("name", MALFORMED_CHUNKS)
def test_stream_that_begins_malformed_is_502(http: httpx.Client, upstream: FixedReplies, path: str, name: str) -> None:
    upstream.stream(*MALFORMED_CHUNKS[name])

    answer = post(http, path, stream=True)

    assert answer.status_code == 502
    assert upstream.base_url in answer.json()["error"]["message"]


def test_stream_that_becomes_malformed_ends_with_an_error_of_the_engine(
    http: httpx.Client, upstream: FixedReplies
) -> None:
    upstream.stream(*CHUNKS[:2], chunk({"content": 5}))

    events = events_in(post(http, "/v1/chat/completions", stream=True))

    error = json.loads(events[-1].data)["error"]
    assert error["code"] == "engine_error"
    assert "choices[0].delta.content is a number" in error["message"]


@pytest.mark.parametrize("status", [301, 401, 403, 500, 501, 503, 520])
@pytest.mark.parametrize("stream", [False, True])
def test_upstream_status_unrelated_to_the_request_is_502(
    http: httpx.Client, upstream: FixedReplies, status: int, stream: bool
) -> None:
    upstream.reply_with({"error": {"message": "no"}})
    upstream.status = status
    try:
        answer = post(http, "/v1/chat/completions", stream=stream)
    finally:
        upstream.status = 200
    assert answer.status_code == 502


RUNS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", REQUESTS)
@RUNS
@given(reply=st.one_of(mutations(COMPLETION), mutations(TOOL_COMPLETION), JSON_VALUES))
def test_any_reply_is_an_answer_or_502(http: httpx.Client, upstream: FixedReplies, path: str, reply: Any) -> None:
    upstream.reply_with(json.dumps(reply))

    answer = post(http, path, stream=False)

    assert answer.status_code in (200, 502), answer.text
    strict_json(answer.text)


@pytest.mark.parametrize("path", REQUESTS)
@RUNS
@given(chunks=st.one_of(mutations(CHUNKS), st.lists(JSON_VALUES, max_size=3)))
def test_any_stream_is_events_or_502(http: httpx.Client, upstream: FixedReplies, path: str, chunks: Any) -> None:
    upstream.stream(*(json.dumps(one) for one in (chunks if isinstance(chunks, list) else [chunks])))

    answer = post(http, path, stream=True)

    assert answer.status_code in (200, 502), answer.text
    data = [event.data for event in events_in(answer)] if answer.status_code == 200 else []
    assert [one for one in data if "internal_error" in one] == []
    for one in data:
        assert one == "[DONE]" or strict_json(one)


ODD_TEXTS = ["\u2028", "\u2029", "\x85", "\x0b\x1c", "\r\n\r\ndata: x", "\ud83d", "\0", "😀", "\ufeff", "\x7f"]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_any_text_reaches_the_client_whole(http: httpx.Client, upstream: FixedReplies, path: str, text: str) -> None:
    field = "text" if path == "/v1/completions" else "message"
    expected_text = text if path == "/v1/completions" else {"role": "assistant", "content": text}
    upstream.reply_with({**COMPLETION, "choices": [{"index": 0, "finish_reason": "stop", field: expected_text}]})

    answer = post(http, path, stream=False)

    assert answer.status_code == 200
    assert json.dumps(text) in json.dumps(answer.json())


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_any_text_is_written_as_a_valid_event(http: httpx.Client, upstream: FixedReplies, text: str) -> None:
    upstream.stream(chunk({"content": text}), chunk({}, "stop"))

    answer = post(http, "/v1/chat/completions", stream=True)

    first, *_, last = events_in(answer)
    assert json.loads(first.data)["choices"][0]["delta"]["content"] == text
    assert last.data == "[DONE]"


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_events_survive_clients_splitting_at_unicode_separators(
    http: httpx.Client, upstream: FixedReplies, text: str
) -> None:
    upstream.stream(chunk({"content": text}), chunk({}, "stop"))

    lines = post(http, "/v1/chat/completions", stream=True).text.splitlines()

    assert [line for line in lines if line and not line.startswith("data: ")] == []
