"""Graphs and agents of LangGraph's and LangChain's tutorials, what they are made of, and their bounds."""
