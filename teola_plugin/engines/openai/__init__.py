"""A server that speaks OpenAI's HTTP API, as an LLM engine."""

from teola_plugin.engines.openai.engine import OpenAIServer

__all__ = ["OpenAIServer"]
