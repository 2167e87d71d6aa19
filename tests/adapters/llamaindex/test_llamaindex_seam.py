"""Tests of the interception of LlamaIndex's provider calls: every form is seen, and equal calls are claimed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from differential.llamaindex.recording import Recorder, plain, recorded
from llama_index.core import PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, PrivateAttr
from support.openai_stub import MODEL, openai_stub

from teola_plugin import uninstall
from teola_plugin.adapters.llamaindex.composite_calls import CompositeCalls
from teola_plugin.adapters.llamaindex.prefetching import find_scope
from teola_plugin.shims.llamaindex import interceptors as seam
from teola_plugin.shims.llamaindex.silent_calls import silent_body

WORDS = ("oats", " are", " good")


class CallCounter:
    """Counts calls by method, and lets the rest of a stream wait."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.may_end = threading.Event()
        self.may_end.set()

    def call(self, method: str) -> None:
        self.calls[method] += 1


class OwnLLM(CustomLLM):
    """Has code of its own for every form."""

    provider: Any = None
    fails: str = ""
    """Where streams fail: `at once`, or `later`, behind the first chunk."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="own", is_chat_model=True)

    def _chat_answer(self, method: str, text: str, delta: str | None = None) -> ChatResponse:
        if delta is None:
            self.provider.call(method)
        return ChatResponse(message=ChatMessage(role="assistant", content=text), delta=delta)

    def _texts(self, method: str) -> Iterator[tuple[str, str]]:
        for i, word in enumerate(WORDS):
            yield "".join(WORDS[: i + 1]), word
            if self.fails == "later":
                raise ValueError("it fails later")
            self.provider.may_end.wait(5)

    def _open(self, method: str) -> None:
        self.provider.call(method)
        if self.fails == "at once":
            raise ValueError("it fails at once")

    @llm_chat_callback()
    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        return self._chat_answer("chat", f"about {messages[-1].content}{kwargs or ''}")

    @llm_chat_callback()
    async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        return self._chat_answer("achat", f"about {messages[-1].content}{kwargs or ''}")

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self.provider.call("complete")
        return CompletionResponse(text=f"about {prompt}{kwargs or ''}")

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self.provider.call("acomplete")
        return CompletionResponse(text=f"about {prompt}{kwargs or ''}")

    @llm_chat_callback()
    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        self._open("stream_chat")
        return (self._chat_answer("", text, delta) for text, delta in self._texts("stream_chat"))

    @llm_chat_callback()
    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        self._open("astream_chat")

        async def chunks() -> Any:
            for text, delta in self._texts("astream_chat"):
                await asyncio.sleep(0)
                yield self._chat_answer("", text, delta)

        return chunks()

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        self._open("stream_complete")
        return (CompletionResponse(text=text, delta=delta) for text, delta in self._texts("stream_complete"))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        self._open("astream_complete")

        async def chunks() -> Any:
            for text, delta in self._texts("astream_complete"):
                await asyncio.sleep(0)
                yield CompletionResponse(text=text, delta=delta)

        return chunks()


class OwnEmbedding(BaseEmbedding):
    """Embeds a text as its length."""

    _provider: Any = PrivateAttr()

    def __init__(self, provider: CallCounter, **fields: Any) -> None:
        super().__init__(embed_batch_size=2, **fields)
        self._provider = provider

    def _get_query_embedding(self, query: str) -> list[float]:
        self._provider.call("_get_query_embedding")
        return [float(len(query))]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        self._provider.call("_aget_query_embedding")
        return [float(len(query))]

    def _get_text_embedding(self, text: str) -> list[float]:
        self._provider.call("_get_text_embedding")
        return [float(len(text))]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        self._provider.call("_get_text_embeddings")
        return [[float(len(text))] for text in texts]


class OneNodeRetriever(BaseRetriever):
    """Finds one node; with `model`, it calls that too."""

    def __init__(self, provider: CallCounter, manager: CallbackManager, model: Any = None) -> None:
        super().__init__(callback_manager=manager)
        self.provider, self.model = provider, model

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.provider.call("_retrieve")
        text = self.model.complete("more").text if self.model else ""
        return [NodeWithScore(node=TextNode(text=f"{query_bundle.query_str}{text}", id_="1"), score=0.5)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.provider.call("_aretrieve")
        return [NodeWithScore(node=TextNode(text=query_bundle.query_str, id_="1"), score=0.5)]


class OwnPostprocessor(BaseNodePostprocessor):
    """Keeps the first node."""

    provider: Any = None

    def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> list[NodeWithScore]:
        self.provider.call("_postprocess_nodes")
        return list(nodes[:1])

    async def _apostprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> list[NodeWithScore]:
        self.provider.call("_apostprocess_nodes")
        return list(nodes[:1])


# ------------------------------------------------------------ the rows


def messages() -> list[ChatMessage]:
    return [ChatMessage(content="oats")]


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=text), score=0.5) for text in ("a", "b")]


async def _all(chunks: Any) -> list[Any]:
    return [chunk async for chunk in await chunks]


class CallForm(NamedTuple):
    """One form of a call."""

    make: Callable[[CallCounter, CallbackManager], Any]
    call: Callable[[Any], Any]
    """Call the object's public method; a coroutine is run on a loop."""
    methods: tuple[str, ...]
    """The provider methods that it comes to."""


def own_llm(provider: CallCounter, manager: CallbackManager) -> OwnLLM:
    return OwnLLM(provider=provider, callback_manager=manager)


def own_embedding(provider: CallCounter, manager: CallbackManager) -> OwnEmbedding:
    return OwnEmbedding(provider, callback_manager=manager)


def own_postprocessor(provider: CallCounter, manager: CallbackManager) -> OwnPostprocessor:
    return OwnPostprocessor(provider=provider, callback_manager=manager)


ASK = PromptTemplate("Say {what}")
ROWS = {
    "chat": CallForm(own_llm, lambda llm: llm.chat(messages()), ("chat",)),
    "chat with arguments": CallForm(own_llm, lambda llm: llm.chat(messages(), top=3), ("chat",)),
    "achat": CallForm(own_llm, lambda llm: llm.achat(messages()), ("achat",)),
    "complete": CallForm(own_llm, lambda llm: llm.complete("oats"), ("complete",)),
    "acomplete": CallForm(own_llm, lambda llm: llm.acomplete("oats"), ("acomplete",)),
    "predict": CallForm(own_llm, lambda llm: llm.predict(ASK, what="oats"), ("chat",)),
    "apredict": CallForm(own_llm, lambda llm: llm.apredict(ASK, what="oats"), ("achat",)),
    "stream_chat": CallForm(own_llm, lambda llm: list(llm.stream_chat(messages())), ("stream_chat",)),
    "astream_chat": CallForm(own_llm, lambda llm: _all(llm.astream_chat(messages())), ("astream_chat",)),
    "stream_complete": CallForm(own_llm, lambda llm: list(llm.stream_complete("oats")), ("stream_complete",)),
    "astream_complete": CallForm(own_llm, lambda llm: _all(llm.astream_complete("oats")), ("astream_complete",)),
    "stream": CallForm(own_llm, lambda llm: list(llm.stream(ASK, what="oats")), ("stream_chat",)),
    "astream": CallForm(own_llm, lambda llm: _all(llm.astream(ASK, what="oats")), ("astream_chat",)),
    "a query's embedding": CallForm(
        own_embedding, lambda model: model.get_query_embedding("oats"), seam.EMBED_QUERY[:1]
    ),
    "a query's embedding on a loop": CallForm(
        own_embedding, lambda model: model.aget_query_embedding("oats"), seam.EMBED_QUERY[1:]
    ),
    "a text's embedding": CallForm(own_embedding, lambda model: model.get_text_embedding("oats"), (seam.EMBED_TEXT,)),
    "batches": CallForm(
        own_embedding, lambda model: model.get_text_embedding_batch(["a", "bb", "ccc"]), (seam.EMBED_BATCH,) * 2
    ),
    "retrieve": CallForm(OneNodeRetriever, lambda retriever: retriever.retrieve("oats"), seam.RETRIEVE[:1]),
    "aretrieve": CallForm(OneNodeRetriever, lambda retriever: retriever.aretrieve("oats"), seam.RETRIEVE[1:]),
    "postprocess_nodes": CallForm(
        own_postprocessor, lambda one: one.postprocess_nodes(nodes(), query_str="oats"), seam.POSTPROCESS[:1]
    ),
    "apostprocess_nodes": CallForm(
        own_postprocessor, lambda one: one.apostprocess_nodes(nodes(), query_str="oats"), seam.POSTPROCESS[1:]
    ),
}


# ------------------------------------------------------------ how they are run


class CallOutcome(NamedTuple):
    """Everything observable about a call."""

    result: str
    events: Counter[str]
    spans: Counter[str]
    callbacks: Counter[str]


class Recording:
    """A scope that makes every call, and keeps it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def result(self, invocation: Any) -> Any:
        self.calls.append(invocation)
        return invocation._body(invocation.target, *invocation._args, **invocation._kwargs)

    stream = result

    async def aresult(self, invocation: Any) -> Any:
        return await self.result(invocation)

    astream = aresult


def run(row: CallForm, target: Any) -> Any:
    """Call the target as the row does; return what it returns, or its exception."""
    try:
        result = row.call(target)
        if asyncio.iscoroutine(result):
            return asyncio.run(_awaited(result))
    except Exception as error:
        return error
    return result


async def _awaited(result: Any) -> Any:
    return await result


def observed(row: CallForm, provider: CallCounter, target: Any = None) -> CallOutcome:
    """Run a row with a new target, or one that is the same as others were."""
    recorder = Recorder()
    manager = CallbackManager([recorder])
    target = target or row.make(provider, manager)
    target.callback_manager = manager
    with recorded(recorder):
        result = run(row, target)
    return CallOutcome(plain(result), recorder.events, recorder.spans, recorder.callbacks)


def calls_of(row: CallForm, target: Any) -> list[Any]:
    """Return the calls at the seam to which a row comes, in the form in which a planner makes them."""
    scope = Recording()
    seam.enable(lambda target: scope)  # type: ignore[arg-type,return-value]
    seam.live_scopes.add(id(scope))
    try:
        run(row, target)
    finally:
        seam.live_scopes.discard(id(scope))
    return [
        seam.LlamaIndexInvocation(target, one._method, silent_body(target, one._method), one._args, one._kwargs)
        for one in scope.calls
    ]


def intercept(target: Any) -> None:
    names = seam.provider_methods(type(target))
    texts = (seam.EMBED_TEXT, seam.EMBED_BATCH) if isinstance(target, BaseEmbedding) else ()
    seam.enable(find_scope)
    seam.install(type(target), (*names, *texts))


@contextmanager
def prefetched(calls: list[Any], called: Callable[[], int]) -> Iterator[None]:
    """Prefetch these calls on threads, and run the body once the provider has got them."""
    seam.enable(find_scope)
    with CompositeCalls(calls, len(calls) + 1).on_threads():
        deadline = time.monotonic() + 5
        while called() < len(calls) and time.monotonic() < deadline:
            time.sleep(0.002)
        yield


def claiming_on_loop(row: CallForm, calls: list[Any], called: Callable[[], int]) -> CallForm:
    """Return the row with its call made on a loop where these calls were prefetched."""

    async def claim(target: Any) -> Any:
        seam.enable(find_scope)
        with CompositeCalls(calls, 2).on_loop():
            while not called():
                await asyncio.sleep(0.001)
            return await row.call(target)

    return row._replace(call=claim)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    uninstall()


# ------------------------------------------------------------ models of the user's own


@pytest.mark.parametrize("name", ROWS)
def test_seam_intercepts_the_provider_call(name: str) -> None:
    row, provider = ROWS[name], CallCounter()
    target = row.make(provider, CallbackManager([]))
    intercept(target)
    assert tuple(call._method for call in calls_of(row, target)) == row.methods


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.methods[0].startswith(("a", "_a"))])
def test_claimed_call_looks_as_the_originals_call(name: str) -> None:
    row, original, provider = ROWS[name], CallCounter(), CallCounter()
    expected = observed(row, original)
    target = row.make(provider, CallbackManager([]))
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()

    with prefetched(calls, lambda: provider.calls.total()):
        outcome = observed(row, provider, target)

    assert outcome == expected
    assert provider.calls == original.calls == Counter(row.methods)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.methods[0].startswith(("a", "_a"))])
def test_claimed_call_on_a_loop_looks_as_the_originals_call(name: str) -> None:
    row, original, provider = ROWS[name], CallCounter(), CallCounter()
    expected = observed(row, original)
    target = row.make(provider, CallbackManager([]))
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()

    outcome = observed(claiming_on_loop(row, calls, lambda: provider.calls.total()), provider, target)

    assert outcome == expected
    assert provider.calls == original.calls == Counter(row.methods)


@pytest.mark.parametrize("name", ["stream_chat", "astream_chat", "stream_complete", "astream_complete"])
@pytest.mark.parametrize("fails", ["at once", "later"])
def test_prefetched_stream_fails_at_the_chunk_of_the_original(name: str, fails: str) -> None:
    row, provider = ROWS[name], CallCounter()
    expected = observed(row, provider, OwnLLM(provider=provider, fails=fails))
    target = OwnLLM(provider=provider, fails=fails)
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()

    if name.startswith("a"):
        outcome = observed(claiming_on_loop(row, calls, lambda: provider.calls.total()), provider, target)
    else:
        with prefetched(calls, lambda: provider.calls.total()):
            outcome = observed(row, provider, target)

    assert outcome == expected
    assert provider.calls == {name: 1}


def test_first_chunk_arrives_before_the_model_ends() -> None:
    row, provider = ROWS["stream_chat"], CallCounter()
    target = OwnLLM(provider=provider)
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()
    provider.may_end.clear()

    with prefetched(calls, lambda: provider.calls.total()):
        stream = target.stream_chat(messages())
        first = next(stream)
        provider.may_end.set()
        rest = list(stream)

    assert (first.delta, len(rest)) == ("oats", 2)
    assert provider.calls.total() == 1


def test_closed_stream_leaves_the_next_call_its_own_request() -> None:
    row, provider = ROWS["stream_chat"], CallCounter()
    target = OwnLLM(provider=provider)
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()
    with prefetched(calls, lambda: provider.calls.total()):
        stream = target.stream_chat(messages())
        next(stream)
        stream.close()
        assert [chunk.delta for chunk in target.stream_chat(messages())] == list(WORDS)
    assert provider.calls.total() == 2, "two calls of the original stay two"


def test_whole_answer_does_not_claim_a_stream() -> None:
    row, provider = ROWS["stream_chat"], CallCounter()
    target = OwnLLM(provider=provider)
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()
    with prefetched(calls, lambda: provider.calls.total()):
        target.chat(messages())
    assert provider.calls == {"stream_chat": 1, "chat": 1}


def test_stream_method_without_generator_is_left_unchanged() -> None:
    class Listing(OwnLLM):
        @llm_chat_callback()
        def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
            self.provider.call("stream_chat")
            return [self._chat_answer("", "all", "all")]

    row, original, provider = ROWS["stream_chat"], CallCounter(), CallCounter()
    expected = observed(row, original, Listing(provider=original))
    target = Listing(provider=provider)
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()
    with prefetched(calls, lambda: provider.calls.total()):
        outcome = observed(row, provider, target)
    assert outcome == expected
    assert provider.calls == original.calls


def test_model_call_inside_a_retriever_is_made_by_the_original() -> None:
    """The original has to hear of the model's call, in the retriever's place."""

    def make(provider: CallCounter, manager: CallbackManager) -> OneNodeRetriever:
        return OneNodeRetriever(provider, manager, OwnLLM(provider=provider, callback_manager=manager))

    row, original, provider = ROWS["retrieve"], CallCounter(), CallCounter()
    expected = observed(row._replace(make=make), original)
    target = make(provider, CallbackManager([]))
    intercept(target)
    calls = calls_of(row, target)
    provider.calls.clear()
    with prefetched(calls, lambda: provider.calls["_retrieve"]):
        outcome = observed(row, provider, target)

    assert outcome.result == expected.result
    assert provider.calls["complete"] == 1, "no model is called where nobody may hear of it"


# ------------------------------------------------------------ OpenAI's classes


class Forecast(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def forecast(city: str, degrees: int) -> str:
    """Say the weather."""
    return f"{degrees} in {city}"


TOOL = FunctionTool.from_defaults(forecast)
ARGUMENTS = '{"city": "Bern", "degrees": 7}'


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Call the first tool that is offered; say what fits the schema, or any words."""
    if body.get("tools"):
        function = {"name": body["tools"][0]["function"]["name"], "arguments": ARGUMENTS}
        return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return {"content": ARGUMENTS if body.get("response_format") else f"about {body['messages'][-1]['content']}"}


def program(llm: Any) -> FunctionCallingProgram:
    return FunctionCallingProgram.from_defaults(output_cls=Forecast, prompt_template_str="Bern {x}", llm=llm)


SERVED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "chat": (lambda llm: llm.chat(messages()), "_chat"),
    "complete": (lambda llm: llm.complete("oats"), "_chat"),
    "achat": (lambda llm: llm.achat(messages()), "_achat"),
    "stream_chat": (lambda llm: list(llm.stream_chat(messages())), "_stream_chat"),
    "astream_chat": (lambda llm: _all(llm.astream_chat(messages())), "_astream_chat"),
    "stream_complete": (lambda llm: list(llm.stream_complete("oats")), "_stream_chat"),
    "structured_predict": (lambda llm: llm.structured_predict(Forecast, ASK, what="Bern"), "_chat"),
    "astructured_predict": (lambda llm: llm.astructured_predict(Forecast, ASK, what="Bern"), "_achat"),
    "stream_structured_predict": (
        lambda llm: list(llm.stream_structured_predict(Forecast, ASK, what="Bern")),
        "_stream_chat",
    ),
    "as_structured_llm": (lambda llm: llm.as_structured_llm(Forecast).complete("Bern"), "_chat"),
    "a function calling program": (lambda llm: program(llm)(x="now"), "_chat"),
    "chat_with_tools": (lambda llm: llm.chat_with_tools([TOOL], user_msg="Bern"), "_chat"),
    "achat_with_tools": (lambda llm: llm.achat_with_tools([TOOL], user_msg="Bern"), "_achat"),
    "stream_chat_with_tools": (lambda llm: list(llm.stream_chat_with_tools([TOOL], user_msg="Bern")), "_stream_chat"),
    "predict_and_call": (lambda llm: llm.predict_and_call([TOOL], user_msg="Bern"), "_chat"),
    "apredict_and_call": (lambda llm: llm.apredict_and_call([TOOL], user_msg="Bern"), "_achat"),
}


@pytest.mark.parametrize("name", SERVED)
def test_prefetched_request_is_claimed_in_every_form(name: str) -> None:
    call, method = SERVED[name]

    def make(provider: Any, manager: CallbackManager) -> OpenAILike:
        return OpenAILike(
            model=MODEL,
            api_base=provider.base_url,
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
            callback_manager=manager,
        )

    row = CallForm(make, call, (method,))
    with openai_stub(answer) as stub:
        provider: Any = stub
        expected = observed(row, provider)
        sent = list(stub.requests)
        target = make(provider, CallbackManager([]))
        intercept(target)
        calls = calls_of(row, target)
        stub.requests.clear()

        if method.startswith("_a"):
            outcome = observed(claiming_on_loop(row, calls, lambda: len(stub.requests)), provider, target)
        else:
            with prefetched(calls, lambda: len(stub.requests)):
                outcome = observed(row, provider, target)

    assert [one._method for one in calls] == [method]
    assert outcome == expected
    assert stub.requests == sent
    assert len(sent) == 1
