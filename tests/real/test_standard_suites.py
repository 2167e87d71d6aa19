"""LangChain's own standard test suites on real engines: vLLM, MiniLM, PostgreSQL with pgvector."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.pool import EnginePool

pytestmark = [pytest.mark.vllm, pytest.mark.postgres, pytest.mark.models]

_names = (f"suite{i}" for i in itertools.count())
TEXTS = ["The cat sleeps on the mat.", "Dogs bark at postmen.", "Green tea is brewed at low heat.", "Rain in May."]


class OnRealEngines:
    """The suites ask for classes and parameters by properties, so the pool stands on the class."""

    pool: EnginePool

    @pytest.fixture(autouse=True)
    def _use(self, real_pool: EnginePool) -> None:
        type(self).pool = real_pool


class OfEmbeddings(OnRealEngines):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return TeolaEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"pool": self.pool}


class TestEmbeddingsUnit(OfEmbeddings, EmbeddingsUnitTests): ...


class TestEmbeddings(OfEmbeddings, EmbeddingsIntegrationTests): ...


class TestVectorStore(VectorStoreIntegrationTests):
    """LangChain's suite with the vectors that it brings, because it expects known scores."""

    @pytest.fixture
    def vectorstore(self, real_pool: EnginePool) -> Iterator[TeolaVectorStore]:
        store = TeolaVectorStore(pool=real_pool, embedding=self.get_embeddings(), collection=next(_names))
        yield store
        store.delete()


class TestRetriever(OnRealEngines, RetrieversIntegrationTests):
    store: TeolaVectorStore

    @pytest.fixture(autouse=True)
    def _filled(self, real_pool: EnginePool) -> Iterator[None]:
        store = TeolaVectorStore(pool=real_pool, embedding=TeolaEmbeddings(pool=real_pool), collection=next(_names))
        store.add_documents([Document(text, id=str(i)) for i, text in enumerate(TEXTS)])
        type(self).store = store
        yield
        store.delete()

    @property
    def retriever_constructor(self) -> Callable[..., Any]:  # type: ignore[override]
        return lambda k=4: self.store.as_retriever(search_kwargs={"k": k})

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {}

    @property
    def retriever_query_example(self) -> str:
        return "a sleeping pet"


class TestChat(OnRealEngines, ChatModelIntegrationTests):
    """The model is random: what it says is nonsense, but of the right shape, in the right pieces, and counted."""

    @property
    def chat_model_class(self) -> type[ChatTeola]:
        return ChatTeola

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"pool": self.pool, "max_tokens": 64}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {}

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return True
