"""Tests of `pool.bound(model, engine)`, for code that `bind=` cannot reach."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import operator
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from differential.recording import Recorder
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnableParallel
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.own_leaves import Chat, Ledger, Notes, Text
from support.recording import arrivals, record

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import FakeLLM, embed_words
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUESTION = "what is a primitive?"


class Provider(Chat):
    """A model as providers write them."""

    temperature: float | None = None
    max_tokens: int | None = 8
    n: int = 1


class Words(Embeddings):
    def __init__(self) -> None:
        self.requests: list[str] = []

    def embed_documents(self, texts: list[str], chunk_size: int | None = None) -> list[list[float]]:
        self.requests += texts
        return [list(embed_words(text, "document")) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self.requests.append(text)
        return list(embed_words(text))


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


# ------------------------------------------------------------ on the server that it talks to


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIStub]:
    with openai_stub() as stub:
        yield stub


@pytest.fixture
def stub(server: OpenAIStub) -> OpenAIStub:
    server.requests.clear()
    return server


@pytest.fixture(scope="module")
def openai_pool(server: OpenAIStub) -> Iterator[EnginePool]:
    engine = OpenAIServer(base_url=server.base_url, api_key="the-engines", prefix_caching=True, calibrate=False)
    with EnginePool.local(llm=engine) as made:
        yield made


def chat(stub: OpenAIStub, **options: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"temperature": 0.0, "max_retries": 0, "model": MODEL, "base_url": stub.base_url, **options}
    return ChatOpenAI(api_key="mine", **given)  # type: ignore[arg-type]


def request_bodies(stub: OpenAIStub) -> list[dict[str, Any]]:
    """Return the bodies of the requests, without the fields that say how the answer is sent."""
    bodies = (body for path, body in stub.requests if path.endswith("completions"))
    return [{k: v for k, v in body.items() if k not in ("stream", "stream_options")} for body in bodies]


def message_fields(message: Any) -> dict[str, Any]:
    return message.model_dump(exclude={"id"}, exclude_none=True) | {"response_metadata": None}


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke"])
def test_bound_openai_model_keeps_its_class_and_requests(openai_pool: EnginePool, stub: OpenAIStub, way: str) -> None:
    """The server gets the requests, and the caller the results, that they would get without a pool."""
    mine = chat(stub)
    made = openai_pool.bound(mine, "llm")
    assert isinstance(made, ChatOpenAI) and type(made).__name__ == "ChatOpenAI" and made.model_name == mine.model_name

    def call(model: Any) -> Any:
        if way == "stream":
            return "".join(chunk.content for chunk in model.stream(QUESTION))
        return message_fields(model.invoke(QUESTION) if way == "invoke" else asyncio.run(model.ainvoke(QUESTION)))

    expected = call(mine)
    seen = arrivals(openai_pool)
    assert call(made) == expected
    [plain, carried] = request_bodies(stub)
    assert carried == plain and len(seen) == 1


def test_bound_openai_model_sends_tools_and_schema_of_the_original(openai_pool: EnginePool, stub: OpenAIStub) -> None:
    class Answer(BaseModel):
        """An answer."""

        text: str

    mine = chat(stub)
    for model in (mine, openai_pool.bound(mine, "llm")):
        model.bind_tools([add], tool_choice="add").invoke(QUESTION)
        with pytest.raises(ValueError, match="Answer"):  # the stub writes no JSON
            model.with_structured_output(Answer).invoke(QUESTION)
    first, second, third, fourth = request_bodies(stub)
    assert (third, fourth) == (first, second) and first["tools"] and second["response_format"]


def test_copies_and_variants_of_a_bound_model_use_the_engine(openai_pool: EnginePool, stub: OpenAIStub) -> None:
    made = openai_pool.bound(chat(stub), "llm")
    seen = arrivals(openai_pool)
    made.configurable_fields(temperature=ConfigurableField(id="t")).invoke(QUESTION, {"configurable": {"t": 0.5}})
    type(made)(base_url=stub.base_url, api_key="other", model=MODEL).invoke(QUESTION)
    made.model_copy(update={"temperature": 1.0}).invoke(QUESTION)
    assert len(seen) == 3 and [body.get("temperature") for body in request_bodies(stub)] == [0.5, None, 1.0]
    with pytest.raises(RegistrationError, match="talks to http://elsewhere/v1"):
        type(made)(base_url="http://elsewhere/v1", api_key="k", model=MODEL).invoke(QUESTION)


def test_pool_bound_raises_the_errors_of_bind(openai_pool: EnginePool, fakes: EnginePool, stub: OpenAIStub) -> None:
    notes = Notes()
    for pool, obj, engine in (
        (openai_pool, chat(stub, base_url="http://elsewhere/v1"), "llm"),
        (fakes, Provider(n=2), "llm"),
        (fakes, Provider(), "lm"),
        (fakes, notes, "llm"),
    ):
        node: Runnable[Any, Any] = RunnableLambda(str) | obj
        with pytest.raises(RegistrationError) as of_bind:
            accelerate(node, pool=pool, bind=[(obj, engine)])
        with pytest.raises(RegistrationError) as of_bound:
            pool.bound(obj, engine)
        assert str(of_bound.value) == str(of_bind.value)


# ------------------------------------------------------------ on engines of the pool


async def _every_way(model: Any) -> list[Any]:
    streamed = functools.reduce(operator.add, [chunk async for chunk in model.astream(QUESTION)])
    return [model.invoke(QUESTION), await model.ainvoke(QUESTION), streamed]


@pytest.mark.parametrize("kind", [Provider, Text])
async def test_bound_model_of_any_provider_keeps_its_class(fakes: EnginePool, kind: Any) -> None:
    mine = kind(ledger=Ledger())
    made = fakes.bound(mine, "llm")
    assert isinstance(made, kind) and isinstance(made, BaseChatModel | BaseLLM) and made.get_name() == mine.get_name()
    same = accelerate(RunnableLambda(str) | mine, pool=fakes, bind=[(mine, "llm")]).invoke(QUESTION)
    texts = [getattr(one, "content", one) for one in await _every_way(made)]
    assert texts == [getattr(same, "content", same)] * 3
    assert made.batch([QUESTION, QUESTION])[1] == made.invoke(QUESTION) or kind is Provider
    assert not mine.ledger.calls


def test_fields_set_on_a_bound_model_apply_to_later_calls(fakes: EnginePool) -> None:
    made = fakes.bound(Provider(), "llm")
    made.max_tokens = 2
    assert made.invoke(QUESTION).usage_metadata["output_tokens"] == 2
    assert made.model_copy(update={"max_tokens": 3}).invoke(QUESTION).usage_metadata["output_tokens"] == 3
    fields = made.configurable_fields(max_tokens=ConfigurableField(id="m"))
    assert fields.invoke(QUESTION, {"configurable": {"m": 1}}).usage_metadata["output_tokens"] == 1
    made.n = 2
    with pytest.raises(RegistrationError, match="n=2"):
        made.invoke(QUESTION)


def openai_of_another_server(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url="http://elsewhere/v1", api_key="k", model=MODEL, max_tokens=40, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
async def test_bound_openai_model_sends_tools_as_chat_teola(fakes: EnginePool, way: str) -> None:
    """The engine is asked for what a `ChatTeola` with these tools asks for; the answer comes whole."""
    made, same = fakes.bound(openai_of_another_server(), "llm"), ChatTeola(pool=fakes, max_tokens=40)
    requests = record(fakes.engine("llm"))

    same.bind_tools([add], tool_choice="add").invoke(QUESTION)
    asking: Any = made.bind_tools([add], tool_choice="add", strict=True)
    if way == "stream":
        answer = functools.reduce(operator.add, asking.stream(QUESTION))
    elif way == "astream":
        answer = functools.reduce(operator.add, [chunk async for chunk in asking.astream(QUESTION)])
    else:
        answer = asking.invoke(QUESTION) if way == "invoke" else await asking.ainvoke(QUESTION)

    expected, found = (request.payload for request in requests)
    assert json.loads(found.sampling.json_schema)["properties"]["name"] == {"enum": ["add"]}
    assert [tool["function"]["name"] for tool in json.loads(found.prompt.tools)] == ["add"]
    assert found.prompt.messages == expected.prompt.messages
    assert answer.content or answer.tool_calls


def test_bind_tools_raises_if_the_original_has_no_tools(fakes: EnginePool) -> None:
    with pytest.raises(NotImplementedError):
        fakes.bound(Provider(), "llm").bind_tools([add])


class Answer(BaseModel):
    """An answer."""

    text: Literal["yes"]


def test_bound_model_parses_structured_output_as_the_original(fakes_of_json: EnginePool) -> None:
    made = fakes_of_json.bound(openai_of_another_server(), "llm")

    assert made.with_structured_output(Answer).invoke(QUESTION) == Answer(text="yes")
    assert made.with_structured_output(Answer.model_json_schema()).invoke(QUESTION) == {"text": "yes"}


@pytest.fixture
def fakes_of_json() -> Iterator[EnginePool]:
    def answer(prompt: Any, sampling: Any) -> str:
        assert json.loads(sampling.json_schema)["properties"]["text"]
        return '{"text": "yes"}'

    with EnginePool.local(engines=[FakeLLM("llm", answer=answer)]) as pool:
        yield pool


def test_bound_model_sends_the_callbacks_of_the_original(fakes: EnginePool) -> None:
    mine = Provider(tags=["t"], metadata={"k": 1})

    def told_by(model: Any) -> Any:
        recorder = Recorder()
        model.invoke(QUESTION, {"callbacks": [recorder]})
        return [(event[0], event[1], event[2]) for event in recorder.events]

    assert told_by(fakes.bound(mine, "llm")) == told_by(mine)


def test_bound_model_in_user_code_joins_the_query(fakes: EnginePool) -> None:
    """A function calls a model that `bind=` cannot reach. `bound` is made for this case."""
    model = fakes.bound(Provider(), "llm")
    fast = accelerate(RunnableLambda(lambda text: model.invoke(text)) | StrOutputParser(), pool=fakes)
    assert fast.invoke(QUESTION) == model.invoke(QUESTION).content
    trace = fast.last_trace()
    assert trace is not None and [span.engine for span in trace.spans if span.engine] == ["llm"]


def test_bound_model_in_a_chain_is_lowered(fakes: EnginePool) -> None:
    model = fakes.bound(Provider(), "llm")
    chain = RunnableParallel(
        a=ChatPromptTemplate.from_template("one {q}") | model, b=ChatPromptTemplate.from_template("two {q}") | model
    )
    fast = accelerate(chain)
    rows = [row for row in fast.report().parts.nodes if row.class_name == "Provider"]
    assert [row.level for row in rows] == ["lowered", "lowered"]
    assert {k: v.content for k, v in fast.invoke({"q": 1}).items()} == {
        k: v.content for k, v in chain.invoke({"q": 1}).items()
    }


def test_bound_model_with_overridden_invoke_is_not_prefetched(fakes: EnginePool) -> None:
    class Polite(Provider):
        def invoke(self, input: Any, *args: Any, **kwargs: Any) -> Any:
            return super().invoke(f"please: {input}", *args, **kwargs)

    model = fakes.bound(Polite(), "llm")
    assert model.invoke(QUESTION).content == fakes.bound(Provider(), "llm").invoke(f"please: {QUESTION}").content
    assert model.__teola_leaf__({}) is None and fakes.bound(Provider(), "llm").__teola_leaf__({}) is not None


def test_bound_embeddings_keep_their_class_and_use_the_engine(fakes: EnginePool) -> None:
    mine = Words()
    made = fakes.bound(mine, "embedder")
    assert isinstance(made, Words) and isinstance(copy.copy(made), Words)
    store = InMemoryVectorStore(made)
    store.add_texts(["an engine", "a pool of engines"])
    assert made.embed_query("x") == mine.embed_query("x")
    assert made.embed_documents(["x"], 5) == mine.embed_documents(["x"])
    assert asyncio.run(made.aembed_query("x")) == mine.embed_query("x")
    mine.requests.clear()
    assert [one.page_content for one in store.similarity_search("a pool", k=1)] == ["a pool of engines"]
    assert not mine.requests


def test_binding_again_returns_same_object_or_raises_for_other_engine(fakes: EnginePool) -> None:
    made = fakes.bound(Provider(), "llm")
    assert fakes.bound(made, "llm") is made
    with pytest.raises(RegistrationError, match="served by the engine 'llm' already"):
        fakes.bound(made, "embedder")


def test_pickling_a_bound_model_or_binding_an_int_raises(fakes: EnginePool) -> None:
    class Slotted(Embeddings):
        __slots__ = ("kept",)

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return []

        def embed_query(self, text: str) -> list[float]:
            return []

    assert fakes.bound(Slotted(), "embedder").embed_query("x")
    with pytest.raises(RegistrationError, match="its pool lives in this process"):
        pickle.dumps(fakes.bound(Provider(), "llm"))
    with pytest.raises(RegistrationError, match=r"a builtins\.int cannot be bound"):
        fakes.bound(3, "llm")


def test_import_of_pool_imports_no_framework() -> None:
    code = (
        "import sys, teola_plugin.pool; print(sorted(m for m in sys.modules if m.startswith(('langchain', 'llama'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
