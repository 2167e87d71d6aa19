"""PostgreSQL with pgvector as a vector store."""

from teola_plugin.engines.pgvector.engine import PgVectorEngine

__all__ = ["PgVectorEngine"]
