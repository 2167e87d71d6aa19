"""`TeolaWebSearch`: a web search engine of the pool (or one of full text), as a retriever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine
from teola_plugin.adapters.langchain.listening import ConfigScoped, call_context
from teola_plugin.adapters.langchain.rows import to_documents
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import SearchText
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.tracer.leaf import TextSearchLeaf

if TYPE_CHECKING:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun


class TeolaWebSearch(ConfigScoped, BaseRetriever):
    """The `k` best results for a query, best first: documents whose `id` and `metadata["source"]` are the address, with
    `metadata["title"]`. For a tool of an agent: `create_retriever_tool(TeolaWebSearch(pool=pool), ...)`."""

    pool: PoolField = Field(exclude=True, repr=False)
    """The `EnginePool`; shared by copies, never serialised."""
    engine: str = "web"
    k: int = Field(default=4, ge=1)

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    def model_post_init(self, context: Any) -> None:
        check_engine(self.pool, self.engine)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return to_documents(self._call(query, run_manager).result()[0])

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return to_documents((await self._call(query, run_manager))[0])

    def _call(self, query: str, callbacks: Any) -> CallHandle:
        """Start a search request of the engine, in the query that the caller belongs to, if any."""
        run, request_context = call_context(self.pool, callbacks)
        request = [SearchText(query, self.k)]
        handle: CallHandle = self.pool.call(
            PrimitiveKind.SEARCHING, self.engine, request, run=run, request_context=request_context
        )
        return handle

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> TextSearchLeaf | None:
        return None if kwargs else TextSearchLeaf(self.engine, self.k, to_documents)
