"""Tests of `bind={object: engine}`: engines of the pool do the work of the user's own objects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from differential.recording import Recorder
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field
from support.own_leaves import Chat, Ledger, Notes, Text
from support.recording import record

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.llm import TeolaLLM
from teola_plugin.engines.fake import embed_words
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]
QUESTION = {"question": "what is a primitive?"}


class Provider(Chat):
    """A model as providers write them."""

    temperature: float | None = None
    max_completion_tokens: int | None = 8
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    frequency_penalty: float | None = None
    n: int = 1
    model_kwargs: dict[str, Any] = Field(default_factory=dict)

    model_config = {"populate_by_name": True}


class Words(Embeddings):
    """The fake embedder's vectors, made at home."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [list(embed_words(text, "document")) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self.requests.append(text)
        return list(embed_words(text))


def ask(text: str, model: Chain) -> Chain:
    return ChatPromptTemplate.from_template(text) | model


def call(chain: Chain, way: str, given: Any = QUESTION) -> Any:
    return chain.invoke(given) if way == "invoke" else asyncio.run(chain.ainvoke(given))


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_bound_model_sends_its_calls_to_the_engine(fakes: EnginePool, way: str) -> None:
    model = Provider(ledger=Ledger())
    chain = ask("{question}", model) | StrOutputParser()
    fast = accelerate(chain, pool=fakes, bind=[(model, "llm")])
    same = ask("{question}", ChatTeola(pool=fakes, max_tokens=8)) | StrOutputParser()
    assert call(fast, way) == call(same, way)
    assert not model.ledger.calls
    assert fast.original is chain and chain.steps[1] is model
    trace = fast.last_trace()
    assert trace is not None and "llm" in {span.engine for span in trace.spans}


def test_bound_model_keeps_its_sampling_parameters_and_tags(fakes: EnginePool) -> None:
    model = Provider(
        temperature=0.5,
        max_completion_tokens=9,
        top_p=0.9,
        stop=["END"],
        model_kwargs={"top_k": 7, "seed": 3},
        tags=["t"],
        metadata={"k": 1},
    )
    requests = record(fakes.engine("llm"))
    recorder = Recorder()

    accelerate(ask("{question}", model), pool=fakes, bind=[(model, "llm")]).invoke(QUESTION, {"callbacks": [recorder]})

    sampling = requests[-1].payload.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p) == (0.5, 9, 0.9)
    assert (sampling.stop, sampling.top_k, sampling.seed) == (("END",), 7, 3)
    [started] = [event for event in recorder.events if event[0] == "chat_model_start"]
    assert "t" in started[2]


def test_bound_text_model_returns_text(fakes: EnginePool) -> None:
    model = Text()
    chain = ask("{question}", model)
    fast = accelerate(chain, pool=fakes, bind=[(model, "llm")])
    same = ask("{question}", TeolaLLM(pool=fakes))
    assert fast.invoke(QUESTION) == same.invoke(QUESTION)
    assert not model.ledger.calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"n": 2}, "n=2"),
        ({"model_kwargs": {"mirostat": 1}}, "mirostat"),
    ],
)
def test_bind_raises_for_options_the_engine_lacks(fakes: EnginePool, options: dict[str, Any], message: str) -> None:
    model = Provider(**options)
    with pytest.raises(RegistrationError, match=message):
        accelerate(ask("{question}", model), pool=fakes, bind=[(model, "llm")])


def test_bind_checks_and_keeps_arguments_of_model_bind(fakes: EnginePool) -> None:
    model = Provider()
    with pytest.raises(RegistrationError, match="logprobs"):
        accelerate(ask("{question}", model.bind(logprobs=True)), pool=fakes, bind=[(model, "llm")])
    fast = accelerate(ask("{question}", model.bind(max_tokens=2)), pool=fakes, bind=[(model, "llm")])
    assert fast.invoke(QUESTION).usage_metadata["output_tokens"] == 2


def test_bind_covers_every_use_of_the_model_only(fakes: EnginePool) -> None:
    mine, other = Provider(ledger=Ledger(), says="mine"), Provider(ledger=Ledger(), says="other")
    chain = RunnablePassthrough.assign(a=ask("1 {question}", mine), b=ask("2 {question}", other)).assign(
        c=ask("3 {question}", mine.with_config(tags=["x"]))
    )
    fast = accelerate(chain, pool=fakes, bind=[(mine, "llm")])
    result = fast.invoke(QUESTION)
    assert not mine.ledger.calls and other.ledger.calls == {"other: 2 what is a primitive?": 1}
    assert all(isinstance(result[key], AIMessage) for key in "abc")


def test_bound_model_keeps_names_and_tags_of_its_runs(fakes: EnginePool) -> None:
    model = Provider(tags=["t"])
    chain = RunnablePassthrough.assign(a=ask("{question}", model))

    def runs(one: Chain) -> list[Any]:
        recorder = Recorder()
        one.invoke(QUESTION, {"callbacks": [recorder]})
        return sorted((e[0], e[1], e[2]) for e in recorder.events if e[0].endswith("start"))

    assert runs(accelerate(chain, pool=fakes, bind=[(model, "llm")])) == runs(chain)


class Streaming(Provider):
    """A model that streams."""

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        yield ChatGenerationChunk(message=AIMessageChunk(self._generate(messages, stop).generations[0].text))


@pytest.mark.parametrize(("kind", "is_streamed"), [(Provider, False), (Streaming, True)])
async def test_bound_model_streams_and_batches_on_the_engine(fakes: EnginePool, kind: Any, is_streamed: bool) -> None:
    """In pieces where the object's class streams, else whole, as of the object itself."""
    model = kind(ledger=Ledger())
    fast = accelerate(ask("{question}", model) | StrOutputParser(), pool=fakes, bind=[(model, "llm")])
    chunks = [chunk async for chunk in fast.astream(QUESTION)]
    assert (len(chunks) > 1) is is_streamed and "".join(chunks) == fast.invoke(QUESTION)
    assert fast.batch([QUESTION, QUESTION]) == [fast.invoke(QUESTION)] * 2
    assert not model.ledger.calls


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_bound_embeddings_inside_a_retriever_use_the_engine(fakes: EnginePool, way: str) -> None:
    words = Words()
    store = InMemoryVectorStore(words)
    store.add_documents(
        [Document(text, id=text) for text in ("a primitive is a unit", "an engine", "a pool of engines")]
    )
    retriever = store.as_retriever(search_kwargs={"k": 2}, tags=["r"])
    chain = RunnableLambda(lambda x: x["question"]) | retriever
    expected = call(chain, way)
    words.requests.clear()
    fast = accelerate(chain, pool=fakes, bind={words: "embedder"})
    assert call(fast, way) == expected and len(expected) == 2
    assert not words.requests
    assert retriever.vectorstore is store and store.embedding is words
    trace = fast.last_trace()
    assert trace is not None and [span.engine for span in trace.spans if span.engine] == ["embedder"]


@pytest.mark.parametrize("search_type", ["similarity", "mmr"])
def test_store_subclass_embeds_on_the_engine(fakes: EnginePool, search_type: str) -> None:
    class Other(InMemoryVectorStore):
        def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
            return super().similarity_search(query.upper(), k, **kwargs)

    words = Words()
    store = Other(words)
    store.add_texts(["A POOL", "an engine"])
    chain = store.as_retriever(search_type=search_type) | RunnableLambda(len)
    expected = chain.invoke("a pool")
    words.requests.clear()

    assert accelerate(chain, pool=fakes, bind={words: "embedder"}).invoke("a pool") == expected
    assert not words.requests


def test_bind_raises_for_unknown_engine_object_or_missing_pool(fakes: EnginePool) -> None:
    model = Provider()
    chain = ask("{question}", model)
    with pytest.raises(RegistrationError, match=r"unknown engine 'lm'.*known: embedder, llm"):
        accelerate(chain, pool=fakes, bind=[(model, "lm")])
    with pytest.raises(RegistrationError, match="does not occur in the chain"):
        accelerate(chain, pool=fakes, bind=[(Provider(), "llm")])
    with pytest.raises(RegistrationError, match="there is no pool"):
        accelerate(chain, bind=[(model, "llm")])
    notes = Notes()
    with pytest.raises(RegistrationError, match="cannot be bound to an engine"):
        accelerate(RunnableLambda(lambda x: "q") | notes, pool=fakes, bind=[(notes, "llm")])


def test_bind_of_a_scorer_to_a_reranker_raises(fakes: EnginePool) -> None:
    class Scorer:
        def score(self, pairs: Any) -> list[float]:
            return []

    with pytest.raises(RegistrationError, match=r"reranker.*TeolaRerank"):
        accelerate(ask("{question}", Provider()), pool=fakes, bind={Scorer(): "reranker"})


def test_accelerate_with_bind_returns_original_if_disabled_by_environment(
    fakes: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEOLA_DISABLE", "1")
    model: BaseChatModel = Provider()
    chain = ask("{question}", model)
    assert accelerate(chain, pool=fakes, bind=[(model, "llm")]) is chain
