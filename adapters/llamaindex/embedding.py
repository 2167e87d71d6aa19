"""`TeolaEmbedding`: a LlamaIndex embedding model on an engine of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import ConfigDict

from teola_plugin.adapters.calls import to_list
from teola_plugin.adapters.llamaindex.pooled import Pooled
from teola_plugin.engines.payloads import EmbedText, Vector
from teola_plugin.graph import PrimitiveKind
from teola_plugin.runtime.handles import CallHandle

Role = Literal["query", "document"]


class TeolaEmbedding(Pooled, BaseEmbedding):
    """LlamaIndex embeddings on the pool's engine `engine`: `TeolaEmbedding(pool=pool)`.

    Queries and texts keep their roles, since some models prefix them differently. Vectors are lists of floats of the
    model's width. Engine errors pass through as they are.
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

    def payload(self, text: str, role: Role) -> EmbedText:
        """What the engine is asked for: `query` for `get_query_embedding`, `document` for `get_text_embedding`."""
        return EmbedText(text, role)

    def vector_of(self, value: Vector) -> list[float]:
        """What the methods return for the engine's value."""
        return to_list(value)

    # ------------------------------------------------------------ LlamaIndex's interface

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vectors(self._call([query], "query").result())[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vectors(await self._call([query], "query"))[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aget_text_embeddings([text]))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._vectors(self._call(texts, "document").result())

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._vectors(await self._call(texts, "document"))

    def _call(self, texts: Sequence[str], role: Role) -> CallHandle:
        return self.request(PrimitiveKind.EMBEDDING, [self.payload(text, role) for text in texts])

    def _vectors(self, values: Sequence[Vector]) -> list[list[float]]:
        return [self.vector_of(value) for value in values]
