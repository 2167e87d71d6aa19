"""Graphs and agents of LangGraph: a graph stays a graph, and its engines run ahead."""

from __future__ import annotations

from teola_plugin.shims import require

require("langgraph", "langgraph-prebuilt")
