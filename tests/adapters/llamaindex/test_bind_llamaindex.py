"""Tests of `bound` for LlamaIndex objects: which engine does the work, and which bindings are refused."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ImageBlock, TextBlock
from llama_index.core.callbacks import CallbackManager
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin.adapters.calls import joined
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM
from teola_plugin.adapters.llamaindex.binding.bind import bound
from teola_plugin.adapters.routing import route_of
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.openai.wire import WirePrompt
from teola_plugin.errors import QueryTimeout, RegistrationError
from teola_plugin.graph import PrimitiveKind, RequestContext
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.interceptors import worker_of

QUESTION = [ChatMessage(role="system", content="be brief"), ChatMessage("why?")]
_loop = asyncio.Runner()
"""One loop for all: the package `openai` keeps connections between calls."""
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


@pytest.fixture(scope="module")
def server_pool(stub: OpenAIStub) -> Iterator[EnginePool]:
    with EnginePool.local(llm=OpenAIServer(base_url=stub.base_url, prefix_caching=True)) as pool:
        yield pool


@pytest.fixture
def own(stub: OpenAIStub) -> Callable[..., OpenAILike]:
    def make(**options: Any) -> OpenAILike:
        given = {"is_chat_model": True, "max_retries": 0, "temperature": 0.0, "max_tokens": 9, **options}
        return OpenAILike(model=MODEL, api_base=stub.base_url, api_key="none", **given)

    return make


async def _list(made: Any) -> list[Any]:
    return [one async for one in await made]


WAYS: dict[str, Callable[[Any], Any]] = {
    "chat": lambda m: m.chat(QUESTION),
    "achat": lambda m: _loop.run(m.achat(QUESTION)),
    "stream_chat": lambda m: list(m.stream_chat(QUESTION)),
    "astream_chat": lambda m: _loop.run(_list(m.astream_chat(QUESTION))),
    "complete": lambda m: m.complete("why?"),
    "acomplete": lambda m: _loop.run(m.acomplete("why?")),
    "stream_complete": lambda m: list(m.stream_complete("why?")),
    "astream_complete": lambda m: _loop.run(_list(m.astream_complete("why?"))),
    "predict": lambda m: m.predict(PromptTemplate("<{q}>"), q="why?"),
    "refused": lambda m: m.complete("refuse"),
    "arefused": lambda m: _loop.run(m.acomplete("refuse")),
    "arguments": lambda m: m.complete("why?", temperature=0.7, seed=3, stop=["x"]),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_chat_model": False},
    {"reuse_client": False},
    {"system_prompt": "be loud", "additional_kwargs": {"top_p": 0.5}, "temperature": 0.8},
    {"default_headers": {"x-mine": "1"}, "logprobs": True},
    {"completion_to_prompt": lambda text: f"[{text}]"},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "default")
def test_bound_openai_like_gives_the_originals_answers_and_events(server_pool, own, way, options):
    """Values, types, errors, callbacks, events and spans."""

    def observed(model: Any) -> Any:
        recorder = Recorder()
        model.callback_manager = CallbackManager([recorder])
        with recorded(recorder):
            try:
                value = WAYS[way](model)
            except Exception as error:
                value = type(error), str(error), error.status_code  # type: ignore[attr-defined]
        return value, recorder.callbacks, recorder.events, recorder.spans

    model = own(**options)
    assert observed(bound(own(**options), "llm", server_pool)) == observed(model)


def test_chat_completions_of_a_bound_llm_use_the_engine(server_pool, own, stub):
    model = bound(own(), "llm", server_pool)
    for way in (
        lambda: model.chat(QUESTION),
        lambda: asyncio.run(_list(model.astream_chat(QUESTION))),
        lambda: asyncio.run(model.acomplete("why?")),
        lambda: list(model.stream_complete("why?")),
    ):
        with server_pool.watching() as run:
            way()
        assert [span.engine for span in run.trace.result(10).spans] == ["llm"]
    with server_pool.watching() as run:
        WAYS["complete"](bound(own(is_chat_model=False), "llm", server_pool))
    assert run.trace.result(10).spans == (), "plain completions go the object's own way"


def test_bound_llm_sends_images_as_the_original(server_pool, own, stub):
    """`TeolaLLM` refuses them; a bound one writes the request itself."""
    picture = ImageBlock(url="http://localhost/x.png")
    messages = [ChatMessage(role="user", blocks=[TextBlock(text="see"), picture])]
    model = own()
    stub.requests.clear()
    for one in (model, bound(own(), "llm", server_pool)):
        one.chat(messages)
    plain, carried = ([m["content"] for m in body["messages"]] for _, body in stub.requests)
    assert carried == plain and any(part["type"] == "image_url" for part in carried[0])


def test_stream_of_bound_llm_belongs_to_the_query_around_it(server_pool, own):
    with server_pool.watching() as run:
        made = bound(own(), "llm", server_pool).stream_chat(QUESTION)
        next(made)
    assert list(made)
    assert [span.engine for span in run.trace.result(10).spans] == ["llm"]


def test_binding_does_not_change_the_llm(server_pool, own):
    model = own()
    before = dict(vars(model)), dict(model.__pydantic_private__)
    made = bound(model, "llm", server_pool)
    made.complete("why?")
    assert (vars(model), model.__pydantic_private__) == before
    assert type(model) is OpenAILike and isinstance(made, OpenAILike) and type(made).__name__ == "OpenAILike"
    assert route_of(made) == (server_pool, "llm")
    assert made.to_dict() == model.to_dict() and made.metadata == model.metadata
    for copied in (copy.copy(made), copy.deepcopy(made), made.model_copy()):
        assert route_of(copied) == (server_pool, "llm")
        assert copied.complete("why?").text == model.complete("why?").text


def test_worker_payloads_equal_the_requests_of_the_llm(stub, own):
    template = PromptTemplate("<{q}>")
    with EnginePool.local(llm=OpenAIServer(base_url=stub.base_url, prefix_caching=True)) as pool:
        for options in ({}, {"system_prompt": "be loud"}, {"completion_to_prompt": lambda text: f"[{text}]"}):
            model: Any = bound(own(**options), "llm", pool)
            worker: Any = worker_of(model)
            for payload, ask, value_of in (
                (worker.payload_of_messages(QUESTION), lambda m: m.chat(QUESTION), worker.chat_of),
                (worker.payload_of_prompt("why?"), lambda m: m.complete("why?"), worker.completion_of),
                (worker.payload_of_template(template, q="x"), lambda m: m.predict(template, q="x"), worker.text_of),
            ):
                stub.requests.clear()
                [generation] = pool.call(PrimitiveKind.PREFILLING, "llm", [payload]).result()
                assert isinstance(payload.prompt, WirePrompt)
                by_engine = _essence(stub.requests[0][1])
                stub.requests.clear()
                value = ask(model)
                assert _essence(stub.requests[0][1]) == by_engine
                assert value_of(generation) == value


def _essence(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options", "priority")}


def test_worker_has_no_template_payload_without_prefix_caching(stub, own):
    with EnginePool.local(llm=OpenAIServer(base_url=stub.base_url)) as pool:
        made = bound(own(), "llm", pool)
        assert not hasattr(worker_of(made), "payload_of_template")
        assert made.chat(QUESTION) == own().chat(QUESTION)
        assert list(made.stream_complete("why?")) == list(own().stream_complete("why?"))


class _Own(OpenAILike):
    def chat(self, messages: Any, **kwargs: Any) -> Any:
        return super().chat(list(reversed(messages)), **kwargs)


def test_bind_raises_for_other_server_model_or_overridden_method(server_pool, own, stub):
    with pytest.raises(RegistrationError, match="talks to"):
        bound(own().model_copy(update={"api_base": "http://localhost:1/v1"}), "llm", server_pool)
    with pytest.raises(RegistrationError, match="asks for 'gpt-4o'"):
        bound(OpenAI(model="gpt-4o", api_base=stub.base_url, api_key="none"), "llm", server_pool)
    with pytest.raises(RegistrationError, match=r"_Own\.chat changes"):
        bound(_Own(model=MODEL, api_base=stub.base_url, api_key="none", is_chat_model=True), "llm", server_pool)


# ------------------------------------------------------------ by what the pool has


def test_teola_llm_serves_a_bound_llm_with_its_settings(pool, llm):
    handlers = CallbackManager([Recorder()])
    own = MockLLM(max_tokens=7, system_prompt="be brief", callback_manager=handlers)
    made = bound(own, "llm", pool)
    worker = worker_of(made)
    assert isinstance(made, MockLLM)
    assert isinstance(worker, TeolaLLM)
    assert (worker.max_tokens, worker.system_prompt) == (7, "be brief")
    assert made.callback_manager is handlers and worker.metadata.is_chat_model == own.metadata.is_chat_model
    assert made.predict(PromptTemplate("{q}"), q="why?") == "you said: be brief\n\nwhy?"
    with pytest.raises(RegistrationError, match="logit_bias"):
        bound(with_arguments(logit_bias={"1": 2}), "llm", pool)
    assert worker_of(bound(with_arguments(top_p=0.5), "llm", pool)).top_p == 0.5


class _WithArguments(MockLLM):
    additional_kwargs: dict[str, Any] = {}


def with_arguments(**given: Any) -> MockLLM:
    return _WithArguments().model_copy(update={"additional_kwargs": given})


def test_bound_function_calling_llm_still_calls_functions(pool, stub, own, llm):
    made = bound(own(is_function_calling_model=True), "llm", pool)
    assert isinstance(made, OpenAILike) and made.metadata.is_function_calling_model
    assert worker_of(made).metadata.is_function_calling_model
    llm.answer = lambda request: '{"name": "same", "arguments": {"of": "a"}}'
    tool = FunctionTool.from_defaults(lambda of: of, name="same", description="The same.")
    [call] = made.get_tool_calls_from_response(made.chat_with_tools([tool], "which?"))
    assert (call.tool_name, call.tool_kwargs) == ("same", {"of": "a"})
    assert json.loads(llm.requests[0].prompt.tools) == [tool.metadata.to_openai_tool()]
    assert not bound(own(), "llm", pool).metadata.is_function_calling_model


def test_teola_embedding_serves_a_bound_embedding_model(pool):
    own = MockEmbedding(embed_dim=3, embed_batch_size=4, model_name="mine")
    made = bound(own, "embedder", pool)
    worker = worker_of(made)
    assert isinstance(made, MockEmbedding)
    assert isinstance(worker, TeolaEmbedding)
    assert (worker.model_name, worker.embed_batch_size) == ("mine", 4)
    texts = [f"text {i}" for i in range(9)]
    by_engine = TeolaEmbedding(pool=pool, engine="embedder").get_text_embedding_batch(texts)
    assert made.get_text_embedding_batch(texts) == by_engine
    assert _loop.run(made.aget_text_embedding_batch(texts)) == by_engine
    assert made.get_query_embedding("why?") == _loop.run(made.aget_query_embedding("why?"))
    assert len(made.get_query_embedding("why?")) == len(by_engine[0])


class _Reranker(BaseNodePostprocessor):
    def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
        return nodes


@pytest.mark.parametrize("obj", [SimilarityPostprocessor(), _Reranker(), object(), "llm"])
def test_bind_raises_for_objects_that_cannot_be_bound(pool, obj):
    with pytest.raises(RegistrationError, match="cannot be bound"):
        bound(obj, "llm", pool)


def test_bind_raises_for_unknown_engine(pool):
    with pytest.raises(RegistrationError, match="engine"):
        bound(MockLLM(), "lmm", pool)


@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat", "astream_chat"])
def test_bound_llm_call_past_its_deadline_is_not_retried(way: str, server_pool, own, stub) -> None:
    model = bound(own(max_retries=3), "llm", server_pool)
    stub.requests.clear()
    stub.go.clear()
    late = RequestContext(tenant="acme", deadline=server_pool.runtime.time() + 1.0)
    messages = [ChatMessage("slowly")]

    async def within(made: Callable[[], Any]) -> Any:
        with joined(None, late):
            return await made()

    def once() -> Any:
        with joined(None, late):
            return model.chat(messages) if way == "chat" else list(model.stream_chat(messages))

    calls: dict[str, Callable[[], Any]] = {
        "achat": lambda: _loop.run(within(lambda: model.achat(messages))),
        "astream_chat": lambda: _loop.run(within(lambda: _list(model.astream_chat(messages)))),
    }
    with pytest.raises(QueryTimeout, match="deadline"):
        calls.get(way, once)()
    stub.go.set()
    assert len(stub.requests) == 1 and stub.requests[0][1].get("cache_salt") == "acme"
