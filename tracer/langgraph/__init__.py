"""Graphs of LangGraph: for each node, a template of what it and the nodes behind it will ask engines for."""
