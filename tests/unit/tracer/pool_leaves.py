"""Small pool-backed objects: LangChain classes that describe themselves to the tracer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig

from teola_plugin.requests.payloads import Chunk, Generate, Generation, Hit, Message, Prompt, Sampling
from teola_plugin.tracer.leaf import EmbeddingLeaf, GenerationLeaf, IndexingLeaf, RerankingLeaf, RetrievalLeaf

ROLES = {"human": "user", "ai": "assistant"}


def answer(prompt: Prompt) -> str:
    """Return the fake model's answer: a list that differs from prompt to prompt."""
    text = " / ".join(f"{m.role}: {m.content}" for m in prompt.messages)
    return f"1. one for <{text}>\n2. two"


class PoolChat(FakeListChatModel):
    """A chat model on engine `llm`, whose answer depends on its prompt alone. Bound `tools` are beyond its leaf."""

    responses: list[str] = []
    items: str = ""
    expected: int | None = None

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> GenerationLeaf | None:
        if "tools" in kwargs:
            return None
        sampling = Sampling(stop=tuple(kwargs.get("stop", ())))

        def payload(value: Any) -> Generate:
            return Generate(_prompt(_messages(value)), sampling)

        def message(generation: Generation) -> AIMessage:
            return AIMessage(content=generation.text)

        return GenerationLeaf("llm", payload, message, self.items, self.expected)

    def _call(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> str:
        return answer(_prompt(messages))


def _prompt(messages: list[BaseMessage]) -> Prompt:
    return Prompt(tuple(_message(m) for m in messages))


def _messages(value: Any) -> list[BaseMessage]:
    if isinstance(value, PromptValue):
        return value.to_messages()
    return convert_to_messages([("human", value)] if isinstance(value, str) else value)


def _message(message: BaseMessage) -> Message:
    return Message(ROLES.get(message.type, message.type), message.text)


class PoolRetriever(BaseRetriever):
    k: int = 4

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> RetrievalLeaf:
        def documents(hits: Sequence[Hit]) -> list[Document]:
            return [Document(hit.text) for hit in hits]

        return RetrievalLeaf("store", "embedder", "docs", self.k, (), documents)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(f"about {query}")]


def score(query: str, text: str) -> float:
    return float(len(text) - len(query))


class PoolReranker(Runnable[dict[str, Any], list[Document]]):
    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> RerankingLeaf:
        return RerankingLeaf("reranker", lambda documents: [d.page_content for d in documents], _best)

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        def rerank(value: dict[str, Any]) -> list[Document]:
            return _best(value["documents"], [score(value["query"], d.page_content) for d in value["documents"]])

        return self._call_with_config(rerank, input, config)


def _best(documents: Sequence[Document], scores: Sequence[float]) -> list[Document]:
    return [d for _, d in sorted(zip(scores, documents, strict=True), key=lambda pair: -pair[0])][:2]


class PoolIndexer(Runnable[str, str]):
    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> IndexingLeaf:
        def chunk(text: str) -> tuple[Chunk, ...]:
            return tuple(Chunk(f"c{i}", part) for i, part in enumerate(text.split()))

        return IndexingLeaf("store", "embedder", "docs", chunk, lambda text: len(text) // 2, lambda ids: "docs")

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return self._call_with_config(lambda _: "docs", input, config)


class PoolEmbedder(Runnable[list[str], list[list[float]]]):
    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> EmbeddingLeaf:
        return EmbeddingLeaf("embedder", "document", True)

    def invoke(self, input: list[str], config: RunnableConfig | None = None, **kwargs: Any) -> list[list[float]]:
        return self._call_with_config(lambda texts: [[0.0] for _ in texts], input, config)
