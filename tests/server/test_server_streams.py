"""Tests that every streamed answer, put together, equals the whole answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.served_apps import VALUES
from support.service import in_process

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt, Sampling

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
OTHER_CALL = '{"name": "time", "arguments": {}}'
TEXTS = [
    "plain text",
    "  blanks around \n\n",
    " \n ",
    "",
    f"  Let me see.\n\n<tool_call>{CALL}</tool_call>\n",
    f"\n\n<tool_call>{CALL}</tool_call>",
    f"\tbefore <tool_call>{CALL}</tool_call> between <tool_call>{OTHER_CALL}</tool_call> after \n",
    f"  {CALL}  ",
    f"[{CALL}, {OTHER_CALL}]",
    " before <tool_call>no call</tool_call> after ",
    'before <tool_call>{"name": "unknown", "arguments": {}}</tool_call> ',
    " before <tool_",
    f"before <tool_call>{CALL}",
    '{"json": "that is no call"}  ',
]
ENGINE_REQUESTS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"n": 3, "tools": TOOLS},
    {"max_tokens": 2},
]
APPS = (
    *("chain", "model", "graph", "query_engine", "streaming_engine", "chat_engine", "workflow", "template"),
    *("value_runnable", "parallel_runnable", "json_runnable", "pieces_runnable", "silent_runnable"),
    *("state_graph", "value_workflow", "listing_template"),
)
TALKING = ("chain", "model", "graph", "talking_graph", "query_engine", "streaming_engine", "chat_engine", "workflow")
OF_VALUES = ("value_runnable", "graph_of_values", "value_workflow")
JSON_TEXTS = ['{"a": [1, 2], "content": "x"}', "[1, 2, [3]]", "42", '"a text"', "true", "null"]


def echo(prompt: Prompt, sampling: Sampling) -> str:
    text = prompt.messages[-1].content if prompt.messages else prompt.text
    return "the answer of the graph" if text == "answer" else text


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    apps: dict[str, dict[str, Any]] = {name: {"object": f"support.served_apps:{name}"} for name in APPS}
    apps["talking_graph"] = {"object": "support.served_apps:graph", "stream_node": "answer"}
    apps["graph_of_values"] = {"object": "support.served_apps:state_graph", "input": "question", "output": "found"}
    apps["titled"] = {"object": "support.served_apps:template", "output": "title"}
    pool = EnginePool.local([FakeLLM("llm", answer=echo), FakeEmbedder(), FakeReranker()])
    with in_process(pool, apps=apps) as client:
        yield client


# ------------------------------------------------------------ folding


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def folded_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    joined: dict[str, Any] = {}
    for chunk in chunks:
        joined |= {key: value for key, value in chunk.items() if key != "choices" and value is not None}
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": {"content": ""}})
            delta, message = part.pop("delta"), choice["message"]
            message["content"] += delta.pop("content", None) or ""
            for call in delta.pop("tool_calls", ()):
                assert call.pop("index") == len(message.setdefault("tool_calls", []))
                message["tool_calls"].append(call)
            message |= delta
            choice |= {key: value for key, value in part.items() if value is not None or key not in choice}
    return {**joined, "choices": [choices[index] for index in sorted(choices)]}


def folded_completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    joined: dict[str, Any] = {}
    for chunk in chunks:
        joined |= {key: value for key, value in chunk.items() if key != "choices" and value is not None}
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {**part, "text": ""})
            choice |= {**part, "text": choice["text"] + part["text"]}
    return {**joined, "choices": [choices[index] for index in sorted(choices)]}


def folded_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response at the end. Check it against the streamed text and calls."""
    joined: dict[str, Any] = events[-1]["response"]
    texts = {item["id"]: item["content"][0]["text"] for item in joined["output"] if item["type"] == "message"}
    calls = {item["id"]: item["arguments"] for item in joined["output"] if item["type"] == "function_call"}
    for kind, expected in (("output_text", texts), ("function_call_arguments", calls)):
        streamed = dict.fromkeys(expected, "")
        for event in events:
            if event["type"] == f"response.{kind}.delta":
                streamed[event["item_id"]] += event["delta"]
        assert streamed == expected
    return joined


def comparable(value: Any) -> Any:
    """Return an answer without ids, times, and how much of a prompt was cached."""
    if isinstance(value, dict):
        left_out = ("created", "created_at", "object", "prompt_tokens_details", "input_tokens_details", "annotations")
        return {key: comparable(inner) for key, inner in value.items() if key not in left_out}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return re.sub(r"^(\w+?)[-_][0-9a-f]{20,}$", r"\1", value) if isinstance(value, str) else value


def assert_chats_are_equal(http: httpx.Client, body: dict[str, Any]) -> str:
    """Return the text of the first choice."""
    joined = http.post("/v1/chat/completions", json=body)
    assert joined.status_code == 200, joined.text
    streamed = folded_chat(events_of(http.post("/v1/chat/completions", json={**body, **WITH_USAGE})))

    expected = comparable(joined.json())
    for choice in expected["choices"]:
        choice["message"]["content"] = choice["message"]["content"] or ""  # null beside calls
    assert comparable(streamed) == expected
    return str(expected["choices"][0]["message"]["content"])


def assert_responses_are_equal(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    joined = http.post("/v1/responses", json=body)
    assert joined.status_code == 200, joined.text
    streamed = folded_response(events_of(http.post("/v1/responses", json={**body, "stream": True})))

    assert comparable(streamed) == comparable(joined.json())
    return streamed


def text_of_response(response: dict[str, Any]) -> str:
    parts = [item["content"] for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for content in parts for part in content)


def text_of_query(http: httpx.Client, body: dict[str, Any]) -> str:
    """Return the text of a submitted query's answer. Check its pieces against it."""
    submitted = http.post("/v1/queries", json=body)
    assert submitted.status_code == 202, submitted.text
    events = events_of(http.get(f"/v1/queries/{submitted.json()['id']}/events"))
    assert events[-1]["status"] == "done", events[-1]
    text = events[-1]["answer"]["text"]
    assert "".join(event["text"] for event in events if "text" in event) == text
    return str(text)


# ------------------------------------------------------------ engines


@pytest.mark.parametrize("more", ENGINE_REQUESTS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_chat_of_an_engine_equals_the_whole_one(http: httpx.Client, text: str, more: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": text}]

    assert_chats_are_equal(http, {"model": "llm", "messages": messages, **more})


@pytest.mark.parametrize("tools", [None, [{"type": "function", **tool["function"]} for tool in TOOLS]])  # type: ignore[dict-item]
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_response_of_an_engine_equals_the_whole_one(http: httpx.Client, text: str, tools: Any) -> None:
    assert_responses_are_equal(http, {"model": "llm", "input": text, "tools": tools})


@pytest.mark.parametrize("text", TEXTS)
def test_events_of_a_query_add_up_to_its_answer(http: httpx.Client, text: str) -> None:
    chat = http.post("/v1/chat/completions", json={"model": "llm", "messages": [{"role": "user", "content": text}]})

    streamed = text_of_query(http, {"model": "llm", "input": text})

    assert streamed == chat.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("prompt", "n"), [(["one two three", "one", "one two"], 1), (["one two three", "one"], 2), ("one", 3), (["a"], 1)]
)
@pytest.mark.parametrize("max_tokens", [1, 50])
def test_streamed_completion_equals_the_whole_one(http: httpx.Client, prompt: Any, n: int, max_tokens: int) -> None:
    body = {"model": "llm", "prompt": prompt, "n": n, "max_tokens": max_tokens}

    joined = http.post("/v1/completions", json=body).json()
    streamed = folded_completion(events_of(http.post("/v1/completions", json={**body, **WITH_USAGE})))

    assert comparable(streamed) == comparable(joined)


# ------------------------------------------------------------ apps


def asked_values() -> list[tuple[str, str]]:
    cases = [(app, text) for app in OF_VALUES for text in VALUES]
    cases += [("json_runnable", text) for text in JSON_TEXTS]
    cases += [(app, "cows") for app in TALKING]
    return [*cases, *((app, "abc") for app in ("parallel_runnable", "pieces_runnable", "silent_runnable"))]


OF_OUR_OWN = ("template", "titled", "listing_template")


@pytest.mark.parametrize(("app", "text"), [*asked_values(), *((app, "cows") for app in OF_OUR_OWN)])
def test_streamed_answer_of_an_app_equals_the_whole_one(http: httpx.Client, app: str, text: str) -> None:
    chat = assert_chats_are_equal(http, {"model": app, "messages": [{"role": "user", "content": text}]})
    response = assert_responses_are_equal(http, {"model": app, "input": text})
    query = text_of_query(http, {"model": app, "input": text})

    assert text_of_response(response) == chat
    assert query == chat


@pytest.mark.parametrize(
    ("app", "text", "expected"),
    [
        ("value_runnable", "dictionary", VALUES["dictionary"]),
        ("value_runnable", "none", None),
        ("value_runnable", "zero", 0),
        ("value_workflow", "true", True),
        ("graph_of_values", "list", VALUES["list"]),
        ("json_runnable", "[1, 2, [3]]", [1, 2, [3]]),
        ("json_runnable", "42", 42),
        ("pieces_runnable", "abc", ["a", "b", "c"]),
        ("silent_runnable", "abc", None),
        ("parallel_runnable", "abc", {"late": "abc", "early": ["abc"]}),
    ],
)
def test_non_text_value_of_an_app_is_answered_as_json(http: httpx.Client, app: str, text: str, expected: Any) -> None:
    answer = assert_chats_are_equal(http, {"model": app, "messages": [{"role": "user", "content": text}]})

    assert json.loads(answer) == expected


@pytest.mark.parametrize("app", ["chain", "model", "talking_graph", "streaming_engine", "chat_engine", "template"])
def test_text_of_apps_is_streamed_in_pieces(http: httpx.Client, app: str) -> None:
    body = {"model": app, "messages": [{"role": "user", "content": "what do cows eat"}], "stream": True}

    chunks = events_of(http.post("/v1/chat/completions", json=body))

    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert len([piece for piece in pieces if piece]) > 2
