"""LlamaIndex's objects on a pool, e.g. `from teola_plugin.llamaindex import TeolaLLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teola_plugin.lazy_names import lazy

if TYPE_CHECKING:
    from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore

__all__ = ["TeolaEmbedding", "TeolaLLM", "TeolaRerank", "TeolaVectorStore"]
__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "teola_plugin.adapters.llamaindex"), "llamaindex")
