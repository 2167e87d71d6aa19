"""`engines.pgvector`, by the name that it had first."""

from teola_plugin.engines.pgvector import PgVectorEngine

__all__ = ["PgVectorEngine"]
