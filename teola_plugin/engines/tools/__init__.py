"""Functions as an engine: tools, with a concurrency of their own."""

from teola_plugin.engines.tools.engine import Tool, ToolEngine, ToolRaised

__all__ = ["Tool", "ToolEngine", "ToolRaised"]
