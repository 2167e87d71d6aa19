"""Tests of replies of OpenAI-compatible servers: allowed forms of event streams, and malformed replies."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fixed_replies import (
    CHUNKS,
    COMPLETION,
    EVENT_STREAM,
    JSON_VALUES,
    MODEL,
    TOOL_COMPLETION,
    FixedReplies,
    chunk,
    fixed_replies,
    mutations,
)

from teola_plugin.engines.conformance import collect
from teola_plugin.engines.openai import OpenAIServer, wire
from teola_plugin.engines.openai.http import refusal_in
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import UNKNOWN, Done, Failed, Generate, Generation, Message, Prompt, Request, Warmup

TEXT = Generate(Prompt((Message("user", "What do horses eat?"),)))


def carried(*, stream: bool) -> Generate:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What do horses eat?"}], "stream": stream}
    prompt = wire.WirePrompt.of(body, exact=True)
    return Generate(prompt, prompt.sampling)


@pytest.fixture(scope="module")
def server() -> Iterator[FixedReplies]:
    with fixed_replies() as replies:
        yield replies


@pytest.fixture
def replies(server: FixedReplies) -> Iterator[FixedReplies]:
    models = server.models
    server.stays_open = False
    yield server
    server.models, server.stays_open = models, False


async def outcome(url: str, payload: Any, *, stream: bool, **options: Any) -> Any:
    """Return the generation, or the error that the engine gives."""
    kind = PrimitiveKind.PARTIAL_PREFILLING if isinstance(payload, Warmup) else PrimitiveKind.PREFILLING
    engine = OpenAIServer(base_url=url, model=MODEL, check=False, **options)
    await engine.start()
    try:
        *_, end = await collect(engine, [Request("r", kind, payload, stream=stream)])
    finally:
        await engine.stop()
    assert isinstance(end, Done | Failed)
    return end.value if isinstance(end, Done) else end.error


# ------------------------------------------------------------ forms of streams


def events(form: str) -> str:
    return "".join(form.replace("JSON", json.dumps(one)) for one in CHUNKS)


TWO_LINES = "".join("data: " + json.dumps(one).replace(', "choices"', ',\ndata: "choices"') + "\n\n" for one in CHUNKS)
FORMS = {
    "no space": events("data:JSON\n\n") + "data:[DONE]\n\n",
    "CR": events("data: JSON\r\r") + "data: [DONE]\r\r",
    "CRLF": events("data: JSON\r\n\r\n") + "data: [DONE]\r\n\r\n",
    "byte order mark": "\ufeff" + events("data: JSON\n\n"),
    "comments": events(": ping\n\ndata: JSON\n\n"),
    "other fields": events("event: message\nid: 1\nretry: 5\nfoo: bar\ndata: JSON\n\n"),
    "several data lines": TWO_LINES,
    "no end": events("data: JSON\n\n"),
    "cut off": events("data: JSON\n\n") + "data: " + json.dumps(CHUNKS[1])[:40],
    "complete JSON without a blank line": events("data: JSON\n\n") + "data: " + json.dumps(CHUNKS[1]) + "\n",
    "more after the end": events("data: JSON\n\n") + "data: [DONE]\n\ndata: nonsense\n\n",
    "empty data": events("data\n\ndata: JSON\n\n"),
}


@pytest.mark.parametrize("payload", [TEXT, carried(stream=True)], ids=["text", "carried"])
@pytest.mark.parametrize("form", FORMS)
async def test_every_valid_form_of_event_stream_is_read(replies: FixedReplies, form: str, payload: Generate) -> None:
    replies.reply_with(FORMS[form], EVENT_STREAM)

    found = await outcome(replies.base_url, payload, stream=True)

    assert found.text == "oats and hay"


@pytest.mark.parametrize("mark", "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e", ids=ascii)
async def test_separators_within_json_are_text(replies: FixedReplies, mark: str) -> None:
    written = json.dumps(chunk({"content": "oats#hay"})).replace("#", mark if mark > " " else f"\\u{ord(mark):04x}")
    replies.stream(written, chunk({}, "stop"))

    found = await outcome(replies.base_url, TEXT, stream=True)

    assert found.text == f"oats{mark}hay"


async def test_done_event_ends_a_stream_on_an_open_connection(replies: FixedReplies) -> None:
    replies.stream(*CHUNKS)
    replies.stays_open = True
    begun = time.monotonic()

    found = await outcome(replies.base_url, TEXT, stream=True)

    assert found.text == "oats and hay"
    assert time.monotonic() - begun < 5


async def test_connection_is_used_again_after_a_stream(replies: FixedReplies) -> None:
    replies.stream(*CHUNKS)
    engine = OpenAIServer(base_url=replies.base_url, model=MODEL, check=False)
    await engine.start()
    try:
        for name in "ab":
            await collect(engine, [Request(name, PrimitiveKind.PREFILLING, TEXT, stream=True)])
        closed = [one for one in engine._client._transport._pool.connections if one.is_closed()]  # type: ignore[union-attr]
    finally:
        await engine.stop()
    assert closed == []


# ------------------------------------------------------------ malformed replies

DEEP = "[" * 100_000 + "]" * 100_000


def completion(message: Any, **fields: Any) -> dict[str, Any]:
    return {**COMPLETION, "choices": [{"index": 0, "finish_reason": "stop", "message": message}], **fields}


def with_usage(usage: Any) -> dict[str, Any]:
    return {**COMPLETION, "usage": usage}


def calls(*tool_calls: Any) -> dict[str, Any]:
    return completion({"role": "assistant", "content": None, "tool_calls": list(tool_calls)})


MALFORMED: dict[str, tuple[Any, str]] = {
    "HTML": ("<html>", "not JSON"),
    "empty": ("", "not JSON"),
    "cut off": (json.dumps(COMPLETION)[:60], "not JSON"),
    "too deep": (DEEP, "not JSON|deep"),
    "a deep field": ('{"choices": ' + "[" * 500 + "]" * 500 + "}", "deep"),
    "bytes that are no text": (b'{"choices": "\xff', "not JSON"),
    "a list": ([], "a list instead of an object"),
    "null": (None, "null instead of an object"),
    "a number": (5, "a number instead of an object"),
    "an error": ({"error": {"message": "out of memory"}}, "out of memory"),
    "choices missing": ({}, "choices is missing"),
    "choices null": ({"choices": None}, "choices is null"),
    "choices empty": ({"choices": []}, "choices is an empty list"),
    "choices an object": ({"choices": {"0": {}}}, "choices is an object"),
    "choice null": ({"choices": [None]}, r"choices\[0\] is null"),
    "choice a text": ({"choices": ["x"]}, r"choices\[0\] is a text"),
    "message missing": ({"choices": [{}]}, r"choices\[0\].message is missing"),
    "message null": (completion(None), r"choices\[0\].message is missing or null"),
    "message a text": (completion("x"), r"choices\[0\].message is a text"),
    "content a number": (completion({"content": 5}), r"choices\[0\].message.content is a number"),
    "content an object": (completion({"content": {}}), r"choices\[0\].message.content is an object"),
    "content of numbers": (completion({"content": [5]}), r"choices\[0\].message.content\[0\] is a number"),
    "text of a block": (completion({"content": [{"text": 5}]}), r"message.content\[0\].text is a number"),
    "tool_calls a text": (completion({"tool_calls": "x"}), "message.tool_calls is a text"),
    "tool call null": (calls(None), r"message.tool_calls\[0\] is null"),
    "function a text": (calls({"function": "f"}), r"message.tool_calls\[0\].function is a text"),
    "name missing": (calls({"function": {"arguments": "{}"}}), r"tool_calls\[0\].function.name is missing"),
    "arguments an object": (calls({"function": {"name": "f", "arguments": {}}}), "function.arguments is an object"),
    "finish_reason a list": ({"choices": [{"text": "x", "finish_reason": []}]}, "finish_reason is a list"),
    "usage a text": (with_usage("5"), "usage is a text"),
    "count a text": (with_usage({"prompt_tokens": "5"}), "usage.prompt_tokens is a text"),
    "count negative": (with_usage({"prompt_tokens": -5}), r"prompt_tokens is a number \(-5"),
    "count a boolean": (with_usage({"completion_tokens": True}), "completion_tokens is a boolean"),
    "count huge": (with_usage({"prompt_tokens": 2**70}), "usage.prompt_tokens is a number"),
    "details a list": (with_usage({"prompt_tokens_details": []}), "prompt_tokens_details is a list"),
    "NaN": ('{"choices": [{"message": {"content": "x"}, "logprobs": NaN}]}', "it holds NaN as a number"),
    "infinity": ('{"choices": [{"message": {"content": "x"}, "logprobs": 1e999}]}', "1e999 is too large"),
    "digits": ('{"choices": [{"message": {"content": "x"}}], "n": ' + "9" * 5000 + "}", "not JSON"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_reply_is_an_engine_error_that_names_server_and_field(replies: FixedReplies, name: str) -> None:
    reply, field = MALFORMED[name]
    replies.reply_with(reply)

    error = await outcome(replies.base_url, TEXT, stream=False)

    assert isinstance(error, EngineError)
    assert not error.retryable
    assert replies.base_url in str(error)
    assert re.search(field, str(error)), error


MALFORMED_CHUNKS: dict[str, tuple[list[Any], str]] = {
    "HTML": (["<html>"], "not JSON"),
    "cut off": ([json.dumps(CHUNKS[1])[:40]], "not JSON"),
    "too deep": ([DEEP], "not JSON|deep"),
    "a list": ([[]], "a list instead of an object"),
    "null": (["null"], "null instead of an object"),
    "an error": ([{"error": {"message": "out of memory"}}], "broke off: out of memory"),
    "an error beside choices": ([{"error": "out of memory", "choices": []}], "broke off: out of memory"),
    "choices missing": ([{}], "choices is missing"),
    "choices a text": ([{"choices": "x"}], "choices is a text"),
    "choice null": ([{"choices": [None]}], r"choices\[0\] is null"),
    "index a text": ([{"choices": [{"index": "0", "delta": {}}]}], r"choices\[0\].index is a text"),
    "delta a text": ([chunk("x")], r"choices\[0\].delta is a text"),
    "content a number": ([chunk({"content": 5})], r"choices\[0\].delta.content is a number"),
    "tool_calls a text": ([chunk({"tool_calls": "x"})], "delta.tool_calls is a text"),
    "tool call a number": ([chunk({"tool_calls": [5]})], r"delta.tool_calls\[0\] is a number"),
    "usage a text": ([chunk({"content": "x"}, usage="5")], "usage is a text"),
}


@pytest.mark.parametrize("at", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("name", MALFORMED_CHUNKS)
async def test_malformed_chunk_is_an_engine_error_that_names_server_and_field(
    replies: FixedReplies, name: str, at: int
) -> None:
    chunks, field = MALFORMED_CHUNKS[name]
    replies.stream(*CHUNKS[:at], *chunks)

    error = await outcome(replies.base_url, TEXT, stream=True)

    assert isinstance(error, EngineError)
    assert replies.base_url in str(error)
    assert re.search(field, str(error)), error


STREAMS_WITHOUT_A_CHOICE: dict[str, tuple[list[Any], str]] = {
    "no events": ([], "no stream of chunks"),
    "only usage": ([CHUNKS[-1]], "no chunk has a choice"),
    "choices always null": ([{"choices": None}], "no chunk has a choice"),
}


@pytest.mark.parametrize("name", STREAMS_WITHOUT_A_CHOICE)
async def test_stream_without_a_choice_is_an_engine_error(replies: FixedReplies, name: str) -> None:
    chunks, message = STREAMS_WITHOUT_A_CHOICE[name]
    replies.stream(*chunks)

    error = await outcome(replies.base_url, TEXT, stream=True)

    assert isinstance(error, EngineError)
    assert message in str(error)


ACCEPTED: dict[str, Any] = {
    "usage null": {**COMPLETION, "usage": None},
    "usage missing": {key: value for key, value in COMPLETION.items() if key != "usage"},
    "counts null": {**COMPLETION, "usage": {"prompt_tokens": None, "prompt_tokens_details": None}},
    "finish_reason missing": {"choices": [{"message": {"content": "oats and hay"}}]},
    "extra fields": {**COMPLETION, "x": [1, {"y": None}], "error": None},
    "content in blocks": completion({"content": [{"type": "text", "text": "oats "}, "and hay"]}),
}


@pytest.mark.parametrize("name", ACCEPTED)
async def test_replies_that_clients_accept_are_accepted(replies: FixedReplies, name: str) -> None:
    replies.reply_with(ACCEPTED[name])

    found = await outcome(replies.base_url, TEXT, stream=False)

    assert found.text == "oats and hay"
    assert found.finish_reason == "stop"


async def test_content_may_be_null_with_tool_calls(replies: FixedReplies) -> None:
    replies.reply_with(TOOL_COMPLETION)

    found = await outcome(replies.base_url, TEXT, stream=False)

    assert (found.text, found.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("one", [chunk(None), {**chunk({}), "choices": None}], ids=["delta null", "choices null"])
async def test_empty_chunk_is_accepted(replies: FixedReplies, one: Any) -> None:
    replies.stream(one, *CHUNKS)

    found = await outcome(replies.base_url, TEXT, stream=True)

    assert found.text == "oats and hay"


async def test_error_of_a_carried_request_has_the_whole_reply(replies: FixedReplies) -> None:
    replies.reply_with({"choices": []}, x_request_id="7")

    error = await outcome(replies.base_url, carried(stream=False), stream=False)

    refusal = refusal_in(error)
    assert refusal is not None
    assert refusal.content == '{"choices": []}'
    assert refusal.headers["x-request-id"] == "7"


def is_well_formed(found: Any) -> bool:
    counts = (found.prompt_tokens, found.completion_tokens, found.cached_tokens)
    return isinstance(found.text, str) and isinstance(found.finish_reason, str) and all(type(n) is int for n in counts)


RUNS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("payload", [TEXT, carried(stream=False)], ids=["text", "carried"])
@RUNS
@given(reply=st.one_of(mutations(COMPLETION), mutations(TOOL_COMPLETION), JSON_VALUES))
async def test_any_reply_is_a_generation_or_an_engine_error(
    server: FixedReplies, payload: Generate, reply: Any
) -> None:
    server.reply_with(json.dumps(reply))

    found = await outcome(server.base_url, payload, stream=False)

    assert is_well_formed(found) if isinstance(found, Generation) else type(found) is EngineError
    assert isinstance(found, Generation) or server.base_url in str(found)


@pytest.mark.parametrize("payload", [TEXT, carried(stream=True)], ids=["text", "carried"])
@RUNS
@given(chunks=st.one_of(mutations(CHUNKS), st.lists(JSON_VALUES, max_size=3)))
async def test_any_stream_is_a_generation_or_an_engine_error(
    server: FixedReplies, payload: Generate, chunks: Any
) -> None:
    server.stream(*(json.dumps(one) for one in (chunks if isinstance(chunks, list) else [chunks])))

    found = await outcome(server.base_url, payload, stream=True)

    assert is_well_formed(found) if isinstance(found, Generation) else type(found) is EngineError
    assert isinstance(found, Generation) or server.base_url in str(found)


# ------------------------------------------------------------ other replies of servers


@pytest.mark.parametrize(
    "models",
    [b"<html>", b"null", b"[]", b'{"data": 5}', b'{"data": ["m"]}', b'{"data": [null]}', b'{"data": {"m": 1}}'],
)
async def test_malformed_model_list_makes_server_unavailable(replies: FixedReplies, models: bytes) -> None:
    replies.models = models

    with pytest.raises(EngineUnavailable, match="no list of models"):
        await OpenAIServer(base_url=replies.base_url, model=MODEL).start()


@pytest.mark.parametrize("length", ["long", None, [], True, -1, 1.5])
async def test_invalid_model_length_is_treated_as_unknown(replies: FixedReplies, length: Any) -> None:
    replies.models = json.dumps({"data": [{"id": MODEL, "max_model_len": length}]}).encode()
    engine = OpenAIServer(base_url=replies.base_url)

    await engine.start()
    await engine.stop()

    assert engine.max_model_len is None


@pytest.mark.parametrize("reply", [b"<html>", b"[]", b'{"usage": "5"}', b'{"usage": {"prompt_tokens": "5"}}'])
async def test_prefix_reply_without_usage_counts_zero_tokens(replies: FixedReplies, reply: bytes) -> None:
    replies.models = json.dumps({"data": [{"id": MODEL}]}).encode()
    replies.reply_with({"tokens": [1]})
    engine = OpenAIServer(base_url=replies.base_url, prefix_caching=True, calibrate=False)
    await engine.start()
    replies.reply_with(reply)
    warmup = Warmup(Prompt((Message("user", "Horses eat oats. " + UNKNOWN),)))
    try:
        [end] = await collect(engine, [Request("r", PrimitiveKind.PARTIAL_PREFILLING, warmup)])
    finally:
        await engine.stop()
    assert isinstance(end, Done)
    assert end.value.tokens == 0
