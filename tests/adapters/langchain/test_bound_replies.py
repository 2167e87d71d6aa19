"""Tests of replies that a bound ChatOpenAI reads: same headers as the original, and the same replies accepted."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from support.fixed_replies import (
    CHUNKS,
    COMPLETION,
    EVENT_STREAM,
    JSON,
    JSON_VALUES,
    MODEL,
    TOOL_COMPLETION,
    FixedReplies,
    chunk,
    fixed_replies,
    mutations,
)
from support.openai_stub import MODEL as ECHO
from support.openai_stub import OpenAIStub, openai_stub
from support.versions import is_older

from teola_plugin import accelerate
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUESTION = "What do horses eat?"


async def collect(chunks: Any) -> list[Any]:
    return [one async for one in chunks]


ENTRY_POINTS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "invoke": lambda model, value: [model.invoke(value)],
    "ainvoke": lambda model, value: [asyncio.run(model.ainvoke(value))],
    "stream": lambda model, value: list(model.stream(value)),
    "astream": lambda model, value: asyncio.run(collect(model.astream(value))),
}


def headers_of(messages: list[Any]) -> list[dict[str, str]]:
    """Return the headers of each message that has some, without the time at which they were sent."""
    headers = [one.response_metadata["headers"] for one in messages if "headers" in one.response_metadata]
    return [{name: value for name, value in one.items() if name != "date"} for one in headers]


# ------------------------------------------------------------ headers


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


@pytest.fixture(scope="module", params=[False, True], ids=["not dedicated", "dedicated"])
def echo_pool(stub: OpenAIStub, request: pytest.FixtureRequest) -> Iterator[EnginePool]:
    engine = OpenAIServer("llm", base_url=stub.base_url, model=ECHO, dedicated=request.param, calibrate=False)
    with EnginePool.local([engine]) as pool:
        yield pool


def echo_model(stub: OpenAIStub, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=stub.base_url, api_key="k", model=ECHO, temperature=0.0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"stream_usage": True}, {"n": 2}], ids=str)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_bound_model_has_the_headers_of_its_server(
    stub: OpenAIStub, echo_pool: EnginePool, entry_point: str, options: dict[str, Any]
) -> None:
    original = echo_model(stub, include_response_headers=True, **options)
    bound = echo_pool.bound(original, "llm")

    expected = headers_of(ENTRY_POINTS[entry_point](original, QUESTION))
    found = headers_of(ENTRY_POINTS[entry_point](bound, QUESTION))

    assert found == expected
    assert found[0]["content-type"] == (EVENT_STREAM if "stream" in entry_point else JSON)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_an_accelerated_chain_has_the_headers_of_its_server(
    stub: OpenAIStub, echo_pool: EnginePool, entry_point: str
) -> None:
    original = echo_model(stub, include_response_headers=True)
    plain = ChatPromptTemplate.from_template("{q}") | original
    fast = accelerate(plain, pool=echo_pool, bind=[(original, "llm")])

    expected = headers_of(ENTRY_POINTS[entry_point](plain, {"q": QUESTION}))
    found = headers_of(ENTRY_POINTS[entry_point](fast, {"q": QUESTION}))

    assert [sorted({*one, "content-length"}) for one in found] == [sorted(one) for one in expected]
    assert [one["content-type"] for one in found] == [one["content-type"] for one in expected]


@pytest.mark.parametrize("entry_point", ["stream", "astream"])
def test_a_stream_that_is_shortened_has_no_length(stub: OpenAIStub, echo_pool: EnginePool, entry_point: str) -> None:
    bound = echo_pool.bound(echo_model(stub, include_response_headers=True, stream_usage=False), "llm")

    [found] = headers_of(ENTRY_POINTS[entry_point](bound, QUESTION))

    assert found["content-type"] == EVENT_STREAM
    assert ("content-length" in found) is not echo_pool.engine("llm").joins  # type: ignore[attr-defined]


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_no_headers_where_the_original_has_none(stub: OpenAIStub, echo_pool: EnginePool, entry_point: str) -> None:
    bound = echo_pool.bound(echo_model(stub), "llm")

    assert headers_of(ENTRY_POINTS[entry_point](bound, QUESTION)) == []


@pytest.fixture(scope="module")
def server() -> Iterator[FixedReplies]:
    with fixed_replies() as replies:
        yield replies


@pytest.fixture(scope="module")
def pool(server: FixedReplies) -> Iterator[EnginePool]:
    with EnginePool.local([OpenAIServer("llm", base_url=server.base_url, model=MODEL)]) as made:
        yield made


@pytest.fixture(scope="module")
def models(server: FixedReplies, pool: EnginePool) -> tuple[ChatOpenAI, Any]:
    """Create a model, and the same model bound to an engine."""
    options: dict[str, Any] = {"include_response_headers": True, "max_retries": 0, "temperature": 0.0}
    original = ChatOpenAI(base_url=server.base_url, api_key="k", model=MODEL, **options)  # type: ignore[arg-type]
    return original, pool.bound(original, "llm")


@pytest.mark.parametrize("entry_point", ["invoke", "ainvoke"])
def test_headers_of_a_compressed_reply_are_the_servers(
    server: FixedReplies, models: tuple[ChatOpenAI, Any], entry_point: str
) -> None:
    compressed = gzip.compress(json.dumps(COMPLETION).encode())
    server.reply_with(compressed, content_encoding="gzip", x_request_id="r-7")
    original, bound = models

    [expected] = ENTRY_POINTS[entry_point](original, QUESTION)
    [found] = ENTRY_POINTS[entry_point](bound, QUESTION)

    assert found.text == "oats and hay"
    assert headers_of([found]) == headers_of([expected])
    assert headers_of([found])[0]["content-encoding"] == "gzip"


@pytest.mark.parametrize("entry_point", ["stream", "astream"])
def test_a_compressed_stream_is_read(server: FixedReplies, models: tuple[ChatOpenAI, Any], entry_point: str) -> None:
    server.stream(*CHUNKS, x_request_id="r-7")
    server.reply_with(gzip.compress(server.content), EVENT_STREAM, content_encoding="gzip", x_request_id="r-7")

    found = ENTRY_POINTS[entry_point](models[1], QUESTION)

    assert "".join(one.text for one in found) == "oats and hay"
    assert headers_of(found)[0]["x-request-id"] == "r-7"


def test_raw_responses_of_the_client_have_the_headers(server: FixedReplies, models: tuple[ChatOpenAI, Any]) -> None:
    server.reply_with(COMPLETION, x_request_id="r-7")
    messages: Any = [{"role": "user", "content": QUESTION}]

    raw = models[1].client.with_raw_response.create(model=MODEL, messages=messages)

    assert raw.headers["x-request-id"] == "r-7"
    assert raw.parse()._request_id == "r-7"
    assert json.loads(raw.text) == COMPLETION


async def test_raw_responses_of_the_async_client_have_the_headers(
    server: FixedReplies, models: tuple[ChatOpenAI, Any]
) -> None:
    server.stream(*CHUNKS, x_request_id="r-7")
    messages: Any = [{"role": "user", "content": QUESTION}]

    raw = await models[1].async_client.with_raw_response.create(model=MODEL, messages=messages, stream=True)
    chunks = await collect(raw.parse())

    assert raw.headers["x-request-id"] == "r-7"
    assert len(chunks) == len(CHUNKS)


# ------------------------------------------------------------ what the original accepts


def summary(messages: list[Any]) -> list[Any]:
    """Return what a caller sees of messages, without their generated ids and the time of their headers."""
    return [
        [one.content, getattr(one, "tool_calls", None), one.usage_metadata, one.additional_kwargs] for one in messages
    ]


def outcome(model: Any, entry_point: str) -> Any:
    try:
        return summary(ENTRY_POINTS[entry_point](model, QUESTION))
    except Exception as error:
        return error


ACCEPTED: dict[str, Any] = {
    "usage null": {**COMPLETION, "usage": None},
    "content null with calls of tools": TOOL_COMPLETION,
    "extra fields": {**COMPLETION, "x": {"y": [None]}},
    "finish_reason missing": {**COMPLETION, "choices": [{"message": {"role": "assistant", "content": "x"}}]},
    "finish_reason a number": {
        **COMPLETION,
        "choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": 5}],
    },
    "content in blocks": {
        **COMPLETION,
        "choices": [{"message": {"role": "assistant", "content": [{"type": "text", "text": "x"}]}}],
    },
    "a lone surrogate": {**COMPLETION, "choices": [{"message": {"role": "assistant", "content": "\ud83d"}}]},
    "NaN": {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "logprobs": {"content": float("nan")}}]},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_reply_that_the_original_accepts_is_accepted(
    server: FixedReplies, models: tuple[ChatOpenAI, Any], name: str
) -> None:
    server.reply_with(ACCEPTED[name])
    original, bound = models
    if name in ("content in blocks", "NaN") and is_older("langchain-openai", "1.7"):
        pytest.skip("the original itself warns of this reply with an older langchain-openai")

    expected = summary(ENTRY_POINTS["invoke"](original, QUESTION))

    assert summary(ENTRY_POINTS["invoke"](bound, QUESTION)) == expected


STREAMS: dict[str, list[Any]] = {
    "choices null": [{**chunk({}), "choices": None}, *CHUNKS],
    "delta null": [chunk(None), *CHUNKS],
    "choices missing": [{"id": "x"}, *CHUNKS],
    "usage null": [chunk({"content": "x"}, usage=None), *CHUNKS],
    "no choices": [CHUNKS[-1]],
    "a lone surrogate": [chunk({"content": "\ud83d"})],
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_the_original_accepts_is_accepted(
    server: FixedReplies, models: tuple[ChatOpenAI, Any], name: str
) -> None:
    server.stream(*STREAMS[name])
    original, bound = models

    expected = summary(ENTRY_POINTS["stream"](original, QUESTION))

    assert summary(ENTRY_POINTS["stream"](bound, QUESTION)) == expected


def test_an_error_within_a_stream_is_the_originals(server: FixedReplies, models: tuple[ChatOpenAI, Any]) -> None:
    server.stream(*CHUNKS[:2], {"error": {"message": "out of memory"}})
    original, bound = models

    expected = outcome(original, "stream")
    found = outcome(bound, "stream")

    assert type(found) is type(expected)
    assert str(found) == str(expected)


RUNS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@RUNS
@given(reply=st.one_of(mutations(COMPLETION), mutations(TOOL_COMPLETION), JSON_VALUES))
def test_any_reply_is_accepted_or_refused_as_by_the_original(
    server: FixedReplies, models: tuple[ChatOpenAI, Any], reply: Any
) -> None:
    server.reply_with(json.dumps(reply))
    original, bound = models

    expected = outcome(original, "invoke")
    found = outcome(bound, "invoke")

    assert type(found) is type(expected), found
    assert isinstance(expected, Exception) or repr(found) == repr(expected)


@RUNS
@given(chunks=st.one_of(mutations(CHUNKS), st.lists(JSON_VALUES, max_size=3)))
def test_any_stream_that_the_original_accepts_is_accepted(
    server: FixedReplies, models: tuple[ChatOpenAI, Any], chunks: Any
) -> None:
    server.stream(*(json.dumps(one) for one in (chunks if isinstance(chunks, list) else [chunks])))
    original, bound = models

    expected = outcome(original, "stream")
    found = outcome(bound, "stream")

    assert isinstance(expected, Exception) or repr(found) == repr(expected)
