"""LlamaIndex: engines, retrievers, synthesizers -> workflow templates."""

BESIDE = "beside"
"""Option of a BRANCH that may run while others of its kind do, which the plain code runs one after the other."""
