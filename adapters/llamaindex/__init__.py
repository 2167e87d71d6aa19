"""LlamaIndex: accelerated engines and pool-backed objects, whose names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teola_plugin.adapters.llamaindex.embedding import TeolaEmbedding
    from teola_plugin.adapters.llamaindex.llm import TeolaLLM
    from teola_plugin.adapters.llamaindex.rerank import TeolaRerank
    from teola_plugin.adapters.llamaindex.vector_store import TeolaVectorStore

_HOMES = {
    "TeolaEmbedding": "embedding",
    "TeolaLLM": "llm",
    "TeolaRerank": "rerank",
    "TeolaVectorStore": "vector_store",
}

__all__ = ["TeolaEmbedding", "TeolaLLM", "TeolaRerank", "TeolaVectorStore"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
