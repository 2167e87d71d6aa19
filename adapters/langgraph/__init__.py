"""Graphs and agents of LangGraph: a graph stays a graph, and its engines run ahead."""
