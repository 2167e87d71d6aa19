"""`TeolaRerank`: nodes ordered by a cross-encoder engine of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index_instrumentation import get_dispatcher
from pydantic import ConfigDict, Field

from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import ScorePair
from teola_plugin.runtime.loop_thread import CallHandle

dispatcher = get_dispatcher(__name__)


class TeolaRerank(PoolBacked, BaseNodePostprocessor):
    """A reranker that keeps the `top_n` best nodes, best first, as LlamaIndex's `SentenceTransformerRerank` does.

    Each node gets its new score (a float, higher is better), in place; `keep_retrieval_score` keeps the old
    one in `metadata["retrieval_score"]`. Nodes are scored by their text for embedding; equal scores keep their order.
    """

    engine: str = "reranker"
    model: str = ""
    """The name in events; if empty, that of the engine's model, else the engine's name."""
    top_n: int = Field(default=2, ge=0)
    keep_retrieval_score: bool = False

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.model = self.model or self.model_version()

    @classmethod
    def class_name(cls) -> str:
        return "TeolaRerank"

    def payloads(self, query: QueryBundle | str, nodes: Sequence[NodeWithScore]) -> list[ScorePair]:
        """Return the engine's requests, a pair per node."""
        text = query if isinstance(query, str) else query.query_str
        return [ScorePair(text, node.node.get_content(metadata_mode=MetadataMode.EMBED)) for node in nodes]

    def select(self, nodes: list[NodeWithScore], scores: Sequence[float]) -> list[NodeWithScore]:
        """Return the result of `postprocess_nodes` for the engine's scores. Changes the nodes as that does."""
        for node, score in zip(nodes, scores, strict=True):
            if self.keep_retrieval_score:
                node.node.metadata["retrieval_score"] = node.score
            node.score = self.score_of(score)
        return sorted(nodes, key=lambda node: -node.score if node.score else 0)[: self.top_n]

    def score_of(self, value: float) -> float:
        return float(value)

    # ------------------------------------------------------------ LlamaIndex's interface

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """Return the best nodes by the engine's scores, and report LlamaIndex's reranking events.

        Without nodes, the engine is not called.
        """
        query = _require_query(query_bundle)
        if not nodes:
            return []
        with self._reporting_events(query, nodes) as reranked:
            reranked += self.select(nodes, self._call(query, nodes).result())
        return reranked

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """Return the best nodes as `_postprocess_nodes` does, in a loop."""
        query = _require_query(query_bundle)
        if not nodes:
            return []
        with self._reporting_events(query, nodes) as reranked:
            reranked += self.select(nodes, await self._call(query, nodes))
        return reranked

    def _call(self, query: QueryBundle, nodes: Sequence[NodeWithScore]) -> CallHandle:
        return self.request(PrimitiveKind.RERANKING, self.payloads(query, nodes))

    @contextmanager
    def _reporting_events(self, query: QueryBundle, nodes: list[NodeWithScore]) -> Iterator[list[NodeWithScore]]:
        """Report a reranking with both kinds of events; the body puts its nodes into the list."""
        reranked: list[NodeWithScore] = []
        dispatcher.event(ReRankStartEvent(query=query, nodes=nodes, top_n=self.top_n, model_name=self.model))
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: self.model,
            EventPayload.QUERY_STR: query.query_str,
            EventPayload.TOP_K: self.top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            yield reranked
            event.on_end(payload={EventPayload.NODES: reranked})
        dispatcher.event(ReRankEndEvent(nodes=reranked))


def _require_query(query_bundle: QueryBundle | None) -> QueryBundle:
    if query_bundle is None:
        raise ValueError("Missing query bundle in extra info.")
    return query_bundle
