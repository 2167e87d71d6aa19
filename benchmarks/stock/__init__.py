"""Apps of the frameworks' own classes, on a vLLM API server and local sentence-transformers."""
