"""Searching the web: SearXNG, Brave and Tavily behind one engine."""

from teola_plugin.engines.websearch.engine import WebSearchEngine
from teola_plugin.engines.websearch.services import SERVICES, SearchService

__all__ = ["SERVICES", "SearchService", "WebSearchEngine"]
