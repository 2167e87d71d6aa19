"""sentence-transformers in a thread of its own: embedding and reranking, a batch computed as one."""

from teola_plugin.engines.sentence_transformers.embedding import EmbeddingEngine
from teola_plugin.engines.sentence_transformers.reranking import RerankingEngine

__all__ = ["EmbeddingEngine", "RerankingEngine"]
