"""Full-text search in PostgreSQL, over documents that are given: web search without a web."""

from teola_plugin.engines.fulltext.engine import FullTextSearch, read_documents

__all__ = ["FullTextSearch", "read_documents"]
