"""Graphs and agents of LangGraph: a graph stays a graph, and its engines run ahead."""

from __future__ import annotations

from teola_plugin.errors import require_modules
from teola_plugin.shims import require

require_modules("LangGraph support", ("langchain_core", "langgraph.graph"), "langgraph")
require("langgraph", "langgraph-prebuilt")
