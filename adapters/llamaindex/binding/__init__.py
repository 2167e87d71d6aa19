"""The user's own LlamaIndex models on engines of a pool."""
