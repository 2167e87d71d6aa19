"""Reads functions of the user's, such as nodes of a graph, to find the requests that they will make of engines.

Nothing of a function runs: its source is interpreted with symbols in place of values. What is understood becomes
components of a template; a request that turns out wrong is claimed by nobody. `trace` is the entry, `symbols` defines
the symbols, `interpreter` the state of a function that is being read; the rules are in `expressions` and `statements`.
"""

from teola_plugin.tracer.functions.frames import FindLeaves
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    Fields,
    Instance,
    InstancePerItem,
    ItemList,
    KnownValue,
    Spread,
    Symbol,
    Text,
)
from teola_plugin.tracer.functions.trace import (
    FunctionSummary,
    first_parameter,
    function_reader,
    materialize,
    summarize_function,
    trace_function,
    trace_node,
)

__all__ = [
    "UNKNOWN_VALUE",
    "Fields",
    "FindLeaves",
    "FunctionInterpreter",
    "FunctionSummary",
    "Instance",
    "InstancePerItem",
    "ItemList",
    "KnownValue",
    "Spread",
    "Symbol",
    "Text",
    "first_parameter",
    "function_reader",
    "materialize",
    "summarize_function",
    "trace_function",
    "trace_node",
]
