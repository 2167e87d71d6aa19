"""The timeline of a query as SVG: a group of lanes for each engine, on a scale that several traces can share."""

from __future__ import annotations

from dataclasses import dataclass

from teola_plugin.observe.critical_path import PathStep
from teola_plugin.observe.layout import pack_lanes
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.observe.steps import Step, nested
from teola_plugin.observe.svg import MONO, element, family, fitted, text, tick_label, ticks
from teola_plugin.observe.text import shortened

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
    look = f"step{' tool' if step.kind == 'tool' else ''}{' tentative' if step.is_prefetched else ''}"
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
        marks = (("critical", critical), ("tentative", self.span.tentative), ("unused", self.span.unused))
        look += [word for word, on in marks if on]
        where, key = self.where or f"{index}:{self.span.primitive}", self.key or f"{index}/{self.number}"
        return element("g", "".join(parts), cls=" ".join(look), data_p=where, data_k=key)
