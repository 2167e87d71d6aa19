"""The text form of a graph, for issue reports and golden tests."""

from __future__ import annotations

from teola_plugin.graph.graph import Graph
from teola_plugin.graph.primitive import Primitive


def format_primitive(p: Primitive, depth: int | None = None) -> str:
    """Return one line, e.g. `%search = SEARCHING@store(vector=%embed) after(%ingest) {k=16} reads collection:docs`."""
    args = ", ".join(f"{key}=%{ref}" for key, ref in p.inputs)
    text = f"%{p.id} = {p.kind.name}" + (f"@{p.engine}" if p.engine else "") + f"({args})"
    if p.after:
        text += f" after({', '.join('%' + a for a in p.after)})"
    if p.early:
        text += f" early({', '.join('%' + str(r) for r in p.early)})"
    notes = [f"{key}={value}" for key, value in (*p.attributes.non_default_items(), *p.options)]
    if p.item is not None:
        notes.append(f"item={p.item}")
    if p.size is not None:
        notes.append(f"size={p.size}")
    if p.prompt:
        notes.append("prompt=" + "".join(map(str, p.prompt)))
    notes += [name for name in ("batchable", "splittable", "tentative") if getattr(p, name)]
    if notes:
        text += " {" + ", ".join(notes) + "}"
    text += "".join(f" {effect}" for effect in p.effects)
    return text if depth is None else f"{text}  # depth {depth}"


def format_graph(graph: Graph, *, depths: bool = True) -> str:
    """Return one line per primitive, in order, with fragments indented below their primitive."""
    lines: list[str] = []
    for p in graph:
        lines.append(format_primitive(p, graph.depths[p.id] if depths else None))
        for label, fragment in (("each", p.fragment), ("else", p.otherwise)):
            if fragment is not None:
                inner = format_graph(fragment.graph, depths=False)
                lines += [f"    {label} | {line}" for line in inner.split("\n")]
    lines.append(f"return %{graph.output}")
    return "\n".join(lines)


def format_mermaid(graph: Graph) -> str:
    """Return a Mermaid flow chart: data edges are solid, order edges dotted."""
    names = {p.id: f"n{i}" for i, p in enumerate(graph)}
    lines = ["flowchart TD"]
    for p in graph:
        engine = f"<br/>{p.engine}" if p.engine else ""
        lines.append(f'  {names[p.id]}["{p.kind.name}<br/>{p.id}{engine}"]')
    for p in graph:
        for producer in dict.fromkeys(r.producer for r in p.refs if not r.external):
            lines.append(f"  {names[producer]} --> {names[p.id]}")
        lines += [f"  {names[a]} -.-> {names[p.id]}" for a in p.after]
    return "\n".join(lines)
