"""LlamaIndex objects of "the user's own": models with code for both ways of calling, which keep every call.

They take as long as a profile says and, like a hosted API, do not slow each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.generic_utils import completion_response_to_chat_response
from llama_index.core.base.llms.types import CompletionResponse, LLMMetadata
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores import SimpleVectorStore
from pydantic import Field, PrivateAttr

from benchmarks.llamaindex.answers import answer
from benchmarks.llamaindex.ledger import Ledger
from benchmarks.rag.apps import tokens_of
from benchmarks.replies import reply_after
from teola_plugin.engines.fake import bag_of_words, embed_words, split_tokens
from teola_plugin.graph import EngineProfile, PrimitiveKind

K = PrimitiveKind
Machine = Mapping[str, EngineProfile]


class Slow:
    """How long the models of a machine take, in seconds."""

    def __init__(self, machine: Machine, ledger: Ledger) -> None:
        self._machine, self.ledger = machine, ledger

    def generate(self, prompt: str, text: str) -> float:
        llm = self._machine["llm"]
        return llm.seconds(K.PREFILLING, tokens_of(prompt)) + llm.seconds(K.DECODING, tokens_of(text))

    def embed(self, texts: int) -> float:
        return self._machine["embedder"].seconds(K.EMBEDDING, texts)

    def rerank(self, pairs: int) -> float:
        return self._machine["reranker"].seconds(K.RERANKING, pairs)

    def search(self) -> float:
        return self._machine["store"].seconds(K.SEARCHING, 1)


class OwnLLM(CustomLLM):
    """A model behind an API. With `chat`, it takes messages and LlamaIndex chooses its prompts for chat models."""

    words: int = 12
    chat_model: bool = False
    slow: Any = Field(exclude=True, repr=False)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=3900, num_output=256, is_chat_model=self.chat_model, model_name="own")

    @classmethod
    def class_name(cls) -> str:
        return "OwnLLM"

    def _said(self, prompt: str) -> tuple[float, str]:
        ledger: Ledger = self.slow.ledger
        ledger.asked(prompt)
        if prompt == ledger.broken_prompt:
            raise ValueError(f"injected: {len(prompt)}")
        text = answer(prompt, self.words)
        return self.slow.generate(prompt, text), text

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        seconds, text = self._said(prompt)
        time.sleep(seconds)
        return CompletionResponse(text=text)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        seconds, text = self._said(prompt)
        await reply_after(seconds)
        return CompletionResponse(text=text)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        seconds, text = self._said(prompt)

        def pieces() -> Any:
            time.sleep(seconds)
            yield from _pieces(text)

        return pieces()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        seconds, text = self._said(prompt)

        async def pieces() -> Any:
            await reply_after(seconds)
            for piece in _pieces(text):
                yield piece

        return pieces()

    @llm_chat_callback()
    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        assert self.messages_to_prompt is not None
        said = await self.acomplete(self.messages_to_prompt(messages), formatted=True, **kwargs)
        return completion_response_to_chat_response(said)


def _pieces(text: str) -> Any:
    so_far = ""
    for piece in split_tokens(text):
        so_far += piece
        yield CompletionResponse(text=so_far, delta=piece)


class OwnEmbedding(BaseEmbedding):
    """Equal texts are equally near, whichever kit embeds them."""

    _slow: Slow = PrivateAttr()

    def __init__(self, slow: Slow) -> None:
        super().__init__(model_name="own")
        self._slow = slow

    @classmethod
    def class_name(cls) -> str:
        return "OwnEmbedding"

    def _vectors(self, role: Any, texts: list[str]) -> list[list[float]]:
        ledger = self._slow.ledger
        ledger.embedded(role, texts)
        if ledger.broken_text in texts:
            raise ValueError(f"injected: {ledger.broken_text}")
        return [list(embed_words(text, role)) for text in texts]

    def _now(self, role: str, texts: list[str]) -> list[list[float]]:
        found = self._vectors(role, texts)
        time.sleep(self._slow.embed(len(texts)))
        return found

    async def _later(self, role: str, texts: list[str]) -> list[list[float]]:
        found = self._vectors(role, texts)
        await reply_after(self._slow.embed(len(texts)))
        return found

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._now("query", [query])[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._now("document", [text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._now("document", texts)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._later("query", [query]))[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._later("document", [text]))[0]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self._later("document", texts)


class OwnStore(SimpleVectorStore):
    """The store that is built in, behind an API."""

    _slow: Slow = PrivateAttr()

    def __init__(self, slow: Slow) -> None:
        super().__init__()
        self._slow = slow

    def _searched(self) -> float:
        self._slow.ledger.searched()
        if self._slow.ledger.broken_store:
            raise ValueError("injected: the store is down")
        return self._slow.search()

    def query(self, query: Any, **kwargs: Any) -> Any:
        time.sleep(self._searched())
        return super().query(query, **kwargs)

    async def aquery(self, query: Any, **kwargs: Any) -> Any:
        await reply_after(self._searched())
        return super().query(query, **kwargs)


class OwnRerank(BaseNodePostprocessor):
    """Scores by the words that a text shares with the query."""

    top_n: int
    slow: Any = Field(exclude=True, repr=False)

    @classmethod
    def class_name(cls) -> str:
        return "OwnRerank"

    def _best(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None) -> list[NodeWithScore]:
        assert query_bundle is not None
        asked = bag_of_words(query_bundle.query_str)
        for node in nodes:
            words = bag_of_words(node.node.get_content(metadata_mode=MetadataMode.EMBED))
            node.score = sum(weight for word, weight in asked.items() if word in words)
        return sorted(nodes, key=lambda node: -(node.score or 0.0))[: self.top_n]

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        time.sleep(self.slow.rerank(len(nodes)))
        return self._best(nodes, query_bundle)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        await reply_after(self.slow.rerank(len(nodes)))
        return self._best(nodes, query_bundle)
