"""Functions of the user's that call Runnables: their source is walked with symbols, so that engines can be asked early.

Nothing of a function runs. What is understood becomes components of a template; whatever is got wrong is asked for in
vain and claimed by nobody. See `trace` for what it gives, `values` for the symbols.
"""

from teola_plugin.tracer.functions.trace import FunctionWalk, realised, trace_function, trace_node, walk_function
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE, Built, Fields, Known, Sent, Series, Spread, Symbol, Text

__all__ = [
    "UNKNOWN_VALUE",
    "Built",
    "Fields",
    "FunctionWalk",
    "Known",
    "Sent",
    "Series",
    "Spread",
    "Symbol",
    "Text",
    "realised",
    "trace_function",
    "trace_node",
    "walk_function",
]
