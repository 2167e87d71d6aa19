"""`TeolaCrossEncoder`: scores by a cross-encoder engine of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.cross_encoders import BaseCrossEncoder
from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine
from teola_plugin.adapters.langchain.current_query import call_context
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import ScorePair
from teola_plugin.tracer.leaf import RerankingLeaf


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
        run, terms = call_context(self.pool)
        return _array(self.pool.call(PrimitiveKind.RERANKING, self.engine, pairs, run=run, terms=terms).result())

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> RerankingLeaf | None:
        """Return the leaf of a call of `score` with a query and each of the documents."""
        return None if kwargs else RerankingLeaf(self.engine, _texts, lambda _, scores: _array(scores))


def _texts(documents: Sequence[Any]) -> list[str]:
    return [one.page_content for one in documents]


def _array(scores: Sequence[float]) -> Any:
    import numpy as np

    return np.asarray(scores, dtype=np.float32)
