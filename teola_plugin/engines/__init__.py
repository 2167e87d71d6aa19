"""Engines run requests. Every engine class can be imported from here; its module is loaded when it is first used.

`base` is the interface of an engine, `conformance` its contract as tests. Each backend has a module.
"""

from typing import TYPE_CHECKING

from teola_plugin.lazy_names import lazy

if TYPE_CHECKING:
    from teola_plugin.engines.base import Engine
    from teola_plugin.engines.fake import fake_engines
    from teola_plugin.engines.fulltext import FullTextSearch
    from teola_plugin.engines.openai import EmbeddingServer, OpenAIServer, RerankingServer
    from teola_plugin.engines.pgvector import PgVectorEngine
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine
    from teola_plugin.engines.tools import ToolEngine, ToolFunction
    from teola_plugin.engines.vector_store import VectorStoreEngine
    from teola_plugin.engines.vllm import VllmEngine
    from teola_plugin.engines.websearch import WebSearchEngine

_HOMES = {
    "EmbeddingEngine": "teola_plugin.engines.sentence_transformers",
    "EmbeddingServer": "teola_plugin.engines.openai",
    "Engine": "teola_plugin.engines.base",
    "FullTextSearch": "teola_plugin.engines.fulltext",
    "OpenAIServer": "teola_plugin.engines.openai",
    "PgVectorEngine": "teola_plugin.engines.pgvector",
    "RerankingEngine": "teola_plugin.engines.sentence_transformers",
    "RerankingServer": "teola_plugin.engines.openai",
    "ToolEngine": "teola_plugin.engines.tools",
    "ToolFunction": "teola_plugin.engines.tools",
    "VectorStoreEngine": "teola_plugin.engines.vector_store",
    "VllmEngine": "teola_plugin.engines.vllm",
    "WebSearchEngine": "teola_plugin.engines.websearch",
    "fake_engines": "teola_plugin.engines.fake",
}

__all__ = [
    "EmbeddingEngine",
    "EmbeddingServer",
    "Engine",
    "FullTextSearch",
    "OpenAIServer",
    "PgVectorEngine",
    "RerankingEngine",
    "RerankingServer",
    "ToolEngine",
    "ToolFunction",
    "VectorStoreEngine",
    "VllmEngine",
    "WebSearchEngine",
    "fake_engines",
]
__getattr__, __dir__ = lazy(__name__, _HOMES)
