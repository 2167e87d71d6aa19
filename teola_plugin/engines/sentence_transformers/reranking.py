"""The reranking engine: a cross encoder of sentence-transformers, one batch for the pairs of many queries and apps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.bundled import reranker as tiny_reranker
from teola_plugin.engines.sentence_transformers.loaded_models import no_loading_bars
from teola_plugin.engines.sentence_transformers.static_batching import StaticBatchingEngine, sample_chunk
from teola_plugin.engines.sentence_transformers.torch_worker import twin
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import ScorePair, lone_surrogate

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

TINY = "tiny"
"""Name of the small random model of `bundled.reranker`."""


@dataclass(frozen=True, slots=True)
class _Scorer:
    model: CrossEncoder
    batch_size: int

    def compute(self, payloads: Sequence[ScorePair]) -> Sequence[float]:
        """Return the scores of pairs, in order. Raise ValueError for a model with more than one label."""
        pairs = [(payload.query, payload.text) for payload in payloads]
        scores = self.model.predict(pairs, batch_size=self.batch_size, show_progress_bar=False)
        if scores.ndim != 1:
            raise ValueError(f"a reranker gives one score a pair, this model gives {scores.shape[-1]}.")
        return [float(score) for score in scores]

    def close(self) -> None:
        """Release nothing: the scorer holds memory only."""


class RerankingEngine(StaticBatchingEngine):
    """An engine that scores pairs of a query and a text. The value of a request is a float, higher is more relevant.

    `model` is a folder or a hub name of a cross encoder with one label; or a `CrossEncoder` that is loaded already,
    which stays where it is and is shared; by default a tiny one with random weights, made on first use: real work, but
    its ranking means nothing. The scores are what `CrossEncoder.predict` gives, so the model's activation is applied.
    `max_length` cuts pairs, in tokens. `device`, `cores`, `gpu_memory_utilization`, `batch_size` and `dedicated` are as
    in `EmbeddingEngine`; `options` go to `CrossEncoder` as they are.
    """

    kinds = frozenset({PrimitiveKind.RERANKING})
    takes = ScorePair

    def __init__(
        self,
        name: str = "reranker",
        model: str | Path | CrossEncoder | None = None,
        *,
        device: str | None = None,
        cores: str | Iterable[int] | None = None,
        max_length: int | None = None,
        batch_size: int = 32,
        max_batch: int = 256,
        gpu_memory_utilization: float | None = None,
        options: Mapping[str, Any] | None = None,
        dedicated: bool = True,
    ) -> None:
        super().__init__(
            name,
            TINY if model is None else str(model) if isinstance(model, str | Path) else model,
            device=device,
            cores=cores,
            max_batch=max_batch,
            gpu_memory_utilization=gpu_memory_utilization,
            dedicated=dedicated,
        )
        self.max_length, self._batch_size, self.options = max_length, batch_size, dict(options or {})

    def _load(self) -> _Scorer:
        """Return the scorer with the engine's own model, or a copy of the user's that shares its weights."""
        if self.loaded_model is not None:
            return _Scorer(twin(self.loaded_model), self._batch_size)  # its tokenizer belongs to the user
        folder = str(tiny_reranker.make()) if self.model_name == TINY else self.model_name
        with no_loading_bars():
            from sentence_transformers import CrossEncoder

            model = CrossEncoder(folder, device=self.device, max_length=self.max_length, **self.options)
        return _Scorer(model, self._batch_size)

    def _fault(self, payload: ScorePair) -> str:
        """Describe why a pair cannot be scored: no text or invalid Unicode; empty if it can."""
        for side in (payload.query, payload.text):
            if not isinstance(side, str):
                return f"both sides of a pair must be a str, not {type(side).__name__}."
        return lone_surrogate(payload.query) or lone_surrogate(payload.text)

    def _sample(self, number: int) -> ScorePair:
        return ScorePair("what does a function return?", sample_chunk(number))
