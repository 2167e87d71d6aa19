"""Servers that speak OpenAI's HTTP API as engines: an LLM, an embedder, and a reranker beside them."""

from teola_plugin.engines.openai.embedding_server import EmbeddingServer, RerankingServer
from teola_plugin.engines.openai.engine import OpenAIServer

__all__ = ["EmbeddingServer", "OpenAIServer", "RerankingServer"]
