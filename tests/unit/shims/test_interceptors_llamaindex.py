"""Tests of LlamaIndex's provider methods: which they are, that they are intercepted, and restored exactly."""

from __future__ import annotations

import asyncio
import functools
import timeit
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import MockEmbedding, PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.retrievers import VectorIndexRetriever
from llama_index.core.schema import QueryBundle
from llama_index.core.vector_stores import SimpleVectorStore, VectorStoreQuery
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from pydantic import PrivateAttr

from benchmarks.llamaindex.kits import Kit, Sizes, own_kit
from teola_plugin import accelerate, uninstall
from teola_plugin.engines import profiles
from teola_plugin.shims.interception import STREAM_OPENED
from teola_plugin.shims.llamaindex import interceptors as seam
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.llamaindex.silent_calls import prepare
from tests.support.llamaindex_own import ChattyLLM

TARGETS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (OpenAI, ("_chat", "_complete")),
    (OpenAILike, ("_chat", "_complete")),
    (MockLLM, ("complete",)),
    (ChattyLLM, ("chat",)),
    (SimpleVectorStore, ("query",)),
)


class Spoken(CustomLLM):
    """Completes by itself; `CustomLLM` makes chats of that."""

    _prompts: list[str] = PrivateAttr(default_factory=list)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self._prompts.append(prompt)
        return CompletionResponse(text=prompt.upper())

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


class Passing:
    """A scope that makes every call, and remembers it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def result(self, invocation: Any) -> Any:
        self.calls.append(invocation)
        return invocation.start(None)

    async def aresult(self, invocation: Any) -> Any:
        self.calls.append(invocation)
        return await invocation.start(None)


@pytest.fixture
def scope() -> Iterator[Passing]:
    """Make every call of a provider method run in this scope."""
    passing = Passing()
    seam.live_scopes.add(id(passing))
    yield passing
    seam.live_scopes.discard(id(passing))
    uninstall()


def installed(scope: Passing, kind: type) -> None:
    seam.enable(lambda target: scope)  # type: ignore[arg-type,return-value]
    seam.install(kind, seam.provider_methods(kind))


@pytest.fixture
def kit() -> Kit:
    return own_kit(profiles.noop(), Sizes(chunks=2, chunk_tokens=10, answer=3), CallbackManager([]))


# ------------------------------------------------------------ which methods


def test_provider_methods_are_found_by_class(kit: Kit) -> None:
    whole = ("complete", "acomplete")  # `chat` calls `complete`
    assert seam.provider_methods(type(kit.llm)) == (*whole, "stream_complete", "astream_complete")
    streams = ("_stream_complete", "_astream_complete", "_stream_chat", "_astream_chat")
    assert seam.provider_methods(OpenAILike) == ("_complete", "_acomplete", "_chat", "_achat", *streams)
    assert seam.provider_methods(type(kit.embedding)) == seam.EMBED_QUERY
    assert seam.provider_methods(type(kit.reports.vector_store)) == seam.SEARCH


def test_a_class_that_is_no_model_has_no_provider_methods() -> None:
    with pytest.raises(Unreadable, match="int is not known"):
        seam.provider_methods(int)
    with pytest.raises(Unreadable, match="no method 'sing'"):
        seam.body_of(ChattyLLM, "sing")


def test_class_that_overrides_framework_methods_is_unreadable() -> None:
    class Own(MockLLM):
        def predict(self, *_: Any, **__: Any) -> str:
            return "mine"

    with pytest.raises(Unreadable, match="has a 'predict' of its own"):
        seam.provider_methods(Own)


def test_streams_and_retrievers_and_postprocessors_have_provider_methods() -> None:
    class NoNodesRetriever(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> Any:
            return []

    class KeepingPostprocessor(BaseNodePostprocessor):
        async def _apostprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            return nodes

        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            return nodes

    assert seam.provider_methods(NoNodesRetriever) == ("_retrieve",), "the async default calls it"
    assert seam.provider_methods(KeepingPostprocessor) == seam.POSTPROCESS
    assert "stream_chat" not in seam.provider_methods(Spoken), "the framework's calls `stream_complete`"
    for composite in (VectorIndexRetriever, SimilarityPostprocessor):
        with pytest.raises(Unreadable, match="calls methods of other objects"):
            seam.provider_methods(composite)
    with pytest.raises(Unreadable, match="calls another class's methods"):
        seam.provider_methods(StructuredLLM)


def test_written_function_is_inside_the_frameworks_span_alone() -> None:
    def retrieve(self: Any, query_bundle: QueryBundle) -> Any:
        return []

    @functools.wraps(retrieve)
    def checked(self: Any, query_bundle: QueryBundle) -> Any:
        return retrieve(self, query_bundle)

    def written_in(method: Any) -> Any:
        return seam.written_function(type("Own", (BaseRetriever,), {"_retrieve": method}), "_retrieve")

    assert written_in(retrieve) is retrieve
    assert written_in(functools.cache(retrieve)) is None
    assert written_in(checked) is None
    with pytest.raises(Unreadable, match="no method"):
        seam.written_function(object, "_retrieve")


def test_embedding_method_of_lists_is_found_by_class(scope: Passing) -> None:
    class ByBatch(MockEmbedding):
        def _get_text_embeddings(self, texts: list[str]) -> Any:
            return [[1.0] for _ in texts]

    class OwnWay(MockEmbedding):
        def get_text_embedding_batch(self, texts: Any, show_progress: bool = False, **kwargs: Any) -> Any:
            return [[1.0] for _ in texts]

    seam.enable(lambda target: scope)  # type: ignore[arg-type,return-value]
    for kind, name, calls in ((MockEmbedding, seam.EMBED_TEXT, 3), (ByBatch, seam.EMBED_BATCH, 2)):
        assert seam.embedding_method(kind) == name
        assert seam.is_intercepted(kind, name)
        seam.install(kind, (name,))
        scope.calls.clear()
        assert len(kind(embed_dim=1, embed_batch_size=2).get_text_embedding_batch(["a", "b", "c"])) == 3
        assert len(scope.calls) == calls
    with pytest.raises(Unreadable):
        seam.embedding_method(OwnWay)


def test_defaults_of_the_framework_are_not_intercepted() -> None:
    assert not seam.is_intercepted(Spoken, "acomplete")
    assert not seam.is_intercepted(SimpleVectorStore, "aquery")
    assert seam.is_async_method("aquery")
    assert not seam.is_async_method("_get_query_embedding")
    assert seam.is_openai(OpenAILike)
    assert not seam.is_openai(MockLLM)


def test_nothing_is_intercepted_after_uninstall(scope: Passing) -> None:
    seam.enable(lambda target: scope)  # type: ignore[arg-type,return-value]
    seam.uninstall()
    before = vars(SimpleVectorStore)["query"]
    assert not seam.install(SimpleVectorStore, seam.SEARCH)
    seam.intercept_methods(SimpleVectorStore, {"query": lambda original: print})
    assert vars(SimpleVectorStore)["query"] is before


# ------------------------------------------------------------ interception


def test_public_call_reaches_the_intercepted_body_once(scope: Passing) -> None:
    llm = Spoken()
    installed(scope, Spoken)
    assert llm.chat([ChatMessage(content="oats")]).message.content == "USER: OATS\nASSISTANT: "
    assert [call.target for call in scope.calls] == [llm]
    assert len(llm._prompts) == 1


def test_interception_leaves_events_and_spans_unchanged(scope: Passing) -> None:
    records = []
    for is_intercepted in (False, True):
        if is_intercepted:
            installed(scope, Spoken)
        recorder = Recorder()
        llm = Spoken(callback_manager=CallbackManager([recorder]))
        with recorded(recorder):
            answer = llm.predict(PromptTemplate("Say {what}"), what="oats")
        records.append((answer, recorder.events, recorder.spans, recorder.callbacks))
    assert records[0] == records[1]
    assert records[0][1]
    assert len(scope.calls) == 1


def test_embedding_and_search_are_intercepted_as_pure_calls(scope: Passing, kit: Kit) -> None:
    store = SimpleVectorStore()
    installed(scope, type(kit.embedding))
    installed(scope, SimpleVectorStore)
    vector = kit.embedding.get_query_embedding("oats")
    store.query(VectorStoreQuery(query_embedding=vector))
    assert [(call.kind, call.is_pure) for call in scope.calls] == [("EMBEDDING", True), ("SEARCHING", True)]


async def test_async_methods_are_intercepted_as_async_calls(scope: Passing, kit: Kit) -> None:
    installed(scope, type(kit.llm))
    installed(scope, type(kit.embedding))
    await kit.llm.acomplete("oats")
    await kit.embedding.aget_query_embedding("oats")
    assert [call.is_async for call in scope.calls] == [True, True]


def test_keys_are_equal_for_equal_calls_of_one_object() -> None:
    def key(llm: Any, *args: Any, **kwargs: Any) -> Any:
        return seam.LlamaIndexInvocation(llm, "_chat", print, args, kwargs).key()

    one, other = OpenAI(model="gpt-4o", api_key="none"), OpenAI(model="gpt-4o", api_key="none")
    messages = [ChatMessage(content="oats")]
    assert key(one, messages) == key(one, [ChatMessage(content="oats")])
    assert key(one, messages) != key(one, [ChatMessage(content="rye")])
    assert key(one, messages) != key(one, messages, tools=[])
    assert key(one, messages) != key(other, messages)


def test_keys_of_searches_compare_vectors_by_their_numbers() -> None:
    store = SimpleVectorStore()

    assert seam.query_key("oats") is None

    def key(query: VectorStoreQuery) -> Any:
        return seam.LlamaIndexInvocation(store, "query", print, (query,), {}).key()

    assert key(VectorStoreQuery(query_embedding=[0.5, 1.0])) == key(VectorStoreQuery(query_embedding=[0.5, 1.0]))
    assert key(VectorStoreQuery(query_embedding=[0.5, 1.0])) != key(VectorStoreQuery(query_embedding=[0.5, 1.5]))
    assert key(VectorStoreQuery(query_embedding=[0.5])) != key(VectorStoreQuery([0.5], similarity_top_k=7))


def test_keys_of_queries_compare_texts_and_vectors() -> None:
    def key(query: QueryBundle) -> Any:
        return seam.query_key(query)

    assert key(QueryBundle("oats", embedding=[0.5])) == key(QueryBundle("oats", embedding=[0.5]))
    assert key(QueryBundle("oats")) != key(QueryBundle("rye"))
    assert key(QueryBundle("oats", embedding=[0.5])) != key(QueryBundle("oats", embedding=[1.5]))


def test_prefetched_chunk_does_not_change_afterwards() -> None:
    """OpenAI's class writes in the tool calls that earlier chunks hold."""

    def stream_chat(self: Any) -> Iterator[ChatResponse]:
        tool_calls = ["a"]
        yield ChatResponse(message=ChatMessage(content="", additional_kwargs={"tool_calls": tool_calls}))
        tool_calls.append("b")

    def chunks(record: Any) -> list[Any]:
        invocation = seam.LlamaIndexInvocation(Spoken(), "_stream_chat", stream_chat, (), {})
        opened, *rest = invocation.start(record)
        assert opened is STREAM_OPENED
        return [chunk.message.additional_kwargs["tool_calls"] for chunk in rest]

    assert chunks(print) == [["a"]]
    assert chunks(None) == [["a", "b"]], "that is what the original's consumer sees"


# ------------------------------------------------------------ put back


@pytest.mark.parametrize(("kind", "names"), TARGETS, ids=lambda one: getattr(one, "__name__", None))
def test_uninstall_restores_every_function(scope: Passing, kind: type, names: tuple[str, ...]) -> None:
    slots = [seam.slot_of(seam.defining_class(kind, name), name) for name in names]
    attributes = [vars(seam.defining_class(kind, name))[name] for name in names]
    before = [slot.get() for slot in slots]
    installed(scope, kind)
    assert all(slot.get() is not function for slot, function in zip(slots, before, strict=True))
    uninstall()
    assert all(slot.get() is function for slot, function in zip(slots, before, strict=True))
    if kind is not OpenAI and kind is not OpenAILike:
        assert attributes == [vars(seam.defining_class(kind, name))[name] for name in names]


def test_uninstall_restores_the_body_below_foreign_wrappers(scope: Passing) -> None:
    slot = seam.slot_of(Spoken, "complete")
    before = slot.get()
    with mock.patch.object(Spoken, "complete", autospec=True) as patched:
        patched.side_effect = lambda self, prompt, **_: CompletionResponse(text="patched")
        assert Spoken().complete("oats").text == "patched"
        uninstall()
    installed(scope, Spoken)
    with mock.patch.object(Spoken, "complete", lambda self, prompt, **_: CompletionResponse(text="patched")):
        uninstall()
        assert Spoken().complete("oats").text == "patched"
    assert slot.get() is before
    assert Spoken().complete("oats").text == "OATS"
    assert scope.calls == []


def test_a_wrapper_that_stays_is_inert_after_uninstall(scope: Passing) -> None:
    installed(scope, SimpleVectorStore)
    below = SimpleVectorStore.query

    def wrapped_by_others(self: Any, *args: Any, **kwargs: Any) -> Any:
        return below(self, *args, **kwargs)

    with mock.patch.object(SimpleVectorStore, "query", wrapped_by_others):
        uninstall()
        SimpleVectorStore().query(VectorStoreQuery(query_embedding=[1.0]))
    assert scope.calls == []
    uninstall()


def test_a_call_outside_of_a_query_costs_little() -> None:
    """The body is called without the span around it, which takes a hundred times as long."""

    class Fast(BaseEmbedding):
        def _get_text_embedding(self, text: str) -> list[float]:
            return []

        def _get_query_embedding(self, query: str) -> list[float]:
            return []

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return []

    model, slot = Fast(), seam.slot_of(Fast, "_get_query_embedding")

    def fastest(body: Any) -> float:
        return min(timeit.repeat(lambda: body(model, "oats"), number=5000, repeat=7)) / 5000

    plain = slot.get()
    seam.enable(lambda target: None)
    seam.install(Fast, seam.EMBED_QUERY)
    wrapper = slot.get()
    assert wrapper is not plain
    assert fastest(wrapper) - fastest(plain) <= 3e-6
    uninstall()


# ------------------------------------------------------------ routed models


class ShoutingRouter:
    """A router that has one model's work done by a function of its own."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def worker_of(self, target: Any) -> Any:
        return self if target is self._target else None

    def body_of(self, target: Any, method: str, original: Any) -> Any:
        if target is not self._target or method not in ("chat", "achat"):
            return original
        return self._ashout if seam.is_async_method(method) else self._shout

    def _shout(self, _: Any, messages: Any, **kwargs: Any) -> Any:
        return ChatResponse(message=ChatMessage(role="assistant", content="ROUTED"))

    async def _ashout(self, _: Any, messages: Any, **kwargs: Any) -> Any:
        return self._shout(_, messages)


@pytest.fixture
def routed() -> Iterator[Spoken]:
    model, before = Spoken(), list(seam._router)
    seam.enable(lambda target: None, ShoutingRouter(model))
    seam.install_routing(Spoken)
    yield model
    uninstall()
    seam._router[:] = before


def test_methods_that_a_class_inherits_are_routed(routed: Spoken) -> None:
    question = [ChatMessage(content="oats?")]
    assert routed.chat(question).message.content == "ROUTED"
    assert asyncio.run(routed.achat(question)).message.content == "ROUTED"
    assert Spoken().chat(question).message.content != "ROUTED"
    assert routed.complete("oats").text == "OATS"


def test_worker_of_returns_the_router_of_a_model(routed: Spoken) -> None:
    def original(*_: Any) -> None: ...

    assert isinstance(seam.worker_of(routed), ShoutingRouter)
    assert seam.worker_of(Spoken()) is None
    assert seam.routed_body(routed, "chat", original) is not original
    assert seam.routed_body(routed, "complete", original) is original


def test_uninstall_restores_methods_intercepted_for_routing(routed: Spoken) -> None:
    slot = seam.slot_of(CustomLLM, "chat")
    wrapper = slot.get()
    uninstall()
    assert slot.get() is wrapper.__wrapped__
    assert seam.worker_of(routed) is None
    assert routed.chat([ChatMessage(content="oats")]).message.content != "ROUTED"


def test_class_that_overrides_prompt_methods_is_unreadable() -> None:
    class Own(MockLLM):
        def _extend_prompt(self, formatted_prompt: str) -> str:
            return "mine"

    seam.require_framework_methods(MockLLM)
    with pytest.raises(Unreadable, match="has a '_extend_prompt' of its own"):
        seam.require_framework_methods(Own)


def test_all_models_but_internal_helpers_are_intercepted() -> None:
    accelerate(Flow())
    prepare(MockLLM())

    seam.intercept_models()

    helpers = [kind for kind in MockLLM.__subclasses__() if hasattr(kind, seam.CALLS_NOBODY)]
    assert seam.interceptors.original_of(MockLLM, "complete") is not None
    assert helpers
    assert not [kind for kind in helpers if seam.interceptors.original_of(kind, "complete") is not None]


class Flow(Workflow):
    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result="a")
