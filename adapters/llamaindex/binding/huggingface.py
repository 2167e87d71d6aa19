"""Sentence-transformers objects of LlamaIndex on engines: served only where the engine computes what they compute.

The object's own code runs; the inputs of its model go to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.engine_specs import (
    check_computes_here,
    check_model_name,
    check_prompt,
    computes_with,
    differs,
)
from teola_plugin.adapters.llamaindex.batches import BatchPrefetching, Role
from teola_plugin.adapters.llamaindex.binding.model_copies import (
    Body,
    ModelCopy,
    copy_of,
    instance_of,
    overridden,
    read,
)
from teola_plugin.adapters.routing import EngineRoute
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import ScorePair
from teola_plugin.runtime.query_run import current_run
from teola_plugin.shims.llamaindex.interceptors import HUGGINGFACE_EMBED, POSTPROCESS
from teola_plugin.shims.llamaindex.models import HuggingFaceEmbeddingParts, SentenceTransformerRerankParts

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore, QueryBundle

_EMBEDDING = ("llama_index.embeddings.huggingface.base", "HuggingFaceEmbedding")
_RERANKER = ("llama_index.core.postprocessor.sbert_rerank", "SentenceTransformerRerank")
_ROLES: dict[str, Role] = {"query": "query", "text": "document"}
"""The engine's role for the name of the prompt with which LlamaIndex encodes."""
_COMPARED = {
    "max_seq_length": "cuts texts at {} tokens",
    "truncate_dim": "cuts vectors to truncate_dim={}",
    "dtype": "computes in {}",
}


# ------------------------------------------------------------ embeddings


class EmbeddingCopy(BatchPrefetching, ModelCopy):
    """A copy of a `HuggingFaceEmbedding` on an engine: all methods of that class end in one."""

    def __teola_body__(self, method: str, original: Body) -> Body | None:
        """Return the function that embeds on the engine, in place of the method in which all others of the class end.

        None for any other method. Inputs without a known role, such as images, are embedded by the original.
        """
        if method != HUGGINGFACE_EMBED:
            return None

        def embed(_: Any, inputs: list[Any], prompt_name: str | None = None) -> list[list[float]]:
            role = _ROLES.get(prompt_name or "")
            return self.vectors(inputs, role) if role else original(self, inputs, prompt_name)  # images have no role

        return embed


def is_embedding(obj: Any) -> bool:
    return instance_of(*_EMBEDDING, obj) is not None


def embedding_copy(obj: Any, route: EngineRoute) -> Any:
    """Return a copy that embeds on an engine. Raise `RegistrationError` if its vectors would differ."""
    cls = instance_of(*_EMBEDDING, obj)
    assert cls is not None
    if other := overridden(obj, cls):
        raise differs(obj, f"{other} changes how it embeds", "leave it unbound")
    parts = read(HuggingFaceEmbeddingParts, obj)
    server: Any = route.pool.engine(route.engine)
    check_computes_here(obj, server, "EmbeddingEngine")
    if hasattr(server, "model_name"):
        _check_embedder(obj, parts, server)
    return copy_of(obj, EmbeddingCopy, route)


def _check_embedder(obj: Any, parts: HuggingFaceEmbeddingParts, server: Any) -> None:
    """Raise `RegistrationError` unless an `EmbeddingEngine` computes the vectors that the user's object computes.

    The options and prompts of the two models are compared only if the engine has loaded its model already.
    """
    own_model = parts.model
    if not computes_with(server, own_model):
        check_model_name(obj, obj.model_name, server, "EmbeddingEngine")
    if parts.parallel_process:
        raise differs(obj, "it embeds in many processes", "parallel_process=False")
    kinds = {type(module).__name__ for module in own_model}
    if "Router" in kinds:
        raise differs(obj, "its model tells queries from documents by itself", "leave it unbound")
    if obj.normalize != server.normalize and "Normalize" not in kinds:
        raise differs(obj, f"it has normalize={obj.normalize}", f"EmbeddingEngine(normalize={obj.normalize})")
    engine_model = server.model
    if engine_model is None:  # the engine has not been started
        return
    if not computes_with(server, own_model):
        _check_same_options(obj, own_model, engine_model)
    for name, role in _ROLES.items():
        own_prompt, engine_prompt = own_model.prompts.get(name) or "", server.prompt_of(role)
        check_prompt(obj, role, own_prompt, engine_prompt)


# ------------------------------------------------------------ rerankers


class _EngineCrossEncoder:
    """A replacement of the `CrossEncoder` of a reranker that scores on an engine."""

    def __init__(self, route: EngineRoute) -> None:
        self._route = route

    def predict(self, pairs: Sequence[tuple[str, str]]) -> Any:
        """Return the scores of the pairs, as an array of float32."""
        payloads = [ScorePair(query, text) for query, text in pairs]
        pool, engine = self._route
        return _array(pool.call(PrimitiveKind.RERANKING, engine, payloads, run=current_run.get()).result())


class RerankerCopy(ModelCopy):
    """A copy of a `SentenceTransformerRerank` on an engine, with its requests and results for the graph."""

    def __teola_body__(self, method: str, original: Body) -> Body | None:
        return (lambda _, *args, **kwargs: original(self, *args, **kwargs)) if method == POSTPROCESS[0] else None

    def payloads(self, query: QueryBundle | str, nodes: Sequence[NodeWithScore]) -> list[ScorePair]:
        """Return the engine's requests, a pair per node."""
        from llama_index.core.schema import MetadataMode

        text = query if isinstance(query, str) else query.query_str
        return [ScorePair(text, node.node.get_content(metadata_mode=MetadataMode.EMBED)) for node in nodes]

    def select(self, nodes: list[NodeWithScore], scores: Sequence[float]) -> list[NodeWithScore]:
        """Return the result of `postprocess_nodes` for the engine's scores. Changes the nodes as that does."""
        obj: Any = self
        for node, score in zip(nodes, _array(scores), strict=True):
            if obj.keep_retrieval_score:
                node.node.metadata["retrieval_score"] = node.score
            node.score = score
        return sorted(nodes, key=lambda node: -node.score if node.score else 0)[: obj.top_n]


def is_reranker(obj: Any) -> bool:
    return instance_of(*_RERANKER, obj) is not None


def reranker_copy(obj: Any, route: EngineRoute) -> Any:
    """Return a copy that scores on an engine. Raise `RegistrationError` if its scores would differ."""
    cls = instance_of(*_RERANKER, obj)
    assert cls is not None
    if other := overridden(obj, cls):
        raise differs(obj, f"{other} changes how it reranks", "leave it unbound")
    parts = read(SentenceTransformerRerankParts, obj)
    server: Any = route.pool.engine(route.engine)
    check_computes_here(obj, server, "RerankingEngine")
    if hasattr(server, "model_name") and not computes_with(server, parts.model):
        check_model_name(obj, obj.model, server, "RerankingEngine")
        if server.model is not None:
            _check_same_options(obj, parts.model, server.model)
    return copy_of(obj, RerankerCopy, route, parts.as_attributes(model=_EngineCrossEncoder(route)))


def _array(scores: Sequence[float]) -> Any:
    import numpy as np

    return np.asarray(scores, dtype=np.float32)


# ------------------------------------------------------------ models


def _check_same_options(obj: Any, own_model: Any, engine_model: Any) -> None:
    """Raise `RegistrationError` if the two loaded models differ in an option that changes results."""
    for name, phrase in _COMPARED.items():
        own_value, engine_value = getattr(own_model, name, None), getattr(engine_model, name, None)
        if str(own_value) != str(engine_value):  # a shared pool tells options of its models as text only
            reason = f"it {phrase.format(own_value)}, the engine {phrase.format(engine_value)}"
            raise differs(obj, reason, "give both the same options")
