"""Engines of the LlamaIndex documentation, what they are made of, and their bounds."""
