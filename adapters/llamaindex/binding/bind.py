"""`bind={object: engine}`: proxies for the user's own LlamaIndex objects, which are never changed themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.llm import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from pydantic import BaseModel

from teola_plugin.adapters.calls import carries_openai, check_engine
from teola_plugin.adapters.llamaindex.binding.engine_proxy import instance_of
from teola_plugin.adapters.llamaindex.binding.huggingface import embedding_on, is_embedding, is_reranker, reranker_on
from teola_plugin.adapters.llamaindex.binding.openai import is_openai, served_by_server
from teola_plugin.adapters.llamaindex.embedding import TeolaEmbedding
from teola_plugin.adapters.llamaindex.llm import TeolaLLM
from teola_plugin.adapters.sampling import sampling_fields
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

_OWN_DECODERS = (
    ("llama_index.llms.huggingface.base", "HuggingFaceLLM"),
    ("llama_index.llms.llama_cpp.base", "LlamaCPP"),
)
_SHARED_FIELDS = ("callback_manager", "rate_limiter")
_LLM_FIELDS = (
    "system_prompt",
    "messages_to_prompt",
    "completion_to_prompt",
    "output_parser",
    "pydantic_program_mode",
    "query_wrapper_prompt",
    *_SHARED_FIELDS,
)
_METADATA_FIELDS = ("model_name", "context_window", "is_chat_model", "is_function_calling_model")
_EMBEDDING_FIELDS = ("model_name", "embed_batch_size", "num_workers", "embeddings_cache", *_SHARED_FIELDS)


def bound(obj: Any, engine: str, pool: EnginePool) -> Any:
    """Return a replacement of `obj` whose work is done by the pool's engine.

    `HuggingFaceEmbedding`, `SentenceTransformerRerank`, and `OpenAI` or `OpenAILike` on an `OpenAIServer` engine keep
    their own code: results, types, events and settings are theirs. Another LLM becomes a `TeolaLLM` with its prompts
    and sampling parameters (those that it leaves to its provider are the engine's defaults: greedy, 256 tokens),
    another embedding model a `TeolaEmbedding`. Raises `RegistrationError` for an object that cannot be served so.
    """
    check_engine(pool, engine)
    if is_embedding(obj):
        return embedding_on(obj, engine, pool)
    if is_reranker(obj):
        return reranker_on(obj, engine, pool)
    if is_openai(obj) and carries_openai(pool.engine(engine)):
        return served_by_server(obj, engine, pool)
    if isinstance(obj, LLM):
        return _bound_llm(obj, engine, pool)
    if isinstance(obj, BaseEmbedding):
        fields = _fields(obj, _EMBEDDING_FIELDS, TeolaEmbedding)
        return TeolaEmbedding(pool=pool, engine=engine, **fields)
    if isinstance(obj, BaseNodePostprocessor):
        raise RegistrationError(
            f"a postprocessor ({type(obj).__name__}) cannot be bound.",
            hint="bind a SentenceTransformerRerank or the LLM in it, or use TeolaRerank(pool=pool)",
        )
    raise RegistrationError(
        f"a {type(obj).__name__} cannot be bound to an engine.",
        hint="bind LLMs, embedding models or a SentenceTransformerRerank",
    )


def _bound_llm(obj: LLM, engine: str, pool: EnginePool) -> TeolaLLM:
    if any(instance_of(module, name, obj) for module, name in _OWN_DECODERS):
        raise RegistrationError(
            f"a {type(obj).__name__} decodes by means of its own: an engine's answers would be others.",
            hint="leave it unbound, or use TeolaLLM(pool=pool)",
        )
    metadata = obj.metadata
    fields = _fields(obj, _LLM_FIELDS, TeolaLLM)
    fields |= {name: getattr(metadata, name) for name in _METADATA_FIELDS}
    sampling = sampling_fields(obj, dict(getattr(obj, "additional_kwargs", None) or {}))
    return TeolaLLM(pool=pool, engine=engine, **fields, **sampling)


def _fields(obj: Any, names: Sequence[str], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the values of the fields that this version of LlamaIndex has: `rate_limiter` is new."""
    return {name: getattr(obj, name) for name in names if name in kind.model_fields}
