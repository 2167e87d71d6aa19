"""vLLM in a process of its own: batches by our order, prefixes kept apart by tenant, news of its cache."""

from teola_plugin.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
