"""`TeolaEmbedding`: a LlamaIndex embedding model on an engine of the pool."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import ConfigDict

from teola_plugin.adapters.llamaindex.batches import BatchPrefetching
from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked


class TeolaEmbedding(PoolBacked, BatchPrefetching, BaseEmbedding):
    """LlamaIndex embeddings on the pool's engine `engine`: `TeolaEmbedding(pool=pool)`.

    Queries and texts keep their roles, since some models prefix them differently. Vectors are lists of floats of the
    model's width. The requests of all batches are sent at once; events and the progress bar show the batches one by
    one, `embed_batch_size` texts each. Engine errors pass through unchanged.
    """

    engine: str = "embedder"

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if "model_name" not in self.model_fields_set:
            self.model_name = self.model_version()

    @classmethod
    def class_name(cls) -> str:
        return "TeolaEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self.vectors([query], "query")[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self.avectors([query], "query"))[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self.vectors([text], "document")[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self.avectors([text], "document"))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self.vectors(texts, "document")

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self.avectors(texts, "document")
