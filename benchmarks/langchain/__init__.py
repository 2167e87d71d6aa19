"""Patterns of the LangChain cookbooks, what they are made of, and their bounds."""
