"""Full-text search in PostgreSQL, over documents that are given: web search without a web."""

from teola_plugin.engines.fulltext.documents import read_documents
from teola_plugin.engines.fulltext.engine import FullTextSearch

__all__ = ["FullTextSearch", "read_documents"]
