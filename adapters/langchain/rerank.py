"""`TeolaRerank` and `TeolaCrossEncoder`: documents ordered, and pairs scored, by a cross-encoder engine of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine
from teola_plugin.adapters.langchain.listening import call_context
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import ScorePair
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.tracer.leaf import RerankingLeaf

if TYPE_CHECKING:
    from langchain_core.callbacks import Callbacks


class TeolaCrossEncoder(BaseModel, BaseCrossEncoder):
    """A LangChain cross encoder on the pool's engine `engine`, for a `CrossEncoderReranker`: its scores, float32,
    [pairs], higher is better. `bind=` puts one in the place of a `HuggingFaceCrossEncoder`.
    """

    pool: PoolField = Field(exclude=True, repr=False)
    """The `EnginePool`; shared by copies, never serialised."""
    engine: str = "reranker"

    model_config = ConfigDict(extra="forbid")

    def model_post_init(self, context: Any) -> None:
        check_engine(self.pool, self.engine)

    def score(self, text_pairs: Sequence[tuple[str, str]]) -> Any:
        """Raises what the engine raises, and `QueryTimeout` in a query whose deadline has passed."""
        pairs = [ScorePair(query, text) for query, text in text_pairs]
        run, request_context = call_context(self.pool)
        return _array(
            self.pool.call(
                PrimitiveKind.RERANKING, self.engine, pairs, run=run, request_context=request_context
            ).result()
        )

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> RerankingLeaf | None:
        """Return the leaf of a call of `score` with a query and each of the documents."""
        return None if kwargs else RerankingLeaf(self.engine, _texts, lambda _, scores: _array(scores))


def _array(scores: Sequence[float]) -> Any:
    import numpy as np

    return np.asarray(scores, dtype=np.float32)


class TeolaRerank(BaseDocumentCompressor):
    """The `top_n` best documents for a query, best first; None keeps them all.

    Equal scores keep the order of the input. The given documents are not changed: copies carry their score in
    `metadata["relevance_score"]` (a float, higher is better). Use it in a `ContextualCompressionRetriever`, or in a
    chain by `as_runnable()`.
    """

    pool: PoolField = Field(exclude=True, repr=False)
    """The `EnginePool`; shared by copies, never serialised."""
    engine: str = "reranker"
    top_n: int | None = Field(default=3, ge=1)

    model_config = ConfigDict(extra="forbid")

    def model_post_init(self, context: Any) -> None:
        check_engine(self.pool, self.engine)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        return self._select(documents, self._call(documents, query, callbacks).result())

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        return self._select(documents, await self._call(documents, query, callbacks))

    def as_runnable(self) -> RerankRunnable:
        """A Runnable from `{"query": str, "documents": list[Document]}` to `list[Document]`."""
        return RerankRunnable(reranker=self)

    def _call(self, documents: Sequence[Document], query: str, callbacks: Any) -> CallHandle:
        """Start one request of the engine for each document, in the query that the caller belongs to, if any."""
        pairs = [ScorePair(query, text) for text in _texts(documents)]
        run, request_context = call_context(self.pool, callbacks)
        handle: CallHandle = self.pool.call(
            PrimitiveKind.RERANKING, self.engine, pairs, run=run, request_context=request_context
        )
        return handle

    def _select(self, documents: Sequence[Document], scores: Sequence[float]) -> list[Document]:
        """Return copies of the `top_n` most relevant documents, best first, each with its score in its metadata.

        `scores`: one for each document. Documents with equal scores keep their order. The originals are not changed.
        """
        order = sorted(range(len(documents)), key=lambda i: scores[i], reverse=True)  # stable, also in reverse
        best = [(documents[i], float(scores[i])) for i in order[: self.top_n]]
        return [one.model_copy(update={"metadata": {**one.metadata, "relevance_score": score}}) for one, score in best]

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> RerankingLeaf | None:
        return None if kwargs else RerankingLeaf(self.engine, texts=_texts, select=self._select)


class RerankRunnable(RunnableSerializable[dict[str, Any], list[Document]]):
    """A `TeolaRerank` as a step of a chain."""

    reranker: TeolaRerank
    name: str | None = "TeolaRerank"

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        return self._call_with_config(self._rerank, input, config, **kwargs)

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        return await self._acall_with_config(self._arerank, input, config, **kwargs)

    def _rerank(self, query_and_documents: dict[str, Any], run_manager: Any) -> list[Document]:
        query, documents = _pair(query_and_documents)
        return self.reranker.compress_documents(documents, query, run_manager)

    async def _arerank(self, query_and_documents: dict[str, Any], run_manager: Any) -> list[Document]:
        query, documents = _pair(query_and_documents)
        return await self.reranker.acompress_documents(documents, query, run_manager)

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> RerankingLeaf | None:
        return self.reranker.__teola_leaf__(kwargs)


def _pair(query_and_documents: Any) -> tuple[str, Sequence[Document]]:
    """Return the query and the documents of a step's input. Raise `RegistrationError` if it has another form."""
    if not isinstance(query_and_documents, Mapping) or not {"query", "documents"} <= query_and_documents.keys():
        described = type(query_and_documents).__name__
        if isinstance(query_and_documents, Mapping):
            described = f"a mapping with the keys {sorted(map(str, query_and_documents))}"
        raise RegistrationError(
            f"the reranker got {described}.",
            hint='give it {"query": str, "documents": list of Document}',
        )
    return query_and_documents["query"], query_and_documents["documents"]


def _texts(documents: Sequence[Document]) -> list[str]:
    return [document.page_content for document in documents]
