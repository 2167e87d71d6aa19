"""Tests of the own models that `bind=` takes: `OpenAI` on a fake server, and small models of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.postprocessor import SentenceTransformerRerank
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin.adapters.llamaindex.binding.bind import bound
from teola_plugin.engines.fake import FakeEmbedder, FakeReranker
from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.openai import OpenAIServer, RerankingServer
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex import interceptors, models
from teola_plugin.shims.llamaindex.records import Parts
from teola_plugin.shims.openai import cohere_server

QUESTION = [ChatMessage("why?")]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


@pytest.fixture(scope="module")
def pool(stub: OpenAIStub) -> Iterator[EnginePool]:
    engines = {"llm": OpenAIServer(base_url=stub.base_url), "embedder": FakeEmbedder(), "reranker": FakeReranker()}
    with EnginePool.local(engines) as made:
        yield made


@pytest.fixture
def llm(stub: OpenAIStub) -> OpenAILike:
    return OpenAILike(model=MODEL, api_base=stub.base_url, api_key="mine", is_chat_model=True, max_retries=0)


def test_a_model_of_an_older_version_has_no_rate_limiter() -> None:
    model = SimpleNamespace(embeddings_cache=None)
    assert models.rate_limiter(model) is None
    assert not models.is_paced(model)


@pytest.mark.parametrize("name", ["rate_limiter", "embeddings_cache"])
def test_a_rate_limiter_or_a_cache_paces_a_model(name: str) -> None:
    assert models.is_paced(SimpleNamespace(**{name: object()}))


def test_openai_parts_read_client_and_credentials(llm: OpenAILike) -> None:
    parts = models.OpenAIParts.of(llm)
    assert (parts.client, parts.aclient, parts.http_client, parts.async_http_client) == (None, None, None, None)
    plain = llm.chat(QUESTION)  # makes the client that is used from then on
    assert str(models.OpenAIParts.of(llm).client.base_url).rstrip("/") == llm.api_base
    assert models.credentials(llm)["api_key"] == models.credentials(llm, is_async=True)["api_key"] == "mine"
    assert models.chat_silently(llm, QUESTION, {}).message == plain.message
    assert models.token_counts(llm, plain.raw) == plain.additional_kwargs


def test_openai_embedding_parts_read_engines_and_credentials() -> None:
    own = OpenAIEmbedding(model_name="m", api_key="mine", api_base="http://localhost:1/v1")
    parts = models.OpenAIEmbeddingParts.of(own)
    assert (parts.client, parts.aclient, parts.http_client, parts.async_http_client) == (None, None, None, None)
    assert (parts.query_engine, parts.text_engine) == ("m", "m")
    assert models.credentials(own)["api_key"] == "mine"


def test_cohere_reranker_parts_read_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    rerankers = pytest.importorskip("llama_index.postprocessor.cohere_rerank", reason="needs its package")
    own = rerankers.CohereRerank(api_key="mine", base_url="http://localhost:1", model="m")
    assert cohere_server(models.CohereRerankParts.of(own).client) == ("http://localhost:1", "mine")
    pool = EnginePool.local([RerankingServer(base_url="http://localhost:1/v2", model="m")])
    not_there(monkeypatch, models.CohereRerankParts, lambda: bound(own, "reranker", pool))


@pytest.mark.models
def test_huggingface_embedding_parts_read_the_model(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface = pytest.importorskip("llama_index.embeddings.huggingface", reason="needs models")
    own = huggingface.HuggingFaceEmbedding(packaged_minilm())
    parts = models.HuggingFaceEmbeddingParts.of(own)
    assert parts.parallel_process is False
    assert parts.model.encode(["a"])[0].tolist() == pytest.approx(own.get_text_embedding("a"), abs=1e-5)
    not_there(monkeypatch, models.HuggingFaceEmbeddingParts, lambda: bound(own, "embedder", pool))


@pytest.mark.models
def test_reranker_parts_read_the_model(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="needs models")
    own = SentenceTransformerRerank(model=str(reranker_folder()), top_n=1)
    assert hasattr(models.SentenceTransformerRerankParts.of(own).model, "predict")
    not_there(monkeypatch, models.SentenceTransformerRerankParts, lambda: bound(own, "reranker", pool))


def test_openai_object_of_another_version_is_not_bound(
    llm: OpenAILike, pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_there(monkeypatch, models.OpenAIParts, lambda: bound(llm, "llm", pool))


def not_there(monkeypatch: pytest.MonkeyPatch, kind: type[Parts], bind: Callable[[], Any]) -> None:
    """Check for each name that an object without it cannot be bound, and stays unchanged."""
    bind()
    for one in fields(kind):
        with monkeypatch.context() as patch:
            source = replace(one.metadata["source"], name="renamed")
            patch.setattr(one, "metadata", MappingProxyType({"source": source}))
            with pytest.raises(RegistrationError, match=r"it has no 'renamed'.*leave it unbound"):
                bind()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "METHODS", (*kind.METHODS, "renamed"))
        with pytest.raises(RegistrationError, match="no method 'renamed'"):
            bind()


# ------------------------------------------------------------ LLMs that code creates


def created_llm(temperature: float = 0.0) -> OpenAILike:
    return OpenAILike(model=MODEL, api_key="none", api_base="http://127.0.0.1:9/v1", temperature=temperature)


def test_created_models_find_the_one_of_equal_configuration() -> None:
    created = models.CreatedModels()
    cold, warm = created.add(created_llm()), created.add(created_llm(1.0))
    assert created.find(created_llm()) is cold
    assert created.find(created_llm(1.0)) is warm
    assert created.find(created_llm(0.5)) is None
    assert created.add(created_llm()) is cold
    assert created.find(object()) is None


def test_created_models_do_not_stand_for_a_model_with_a_client_of_its_own() -> None:
    created = models.CreatedModels()
    created.add(created_llm())
    with_client = created_llm()
    with_client._client = SimpleNamespace()
    assert created.find(with_client) is None


def test_created_models_share_the_client_that_a_model_makes_later() -> None:
    created = models.CreatedModels()
    equal_model, llm = created.add(created_llm()), created_llm()
    created.find(llm)
    client = llm._get_client()
    created.share_clients(equal_model)
    assert equal_model._client is client
    assert created.find(llm) is equal_model
    created.drop_clients()
    assert equal_model._client is None
    assert llm._client is client


def test_is_provider_method_excludes_public_methods_of_openai_itself() -> None:
    class UsersOwn(OpenAI):
        pass

    llm, own = OpenAI(model="gpt-4o-mini", api_key="none"), UsersOwn(model="gpt-4o-mini", api_key="none")

    assert not interceptors.is_provider_method(llm, "chat") and interceptors.is_provider_method(llm, "_chat")
    assert interceptors.is_provider_method(own, "chat")
