"""LangChain's objects on a pool, and what agents need: `from teola_plugin.langchain import ChatTeola`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teola_plugin.lazy_names import lazy

if TYPE_CHECKING:
    from teola_plugin.adapters.langchain.chat import ChatTeola
    from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
    from teola_plugin.adapters.langchain.indexing import TeolaIndexer
    from teola_plugin.adapters.langchain.llm import TeolaLLM
    from teola_plugin.adapters.langchain.rerank import TeolaCrossEncoder, TeolaRerank
    from teola_plugin.adapters.langchain.tools import on_engine, read_only, tool_engine
    from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
    from teola_plugin.adapters.langchain.web_search import TeolaWebSearch

_HOMES = {
    "ChatTeola": "langchain.chat",
    "TeolaCrossEncoder": "langchain.rerank",
    "TeolaEmbeddings": "langchain.embeddings",
    "TeolaIndexer": "langchain.indexing",
    "TeolaLLM": "langchain.llm",
    "TeolaRerank": "langchain.rerank",
    "TeolaVectorStore": "langchain.vectorstore",
    "TeolaWebSearch": "langchain.web_search",
    "on_engine": "langchain.tools",
    "read_only": "langchain.tools",
    "tool_engine": "langchain.tools",
}

__all__ = [
    "ChatTeola",
    "TeolaCrossEncoder",
    "TeolaEmbeddings",
    "TeolaIndexer",
    "TeolaLLM",
    "TeolaRerank",
    "TeolaVectorStore",
    "TeolaWebSearch",
    "on_engine",
    "read_only",
    "tool_engine",
]
__getattr__, __dir__ = lazy(
    __name__, {name: f"teola_plugin.adapters.{home}" for name, home in _HOMES.items()}, "langchain"
)
