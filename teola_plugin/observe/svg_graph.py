"""The e-graph as SVG: primitives in columns by depth, the deepest at the left."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise

from teola_plugin.observe.layout import layered
from teola_plugin.observe.spans import GraphNode, GraphView, QueryTrace
from teola_plugin.observe.svg import MONO, element, family, fitted, text, words
from teola_plugin.observe.text import shortened

_HEIGHT = 36.0
_GAP = 46.0
_MARGIN = 10.0
_NAME_SIZE = 11.5
_NOTE_SIZE = 10.0
_SANS = 0.54  # an upper estimate of the mean width of a character, as a share of the font size


def graph_svg(trace: QueryTrace, index: int) -> str:
    """`trace`'s graph, with the critical path in the accent colour. `index` is the trace's, for hovering."""
    view = trace.view()
    path = [step.span.primitive for step in trace.critical_path()]
    unused = {s.primitive for s in trace.spans if s.unused}
    plan = layered(view)
    width = _node_width(view)
    pitch = width + _GAP
    full = 2 * _MARGIN + plan.layers * pitch - _GAP
    height = 2 * _MARGIN + (plan.height + 1) * _HEIGHT

    def x(layer: int) -> float:
        return _MARGIN + layer * pitch

    def y(row: float) -> float:
        return _MARGIN + (row + 0.5) * _HEIGHT

    tentative = {node[0] for node in view.nodes if node[4]}
    hot = set(pairwise(path))
    data = {(a, b) for a, b, kind in view.edges if kind == "data"}
    drawn = []
    for edge, route in sorted(plan.routes.items(), key=lambda item: item[0] in hot):
        points = [(x(layer), y(row)) for layer, row in route]
        look = ["edge", "data" if edge in data else "order", *(["tentative"] if tentative & set(edge) else [])]
        look += ["critical"] if edge in hot else []
        head = "url(#head-critical)" if edge in hot else "url(#head)"
        drawn.append(element("path", d=_curve(points, width), cls=" ".join(look), marker_end=head))
    for node in view.nodes:
        layer, row = plan.places[node[0]]
        drawn.append(_node(node, x(layer), y(row), width, path, unused, index))
    return element(
        "svg",
        "".join(drawn),
        viewBox=f"0 0 {full:.0f} {height:.0f}",
        style=f"max-width:{full:.0f}px;min-width:{full * 0.7:.0f}px",
        cls="graph",
        role="img",
        aria_label=f"graph of {len(view.nodes)} primitives",
    )


def _node_width(view: GraphView) -> float:
    widest = 0.0
    for node in view.nodes:
        name, note = _labels(node)
        widest = max(widest, len(name) * _NAME_SIZE * MONO, len(note) * _NOTE_SIZE * _SANS)
    return min(172.0, max(84.0, widest + 24))


def _labels(node: GraphNode) -> tuple[str, str]:
    """Two lines. The kind, which usually is part of the id, is said once, below."""
    name, kind, engine, _, _ = node
    bare = re.sub(rf"[./:]{re.escape(kind.lower())}(?=$|\W)", "", name)
    return bare or name, words(kind) + (f" · {engine}" if engine else "")


def _node(
    node: GraphNode, x: float, y: float, width: float, path: Collection[str], unused: Collection[str], index: int
) -> str:
    name, note = _labels(node)
    look = ["node", f"k-{family(node[1])}"]
    look += [word for word, on in (("tentative", node[4]), ("critical", node[0] in path)) if on]
    look += ["unused"] if node[0] in unused else []
    top = y - _HEIGHT / 2
    parts = [
        element("rect", cls="card", x=x, y=top, width=width, height=_HEIGHT, rx=6),
        element("rect", cls="strip", x=x + 5, y=top + 6, width=3, height=_HEIGHT - 12, rx=1.5),
        text(x + 14, y - 3, fitted(name, width - 20, _NAME_SIZE), "name"),
        text(x + 14, y + 11, shortened(note, int((width - 18) / (_NOTE_SIZE * _SANS))), "note"),
    ]
    return element("g", "".join(parts), cls=" ".join(look), data_p=f"{index}:{node[0]}", data_k=f"{index}:{node[0]}")


def _curve(points: list[tuple[float, float]], width: float) -> str:
    """Through the gaps between columns in curves, across the columns in straight lines."""
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
