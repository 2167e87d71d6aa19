"""Engines that embed and that rerank, as models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from teola_plugin.adapters.calls import to_list
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, ScorePair
from teola_plugin.server.models.base import shown_model
from teola_plugin.server.visits import Visit


@dataclass(frozen=True, slots=True)
class VectorEngine:
    """`kind`: embedding or reranking."""

    pool: EnginePool
    name: str
    kind: str

    def told(self) -> dict[str, Any]:
        return {"root": shown_model(self.pool, self.name) or self.name}

    def tokens(self, text: int, answer: int | None, n: int) -> int:
        return text // 4

    async def embed(self, texts: Sequence[str], role: Literal["query", "document"], visit: Visit) -> list[list[float]]:
        with visit.placed() as run:
            asked = [EmbedText(text, role) for text in texts]
            handle = self.pool.call(PrimitiveKind.EMBEDDING, self.name, asked, run=run)
        return [to_list(vector) for vector in await handle]

    async def scores(self, query: str, texts: Sequence[str], visit: Visit) -> list[float]:
        with visit.placed() as run:
            asked = [ScorePair(query, text) for text in texts]
            handle = self.pool.call(PrimitiveKind.RERANKING, self.name, asked, run=run)
        return [float(score) for score in await handle]
