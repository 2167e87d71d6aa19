"""Tests of `ChatTeola` and `TeolaLLM`: payloads, messages, streams, and LangChain's own test suites."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel, Field

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.llm import TeolaLLM
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import Query
from teola_plugin.requests.payloads import UNKNOWN, Generate, Message, Prompt, Sampling
from teola_plugin.runtime.query_run import current_run

ARRAY = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}


@pytest.fixture
def pool(llm_pool):
    return llm_pool


def assert_sampling(llm: Any, **sampling: Any) -> None:
    assert llm.requests[-1].sampling == Sampling(**sampling)


def test_chat_teola_converts_message_roles_and_text_parts(pool, llm):
    call = AIMessage("thinking", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "1"}])
    ChatTeola(pool=pool).invoke(
        [
            SystemMessage("be kind"),
            ("human", "hello"),
            call,
            ToolMessage("3", tool_call_id="1"),
            ChatMessage(role="Developer", content="short"),
            HumanMessage([{"type": "text", "text": "two "}, "parts"]),
        ]
    )
    assert llm.requests[-1].prompt.messages == (
        Message("system", "be kind"),
        Message("user", "hello"),
        Message("assistant", 'thinking\n{"name": "add", "arguments": {"a": 1}}'),
        Message("tool", "3"),
        Message("system", "short"),
        Message("user", "two parts"),
    )


def test_chat_teola_raises_for_images_unknown_roles_and_no_messages(pool, llm):
    image = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    with pytest.raises(RegistrationError, match=r"human message holds a part of type 'image_url'.*Next:"):
        ChatTeola(pool=pool).invoke([HumanMessage([{"type": "text", "text": "see"}, image])])
    with pytest.raises(RegistrationError, match="role 'narrator'"):
        ChatTeola(pool=pool).invoke([ChatMessage(role="narrator", content="x")])
    with pytest.raises(RegistrationError, match="no messages"):
        ChatTeola(pool=pool).invoke([])
    assert llm.requests == []


def test_sampling_options_of_call_override_binding_and_model(pool, llm):
    model = ChatTeola(pool=pool, max_tokens=10, stop=["END"], top_k=5)
    model.invoke("x")
    assert_sampling(llm, max_tokens=10, stop=("END",), top_k=5)
    model.bind(max_tokens=3, seed=7, ignore_eos=True).invoke("x", temperature=0.5, top_p=0.9, stop=["a", "b"])
    assert_sampling(llm, max_tokens=3, seed=7, ignore_eos=True, temperature=0.5, top_p=0.9, stop=("a", "b"), top_k=5)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"json_schema": ARRAY},
        {"json_schema": json.dumps(ARRAY, indent=2)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ARRAY}}},
    ],
)
def test_response_schema_in_every_spelling_gives_the_same_request(pool, llm, kwargs):
    ChatTeola(pool=pool).invoke("x", **kwargs)
    assert_sampling(llm, json_schema=json.dumps(ARRAY))


def test_errors_of_wrong_arguments_name_the_argument(pool, llm):
    model = ChatTeola(pool=pool)
    with pytest.raises(
        RegistrationError, match=r"unknown argument of ChatTeola 'max_token'.*did you mean 'max_tokens'"
    ):
        model.invoke("x", max_token=3)
    with pytest.raises(RegistrationError, match="unknown response_format 'xml'"):
        model.invoke("x", response_format={"type": "xml"})
    with pytest.raises(RegistrationError, match=r"top_p=1\.5 is out of its range"):
        model.invoke("x", top_p=1.5)
    with pytest.raises(RegistrationError, match="JSON schema is not JSON"):
        model.invoke("x", json_schema="{")
    with pytest.raises(RegistrationError, match=r"unknown engine 'lmm'.*did you mean 'llm'"):
        ChatTeola(pool=pool, engine="lmm")
    with pytest.raises(ValueError, match="tempreature"):
        ChatTeola(pool=pool, tempreature=1.0)
    assert llm.requests == []


def test_invoke_returns_message_with_usage_and_metadata(pool, llm):
    message = ChatTeola(pool=pool).invoke("hi")
    assert isinstance(message, AIMessage)
    assert message.content == "you said: user: hi\nassistant:"
    assert message.id.startswith("lc_run-")
    assert message.usage_metadata == {
        "input_tokens": 7,
        "output_tokens": 4,
        "total_tokens": 11,
        "input_token_details": {"cache_read": 3},
    }
    assert message.response_metadata == {
        "model_name": "scripted-1",
        "finish_reason": "stop",
        "model_provider": "teola",
    }


async def test_streamed_chunks_sum_to_the_message_of_invoke(pool, llm):
    model, counter = ChatTeola(pool=pool), UsageMetadataCallbackHandler()
    whole = model.invoke("hi")
    streamed = [list(model.stream("hi", {"callbacks": [counter]})), [chunk async for chunk in model.astream("hi")]]
    for chunks in streamed:
        assert len(chunks) == 5  # four words, and the end
        assert [chunk.chunk_position for chunk in chunks] == [None] * 4 + ["last"]
        total = sum(chunks[1:], chunks[0])
        assert isinstance(total, AIMessageChunk)
        for field in ("content", "usage_metadata", "response_metadata", "additional_kwargs"):
            assert getattr(total, field) == getattr(whole, field)
    assert counter.usage_metadata == {"scripted-1": whole.usage_metadata}


async def test_closed_stream_cancels_its_request(pool, llm, monkeypatch):
    handles = []
    real = pool.call
    monkeypatch.setattr(pool, "call", lambda *args, **kwargs: handles.append(real(*args, **kwargs)) or handles[-1])
    gave_up = []
    for handle_stream in ("sync", "async"):
        model = ChatTeola(pool=pool)
        if handle_stream == "sync":
            stream = model._stream([HumanMessage("hi")])
            next(stream)
            monkeypatch.setattr(handles[-1], "cancel", lambda: gave_up.append("sync"))
            stream.close()
        else:
            stream = model._astream([HumanMessage("hi")])
            await anext(stream)
            monkeypatch.setattr(handles[-1], "cancel", lambda: gave_up.append("async"))
            await stream.aclose()
    assert gave_up == ["sync", "async"]


async def test_chat_teola_supports_abatch_and_astream_events(pool, llm):
    model = ChatTeola(pool=pool)
    answers = await model.abatch(["a", "b"])
    assert [answer.content for answer in answers] == [f"you said: user: {x}\nassistant:" for x in "ab"]
    events = [event["event"] async for event in model.astream_events("hi", version="v2")]
    assert events == ["on_chat_model_start", *["on_chat_model_stream"] * 5, "on_chat_model_end"]


def test_copies_share_the_pool_and_hide_it(pool):
    model = ChatTeola(pool=pool, max_tokens=9)
    for other in (copy.copy(model), copy.deepcopy(model), model.model_copy(deep=True)):
        assert other.pool is pool and other.max_tokens == 9
    assert "pool" not in model.model_dump() and "EnginePool" not in repr(model)
    assert "EnginePool" not in json.dumps(model.asdict())


class Queries(BaseModel):
    """Search queries."""

    queries: list[str] = Field(min_length=1)


def test_structured_output_returns_parsed_or_raw_result(pool, llm):
    llm.answer = lambda request: '{"queries": ["a", "b"]}' if request.sampling.json_schema else "free"
    model = ChatTeola(pool=pool)
    assert model.with_structured_output(Queries).invoke("x") == Queries(queries=["a", "b"])
    assert json.loads(llm.requests[-1].sampling.json_schema) == Queries.model_json_schema()
    assert model.with_structured_output(Queries.model_json_schema()).invoke("x") == {"queries": ["a", "b"]}
    raw = model.with_structured_output(Queries, include_raw=True).invoke("x")
    assert raw["parsed"] == Queries(queries=["a", "b"]) and raw["parsing_error"] is None
    llm.answer = lambda request: '{"queries": []}'
    raw = model.with_structured_output(Queries, include_raw=True).invoke("x")
    assert raw["parsed"] is None and raw["parsing_error"] and raw["raw"].content == '{"queries": []}'
    with pytest.raises(RegistrationError, match="function_calling"):
        model.with_structured_output(Queries, method="guess")


# ------------------------------------------------------------ leaves


@pytest.mark.parametrize("kwargs", [{}, {"max_tokens": 5, "stop": ["x"]}, {"json_schema": ARRAY}])
@pytest.mark.parametrize("asking", ["text", [("system", "s"), HumanMessage([{"type": "text", "text": "t"}])]])
def test_chat_leaf_builds_the_payload_of_the_call(pool, llm, kwargs, asking):
    model = ChatTeola(pool=pool, temperature=0.3)
    leaf = model.__teola_leaf__(kwargs)
    expected = leaf.payload(asking)
    message = model.invoke(asking, **kwargs)
    assert llm.requests == [expected] and isinstance(expected, Generate)
    assert leaf.engine == "llm"
    prompt = ChatPromptTemplate.from_messages([("system", "s"), ("human", "{x}")]).invoke({"x": "t"})
    assert leaf.payload(prompt) == leaf.payload(prompt.to_messages())
    assert leaf.message(llm_answer(llm)).model_copy(update={"id": message.id}) == message


def llm_answer(llm: Any) -> Any:
    from teola_plugin.requests.payloads import Generation

    text = llm.answer(llm.requests[-1])
    return Generation(text, "stop", 7, len(text.split(" ")), 3)


def test_chat_leaf_accepts_unknown_prompt_slots(pool):
    prompt = ChatPromptTemplate.from_template("Use {context} for {question}")
    leaf = ChatTeola(pool=pool).__teola_leaf__({})
    payload = leaf.payload(prompt.invoke({"context": UNKNOWN, "question": "why"}))
    assert payload.prompt == Prompt((Message("user", f"Use {UNKNOWN} for why"),))
    assert payload.prompt.known_prefix() == "user: Use "


def test_chat_leaf_reports_list_schemas_and_their_length(pool):
    model = ChatTeola(pool=pool)
    fixed, open_, free = model.__teola_leaf__({"json_schema": ARRAY}), {"type": "array"}, model.__teola_leaf__({})
    assert (fixed.items, fixed.expected) == ("json", 2)
    assert (free.items, free.expected) == ("", None)
    open_leaf = model.__teola_leaf__({"json_schema": open_})
    assert (open_leaf.items, open_leaf.expected) == ("json", None)
    assert model.__teola_leaf__({"json_schema": Queries.model_json_schema()}).items == "json", "the list is a field"


def test_chat_model_with_cache_or_rate_limiter_has_no_leaf(pool):
    assert ChatTeola(pool=pool).__teola_leaf__({"tools": [{"type": "function"}]}) is None
    assert ChatTeola(pool=pool, cache=InMemoryCache()).__teola_leaf__({}) is None
    assert ChatTeola(pool=pool, rate_limiter=InMemoryRateLimiter()).__teola_leaf__({}) is None
    bound = ChatTeola(pool=pool).with_structured_output(Queries).first
    assert ChatTeola(pool=pool).__teola_leaf__(bound.kwargs) is not None


async def test_chat_calls_join_the_ambient_query(pool, llm, monkeypatch):
    seen = []
    real = pool.call
    monkeypatch.setattr(pool, "call", lambda *a, run=None, **k: seen.append(run) or real(*a, **k))
    run, handler_run = pool.runtime.watch(Query()), pool.runtime.watch(Query())
    token = current_run.set(run)
    try:
        ChatTeola(pool=pool).invoke("x")
    finally:
        current_run.reset(token)

    class Handler(UsageMetadataCallbackHandler):
        teola_run = handler_run

    ChatTeola(pool=pool).invoke("x", {"callbacks": [Handler()]})
    chain = ChatPromptTemplate.from_template("{x}") | ChatTeola(pool=pool)
    list(chain.stream({"x": "x"}, {"callbacks": [Handler()]}))
    for chunk in ChatTeola(pool=pool).bind(max_tokens=3).stream("x", {"callbacks": [Handler()]}):
        assert chunk is not None and current_run.get() is None  # nothing leaks to the reader
    async for chunk in ChatTeola(pool=pool).astream("x", {"callbacks": [Handler()]}):
        assert chunk is not None and current_run.get() is None
    ChatTeola(pool=pool).invoke("x")
    assert seen == [run, *[handler_run] * 4, None]


# ------------------------------------------------------------ TeolaLLM


async def test_teola_llm_returns_and_streams_text(pool, llm):
    model = TeolaLLM(pool=pool, max_tokens=4)
    assert model.invoke("hi there") == "you said: hi there"
    assert llm.requests == [Generate(Prompt(text="hi there"), Sampling(max_tokens=4))]
    assert llm.requests == [model.__teola_leaf__({}).payload("hi there")]
    assert "".join(model.stream("hi")) == model.invoke("hi")
    assert "".join([part async for part in model.astream("hi")]) == await model.ainvoke("hi")
    assert model.generate(["a", "b"]).generations[1][0].generation_info["finish_reason"] == "stop"
    assert TeolaLLM(pool=pool, cache=InMemoryCache()).__teola_leaf__({}) is None


# ------------------------------------------------------------ LangChain's own suites


class TestUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _use(self, pool):
        type(self).pool = pool

    @property
    def chat_model_class(self):
        return ChatTeola

    @property
    def chat_model_params(self):
        return {"pool": self.pool}

    @property
    def standard_chat_model_params(self):
        return {"temperature": 0, "max_tokens": 100, "stop": []}  # no timeout, no retries: unknown fields are refused


class TestIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use(self, pool, llm):
        type(self).pool = pool
        llm.answer = _answer

    @property
    def chat_model_class(self):
        return ChatTeola

    @property
    def chat_model_params(self):
        return {"pool": self.pool}

    @property
    def standard_chat_model_params(self):
        return {}

    @property
    def supports_model_override(self):
        return False

    @property
    def supports_json_mode(self):
        return True

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream=False):
        model = ChatTeola(pool=self.pool)
        chunks = list(model.stream("again")) if stream else [model.invoke("again")]
        return sum(chunks[1:], chunks[0])


def _answer(request: Generate) -> str:
    """Return an answer that fits the schema of a joke or a person, or a call of a tool.

    After the tool's result return text.
    """
    schema = json.loads(request.sampling.json_schema or "{}")
    last_message = request.prompt.messages[-1]
    if request.prompt.tools and last_message.role == "user":
        return _call(json.loads(request.prompt.tools), schema, last_message.content)
    if not schema:
        return "Good day to you."
    return json.dumps({name: "because" for name in schema.get("properties", {})})


def _call(tools: list[dict[str, Any]], schema: dict[str, Any], text: str) -> str:
    named = schema.get("properties", {}).get("name", {}).get("enum")
    tool = next(t["function"] for t in tools if named is None or t["function"]["name"] in named)
    given = {
        name: 3 if kind.get("type") == "integer" else text for name, kind in tool["parameters"]["properties"].items()
    }
    call = json.dumps({"name": tool["name"], "arguments": given})
    return call if schema else f"<tool_call>\n{call}\n</tool_call>"
