"""The base class of pool-backed LlamaIndex objects, and `TeolaEmbedding`: an embedding model on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine
from teola_plugin.adapters.llamaindex.batches import BatchPrefetching
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.query_run import current_run


class PoolBacked(BaseModel):
    """A mixin before LlamaIndex's class. Subclasses give `engine` a default."""

    pool: PoolField = Field(exclude=True, repr=False)
    """The `EnginePool`; shared by copies, never serialised."""
    engine: str
    """Name of the engine in the pool."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        check_engine(self.pool, self.engine)

    def request(self, kind: PrimitiveKind, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle:
        """Send one request per payload; in an accelerated query, prefetched results are claimed."""
        handle: CallHandle = self.pool.call(kind, self.engine, payloads, stream=stream, run=current_run.get())
        return handle

    def model_version(self) -> str:
        """Return the name of the model that the engine runs, else the engine's name."""
        return str(self.pool.versions()[self.engine].get("model") or self.engine)

    def __getstate__(self) -> NoReturn:
        refuse_pickling(self)


def refuse_pickling(obj: object) -> NoReturn:
    """Raise `RegistrationError`: an object with a pool cannot be pickled, as its pool lives in this process."""
    raise RegistrationError(
        f"a {type(obj).__name__} cannot be pickled: its engine pool lives in this process.",
        hint="use threads or async instead of processes (num_workers=None); copies by copy.deepcopy share the pool",
    )


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
