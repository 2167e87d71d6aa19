"""Reranking on sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teola_plugin.engines.base import Request
from teola_plugin.engines.payloads import ScorePair
from teola_plugin.engines.torch_engine import TorchEngine
from teola_plugin.graph import PrimitiveKind


class RerankingEngine(TorchEngine):
    """`CrossEncoder`: (query, text) pairs in, one score each out; higher is more relevant.

    `model`: a path or hub id, by default a tiny randomly initialised one (see `tiny_reranker`): real work, but its
    ranking means nothing.
    """

    kinds = frozenset({PrimitiveKind.RERANKING})
    _kind = PrimitiveKind.RERANKING

    def __init__(
        self,
        name: str = "reranker",
        model: str | None = None,
        *,
        device: str | None = None,
        cores: str | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(name, model or "tiny", device=device, cores=cores)
        self.max_length = max_length

    def _load(self) -> Any:
        from sentence_transformers import CrossEncoder

        from teola_plugin.engines import tiny_reranker

        if self.model_name == "tiny":
            self.model_name = str(tiny_reranker.make())
        return CrossEncoder(self.model_name, device=self.device or "cpu", max_length=self.max_length)

    def _check(self, request: Request) -> str:
        match request.payload:
            case ScorePair(query=str(), text=str()):
                return ""
            case other:
                return f"a reranking request carries {other!r}, not a query and a text"

    def _compute(self, payloads: Sequence[ScorePair]) -> Sequence[float]:
        pairs = [(payload.query, payload.text) for payload in payloads]
        return [float(score) for score in self._model.predict(pairs, batch_size=64, show_progress_bar=False)]

    def _sample(self, size: int) -> list[ScorePair]:
        text = "A passage of a reference document, about as long as a chunk of one usually is. " * 3
        return [ScorePair("What does the passage say?", f"{i} {text}") for i in range(size)]
