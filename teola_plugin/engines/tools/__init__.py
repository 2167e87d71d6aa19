"""Functions as an engine: tools, with a concurrency of their own."""

from teola_plugin.engines.tools.engine import ToolEngine
from teola_plugin.engines.tools.tool import Tool, ToolRaised

__all__ = ["Tool", "ToolEngine", "ToolRaised"]
