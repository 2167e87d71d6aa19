"""What is wrong with a workflow is said when it is made, not when a query comes."""

from __future__ import annotations

from collections import Counter

from teola_plugin.errors import GraphError
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, WorkflowTemplate, build_pgraph
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
    _check(build_pgraph(template))


def _check(graph: Graph) -> None:
    touching = [(p, e) for p in graph for e in p.effects if e.resource != "*"]
    for writer, written in touching:
        for reader, read in touching:
            if not written.writes or read.writes or written.resource != read.resource:
                continue
            first, second = (p.id.partition(".")[0] for p in (writer, reader))
            if writer.id == reader.id:
                if writer.kind is PrimitiveKind.MAP:
                    raise GraphError(
                        f"items of {first} write {written.resource} and read it, side by side, so that what one finds "
                        "depends on how far the others are.",
                        hint=f"write all of it before {first}, or into a collection that it does not search",
                    )
            elif not _in_order(graph, writer, reader):
                raise GraphError(
                    f"{first} writes {written.resource} and {second} reads it, and nothing says which comes first.",
                    hint=f"join them: {first} >> {second}",
                )
    for holder in graph:
        for body in (holder.fragment, holder.otherwise):
            if body is not None:
                _check(body.graph)


def _in_order(graph: Graph, one: Primitive, other: Primitive) -> bool:
    return bool(
        graph.bits[one.id] & graph.ancestor_masks[other.id] or graph.bits[other.id] & graph.ancestor_masks[one.id]
    )
