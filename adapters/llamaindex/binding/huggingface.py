"""Sentence-transformers objects of LlamaIndex on engines: served only where the engine computes what they compute.

The copies keep the object's own code; what reaches the model is handed to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.llamaindex.batches import BatchesAhead, Role
from teola_plugin.adapters.llamaindex.binding.engine_proxy import (
    EngineProxy,
    differs,
    instance_of,
    overridden,
    proxied,
    read,
)
from teola_plugin.adapters.serving.loaded import computes_with
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import ScorePair
from teola_plugin.runtime.context import current_run
from teola_plugin.shims.llamaindex.models import (
    EmbeddingHooks,
    HuggingFaceEmbeddingParts,
    SentenceTransformerRerankParts,
)

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore, QueryBundle

Embed = Callable[[list[Any], str | None], list[list[float]]]
_EMBEDDING = ("llama_index.embeddings.huggingface.base", "HuggingFaceEmbedding")
_RERANKER = ("llama_index.core.postprocessor.sbert_rerank", "SentenceTransformerRerank")
_ROLES: dict[str, Role] = {"query": "query", "text": "document"}
"""The prompt's name with which LlamaIndex encodes -> the engine's role."""
_COMPARED = {
    "max_seq_length": "cuts texts at {} tokens",
    "truncate_dim": "cuts vectors to truncate_dim={}",
    "dtype": "computes in {}",
}


# ------------------------------------------------------------ embeddings


class _Embeds(EmbeddingHooks, BatchesAhead, EngineProxy):
    """For `HuggingFaceEmbedding`, all of whose methods end in the one that is hooked."""

    def __teola_embed__(self, inputs: list[Any], prompt_name: str | None, plain: Embed) -> list[list[float]]:
        role = _ROLES.get(prompt_name or "")
        return plain(inputs, prompt_name) if role is None else self.vectors(inputs, role)  # others are images


def is_embedding(obj: Any) -> bool:
    return instance_of(*_EMBEDDING, obj) is not None


def embedding_on(obj: Any, engine: str, pool: EnginePool) -> Any:
    """The object, embedding on an engine. Raises `RegistrationError` where its vectors would differ."""
    cls = instance_of(*_EMBEDDING, obj)
    assert cls is not None
    if other := overridden(obj, cls):
        raise differs(obj, f"{other} changes how it embeds", "leave it unbound")
    parts = read(HuggingFaceEmbeddingParts, obj)
    server: Any = pool.engine(engine)
    if hasattr(server, "model_name"):
        _check_embedder(obj, parts, server)
    return proxied(obj, _Embeds, engine, pool)


def _check_embedder(obj: Any, parts: HuggingFaceEmbeddingParts, server: Any) -> None:
    own = parts.model
    if not computes_with(server, own):
        _check_name(obj, obj.model_name, server, "EmbeddingEngine")
    if parts.parallel_process:
        raise differs(obj, "it embeds in many processes", "parallel_process=False")
    kinds = {type(module).__name__ for module in own}
    if "Router" in kinds:
        raise differs(obj, "its model tells queries from documents by itself", "leave it unbound")
    if obj.normalize != server.normalize and "Normalize" not in kinds:
        raise differs(obj, f"it has normalize={obj.normalize}", f"EmbeddingEngine(normalize={obj.normalize})")
    theirs = server.model
    if theirs is None:  # the engine has not been started
        return
    if not computes_with(server, own):
        _check_same(obj, own, theirs)
    for name, role in _ROLES.items():
        mine, its = own.prompts.get(name) or "", server.prompt_of(role)
        if mine != its:
            hint = f"EmbeddingEngine(prompts={{{role!r}: {mine!r}, ...}})"
            raise differs(obj, f"it puts {mine!r} before a {role}, the engine {its!r}", hint)


# ------------------------------------------------------------ rerankers


class _Scores:
    """In place of the `CrossEncoder` of a reranker."""

    def __init__(self, engine: str, pool: EnginePool) -> None:
        self._engine, self._pool = engine, pool

    def predict(self, pairs: Sequence[tuple[str, str]]) -> Any:
        """float32, [pairs]."""
        asked = [ScorePair(query, text) for query, text in pairs]
        handle = self._pool.call(PrimitiveKind.RERANKING, self._engine, asked, run=current_run.get())
        return _array(handle.result())


class _Reranks(EngineProxy):
    """For `SentenceTransformerRerank`: what the graph needs to know of it."""

    def payloads(self, query: QueryBundle | str, nodes: Sequence[NodeWithScore]) -> list[ScorePair]:
        """What the engine is asked for, a pair per node."""
        from llama_index.core.schema import MetadataMode

        text = query if isinstance(query, str) else query.query_str
        return [ScorePair(text, node.node.get_content(metadata_mode=MetadataMode.EMBED)) for node in nodes]

    def select(self, nodes: list[NodeWithScore], scores: Sequence[float]) -> list[NodeWithScore]:
        """What `postprocess_nodes` returns for the engine's values. Changes the nodes as it does."""
        obj: Any = self
        for node, score in zip(nodes, _array(scores), strict=True):
            if obj.keep_retrieval_score:
                node.node.metadata["retrieval_score"] = node.score
            node.score = score
        return sorted(nodes, key=lambda node: -node.score if node.score else 0)[: obj.top_n]


def is_reranker(obj: Any) -> bool:
    return instance_of(*_RERANKER, obj) is not None


def reranker_on(obj: Any, engine: str, pool: EnginePool) -> Any:
    """The object, scoring on an engine. Raises `RegistrationError` where its scores would differ."""
    cls = instance_of(*_RERANKER, obj)
    assert cls is not None
    if other := overridden(obj, cls):
        raise differs(obj, f"{other} changes how it reranks", "leave it unbound")
    parts = read(SentenceTransformerRerankParts, obj)
    server: Any = pool.engine(engine)
    if hasattr(server, "model_name") and not computes_with(server, parts.model):
        _check_name(obj, obj.model, server, "RerankingEngine")
        if server.model is not None:
            _check_same(obj, parts.model, server.model)
    return proxied(obj, _Reranks, engine, pool, parts.as_attributes(model=_Scores(engine, pool)))


def _array(scores: Sequence[float]) -> Any:
    import numpy as np

    return np.asarray(scores, dtype=np.float32)


# ------------------------------------------------------------ models


def _check_name(obj: Any, name: str, server: Any, kind: str) -> None:
    if not _same_model(name, server.model_name):
        raise differs(obj, f"it runs {name!r}, the engine {server.model_name!r}", f"{kind}(model={name!r})")


def _same_model(one: str, other: str) -> bool:
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return one.removeprefix("sentence-transformers/") == other.removeprefix("sentence-transformers/")


def _check_same(obj: Any, own: Any, theirs: Any) -> None:
    """Both models as they are loaded."""
    for name, what in _COMPARED.items():
        mine, its = getattr(own, name, None), getattr(theirs, name, None)
        if str(mine) != str(its):  # of a shared pool's model only the words are known
            raise differs(obj, f"it {what.format(mine)}, the engine {what.format(its)}", "give both the same options")
