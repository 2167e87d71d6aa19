"""What users look at: traces of queries, and their forms for terminals, browsers and other tools."""

from teola_plugin.observe.critical_path import PathStep
from teola_plugin.observe.export import chrome_trace, write_chrome_trace
from teola_plugin.observe.html import html_page
from teola_plugin.observe.otel import emit
from teola_plugin.observe.progress import progress
from teola_plugin.observe.recorder import TraceRecorder
from teola_plugin.observe.spans import Cost, GraphEdge, GraphNode, GraphView, ModelCost, Price, QueryTrace, Span
from teola_plugin.observe.steps import Step, Wait
from teola_plugin.observe.text import format_summary, timeline_text

__all__ = [
    "Cost",
    "GraphEdge",
    "GraphNode",
    "GraphView",
    "ModelCost",
    "PathStep",
    "Price",
    "QueryTrace",
    "Span",
    "Step",
    "TraceRecorder",
    "Wait",
    "chrome_trace",
    "emit",
    "format_summary",
    "html_page",
    "progress",
    "timeline_text",
    "write_chrome_trace",
]
