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
_SHARED = ("callback_manager", "rate_limiter")
_OF_LLMS = (
    "system_prompt",
    "messages_to_prompt",
    "completion_to_prompt",
    "output_parser",
    "pydantic_program_mode",
    "query_wrapper_prompt",
    *_SHARED,
)
_METADATA = ("model_name", "context_window", "is_chat_model", "is_function_calling_model")
_OF_EMBEDDINGS = ("model_name", "embed_batch_size", "num_workers", "embeddings_cache", *_SHARED)


def bound(obj: Any, engine: str, pool: EnginePool) -> Any:
    """What stands in for `obj`, its work done by the pool's engine.

    `HuggingFaceEmbedding`, `SentenceTransformerRerank`, and `OpenAI` or `OpenAILike` on an `OpenAIServer` engine keep
    their own code: results, types, events and settings are theirs. Another LLM becomes a `TeolaLLM` with its prompts
    and sampling parameters (those that it leaves to its provider are the engine's defaults: greedy, 256 tokens),
    another embedding model a `TeolaEmbedding`. Raises `RegistrationError` for what cannot be served faithfully.
    """
    check_engine(pool, engine)
    if is_embedding(obj):
        return embedding_on(obj, engine, pool)
    if is_reranker(obj):
        return reranker_on(obj, engine, pool)
    if is_openai(obj) and carries_openai(pool.engine(engine)):
        return served_by_server(obj, engine, pool)
    if isinstance(obj, LLM):
        return _llm(obj, engine, pool)
    if isinstance(obj, BaseEmbedding):
        kept = _fields(obj, _OF_EMBEDDINGS, TeolaEmbedding)
        return TeolaEmbedding(pool=pool, engine=engine, **kept)
    if isinstance(obj, BaseNodePostprocessor):
        raise RegistrationError(
            f"a postprocessor ({type(obj).__name__}) cannot be bound.",
            hint="bind a SentenceTransformerRerank or the LLM in it, or use TeolaRerank(pool=pool)",
        )
    raise RegistrationError(
        f"a {type(obj).__name__} cannot be bound to an engine.",
        hint="bind LLMs, embedding models or a SentenceTransformerRerank",
    )


def _llm(obj: LLM, engine: str, pool: EnginePool) -> TeolaLLM:
    if any(instance_of(module, name, obj) for module, name in _OWN_DECODERS):
        raise RegistrationError(
            f"a {type(obj).__name__} decodes by means of its own: an engine's answers would be others.",
            hint="leave it unbound, or use TeolaLLM(pool=pool)",
        )
    known = obj.metadata
    kept = _fields(obj, _OF_LLMS, TeolaLLM)
    kept |= {name: getattr(known, name) for name in _METADATA}
    fields = sampling_fields(obj, dict(getattr(obj, "additional_kwargs", None) or {}))
    return TeolaLLM(pool=pool, engine=engine, **kept, **fields)


def _fields(obj: Any, names: Sequence[str], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the values of those fields that this version of LlamaIndex gives to models: `rate_limiter` is new."""
    return {name: getattr(obj, name) for name in names if name in kind.model_fields}
