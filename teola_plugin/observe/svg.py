"""Drawings as SVG: the e-graph and the timeline of a query.

The e-graph has its primitives in columns by depth, the deepest at the left. The timeline has a group of lanes for each
engine, on a scale that several traces can share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from html import escape

from teola_plugin.observe.critical_path import CODE, PathStep
from teola_plugin.observe.layout import layered, pack_lanes
from teola_plugin.observe.spans import GraphNode, GraphView, QueryTrace, Span
from teola_plugin.observe.steps import Step, nested
from teola_plugin.observe.text import duration, shortened

MONO = 0.61
"""Width of a character of the monospaced font, as a share of the font size."""

_FAMILIES = {
    "CHUNKING": "chunking",
    "EMBEDDING": "embedding",
    "INGESTION": "ingestion",
    "SEARCHING": "searching",
    "RERANKING": "reranking",
    "PREFILLING": "prefilling",
    "PARTIAL_PREFILLING": "prefilling",
    "FULL_PREFILLING": "prefilling",
    "DECODING": "decoding",
    "PARTIAL_DECODING": "decoding",
    "GENERATION": "generation",
    "TOOL": "tool",
    "OPAQUE": "tool",
    "CODE": "tool",
}


def family(kind: str) -> str:
    """Return the colour family of a kind; `control` for everything that only steers or reshapes."""
    return _FAMILIES.get(kind, "control")


def family_label(name: str) -> str:
    return {"tool": "tools, user code", "control": "control, glue"}.get(name, name)


def words(kind: str) -> str:
    return kind.lower().replace("_", " ")


def element(tag: str, body: str = "", **attributes: object) -> str:
    """Return an element. Attribute names have `_` for `-`, and `cls` for `class`. `body` is markup."""
    pairs = "".join(
        f' {"class" if name == "cls" else name.replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None and value != ""
    )
    return (
        f"<{tag}{pairs}>{body}</{tag}>" if body or tag not in ("rect", "path", "line", "circle") else f"<{tag}{pairs}/>"
    )


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value), quote=True)


def text(x: float, y: float, content: str, cls: str = "", **attributes: object) -> str:
    return element("text", escape(content), x=x, y=y, cls=cls, **attributes)


def fitted(label: str, width: float, size: float) -> str:
    """Return `label` cut to `width` pixels of monospaced text; empty if too little of it would be left.

    `size` is the font's size in pixels. Too little means fewer than 9 characters of a label that has more.
    """
    room = int(width / (size * MONO))
    return "" if room < min(9, len(label)) else shortened(label, room)


def ticks(total: float, max_ticks: int) -> list[float]:
    """Return round values from 0 to `total`, in at most `max_ticks` steps."""
    if total <= 0:
        return [0.0]
    rough = total / max(1, max_ticks)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    return [i * step for i in range(int(total / step * 1.0001) + 1)]


def tick_label(value: float, total: float) -> str:
    factor, unit = (1.0, "s") if total >= 1 else (1e3, "ms") if total >= 1e-3 else (1e6, "µs")
    return f"{value * factor:g} {unit}" if value else "0"


def step_facts(step: Step, outer: str, origin: float) -> list[tuple[str, str]]:
    """Return the lines of the tooltip for a step inside the step `outer`."""
    lines = [("kind", step.kind)]
    for key, value in step.facts:
        lines.append((key, ("yes" if value else "no") if isinstance(value, bool) else str(value)))
    lines.append(("ran", duration(step.seconds) if step.ended is not None else "did not end"))
    lines.append(("from", f"{duration(max(0.0, step.began - origin))} on"))
    return [*lines, *([("in", outer)] if outer else []), ("outcome", step.outcome)]


def facts(span: Span, origin: float, step: Step | None = None) -> list[tuple[str, str]]:
    """Return the lines of the tooltip for a span of `step`, with times from the query's start."""
    lines = [
        ("kind", words(span.kind)),
        ("engine", " / ".join(filter(None, (span.engine or "client", span.replica)))),
        ("waited", duration(max(0.0, span.begin - span.queued))),
        ("ran", duration(span.seconds) if span.done is not None else "did not finish"),
        ("from", f"{duration(max(0.0, span.begin - origin))} on"),
    ]
    if span.first is not None:
        lines.append(("first piece", f"after {duration(max(0.0, span.first - span.begin))}"))
    if span.size != 1:
        lines.append(("requests", str(span.size)))
    if span.tokens:
        lines.append(("tokens", f"{span.tokens}, {span.cached} cached" if span.cached else str(span.tokens)))
    if span.written:
        lines.append(("tokens written", str(span.written)))
    if span.drafted:
        lines.append(("tokens drafted", f"{span.drafted}, {span.accepted} accepted"))
    if span.also:
        lines.append(("also", ", ".join(span.also)))
    if span.batch >= 0:
        lines.append(("batch", str(span.batch)))
    lines.append(("depth", str(span.depth)))
    if span.scope:
        lines.append(("scope", " / ".join(span.scope)))
    if step is not None:
        lines.append(("step", step.label))
    lines.append(("outcome", span.outcome + (", speculative" if span.speculative else "")))
    return lines + list(span.detail)


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
        """Return the width of nodes, in pixels, that fits the longest label, within bounds."""
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

    speculative = {node[0] for node in view.nodes if node[4]}
    hot = {(a, b) for a, b, _ in view.edges if a in path and b in path and 0 <= path[b] - path[a] <= 1}
    data = {(a, b) for a, b, kind in view.edges if kind == "data"}
    drawn = []
    for edge, route in sorted(plan.routes.items(), key=lambda item: item[0] in hot):
        points = [(x(layer), y(row)) for layer, row in route]
        look = ["edge", "data" if edge in data else "order", *(["speculative"] if speculative & set(edge) else [])]
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
    """Draw a node: a card with name, kind and engine of a primitive, at the position of its left side's middle."""
    name, kind, engine = _labels(node)
    look = ["node", f"k-{family(node[1])}"]
    look += [word for word, on in (("speculative", node[4]), ("critical", node[0] in path)) if on]
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


_WIDTH = 1240.0
_GUTTER = 132.0
_RIGHT = 18.0
_LANE = 21.0
_BAR = 15.0
_AXIS = 26.0
_PAD = 7.0
_LABEL = 10.5
_LONGEST = 30


@dataclass(frozen=True, slots=True)
class _Scale:
    origin: float
    seconds: float

    def __call__(self, at: float) -> float:
        share = (at - self.origin) / self.seconds if self.seconds else 0.0
        return _GUTTER + min(1.0, max(0.0, share)) * (_WIDTH - _GUTTER - _RIGHT)


def timeline_svg(trace: QueryTrace, index: int, seconds: float) -> str:
    """Draw `trace` on a scale of `seconds`. `index`: number of the trace on the page, for hovering."""
    scale = _Scale(trace.started, seconds)
    path = trace.critical_path()
    critical = {step.span for step in path}
    body: list[str] = []
    top = _AXIS
    body.append(_strip(path, scale, top, index))
    top += _LANE + 2 * _PAD
    if trace.steps:
        markup, height = _steps(trace, scale, top, index)
        body.append(markup)
        top += height
    numbered = list(enumerate(trace.spans))
    for row, engine in enumerate((*trace.engines, "")):
        members = [(number, span) for number, span in numbered if span.engine == engine]
        if members:
            markup, height = _group(trace, engine, members, critical, scale, top, index, row % 2 == 0)
            body.append(markup)
            top += height
    end = element("line", x1=scale(trace.ended), x2=scale(trace.ended), y1=_AXIS - 4, y2=top, cls="end")
    return element(
        "svg",
        _grid(seconds, scale, top) + "".join(body) + end,
        viewBox=f"0 0 {_WIDTH:.0f} {top + 4:.0f}",
        cls="timeline",
        role="img",
        aria_label=f"timeline of {len(trace.spans)} spans",
    )


def _grid(seconds: float, scale: _Scale, bottom: float) -> str:
    """Draw the vertical lines of the time axis, with their labels."""
    parts = []
    for value in ticks(seconds, 10):
        x = scale(scale.origin + value)
        parts.append(element("line", x1=x, x2=x, y1=_AXIS - 4, y2=bottom, cls="grid"))
        anchor = "end" if x > _WIDTH - _RIGHT - 20 else "middle"
        parts.append(text(x, _AXIS - 10, tick_label(value, seconds), "tick", text_anchor=anchor))
    return "".join(parts)


def _strip(path: tuple[PathStep, ...], scale: _Scale, top: float, index: int) -> str:
    """Draw the critical path on one line: spans that ran, and hatched gaps in which the query only waited."""
    y = top + _PAD + (_LANE - _BAR) / 2
    parts = [text(8, y + 11.5, "critical path", "engine accent")]
    at = scale.origin
    for step in path:
        begin = at + step.idle + step.waited
        x, until = scale(begin), scale(begin + step.seconds)
        if x - scale(at) > 0.5:
            parts.append(element("rect", x=scale(at), y=y, width=x - scale(at), height=_BAR, cls="gap"))
        bar = element("rect", x=x, y=y, width=max(1.0, until - x), height=_BAR, cls="run")
        label = fitted(step.span.primitive, until - x - 8, _LABEL)
        inside = text(x + 5, y + 11, label, "inside") if label else ""
        where = f"{index}:{step.span.primitive}"
        parts.append(element("g", bar + inside, cls=f"k-{family(step.span.kind)} span", data_p=where, data_k=where))
        at = begin + step.seconds
    return "".join(parts)


def _group(
    trace: QueryTrace,
    engine: str,
    members: list[tuple[int, Span]],
    critical: set[Span],
    scale: _Scale,
    top: float,
    index: int,
    shaded: bool,
) -> tuple[str, float]:
    """Return the lanes of one engine, and their height."""
    bars = [_Bar(span, number, trace, scale) for number, span in members]
    lanes = pack_lanes([bar.extent for bar in bars])
    height = max((max(lanes) + 1) * _LANE, 2 * _LANE - 8) + 2 * _PAD
    parts = [element("rect", x=0, y=top, width=_WIDTH, height=height, cls="band")] if shaded else []
    share = trace.busy(engine) / trace.seconds if trace.seconds else 0.0
    parts.append(text(8, top + _PAD + 14, shortened(engine or "client", 16), "engine"))
    parts.append(text(8, top + _PAD + 28, f"{100 * share:.0f} % busy", "note"))
    for bar, lane in zip(bars, lanes, strict=True):
        parts.append(bar.draw(top + _PAD + lane * _LANE + (_LANE - _BAR) / 2, bar.span in critical, index))
    return "".join(parts), height


def _steps(trace: QueryTrace, scale: _Scale, top: float, index: int) -> tuple[str, float]:
    """Return the lanes of the original's steps, inner ones below outer ones, and their height."""
    levels: dict[int, list[_Bar]] = {}
    for level, step in nested(trace.steps):
        levels.setdefault(level, []).append(_step_bar(step, trace, scale, index))
    parts = [
        text(8, top + _PAD + 14, "steps", "engine"),
        text(8, top + _PAD + 28, f"{len(trace.steps)} in all", "note"),
    ]
    lane = 0
    for _, bars in sorted(levels.items()):
        lanes = pack_lanes([(bar.begin, bar.end) if bar.inside else bar.extent for bar in bars])
        for bar, offset in zip(bars, lanes, strict=True):
            parts.append(bar.draw(top + _PAD + (lane + offset) * _LANE + (_LANE - _BAR) / 2, False, index))
        lane += max(lanes) + 1
    return "".join(parts), max(lane * _LANE, 2 * _LANE - 8) + 2 * _PAD


def _step_bar(step: Step, trace: QueryTrace, scale: _Scale, index: int) -> _Bar:
    drawn = Span("", "", step.name, step.kind, step.began, step.began, None, step.ended)
    look = f"step{' tool' if step.kind == 'tool' else ''}{' speculative' if step.is_prefetched else ''}"
    return _Bar(drawn, 0, trace, scale, where=f"{index}:step {step.id}", key=f"{index}/s{step.id}", look=look)


class _Bar:
    """A span on the scale, with its label in the bar, else right of it, else left of it.

    `where` and `key` identify it for hovering, `look` is its class; by default those of a primitive.
    """

    def __init__(
        self,
        span: Span,
        number: int,
        trace: QueryTrace,
        scale: _Scale,
        *,
        where: str = "",
        key: str = "",
        look: str = "",
    ) -> None:
        self.span = span
        self.number = number
        self.where, self.key, self.look = where, key, look
        until = trace.ended if span.done is None else span.done
        self.end = scale(until)
        self.begin = min(self.end, scale(span.begin) if span.started is not None else self.end)
        self.queued = min(self.begin, scale(span.queued))
        if self.end - self.queued < 2:
            self.end = self.queued + 2
        self.first = None if span.first is None else scale(span.first)
        self.label = shortened(span.primitive, _LONGEST)
        room = len(self.label) * _LABEL * MONO + 12
        self.extent = (self.queued, self.end + 3)
        self.anchor, self.at = "start", self.begin + 5
        if room > self.end - self.begin:
            after = self.end + room < _WIDTH
            self.anchor, self.at = ("start", self.end + 5) if after else ("end", self.queued - 5)
            self.extent = (self.queued, self.end + room) if after else (self.queued - room, self.end + 3)
        self.inside = room <= self.end - self.begin
        if self.inside and self.first is not None and self.first < self.at + room < self.first + room < self.end:
            self.at = self.first + 5  # keep the label clear of the tick

    def draw(self, y: float, critical: bool, index: int) -> str:
        """Draw the span at this height: the time in a queue, the run, the first piece, and the label."""
        parts = []
        if self.begin - self.queued > 0.5:
            wide = self.begin - self.queued
            parts.append(element("rect", x=self.queued, y=y + 4, width=wide, height=_BAR - 8, cls="wait"))
        if self.span.started is not None or self.begin <= self.queued:
            wide = max(2.0, self.end - self.begin)
            parts.append(element("rect", x=self.begin, y=y, width=wide, height=_BAR, rx=2.5, cls="run"))
        if self.first is not None:
            parts.append(element("line", x1=self.first, x2=self.first, y1=y - 2, y2=y + _BAR + 2, cls="first"))
        parts.append(text(self.at, y + 11, self.label, "inside" if self.inside else "beside", text_anchor=self.anchor))
        look = ["span", self.look or f"k-{family(self.span.kind)}"]
        marks = (("critical", critical), ("speculative", self.span.speculative), ("unused", self.span.unused))
        look += [word for word, on in marks if on]
        where, key = self.where or f"{index}:{self.span.primitive}", self.key or f"{index}/{self.number}"
        return element("g", "".join(parts), cls=" ".join(look), data_p=where, data_k=key)
