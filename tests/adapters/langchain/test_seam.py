"""Tests of the interception of provider calls: calls of any model are seen, and equal prefetched calls are claimed."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, NamedTuple

import pytest
from differential.recording import WAYS, Outcome, observe
from langchain.chat_models import init_chat_model
from langchain_core.documents import Document
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import LLM
from langchain_core.outputs import ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda
from langchain_core.tools import StructuredTool, tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.provider_models import Model, Server

from teola_plugin.adapters.langchain.composite_calls import CompositeCalls, PartCall, intercept_composite_methods
from teola_plugin.adapters.langchain.prefetching import calls_scope, copied, find_scope
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.shims import langchain_interceptors as seam

QUESTION = "why"


@tool
def lookup(word: str) -> str:
    """Look a word up."""
    return word


class Holder:
    """Has a model as an attribute, and a method that calls it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def ask(self, question: str) -> Any:
        return self.model.invoke(question)


def asks(model: Any, question: str) -> Any:
    return model.invoke(question)


GLOBAL: dict[str, Any] = {}

PLACES: dict[str, Callable[[Any], Runnable[Any, Any]]] = {
    "itself": lambda model: model,
    "a closure": lambda model: RunnableLambda(lambda question: model.invoke(question)),
    "a global": lambda model: (GLOBAL.update(model=model), RunnableLambda(lambda q: GLOBAL["model"].invoke(q)))[1],
    "an attribute": lambda model: RunnableLambda(functools.partial(lambda one, q: one.model.invoke(q), Holder(model))),
    "a method": lambda model: RunnableLambda(Holder(model).ask),
    "a partial": lambda model: RunnableLambda(functools.partial(asks, model)),
    "an equal model that is made in the function": lambda model: RunnableLambda(
        lambda question: Model(server=model.server, label=model.label).invoke(question)
    ),
    "with_retry": lambda model: model.with_retry(),
    "with_fallbacks": lambda model: model.with_fallbacks([Model()]),
    "with_config": lambda model: model.with_config(tags=["mine"]),
    "configurable_fields": lambda model: model.configurable_fields(label=ConfigurableField(id="label")),
}


def prefetched(*calls: PartCall) -> Any:
    """Prefetch these calls in the body, and wait until they have ended."""
    intercept_composite_methods()
    return CompositeCalls(calls, None, on_loop=False).running()


def wait_for_calls(count: int, calls: Callable[[], int]) -> None:
    """Wait until a provider has got so many calls."""
    for _ in range(500):
        if calls() >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"{calls()} calls, not {count}")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("entry", ["invoke", "stream"])
def test_prefetched_call_is_claimed_wherever_the_model_is_stored(place: str, entry: str) -> None:
    plain, server = Server(), Server()
    expected = observe(PLACES[place](Model(server=plain, label="a")), entry, QUESTION)
    model = Model(server=server, label="a")
    chain = PLACES[place](model)
    streams = entry == "stream" and not isinstance(chain, RunnableLambda)
    part = RunnableLambda(lambda question: list(model.stream(question))) if streams else model

    with prefetched(PartCall(part, QUESTION, {})):
        wait_for_calls(1, lambda: server.calls.total())
        result = observe(chain, entry, QUESTION)

    assert result == expected
    assert server.calls == plain.calls
    assert server.calls.total() == 1


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as server:
        yield server


def openai(stub: OpenAIStub, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=stub.base_url, api_key="k", model=MODEL, temperature=0.0, **more)  # type: ignore[arg-type]


def _initialised(stub: OpenAIStub, **more: Any) -> Any:
    return init_chat_model(MODEL, model_provider="openai", base_url=stub.base_url, api_key="k", temperature=0.0, **more)


CREATED: dict[str, tuple[Callable[[OpenAIStub], Any], dict[str, Any]]] = {
    "ChatOpenAI": (lambda stub: openai(stub), {}),
    "init_chat_model": (lambda stub: _initialised(stub), {}),
    "init_chat_model, configurable": (lambda stub: _initialised(stub, configurable_fields=("temperature",)), {}),
    "bind": (lambda stub: openai(stub).bind(stop=["x"]), {"stop": ["x"]}),
}


@pytest.mark.parametrize("name", CREATED)
def test_model_created_in_function_claims_call_of_equal_model(stub: OpenAIStub, name: str) -> None:
    create, kwargs = CREATED[name]
    chain = RunnableLambda(lambda question: create(stub).invoke(question))
    expected = chain.invoke(QUESTION)
    before = len(stub.requests)

    with prefetched(PartCall(openai(stub), QUESTION, kwargs)):
        wait_for_calls(before + 1, lambda: len(stub.requests))
        result = chain.invoke(QUESTION)

    assert result.content == expected.content
    assert result.response_metadata == expected.response_metadata
    assert len(stub.requests) == before + 1


def test_call_with_bound_tools_claims_only_a_request_with_tools(stub: OpenAIStub) -> None:
    bound = openai(stub).bind_tools([lookup])
    chain = RunnableLambda(lambda question: openai(stub).bind_tools([lookup]).invoke(question))
    before = len(stub.requests)
    with prefetched(PartCall(bound, QUESTION, {}), PartCall(openai(stub), QUESTION, {})):
        wait_for_calls(before + 2, lambda: len(stub.requests))
        chain.invoke(QUESTION)
    assert len(stub.requests) == before + 2


def test_model_with_other_settings_does_not_claim_the_call(stub: OpenAIStub) -> None:
    before = len(stub.requests)
    with prefetched(PartCall(openai(stub), QUESTION, {})):
        wait_for_calls(before + 1, lambda: len(stub.requests))
        openai(stub, max_tokens=3).invoke(QUESTION)
    assert len(stub.requests) == before + 2


def test_async_call_does_not_claim_a_sync_call() -> None:
    server = Server()
    model = Model(server=server)
    with prefetched(PartCall(model, QUESTION, {})):
        wait_for_calls(1, lambda: server.calls.total())
        asyncio.run(model.ainvoke(QUESTION))
    assert set(server.calls) == {("_generate", QUESTION), ("_agenerate", QUESTION)}


# ------------------------------------------------------------ every form of a call


class OwnInvoke(Model):
    """Enters by code of its own."""

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        self.server.calls["invoke", "own"] += 1
        return super().invoke(*args, **kwargs)


class OwnGenerate(Model):
    """Changes what its class above is called with."""

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return super()._generate([messages[-1].model_copy(update={"content": "changed"})], *args, **kwargs)


class OwnBoth(OwnInvoke, OwnGenerate):
    """A model with both of these methods."""


class WholeModel(Model):
    """Answers whole: `stream` gives one chunk."""

    disable_streaming: bool = True


class CountedTextModel(LLM):
    """A plain text model."""

    server: Any = Field(default_factory=Server)

    @property
    def _llm_type(self) -> str:
        return "text"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        self.server.calls["_call", prompt] += 1
        return f"about {prompt}"

    async def _acall(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        self.server.calls["_acall", prompt] += 1
        return f"about {prompt}"


class CountedRetriever(BaseRetriever):
    """Finds one document."""

    server: Any = Field(default_factory=Server)

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.server.calls["_get_relevant_documents", query] += 1
        return [Document(f"about {query}")]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.server.calls["_aget_relevant_documents", query] += 1
        return [Document(f"about {query}")]


class FirstDocument(BaseDocumentCompressor):
    """Keeps the first document."""

    server: Any = Field(default_factory=Server)

    def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> Any:
        self.server.calls["compress_documents", query] += 1
        return documents[:1]

    async def acompress_documents(self, documents: Any, query: str, callbacks: Any = None) -> Any:
        self.server.calls["acompress_documents", query] += 1
        return documents[:1]


class CountedEmbeddings(Embeddings):
    """Embeds a text as its length."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.server.calls["embed_documents", str(texts)] += 1
        return [[float(len(text))] for text in texts]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        self.server.calls["aembed_documents", str(texts)] += 1
        return [[float(len(text))] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self.server.calls["embed_query", text] += 1
        return [float(len(text))]

    async def aembed_query(self, text: str) -> list[float]:
        self.server.calls["aembed_query", text] += 1
        return [float(len(text))]


def embedding(model: Embeddings) -> Runnable[Any, Any]:
    return RunnableLambda(model.embed_query, model.aembed_query)


def embedding_documents(model: Embeddings) -> Runnable[Any, Any]:
    async def aembed(question: str) -> Any:
        return await model.aembed_documents([question, "more"])

    return RunnableLambda(lambda question: model.embed_documents([question, "more"]), aembed)


def compressing(compressor: BaseDocumentCompressor) -> Runnable[Any, Any]:
    documents = [Document("one"), Document("two")]

    async def acompress(question: str) -> Any:
        return await compressor.acompress_documents(documents, question)

    return RunnableLambda(lambda question: compressor.compress_documents(documents, question), acompress)


class CallForm(NamedTuple):
    """A way to a provider method."""

    make: Callable[[Server], Runnable[Any, Any]]
    entry: str
    """The public method by which it is called."""
    method: str
    """The provider method that it comes to first."""


def _rows() -> Iterator[tuple[str, CallForm]]:
    for entry, method in (
        ("invoke", "_generate"),
        ("ainvoke", "_agenerate"),
        ("stream", "_stream"),
        ("astream", "_astream"),
    ):
        yield f"a model, {entry}", CallForm(lambda server: Model(server=server), entry, method)
        for place in ("with_retry", "with_fallbacks", "with_config", "configurable_fields"):
            yield (
                f"{place}, {entry}",
                CallForm(lambda server, at=PLACES[place]: at(Model(server=server)), entry, method),
            )
        for kind in (OwnInvoke, OwnGenerate, OwnBoth):
            yield f"{kind.__name__}, {entry}", CallForm(lambda server, kind=kind: kind(server=server), entry, method)
    yield "a model without chunks, stream", CallForm(lambda server: WholeModel(server=server), "stream", "_generate")
    yield "a model without chunks, astream", CallForm(lambda server: WholeModel(server=server), "astream", "_agenerate")
    yield "a text model, invoke", CallForm(lambda server: CountedTextModel(server=server), "invoke", "_call")
    yield "a text model, ainvoke", CallForm(lambda server: CountedTextModel(server=server), "ainvoke", "_acall")
    yield (
        "a retriever, invoke",
        CallForm(lambda server: CountedRetriever(server=server), "invoke", "_get_relevant_documents"),
    )
    yield (
        "a retriever, ainvoke",
        CallForm(lambda server: CountedRetriever(server=server), "ainvoke", "_aget_relevant_documents"),
    )
    yield (
        "a compressor",
        CallForm(lambda server: compressing(FirstDocument(server=server)), "invoke", "compress_documents"),
    )
    for entry, prefix in (("invoke", ""), ("ainvoke", "a")):
        yield (
            f"a query's embedding, {entry}",
            CallForm(lambda server: embedding(CountedEmbeddings(server)), entry, f"{prefix}embed_query"),
        )
        yield (
            f"documents' embeddings, {entry}",
            CallForm(lambda server: embedding_documents(CountedEmbeddings(server)), entry, f"{prefix}embed_documents"),
        )
    yield (
        "a compressor on a loop",
        CallForm(lambda server: compressing(FirstDocument(server=server)), "ainvoke", "acompress_documents"),
    )


ROWS = dict(_rows())


class Recording:
    """A scope that makes every call, and keeps the outermost ones."""

    def __init__(self) -> None:
        self.calls: list[seam.LangChainInvocation] = []
        self._is_inside = False

    def find(self, target: Any, run_manager: Any) -> Any:
        return None if self._is_inside else self

    def items(self, invocation: Any) -> Iterator[Any]:
        self.calls.append(invocation)
        self._is_inside = True
        yield from invocation.start(None)
        self._is_inside = False

    def result(self, invocation: Any) -> Any:
        self.calls.append(invocation)
        self._is_inside = True
        result = invocation.start(None)
        self._is_inside = False
        return result

    async def aitems(self, invocation: Any) -> Any:
        self.calls.append(invocation)
        self._is_inside = True
        async for item in invocation.start(None):
            yield item
        self._is_inside = False

    async def aresult(self, invocation: Any) -> Any:
        self.calls.append(invocation)
        self._is_inside = True
        result = await invocation.start(None)
        self._is_inside = False
        return result


def calls_of(chain: Runnable[Any, Any], entry: str) -> list[seam.LangChainInvocation]:
    """Return the calls at the seam to which a chain comes."""
    recording: Any = Recording()
    seam.install(recording.find)
    seam.live_scopes.add(id(recording))
    try:
        WAYS[entry](chain, QUESTION, {})
    finally:
        seam.live_scopes.discard(id(recording))
        seam.install(find_scope)
    return recording.calls  # type: ignore[no-any-return]


@contextmanager
def claimable(table: ProviderCallTable) -> Iterator[None]:
    """Let calls in the body claim those of the table."""
    seam.live_scopes.add(id(table))
    token = calls_scope.set(CallScope(table, Caller.ORIGINAL, copied))
    try:
        yield
    finally:
        calls_scope.reset(token)
        seam.live_scopes.discard(id(table))
        table.close()


def outcome_of_claims(chain: Runnable[Any, Any], entry: str, calls: list[seam.LangChainInvocation]) -> Outcome:
    """Prefetch calls as a plan does, and return the outcome of the chain that claims them."""
    table = ProviderCallTable()
    scopes = [(CallScope(table, Caller.PLANNER, copied, is_offer=True), call) for call in calls]
    if not entry.startswith("a"):
        for scope, call in scopes:
            Context().run(list, scope.items(call))
        with claimable(table):
            return observe(chain, entry, QUESTION)

    async def claim(chain: Any, question: Any, config: Any) -> Any:
        for scope, call in scopes:
            [item async for item in scope.aitems(call)]
        with claimable(table):
            if entry == "ainvoke":
                return await chain.ainvoke(question, config)
            return [chunk async for chunk in chain.astream(question, config)]

    return observe(chain, entry, QUESTION, lambda *arguments: asyncio.run(claim(*arguments)))


@pytest.mark.parametrize("name", ROWS)
def test_provider_call_in_every_form_is_intercepted_and_claimed(name: str) -> None:
    row, original, server = ROWS[name], Server(), Server()
    expected = observe(row.make(original), row.entry, QUESTION)
    chain = row.make(server)
    calls = calls_of(chain, row.entry)
    server.calls.clear()

    outcome = outcome_of_claims(chain, row.entry, calls)

    assert [call._method for call in calls] == [row.method]
    assert outcome == expected
    assert server.calls == original.calls


class CityWeather(BaseModel):
    """The weather of a city."""

    city: str


def _structured(stub: OpenAIStub) -> Runnable[Any, Any]:
    return openai(stub).with_structured_output(CityWeather)


SERVED: dict[str, Callable[[OpenAIStub], Runnable[Any, Any]]] = {
    "with_structured_output": _structured,
    "with_structured_output, by tools": lambda stub: openai(stub).with_structured_output(
        CityWeather, method="function_calling"
    ),
    "bind_tools": lambda stub: openai(stub).bind_tools([lookup]),
    "init_chat_model": lambda stub: _initialised(stub),
    "init_chat_model, configurable": lambda stub: _initialised(stub, configurable_fields=("temperature",)),
    "with_retry": lambda stub: openai(stub).with_retry(),
}


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that fits the schema, a call of the first tool, or any words."""
    if body.get("tools"):
        function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"city": "Bern", "word": "Bern"}'}
        return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return {"content": '{"city": "Bern"}' if body.get("response_format") else "words"}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # langchain-openai's own, of what it parses
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("entry", ["invoke", "ainvoke", "stream", "astream"])
def test_request_in_every_form_is_claimed_by_an_equal_model(name: str, entry: str) -> None:
    """The model that claims is made in the function; an equal one made the call."""
    with openai_stub(_answer) as stub:
        expected = observe(SERVED[name](stub), entry, QUESTION)
        sent = list(stub.requests)
        calls = calls_of(SERVED[name](stub), entry)
        stub.requests.clear()

        outcome = outcome_of_claims(SERVED[name](stub), entry, calls)

    assert outcome == expected
    assert stub.requests == sent
    assert len(sent) == 1


class TableToolClaim:
    """The original's claim to a tool's call in a table."""

    def __init__(self, tool: Any, table: ProviderCallTable) -> None:
        self.tool = tool
        self._scope = CallScope(table, Caller.ORIGINAL, lambda value: value, is_user_code=True)

    def result(self, invocation: Any) -> Any:
        return self._scope.result(invocation).get()

    async def aresult(self, invocation: Any) -> Any:
        return (await self._scope.aresult(invocation)).get()


def test_a_read_only_tool_claims_its_prefetched_call() -> None:
    calls = Counter[str]()

    def look(word: str) -> str:
        """Look a word up."""
        calls[word] += 1
        return f"about {word}"

    looking = StructuredTool.from_function(look)
    seam.install(find_scope)
    expected = observe(looking, "invoke", {"word": "oats"})
    calls.clear()
    table = ProviderCallTable()
    invocation = seam.tool_invocation(looking, "_run", (), {"word": "oats"})
    assert invocation is not None
    invocation.set_config({})
    CallScope(table, Caller.PLANNER, lambda value: value, is_user_code=True).result(invocation)

    token = seam.tool_claim.set(TableToolClaim(looking, table))
    try:
        outcome = observe(looking, "invoke", {"word": "oats"})
    finally:
        seam.tool_claim.reset(token)

    assert outcome == expected
    assert calls == {"oats": 1}
