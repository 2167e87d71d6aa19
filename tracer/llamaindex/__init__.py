"""LlamaIndex: engines, retrievers, synthesizers -> workflow templates."""
