"""`engines.sentence_transformers`, by the name that it had first."""

from teola_plugin.engines.sentence_transformers import EmbeddingEngine

__all__ = ["EmbeddingEngine"]
