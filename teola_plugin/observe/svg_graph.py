"""The e-graph as SVG: primitives in columns by depth, the deepest at the left."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from teola_plugin.observe.critical_path import CODE
from teola_plugin.observe.layout import layered
from teola_plugin.observe.spans import GraphNode, GraphView, QueryTrace
from teola_plugin.observe.svg import MONO, element, family, fitted, text, words
from teola_plugin.observe.text import shortened

_MARGIN = 10.0
_ROOM = 1240.0  # the width of the page's content
_NAME_SIZE = 11.5
_NOTE_SIZE = 10.0
_SANS = 0.58  # an upper estimate of the mean width of a character, as a share of the font size


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of all nodes of a drawing, and the gap between columns. Tall nodes show the engine on a second line."""

    width: float
    height: float
    gap: float
    tall: bool

    @classmethod
    def of(cls, view: GraphView, layers: int) -> _Size:
        """Return the size of wide nodes if the columns fit the page, else that of tall ones."""
        wide = cls(cls._width(view, tall=False, max_width=172.0), 36.0, 46.0, False)
        if layers * (wide.width + wide.gap) - wide.gap + 2 * _MARGIN <= _ROOM:
            return wide
        return cls(cls._width(view, tall=True, max_width=128.0), 48.0, 34.0, True)

    @staticmethod
    def _width(view: GraphView, *, tall: bool, max_width: float) -> float:
        widest = 0.0
        for name, kind, engine in map(_labels, view.nodes):
            note = max(len(kind), len(engine)) if tall else len(kind) + len(engine) + (3 if engine else 0)
            widest = max(widest, len(name) * _NAME_SIZE * MONO, note * _NOTE_SIZE * _SANS)
        return min(max_width, max(84.0, widest + 22))


def graph_svg(trace: QueryTrace, index: int) -> str:
    """Draw the graph of `trace`, with the critical path in the accent colour. `index`: see `timeline_svg`."""
    view = trace.view()
    path = _on_the_path(trace)
    unused = {name for s in trace.spans if s.unused for name in (s.primitive, *s.also)}
    plan = layered(view)
    size = _Size.of(view, plan.layers)
    full = 2 * _MARGIN + plan.layers * (size.width + size.gap) - size.gap
    height = 2 * _MARGIN + (plan.height + 1) * size.height

    def x(layer: int) -> float:
        return _MARGIN + layer * (size.width + size.gap)

    def y(row: float) -> float:
        return _MARGIN + (row + 0.5) * size.height

    tentative = {node[0] for node in view.nodes if node[4]}
    hot = {(a, b) for a, b, _ in view.edges if a in path and b in path and 0 <= path[b] - path[a] <= 1}
    data = {(a, b) for a, b, kind in view.edges if kind == "data"}
    drawn = []
    for edge, route in sorted(plan.routes.items(), key=lambda item: item[0] in hot):
        points = [(x(layer), y(row)) for layer, row in route]
        look = ["edge", "data" if edge in data else "order", *(["tentative"] if tentative & set(edge) else [])]
        look += ["critical"] if edge in hot else []
        head = "url(#head-critical)" if edge in hot else "url(#head)"
        drawn.append(element("path", d=_curve(points, size.width), cls=" ".join(look), marker_end=head))
    for node in view.nodes:
        layer, row = plan.positions[node[0]]
        drawn.append(_node(node, x(layer), y(row), size, path, unused, index))
    return element(
        "svg",
        "".join(drawn),
        viewBox=f"0 0 {full:.0f} {height:.0f}",
        style=f"--full:{full:.0f}px;max-width:{full:.0f}px;min-width:{full * 0.66:.0f}px",
        cls="graph",
        role="img",
        aria_label=f"graph of {len(view.nodes)} primitives",
    )


def _on_the_path(trace: QueryTrace) -> dict[str, int]:
    """Return the primitives for which the answer waited -> their positions on the path, equal for those of one span."""
    spans = [step.span for step in trace.critical_path() if step.span.kind != CODE]
    return {name: number for number, span in enumerate(spans) for name in (span.primitive, *span.also)}


def _labels(node: GraphNode) -> tuple[str, str, str]:
    """Return name, kind and engine. The kind is removed from the name, of which it usually is a part."""
    name, kind, engine, _, _ = node
    bare = re.sub(rf"[./:]{re.escape(kind.lower())}(?=$|\W)", "", name)
    return bare or name, words(kind), engine


def _node(
    node: GraphNode, x: float, y: float, size: _Size, path: Collection[str], unused: Collection[str], index: int
) -> str:
    name, kind, engine = _labels(node)
    look = ["node", f"k-{family(node[1])}"]
    look += [word for word, on in (("tentative", node[4]), ("critical", node[0] in path)) if on]
    look += ["unused"] if node[0] in unused else []
    top = y - size.height / 2
    notes = [kind, engine] if size.tall else [" · ".join(filter(None, (kind, engine)))]
    room = int((size.width - 18) / (_NOTE_SIZE * _SANS))
    parts = [
        element("rect", cls="card", x=x, y=top, width=size.width, height=size.height, rx=6),
        element("rect", cls="strip", x=x + 5, y=top + 6, width=3, height=size.height - 12, rx=1.5),
        text(x + 14, top + 15, fitted(name, size.width - 17, _NAME_SIZE), "name"),
        *(text(x + 14, top + 29 + 12 * i, shortened(note, room), "note") for i, note in enumerate(notes)),
    ]
    return element("g", "".join(parts), cls=" ".join(look), data_p=f"{index}:{node[0]}", data_k=f"{index}:{node[0]}")


def _curve(points: list[tuple[float, float]], width: float) -> str:
    """Return the path of an edge: curves in the gaps between columns, straight lines across the columns."""
    (x, y), *rest = points
    parts = [f"M{x + width:.1f} {y:.1f}"]
    at, last = (x + width, y), len(rest) - 1
    for i, (x, y) in enumerate(rest):
        to = x - 3 if i == last else x
        middle = (at[0] + to) / 2
        parts.append(f"C{middle:.1f} {at[1]:.1f} {middle:.1f} {y:.1f} {to:.1f} {y:.1f}")
        if i != last:
            parts.append(f"H{x + width:.1f}")
        at = (x + width, y)
    return "".join(parts)
