"""`engines.openai`, by the name that it had first."""

from teola_plugin.engines.openai import OpenAIServer

__all__ = ["OpenAIServer"]
