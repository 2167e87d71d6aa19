"""The RAG applications of the benchmarks, and the least time that they can take."""
