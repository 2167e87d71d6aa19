"""What is wrong with a workflow is said when it is made, not when a query comes."""

from __future__ import annotations

from collections import Counter

from teola_plugin.errors import GraphError
from teola_plugin.graph import WorkflowTemplate, build_pgraph
from teola_plugin.workflow.flow import Flow


def check_names(flow: Flow) -> None:
    """Raises `GraphError` for a name that two components have, also in bodies: settings and results go by names."""
    counts = Counter(one.name for one in flow.everything())
    for name, count in counts.items():
        if count > 1:
            raise GraphError(f"{count} components share the name {name!r}.", hint="rename all but one of them")


def check_order(template: WorkflowTemplate) -> None:
    """Raises `GraphError` for a component that reads what another one writes, where nothing says which comes first:
    a query would give one answer or the other."""
    graph = build_pgraph(template)
    touching = [(p, e) for p in graph for e in p.effects if e.resource != "*"]
    for writer, written in touching:
        for reader, read in touching:
            if not written.writes or read.writes or written.resource != read.resource:
                continue
            if (
                not graph.bits[writer.id] & graph.above[reader.id]
                and not graph.bits[reader.id] & graph.above[writer.id]
            ):
                first, second = (p.id.partition(".")[0] for p in (writer, reader))
                raise GraphError(
                    f"{first} writes {written.resource} and {second} reads it, and nothing says which comes first.",
                    hint=f"join them: {first} >> {second}",
                )
