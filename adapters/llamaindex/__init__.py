"""LlamaIndex: accelerated engines and pool-backed objects."""
