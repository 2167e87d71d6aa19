"""LlamaIndex: accelerated engines and pool-backed objects, whose names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teola_plugin.errors import require_modules
from teola_plugin.lazy_names import lazy
from teola_plugin.shims import require

require_modules("LlamaIndex support", ("llama_index.core",), "llamaindex")
require("llama-index-core", "llama-index-workflows")

if TYPE_CHECKING:
    from teola_plugin.adapters.llamaindex.llm import TeolaLLM
    from teola_plugin.adapters.llamaindex.pool_backed import TeolaEmbedding
    from teola_plugin.adapters.llamaindex.rerank import TeolaRerank
    from teola_plugin.adapters.llamaindex.vector_store import TeolaVectorStore

_HOMES = {
    "TeolaEmbedding": "pool_backed",
    "TeolaLLM": "llm",
    "TeolaRerank": "rerank",
    "TeolaVectorStore": "vector_store",
}

__all__ = ["TeolaEmbedding", "TeolaLLM", "TeolaRerank", "TeolaVectorStore"]
__getattr__, __dir__ = lazy(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
