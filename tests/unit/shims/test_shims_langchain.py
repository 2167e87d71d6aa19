"""Tests of `shims.langchain` and `shims.openai` on the installed packages, and with a private name missing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
from collections.abc import Iterator
from contextvars import ContextVar, copy_context
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    CallbackManager,
    CallbackManagerForLLMRun,
    StdOutCallbackHandler,
)
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableGenerator, RunnableLambda
from langchain_core.tracers import context as tracers
from langchain_core.tracers.event_stream import _AstreamEventsCallbackHandler
from langchain_text_splitters import CharacterTextSplitter
from support.private_names import touches

import teola_plugin.adapters.langchain
from teola_plugin.adapters import accelerate
from teola_plugin.errors import RegistrationError
from teola_plugin.shims import langchain as shims
from teola_plugin.shims import openai as openai_shims

STREAMING = "langchain_core.tracers._streaming"


def remove_name(patch: pytest.MonkeyPatch, module: str, name: str) -> None:
    patch.delattr(importlib.import_module(module), name)


# ------------------------------------------------------------ nowhere else


def test_only_shims_touch_private_names() -> None:
    allowed = {
        "": shims.EXTENSION_POINTS,
        "tracer/functions/lookup.py": ("_lru_list_elem",),
        "tracer/purity/data_classes.py": ("_new_member_",),
        "tracer/purity/purity.py": ("_value_",),
    }  # the last three are names of the standard library
    assert touches(allowed=allowed) == [], "of any framework, anywhere but in the shims"


def test_subclasses_override_only_extension_points() -> None:
    overridden = {
        name
        for cls in _own_classes(teola_plugin.adapters.langchain)
        for name, value in vars(cls).items()
        if name.startswith("_") and not name.startswith("__") and _is_method(value) and _of_langchain(cls, name)
    }
    assert overridden - shims.EXTENSION_POINTS.keys() == set()
    assert {"_generate", "_get_relevant_documents", "_llm_type"} <= overridden


def _own_classes(package: ModuleType) -> Iterator[type]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        yield from (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == found.name)


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def _of_langchain(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__[1:] if base.__module__.startswith("langchain"))


def test_every_shim_function_has_a_test() -> None:
    source = inspect.getsource(importlib.import_module(__name__))
    for module, alias in ((shims, "shims"), (openai_shims, "openai_shims")):
        own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
        functions = [one.__name__ for one in own if inspect.isfunction(one) or one is shims.inline_callback]
        for name in (name for name in functions if not name.startswith("_")):
            assert f"{alias}.{name}" in source, f"{name} has no test"


# ------------------------------------------------------------ who listens


class Listener(BaseCallbackHandler):
    pass


def test_listeners_are_known_while_their_private_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shims.listeners_are_known()
    with monkeypatch.context() as patch:
        remove_name(patch, STREAMING, "_V2StreamingCallbackHandler")
        assert not shims.listeners_are_known()
    with monkeypatch.context() as patch:
        patch.setattr(tracers, "_configure_hooks", [("another", "shape")])
        assert not shims.listeners_are_known()
    remove_name(monkeypatch, "langchain_core.tracers.context", "_configure_hooks")
    assert not shims.listeners_are_known()


async def test_streams_detects_streaming_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = _AstreamEventsCallbackHandler()
    assert shims.streams([Listener(), streaming])
    assert not shims.streams([Listener()])
    remove_name(monkeypatch, STREAMING, "_StreamingCallbackHandler")
    assert shims.streams([Listener()]), "any handler may be one"
    assert not shims.streams([])


def test_handlers_in_reads_lists_and_managers() -> None:
    listener = Listener()
    assert list(shims.handlers_in([listener])) == [listener]
    assert list(shims.handlers_in(CallbackManager([listener]))) == [listener]
    assert list(shims.handlers_in(None)) == []


class Attached(_AstreamEventsCallbackHandler):
    """A handler that an environment variable attaches."""


async def test_may_stream_detects_possible_streaming_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = _AstreamEventsCallbackHandler()
    assert shims.may_stream([streaming])
    assert not shims.may_stream([Listener()])
    monkeypatch.setattr(tracers, "_configure_hooks", [*tracers._configure_hooks])
    ambient: ContextVar[Any] = ContextVar("ambient", default=None)
    tracers.register_configure_hook(ambient, inheritable=True)
    token = ambient.set(streaming)
    assert shims.may_stream(None), "a handler that hangs on a context variable"
    ambient.reset(token)
    assert not shims.may_stream(None)
    for number, kind in enumerate((Listener, Attached)):
        tracers.register_configure_hook(ambient, inheritable=True, handle_class=kind, env_var=f"TEOLA_TEST_{number}")
    monkeypatch.setenv("TEOLA_TEST_0", "true")
    assert not shims.may_stream(None), "the handler that the environment attaches does not stream"
    monkeypatch.setenv("TEOLA_TEST_1", "true")
    assert shims.may_stream(None)
    remove_name(monkeypatch, "langchain_core.tracers.context", "_configure_hooks")
    assert shims.may_stream(None), "nobody knows who listens"


async def test_streaming_kinds_lists_classes_of_streaming_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shims.streaming_kinds([Listener()]) == ()
    assert shims.streaming_kinds([_AstreamEventsCallbackHandler()]) == shims.event_listeners() != ()
    remove_name(monkeypatch, STREAMING, "_StreamingCallbackHandler")
    assert shims.streaming_kinds([Listener()]) is None, "nobody knows"
    assert shims.event_listeners() == ()


class Streaming(FakeListChatModel):
    streaming: bool = True


def test_always_streams_follows_model_and_call_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shims.always_streams(FakeListChatModel(responses=["a"]), {}) is None, "as its handlers ask"
    assert shims.always_streams(FakeListChatModel(responses=["a"]), {"stream": True}) is True
    assert shims.always_streams(FakeListChatModel(responses=["a"]), {"stream": False}) is False
    assert shims.always_streams(FakeListChatModel(responses=["a"], disable_streaming=True), {}) is False
    assert shims.always_streams(Streaming(responses=["a"], streaming=True), {}) is True
    assert shims.always_streams(Streaming(responses=["a"], streaming=False), {}) is False
    model = FakeListChatModel(responses=["a"], callbacks=[Attached.__new__(Attached)])
    assert shims.always_streams(model, {}) is True
    with monkeypatch.context() as patch:
        remove_name(patch, STREAMING, "_StreamingCallbackHandler")
        assert shims.always_streams(FakeListChatModel(responses=["a"]), {}) is None
    monkeypatch.delattr(BaseChatModel, "_should_stream")
    assert shims.always_streams(FakeListChatModel(responses=["a"]), {}) is True, "nothing is assumed"


def test_attached_by_environment_detects_configured_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracers, "_configure_hooks", [*tracers._configure_hooks])
    variable: ContextVar[Any] = ContextVar("found", default=None)
    tracers.register_configure_hook(variable, True, StdOutCallbackHandler, "TEOLA_TEST_LISTENS")
    assert not shims.attached_by_environment()
    monkeypatch.setenv("TEOLA_TEST_LISTENS", "1")
    assert shims.attached_by_environment()
    monkeypatch.delenv("TEOLA_TEST_LISTENS")
    remove_name(monkeypatch, "langchain_core.tracers.context", "_configure_hooks")
    assert shims.attached_by_environment(), "it may be"


def handler_events(silent: bool) -> list[str]:
    """Return the events of a call that a handler on a context variable gets."""
    found: list[str] = []

    class Hears(BaseCallbackHandler):
        def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
            found.append("start")

    variable: ContextVar[Any] = ContextVar("hears", default=None)
    tracers.register_configure_hook(variable, True)

    def call() -> None:
        variable.set(Hears())
        if silent:
            shims.silence()
        RunnableLambda(lambda x: x).invoke(1)

    copy_context().run(call)
    return found


def test_silence_hides_calls_from_ambient_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracers, "_configure_hooks", [*tracers._configure_hooks])
    assert handler_events(silent=False) == ["start"]
    assert handler_events(silent=True) == []
    remove_name(monkeypatch, "langchain_core.tracers.context", "_configure_hooks")
    with pytest.raises(RegistrationError, match="keeps its handlers elsewhere"):
        shims.silence()


def test_without_known_listeners_nothing_is_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from teola_plugin.adapters.langchain.prefetch_plan import form_of_entry
    from teola_plugin.adapters.langchain.prefetching import EntryPoint

    assert form_of_entry({}, EntryPoint(on_loop=False), models=True) is not None
    remove_name(monkeypatch, STREAMING, "_V2StreamingCallbackHandler")
    assert form_of_entry({}, EntryPoint(on_loop=False), models=True) is None


def test_shadow_without_known_listeners_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    chain: Any = RunnableLambda(lambda x: x) | RunnableLambda(lambda x: x)
    error = shims.unknown_listeners("shadow=")
    assert "langchain-core" in str(error) and error.hint
    with monkeypatch.context() as patch:
        remove_name(patch, "langchain_core.tracers.context", "_configure_hooks")
        with pytest.raises(RegistrationError, match="shadow= is not possible with langchain-core"):
            accelerate(chain, shadow=0.5)
        fast = accelerate(chain)
    assert fast.invoke(1) == 1


# ------------------------------------------------------------ inline callbacks


class Inline(BaseCallbackHandler):
    def __init__(self) -> None:
        self.threads: list[int] = []

    @shims.inline_callback
    def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
        self.threads.append(threading.get_ident())


async def _started(handler: BaseCallbackHandler) -> None:
    await AsyncCallbackManager([handler]).on_chain_start({}, {})


async def test_inline_callbacks_run_where_they_are_called() -> None:
    handler = Inline()
    CallbackManager([handler]).on_chain_start({}, {})
    await _started(handler)
    assert handler.threads == [threading.get_ident()] * 2


async def test_inline_callbacks_are_marked_where_python_has_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 has `inspect.markcoroutinefunction` and `inspect.iscoroutinefunction`."""

    def mark(call: Any) -> Any:
        call.marked = True
        return call

    plain = inspect.iscoroutinefunction
    monkeypatch.setattr(shims, "_mark", mark)
    monkeypatch.setattr(inspect, "iscoroutinefunction", lambda one: plain(one) or getattr(one, "marked", False))
    handler = Inline()
    assert not hasattr(handler.on_chain_start, "__code__")
    await _started(handler)
    assert handler.threads == [threading.get_ident()]


async def test_unrecognized_inline_callbacks_run_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "iscoroutinefunction", inspect.isgenerator)
    handler = Inline()
    await _started(handler)
    assert len(handler.threads) == 1 and handler.threads != [threading.get_ident()]


# ------------------------------------------------------------ models


@pytest.mark.parametrize("kind", [FakeListChatModel, FakeListLLM])
@pytest.mark.parametrize("with_name", [True, False], ids=["with", "without"])
def test_prompt_value_converts_every_input_form(kind: Any, with_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind(responses=[""])
    if not with_name:
        base = next(cls for cls in kind.__mro__ if "_convert_input" in vars(cls))
        monkeypatch.delattr(base, "_convert_input")
    given = StringPromptValue(text="a")
    assert shims.prompt_value(model, given) is given
    assert shims.prompt_value(model, "a") == StringPromptValue(text="a")
    assert shims.prompt_value(model, [("human", "a")]) == ChatPromptValue(messages=[HumanMessage("a")])


def openai_chat(**given: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", api_key="k", base_url="http://localhost:1/v1", **given)


class Echo(BaseChatModel):
    """A model that repeats the question, and says what it was called with."""

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        arguments = {"stop": stop, "metadata": run_manager.metadata, **kwargs}
        message = AIMessage(messages[-1].content, additional_kwargs=arguments)
        return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"model": "echo"})


class OwnEntry(Echo):
    """A model with an `invoke` of its own."""

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return super().invoke(*args, **kwargs)


def test_generates_as_usual_rejects_models_with_own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shims.generates_as_usual(Echo())
    assert not shims.generates_as_usual(OwnEntry())
    assert not shims.generates_as_usual(FakeListLLM(responses=["a text model"]))
    remove_name(monkeypatch, "langchain_core.language_models._utils", "_normalize_messages")
    assert not shims.generates_as_usual(Echo())


def test_openai_model_generates_as_usual_unless_it_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from langchain_openai import ChatOpenAI

    class OwnParams(ChatOpenAI):
        def _get_invocation_params(self, *args: Any, **kwargs: Any) -> Any:
            return super()._get_invocation_params(*args, **kwargs)

    class Instrumented(ChatOpenAI):
        pass

    monkeypatch.setattr(
        Instrumented, "_combine_llm_outputs", wraps(ChatOpenAI._combine_llm_outputs)(lambda *outputs: {})
    )

    assert shims.generates_as_usual(openai_chat())
    assert not shims.generates_as_usual(OwnParams(model="m", api_key="k"))
    assert not shims.generates_as_usual(Instrumented(model="m", api_key="k"))


@pytest.mark.parametrize("question", ["a text", [("human", "a message")], StringPromptValue(text="a prompt")])
async def test_generate_gives_the_same_message_as_invoke(question: Any) -> None:
    for_tracers = {"schema": {"title": "answer"}, "kwargs": {}}
    model, kwargs = Echo(), {"stop": ["."], "temperature": 1, "ls_structured_output_format": for_tracers}
    metadata = {**shims.tracing_metadata(model, kwargs), **(model.metadata or {})}

    def manager(kind: Any) -> Any:
        return kind(run_id=uuid4(), handlers=[], inheritable_handlers=[], metadata=metadata)

    messages = [
        model.invoke(question, **kwargs),
        shims.generate(model, question, manager(CallbackManagerForLLMRun), kwargs),
        await shims.agenerate(model, question, manager(AsyncCallbackManagerForLLMRun), kwargs),
    ]

    assert messages[0].additional_kwargs["temperature"] == 1
    assert len({message.id for message in messages}) == 3
    first, *others = [message.model_copy(update={"id": None}) for message in messages]
    assert others == [first, first]


def test_tracing_metadata_names_the_model_type() -> None:
    assert shims.tracing_metadata(Echo(), {})["ls_model_type"] == "chat"
    assert shims.tracing_metadata(object(), {}) == {}


@pytest.mark.parametrize("name", ["_default_params", "_use_responses_api", "_create_chat_result"])
def test_chat_completion_params_returns_params_or_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = shims.chat_completion_params(openai_chat(temperature=0.5), {"stop": ["x"]})
    assert params is not None and (params["model"], params["temperature"], params["stop"]) == ("m", 0.5, ["x"])
    assert shims.chat_completion_params(openai_chat(use_responses_api=True), {}) is None
    model = openai_chat()
    for cls in type(model).__mro__:
        if name in vars(cls):
            monkeypatch.delattr(cls, name)
    assert shims.chat_completion_params(model, {}) is None


@pytest.mark.parametrize("include", [False, True])
def test_chat_result_includes_headers_only_if_configured(include: bool) -> None:
    answer = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
    model, headers = openai_chat(include_response_headers=include), {"x-request-id": "7"}
    result = shims.chat_result(model, {"id": "1", "model": "m", "choices": [answer]}, headers)
    assert [one.message.content for one in result.generations] == ["hello"]
    assert (result.generations[0].generation_info or {}).get("headers") == (headers if include else None)


def test_http_client_finds_the_httpx_client_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = openai_chat()
    for client, name in ((model.root_client, "Client"), (model.root_async_client, "AsyncClient")):
        found = openai_shims.http_client(client)
        assert any(cls.__name__ == name and cls.__module__.startswith("httpx") for cls in type(found).__mro__)
    monkeypatch.delattr(model.root_client, "_client")
    with pytest.raises(RegistrationError, match="cannot be found") as raised:
        openai_shims.http_client(model.root_client)
    assert raised.value.hint


def test_copy_with_one_tokenization_tokenizes_equal_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_openai import OpenAIEmbeddings

    calls: list[int] = []
    monkeypatch.setattr(OpenAIEmbeddings, "_tokenize", lambda self, texts, chunk_size: calls.append(chunk_size))
    model = OpenAIEmbeddings(api_key="k")  # type: ignore[arg-type]
    copied: Any = shims.copy_with_one_tokenization(model)
    texts = ["a"]
    for chunk_size in (2, 2, 3):
        copied._tokenize(texts, chunk_size)
    assert calls == [2, 3]
    monkeypatch.delattr(OpenAIEmbeddings, "_tokenize")
    assert shims.copy_with_one_tokenization(model) == model


def test_cohere_server_returns_address_and_fixed_key_or_none() -> None:
    class ClientV2:
        _client_wrapper = SimpleNamespace(get_base_url=lambda: "http://localhost:1/", _token="key")

    assert openai_shims.cohere_server(ClientV2()) == ("http://localhost:1", "key")
    ClientV2._client_wrapper._token = lambda: "later"
    assert openai_shims.cohere_server(ClientV2()) == ("http://localhost:1", None)
    assert openai_shims.cohere_server(SimpleNamespace(_client_wrapper=ClientV2._client_wrapper)) is None
    assert openai_shims.cohere_server(object()) is None


def test_inference_address_is_empty_for_hub_models_and_none_for_other_clients() -> None:
    hub = pytest.importorskip("huggingface_hub", minversion="1.0")
    for cls in (hub.InferenceClient, hub.AsyncInferenceClient):
        assert openai_shims.inference_address(cls(base_url="http://localhost:1")) == "http://localhost:1"
        assert openai_shims.inference_address(cls(model="a/model")) == ""
        assert openai_shims.inference_address(type("Own", (cls,), {})("a/model")) is None
    assert openai_shims.inference_address(object()) is None


def test_inference_address_is_none_without_the_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", minversion="1.0")
    for cls, name in ((hub.InferenceClient, "_inner_post"), (hub.AsyncInferenceClient, "_get_async_client")):
        client = cls(base_url="http://localhost:1")
        monkeypatch.delattr(cls, name)
        assert openai_shims.inference_address(client) is None


async def test_inference_client_on_sends_by_the_other_http_client() -> None:
    hub = pytest.importorskip("huggingface_hub", minversion="1.0")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=[[0.5]]))
    url = "http://localhost:1"
    originals = hub.InferenceClient(base_url=url), hub.AsyncInferenceClient(base_url=url)
    sync = openai_shims.inference_client_on(originals[0], lambda _: httpx.Client(transport=transport))
    on_loop = openai_shims.inference_client_on(originals[1], lambda _: httpx.AsyncClient(transport=transport))
    assert sync.feature_extraction("a").tolist() == [[0.5]]
    assert (await on_loop.feature_extraction("a")).tolist() == [[0.5]]
    assert "_inner_post" not in vars(originals[0])
    assert "_get_async_client" not in vars(originals[1])


def test_client_of_resource_returns_the_client_or_raises() -> None:
    import openai

    client = openai.OpenAI(api_key="k", base_url="http://localhost:1/v1")
    assert openai_shims.client_of_resource(client.embeddings) is client
    with pytest.raises(RegistrationError, match="none of the package openai"):
        openai_shims.client_of_resource(object())


def test_has_dynamic_key_detects_an_api_key_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    client = openai.OpenAI(api_key=lambda: "k", base_url="http://localhost:1/v1")
    assert openai_shims.has_dynamic_key(client)
    assert not openai_shims.has_dynamic_key(openai_chat().root_client)
    monkeypatch.delattr(client, "_api_key_provider")
    assert not openai_shims.has_dynamic_key(client)


def test_sentence_transformer_returns_the_model_or_none() -> None:
    huggingface = pytest.importorskip("langchain_huggingface", reason="needs models")
    made = huggingface.HuggingFaceEmbeddings.model_construct()
    made._client = model = object()
    assert shims.sentence_transformer(made) is model
    assert shims.sentence_transformer(SimpleNamespace(client=model)) is model, "of langchain_community"
    assert shims.sentence_transformer(SimpleNamespace()) is None


# ------------------------------------------------------------ generators, splitters


def test_yields_detects_sync_and_async_generators() -> None:
    def sync(given: Any) -> Any:
        yield from given

    async def on_loop(given: Any) -> Any:
        async for one in given:
            yield one

    assert shims.yields(RunnableGenerator(sync), on_loop=False)
    assert not shims.yields(RunnableGenerator(sync), on_loop=True)
    assert shims.yields(RunnableGenerator(on_loop), on_loop=True)
    assert not shims.yields(RunnableGenerator(on_loop), on_loop=False)
    unknown = RunnableGenerator(sync)
    del unknown._transform
    assert shims.yields(unknown, on_loop=True) and shims.yields(unknown, on_loop=False)


def test_splitter_sizes_returns_chunk_and_overlap_or_none() -> None:
    splitter = CharacterTextSplitter(chunk_size=20, chunk_overlap=3, length_function=lambda text: 2 * len(text))
    sizes = shims.splitter_sizes(splitter)
    assert sizes is not None and (sizes.chunk, sizes.overlap, sizes.length("abc")) == (20, 3, 6)
    del splitter._chunk_size
    assert shims.splitter_sizes(splitter) is None


# ------------------------------------------------------------ langchain_classic


def stuff_chain() -> Any:
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    return create_stuff_documents_chain(
        FakeListChatModel(responses=["a"]),
        PromptTemplate.from_template("{context}"),
        document_prompt=PromptTemplate.from_template("<{page_content}>"),
        document_separator="|",
    )


def format_docs(chain: Any) -> Any:
    """Return the function `format_docs` from inside a chain."""
    todo, seen = [chain], []
    while todo:
        one = todo.pop()
        seen.append(one)
        if getattr(getattr(one, "func", None), "__name__", "") == "format_docs":
            return one.func
        todo += [*getattr(one, "steps", ()), *getattr(one, "steps__", {}).values()]
        todo += [getattr(one, name) for name in ("mapper", "bound") if hasattr(one, name)]
    raise AssertionError(seen)


def test_stuffing_reads_separator_and_variable() -> None:
    function = format_docs(stuff_chain())
    found = shims.stuffing(function)
    assert found is not None and (found.separator, found.variable) == ("|", "context")
    assert found.prompt.format(page_content="x") == "<x>"
    assert function({"context": [Document("a"), Document("b")]}) == "<a>|<b>"
    assert shims.stuffing(format_docs) is None and shims.stuffing(None) is None


def test_stuffing_of_another_release_is_none() -> None:
    before = format_docs(stuff_chain())

    def another() -> Any:
        prompt, separator = 1, 2
        return lambda inputs: (prompt, separator, inputs)

    other = another()
    other.__module__, other.__qualname__ = before.__module__, before.__qualname__
    assert shims.stuffing(other) is None


def test_keeps_documents_as_bytes_only_for_default_codecs() -> None:
    from langchain_classic.storage import EncoderBackedStore, create_kv_docstore
    from langchain_core.stores import InMemoryByteStore

    store = create_kv_docstore(InMemoryByteStore())
    assert shims.keeps_documents_as_bytes(store)
    assert not shims.keeps_documents_as_bytes(create_kv_docstore(InMemoryByteStore(), key_encoder=str.upper))
    own = EncoderBackedStore(InMemoryByteStore(), str, bytes, store.value_deserializer)
    assert not shims.keeps_documents_as_bytes(own)


def test_is_structured_output_parser_recognizes_openais_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_openai import ChatOpenAI
    from langchain_openai.chat_models import base
    from pydantic import BaseModel

    class Answer(BaseModel):
        text: str

    chain: Any = ChatOpenAI(model="gpt-4o-mini", api_key="sk-test").with_structured_output(Answer)  # type: ignore[arg-type]
    parser = chain.last.bound.func
    assert shims.is_structured_output_parser(parser)
    assert not shims.is_structured_output_parser(parser.func)
    monkeypatch.setattr(base._oai_structured_outputs_parser, "__qualname__", "of_another_release")
    assert not shims.is_structured_output_parser(parser)


# ------------------------------------------------------------ models that a config chooses


def configurable_model(**options: Any) -> Any:
    from langchain.chat_models import init_chat_model

    return init_chat_model(model_provider="openai", api_key="k", configurable_fields=("model",), **options)


@pytest.mark.parametrize("method", ["with_listeners", "with_alisteners"])
def test_listens_to_ends_rejects_listeners_to_starts(method: str) -> None:
    chain = RunnableLambda(str)
    (to_end,) = getattr(chain, method)(on_end=print).config_factories
    (to_start,) = getattr(chain, method)(on_start=print, on_end=print).config_factories

    assert shims.listens_to_ends(to_end)
    assert not shims.listens_to_ends(to_start)
    assert not shims.listens_to_ends(lambda config: {})


def test_setting_names_lists_configurable_settings() -> None:
    from langchain.chat_models import init_chat_model

    model = configurable_model(config_prefix="my")
    assert shims.setting_names(model) == ("my_model",)
    assert shims.setting_names(PromptTemplate.from_template("{a}") | model.with_retry()) == ("my_model",)
    assert shims.setting_names(init_chat_model(configurable_fields="any")) is None
    assert shims.setting_names(FakeListChatModel(responses=["a"])) == ()


def test_configured_applies_settings_to_nested_models() -> None:
    model = configurable_model(config_prefix="my")
    prompt = PromptTemplate.from_template("{a}")
    chain = shims.configured(prompt | model.with_retry(), {"my_model": "echo"}, lambda model, provider: True)
    assert chain.first is prompt
    assert chain.last.bound.model_name == "echo"
    inner = model.with_retry().with_config(configurable={"my_model": "inner"})
    assert shims.configured(inner, {"my_model": "echo"}, lambda model, provider: True).bound.bound.model_name == "inner"
    unchanged = FakeListChatModel(responses=["a"])
    assert shims.configured(unchanged, {}, lambda model, provider: True) is unchanged
    with pytest.raises(ValueError, match="may open a connection"):
        shims.configured(model, {"my_model": "echo"}, lambda model, provider: model != "echo")
