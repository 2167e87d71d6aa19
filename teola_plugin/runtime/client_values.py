"""The values of primitives that run at the client."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from teola_plugin.graph import Graph, Primitive, PrimitiveKind, is_impure
from teola_plugin.runtime.query_run import QueryRun


@lru_cache(maxsize=256)
def runs_user_code(graph: Graph) -> bool:
    """Whether user code runs in it, or in what its primitives hold."""
    return any(is_impure(p) for p in graph)


def computed(run: QueryRun, p: Primitive, inputs: dict[str, Any]) -> Any:
    """Of a CALL, CHUNKING or AGGREGATE. Raises what the client's function raises."""
    if p.call == "concat":
        return [item for part in inputs.values() for item in part]
    function = run.calls_of(p.id).get(p.call)
    return inputs if function is None else function(**inputs)


def client_value(run: QueryRun, p: Primitive, inputs: dict[str, Any]) -> Any:
    """`computed`, and of a VERIFY what it lets through."""
    return inputs["actual"] if p.kind is PrimitiveKind.VERIFY else computed(run, p, inputs)
