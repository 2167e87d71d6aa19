"""`TeolaEmbeddings`: embeddings by an engine of the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine, to_list
from teola_plugin.adapters.langchain.listening import call_context
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.tracer.leaf import EmbeddingLeaf

Role = Literal["query", "document"]


class TeolaEmbeddings(BaseModel, Embeddings):
    """LangChain embeddings on the pool's engine `engine`: `TeolaEmbeddings(pool=pool)`.

    Queries and documents keep their roles, since some models prefix them differently. Vectors are lists of floats of
    the model's width.
    """

    pool: PoolField = Field(exclude=True, repr=False)
    """The `EnginePool`; shared by copies, never serialised."""
    engine: str = "embedder"

    model_config = ConfigDict(extra="forbid")

    def model_post_init(self, context: Any) -> None:
        check_engine(self.pool, self.engine)

    def embed_query(self, text: str) -> list[float]:
        return to_list(self._call([text], "query").result()[0])

    async def aembed_query(self, text: str) -> list[float]:
        return to_list((await self._call([text], "query"))[0])

    def embed_documents(self, texts: Iterable[str]) -> list[list[float]]:
        return [to_list(vector) for vector in self._call(texts, "document").result()]

    async def aembed_documents(self, texts: Iterable[str]) -> list[list[float]]:
        return [to_list(vector) for vector in await self._call(texts, "document")]

    def begin_documents(self, texts: Iterable[str], *, keep_remote: bool = False) -> CallHandle:
        """`embed_documents`, under way. With `keep_remote`, which is for rows in a store of the same pool, the vectors
        may be `RemoteValue`s."""
        return self._call(texts, "document", keep_remote=keep_remote)

    def _call(self, texts: Iterable[str], role: Role, *, keep_remote: bool = False) -> CallHandle:
        requests = [EmbedText(text, role) for text in texts]
        run, request_context = call_context(self.pool)
        kind = PrimitiveKind.EMBEDDING
        handle: CallHandle = self.pool.call(
            kind, self.engine, requests, keep_remote=keep_remote, run=run, request_context=request_context
        )
        return handle

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> EmbeddingLeaf | None:
        """Return the leaf of a call of `embed_query`: one text in, its vector out."""
        return None if kwargs else EmbeddingLeaf(self.engine, "query", batchable=False, result=to_list)
