"""Tests of the fields of requests: null means not given, 0 and empty texts are values, and errors name the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.service import in_process

from teola_plugin.adapters.sampling import call_schema
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt, Sampling
from teola_plugin.server.models.base import without_folders
from teola_plugin.server.wire.requests import ChatRequest

MESSAGES = [{"role": "user", "content": "q"}]
F = {"type": "function", "function": {"name": "f"}}
OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
SCHEMA = {"type": "object", "properties": {"x": {"default": None, "enum": [None, 1]}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@dataclass
class RecordingLLM:
    """Says back its last message, and keeps what it was sent."""

    prompts: list[Prompt] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)

    def answer(self, prompt: Prompt, sampling: Sampling) -> str:
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        return prompt.messages[-1].content if prompt.messages else prompt.text


LLM = RecordingLLM()
APPS = ("chain", "model", "graph", "query_engine", "chat_engine", "workflow", "template", "echoing_graph", "remembers")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    pool = EnginePool.local([FakeLLM("llm", answer=LLM.answer), FakeEmbedder(), FakeReranker()])
    with in_process(pool, apps={name: {"object": f"support.served_apps:{name}"} for name in APPS}) as client:
        yield client


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Send a request. Lone surrogates and infinite numbers are spelled as Python's JSON does."""
    return http.post(f"/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"})


def chat(http: httpx.Client, model: str = "llm", messages: Any = MESSAGES, **more: Any) -> httpx.Response:
    return post(http, "chat/completions", {"model": model, "messages": messages, **more})


def content_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def assert_refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param), error
    assert sorted(error) == ["code", "message", "param", "type"]


# ------------------------------------------------------------ null

NULLS = {
    "chat/completions": "max_tokens max_completion_tokens temperature top_p top_k n seed stop stream stream_options "
    "tools tool_choice response_format logprobs top_logprobs logit_bias service_tier store metadata modalities audio "
    "prediction reasoning_effort verbosity web_search_options parallel_tool_calls functions function_call user "
    "ignore_eos frequency_penalty presence_penalty unheard_of",
    "completions": "max_tokens echo best_of suffix logprobs logit_bias n user stop stream stream_options",
    "responses": "instructions tools tool_choice text reasoning include conversation max_tool_calls prompt "
    "top_logprobs previous_response_id background truncation stream metadata max_output_tokens "
    "temperature top_p stream_options",
    "embeddings": "encoding_format dimensions user input_type metadata",
    "rerank": "top_n return_documents user metadata",
    "queries": "inputs parameters variables documents settings metadata user",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "llm", "messages": MESSAGES},
    "completions": {"model": "llm", "prompt": "q"},
    "responses": {"model": "llm", "input": "q"},
    "embeddings": {"model": "embedder", "input": "q"},
    "rerank": {"model": "reranker", "query": "q", "documents": ["a"]},
    "queries": {"model": "llm", "input": "q"},
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path in NULLS for name in NULLS[path].split()])
def test_null_parameter_is_accepted_as_missing(http: httpx.Client, path: str, name: str) -> None:
    response = post(http, path, {**BODIES[path], name: None})

    assert response.status_code in (200, 202), response.text


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {"stream_options": {"include_usage": None}}),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]}),
        ("chat/completions", {"tools": [{**F, "function": {**F["function"], "strict": None, "description": None}}]}),  # type: ignore[dict-item]
        ("chat/completions", {"messages": [{"role": "user", "content": "q", "name": None, "tool_calls": None}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "q", "x": None}]}]}),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": OBJECT, "strict": None},
                }
            },
        ),
        ("chat/completions", {"response_format": {"type": "text", "json_schema": None}}),
        ("completions", {"stream": True, "stream_options": {"include_usage": None}}),
        ("responses", {"text": {"format": None, "verbosity": None}}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": OBJECT, "strict": None}}}),
        ("responses", {"input": [{"role": "user", "type": None, "content": "q", "status": None}]}),
        ("responses", {"tools": [{"type": "function", "name": "f", "parameters": None, "strict": None}]}),
        ("queries", {"parameters": {"n": None, "stream": None, "max_tokens": None, "stop": None}}),
        ("queries", {"documents": [{"text": "t", "name": None, "file_id": None}], "model": "llm"}),
    ],
)
def test_nested_null_is_accepted_as_missing(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    response = post(http, path, {**BODIES[path], **more})

    assert response.status_code in (200, 202), response.text


def test_documents_of_a_form_may_be_null(http: httpx.Client) -> None:
    response = http.post("/v1/queries", files={"query": (None, '{"model": "llm", "input": "q", "documents": null}')})

    assert response.status_code == 202


def test_null_is_not_carried_to_another_server() -> None:
    body = {
        **BODIES["chat/completions"],
        "stream_options": None,
        "audio": None,
        "messages": [{**MESSAGES[0], "name": None}],
    }

    assert ChatRequest.model_validate(body).sent_fields() == BODIES["chat/completions"]


def test_null_in_a_schema_is_kept(http: httpx.Client) -> None:
    response = chat(http, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})

    assert response.status_code == 200
    assert json.loads(LLM.samplings[-1].json_schema) == SCHEMA


def test_null_in_inputs_is_kept(http: httpx.Client) -> None:
    inputs = {"messages": [{"role": "user", "content": "x", "name": None}], "other": None}

    response = chat(http, "echoing_graph", metadata={"inputs": inputs})

    assert json.loads(content_of(response)) == [["human", "x", None, None, None]]


# ------------------------------------------------------------ 0, empty texts, empty lists


@pytest.mark.parametrize(("value", "status"), [(None, 200), (0, 400), (1, 400)])
def test_zero_logprobs_is_a_value_and_refused(http: httpx.Client, value: Any, status: int) -> None:
    assert post(http, "completions", {**BODIES["completions"], "logprobs": value}).status_code == status


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {"n": 0}),
        ("chat/completions", {"max_tokens": 0}),
        ("chat/completions", {"max_completion_tokens": 0}),
        ("chat/completions", {"tool_choice": ""}),
        ("chat/completions", {"tool_choice": {}}),
        ("chat/completions", {"response_format": {}}),
        ("completions", {"best_of": 0}),
        ("responses", {"max_output_tokens": 0}),
        ("responses", {"previous_response_id": ""}),
        ("embeddings", {"dimensions": 0}),
        ("embeddings", {"encoding_format": ""}),
        ("rerank", {"top_n": 0}),
    ],
)
def test_empty_value_is_not_treated_as_missing(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    assert_refused(post(http, path, {**BODIES[path], **more}), next(iter(more)))


def test_zero_temperature_and_seed_reach_the_engine(http: httpx.Client) -> None:
    chat(http, temperature=0, seed=0)

    assert (LLM.samplings[-1].temperature, LLM.samplings[-1].seed) == (0, 0)


def test_empty_instructions_become_a_system_message(http: httpx.Client) -> None:
    post(http, "responses", {**BODIES["responses"], "instructions": ""})

    assert [(one.role, one.content) for one in LLM.prompts[-1].messages] == [("system", ""), ("user", "q")]


def test_thread_id_zero_names_a_thread(http: httpx.Client) -> None:
    for text in ("one", "two"):
        answer = content_of(chat(http, "remembers", [{"role": "user", "content": text}], metadata={"thread_id": 0}))

    assert answer == "one two"


@pytest.mark.parametrize("name", ["", True, {}, [1]])
def test_thread_without_a_name_is_refused(http: httpx.Client, name: Any) -> None:
    assert_refused(chat(http, "remembers", metadata={"thread_id": name}), "metadata")


@pytest.mark.parametrize("value", ["", 0, False, {}])
def test_non_list_documents_of_a_form_are_refused(http: httpx.Client, value: Any) -> None:
    query = json.dumps({"model": "llm", "input": "q", "documents": value})

    assert_refused(http.post("/v1/queries", files={"query": (None, query)}), "documents")


def test_seeds_of_several_answers_stay_within_64_bits(http: httpx.Client) -> None:
    chat(http, seed=2**63 - 1, n=2)

    assert {one.seed for one in LLM.samplings[-2:]} == {2**63 - 1, -(2**63)}


# ------------------------------------------------------------ tools


def of_parameters(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        *(({"tools": [F], "tool_choice": choice}, "tool_choice") for choice in (
            {"type": "function", "function": "f"},
            {"type": "function", "function": ["f"]},
            {"type": "function", "function": {"name": "other"}},
            {"type": "function", "function": {"name": 1}},
            {"type": "function"},
            {"type": "custom", "custom": {"name": "f"}},
            {"type": ["function"]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [F]}},
            "other", 1, ["f"],
        )),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        *(({"tools": [tool]}, "tools") for tool in (
            None, "f", {}, {"type": "custom"}, {"function": "f"}, {"function": {}}, {"function": {"name": ""}},
            {"function": {"name": 1}}, {"function": {"name": "f", "description": 1}},
        )),
        *((of_parameters(parameters), "tools") for parameters in (
            "bad", [1], {"type": "string"}, {"type": 1}, {"type": [1]}, {"properties": [1]}, {"properties": {"x": 1}},
            {"required": "x"}, {"required": [1]}, {"enum": 1}, {"items": "x"}, {"anyOf": {}}, {"allOf": [1]},
            {"$defs": None}, {"$defs": "bad"}, {"$defs": [1]}, {"$defs": {"x": 1}}, {"definitions": 1},
            {"properties": {"x": {"$ref": 1}}}, {"properties": {"x": {"$ref": "#/$defs/x"}}},
            {"properties": {"x": {"$ref": "https://example.org/schema"}}}, {"$ref": "#"},
            {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
            {"properties": {"x": {"$ref": "#/properties/y"}, "y": {"$ref": "#/properties/x"}}},
        )),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_malformed_tools_are_refused(http: httpx.Client, more: dict[str, Any], param: str, stream: bool) -> None:
    assert_refused(chat(http, **more, stream=stream), param)


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "f"}}])
def test_parameters_that_refer_to_themselves_are_followed(http: httpx.Client, choice: Any) -> None:
    tree = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/tree"}, "root": {"$ref": "#"}}}

    response = chat(http, **of_parameters({**tree, "$defs": {"tree": tree}}), tool_choice=choice)

    schema = json.loads(LLM.samplings[-1].json_schema)
    assert response.status_code == 200
    assert schema["$defs"]["tree"]["properties"]["inner"] == {"$ref": "#/$defs/tree"}
    assert schema["properties"]["arguments"]["properties"]["root"] == {"$ref": "#/properties/arguments"}


def test_definitions_of_two_tools_do_not_clash() -> None:
    parameters = [
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/x"}, "default": {"$ref": "#/$defs/x"}},
            "$defs": {"x": x},
        }
        for x in ({"type": "string"}, {"type": "integer"})
    ]

    schema = json.loads(call_schema([{"name": f"f{at}", "parameters": one} for at, one in enumerate(parameters)]))

    for at, kind in enumerate(("string", "integer")):
        for reference in schema["anyOf"][at]["properties"]["arguments"]["properties"].values():
            assert schema["$defs"][reference["$ref"].removeprefix("#/$defs/")] == {"type": kind}


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/$defs/x"}, {"properties": 1}, {"type": 1}, {"$defs": {"x": None}}, {"anyOf": [None]}]
)
def test_malformed_schema_of_an_answer_is_refused(http: httpx.Client, schema: Any) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    assert_refused(chat(http, response_format=format), "response_format")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_app_refuses_required_tool_choice(http: httpx.Client, choice: Any) -> None:
    assert_refused(chat(http, "chain", tool_choice=choice), "tool_choice")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_optional_tool_choice_needs_no_tools(http: httpx.Client, choice: Any) -> None:
    assert chat(http, tool_choice=choice).status_code == 200


@pytest.mark.parametrize("name", ["messages", "n", "response_format", "max_completion_tokens"])
def test_chat_parameter_is_refused_in_responses(http: httpx.Client, name: str) -> None:
    assert_refused(post(http, "responses", {**BODIES["responses"], name: 1}), name)


@pytest.mark.parametrize("more", [{"stop": 5}, {"seed": "x"}, {"logit_bias": 1}])
def test_parameter_of_a_wrong_type_is_refused_in_responses(http: httpx.Client, more: dict[str, Any]) -> None:
    assert_refused(post(http, "responses", {**BODIES["responses"], **more}), next(iter(more)))


# ------------------------------------------------------------ messages

HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "be short"},
    {"role": "user", "content": "q", "name": "bob"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
    {"role": "function", "name": "f", "content": "43"},
    {"role": "user", "content": "thanks"},
]


def test_graph_gets_messages_with_their_types(http: httpx.Client) -> None:
    echoed = json.loads(content_of(chat(http, "echoing_graph", HISTORY)))

    assert echoed == [
        ["system", "be short", None, None, None],
        ["human", "q", "bob", None, None],
        ["ai", "", None, None, [{"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}]],
        ["tool", "42", None, "1", None],
        ["function", "43", "f", None, None],
        ["human", "thanks", None, None, None],
    ]


@pytest.mark.parametrize("arguments", ["{bad", "[1]", "", '"\\ud800"', "[" * 5000, "NaN", "9" * 5000])
@pytest.mark.parametrize("model", ["llm", *APPS])
def test_tool_calls_with_odd_arguments_are_accepted(http: httpx.Client, model: str, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}, *MESSAGES]

    assert chat(http, model, messages).status_code == 200


@pytest.mark.parametrize("model", ["llm", *APPS])
def test_history_with_tool_calls_is_accepted(http: httpx.Client, model: str) -> None:
    assert chat(http, model, HISTORY).status_code == 200


@pytest.mark.parametrize(
    "call",
    [
        *({}, {"function": "f"}, {"function": {}}, {"function": {"name": 1}}),
        *({"function": {"name": "f", "arguments": 1}}, {"id": 1, "function": {"name": "f", "arguments": "{}"}}),
    ],
)
@pytest.mark.parametrize("model", ["llm", "graph", "model", "chat_engine"])
def test_malformed_call_is_refused(http: httpx.Client, model: str, call: Any) -> None:
    assert_refused(
        chat(http, model, [{"role": "assistant", "content": "x", "tool_calls": [call]}, *MESSAGES]), "messages"
    )


@pytest.mark.parametrize(
    "message", [{"role": "tool", "content": "x"}, {"role": "function", "content": "x"}, {"role": "user", "name": 1}]
)
@pytest.mark.parametrize("model", ["graph", "model"])
def test_message_without_required_fields_is_refused(http: httpx.Client, model: str, message: Any) -> None:
    assert_refused(chat(http, model, [message, *MESSAGES]), "messages.0")


@pytest.mark.parametrize("output", ["42", [{"type": "input_text", "text": "4"}, {"type": "output_text", "text": "2"}]])
def test_output_of_a_function_is_text(http: httpx.Client, output: Any) -> None:
    item = {"type": "function_call_output", "call_id": "1", "output": output}

    post(http, "responses", {"model": "llm", "input": [item]})

    assert LLM.prompts[-1].messages[-1].content == "42"


def test_parts_of_a_tools_message_are_text(http: httpx.Client) -> None:
    chat(http, messages=HISTORY[:4])

    assert (LLM.prompts[-1].messages[-1].role, LLM.prompts[-1].messages[-1].content) == ("tool", "42")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("chain", 5), ("chain", {}), ("chain", []), ("model", 5), ("model", {}), ("model", [{"role": "tool"}]),
        ("graph", 5), ("graph", "x"), ("graph", {"messages": 5}), ("graph", {"messages": None}),
        ("graph", {"messages": [{"role": "tool"}]}),
        ("query_engine", 5), ("query_engine", ""), ("chat_engine", 5), ("chat_engine", []),
        ("chat_engine", [["king", "x"]]), ("workflow", {"ctx": 1}), ("template", 5), ("template", {}),
    ],
)  # fmt: skip
def test_invalid_app_inputs_are_refused(http: httpx.Client, model: str, inputs: Any) -> None:
    if isinstance(inputs, str):
        inputs = json.dumps(inputs)
    response = chat(http, model, metadata={"inputs": inputs})

    assert response.status_code == 400, response.text


@pytest.mark.parametrize("inputs", ["{bad", '"\\ud800"', "[" * 5000, "NaN", "1e999", "9" * 5000])
def test_malformed_json_inputs_are_refused(http: httpx.Client, inputs: str) -> None:
    assert_refused(chat(http, "chain", metadata={"inputs": inputs}), "metadata")


# ------------------------------------------------------------ JSON that cannot be carried


@pytest.mark.parametrize("bad", ["\ud800", "x\udfffy", float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("chat/completions", name) for name in ("user", "metadata", "tools", "unheard_of", "stop")),
        *(("completions", name) for name in ("prompt", "suffix", "logit_bias")),
        *(("responses", name) for name in ("input", "instructions", "text", "unheard_of")),
        ("embeddings", "input"), ("rerank", "query"), ("rerank", "documents"),
        *(("queries", name) for name in ("inputs", "parameters", "variables", "settings", "documents")),
        ("queries/x/resume", "value"),
    ],
)  # fmt: skip
def test_field_that_json_cannot_carry_is_named(http: httpx.Client, path: str, name: str, bad: Any) -> None:
    for value in (bad, [bad], {"x": [{"y": bad}]}):
        assert_refused(post(http, path, {**BODIES.get(path, {}), name: value}), name)


@pytest.mark.parametrize("depth", [150, 300, 900])
def test_deeply_nested_field_is_refused(http: httpx.Client, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}

    assert_refused(chat(http, unheard_of=value), "unheard_of")


# ------------------------------------------------------------ paths


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/srv/models/llama", "llama"),
        ("/srv/models/llama/", "llama"),
        ("./models/llama", "llama"),
        ("~/llama", "llama"),
        ("C:\\models\\llama", "llama"),
        ("/x/models--org--llama-3/snapshots/0123abc", "org/llama-3"),
        ("org/llama-3", "org/llama-3"),
        ("llama", "llama"),
    ],
)
def test_model_is_shown_without_folders(model: str, expected: str) -> None:
    assert without_folders(model) == expected


def test_no_route_shows_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret-folder/my-model").mkdir(parents=True)
    model = str(tmp_path / "secret-folder/my-model")
    engines = [FakeLLM("llm"), FakeEmbedder(), FakeReranker()]
    for engine, path in zip(engines, (model, f"{model}-2", f"{model}-3"), strict=True):
        monkeypatch.setattr(engine, "versions", lambda path=path: {"model": path})
    addresses = (
        "/v1/models /v1/models/llm /v1/models/embedder /version /metrics /ready /health /pages/pool / /openapi.json"
    )
    with in_process(EnginePool.local(engines)) as http:
        by_path = chat(http, model)
        answers = [http.get(path) for path in (*addresses.split(), "/v1/activity", "/v1/models/nobody", "/nowhere")]
        answers += [chat(http, "nobody"), chat(http, "embedder"), chat(http, max_tokens=0), chat(http, "my-model")]

    assert by_path.status_code == 200
    assert answers[-1].status_code == 200
    assert not [answer.text for answer in answers if "secret-folder" in answer.text]
    assert {one["id"]: one["root"] for one in answers[0].json()["data"]}["llm"] == "my-model"
