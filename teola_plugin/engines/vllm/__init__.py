"""vLLM in a process of its own: requests in our order, a prefix cache per tenant, and events of that cache."""

from teola_plugin.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
