"""Small charts as SVG: lines over numbers, bars in groups, bars of parts. Sizes in pixels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.themes import SANS, painted
from teola_plugin.observe.svg import element, text

LEFT, TOP, BOTTOM, TICK = 44, 30, 34, 11
"""Room around the plot of a panel, and the size of small letters."""
STYLE = f"""
text {{ fill: INK; font: 12px {SANS} }} .title {{ font-weight: 600; font-size: 13px }}
.small {{ font-size: {TICK}px; fill: DIM }} .page {{ fill: PANEL }} .grid {{ stroke: LINE }} .axis {{ stroke: EDGE }}
.one {{ stroke: INK; stroke-dasharray: 3 3 }}
"""


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: (x, y). `marked`: an x that a ring is put at, on the line. `colour`: a name of the page's."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashes: str = ""
    marked: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(one) if self.logarithmic else one for one in (self.low, self.high, value))
        return self.begin + (self.end - self.begin) * (at - low) / ((high - low) or 1)


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart's place."""

    title: str
    across: str
    up: str
    x: float = 0.0
    y: float = 0.0
    width: float = 360.0
    height: float = 230.0
    logarithmic: tuple[bool, bool] = (False, False)
    """Along x, along y."""


def steps(low: float, high: float, most: int = 5) -> list[float]:
    """Round values between the two, at most so many steps apart."""
    rough = (high - low) / most or 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * one for one in (1, 2, 5, 10) if size * one >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * n, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Round values that are about as far apart on a logarithmic axis."""
    found = [m * 10.0**e for e in range(-4, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return found if len(found) <= 6 else [one for one in found if f"{one:e}"[0] == "1"]


def lines(panel: Panel, series: Sequence[Series]) -> str:
    """Lines with a dot at each point."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    low, high = (min(ys) * 0.9, max(ys) * 1.1) if panel.logarithmic[1] else (0.0, max(ys) * 1.08)
    right, bottom = panel.x + panel.width - 10, panel.y + panel.height - BOTTOM
    across = Scale(min(xs), max(xs), panel.x + LEFT, right, panel.logarithmic[0])
    up = Scale(low, high, bottom, panel.y + TOP, panel.logarithmic[1])
    drawn = _frame(panel, up)
    for value in sorted(set(xs)) if len(set(xs)) <= 7 else steps(min(xs), max(xs)):
        drawn += text(across(value), bottom + 14, f"{value:g}", "small", text_anchor="middle")
    return drawn + "".join(_line(one, across, up) for one in series)


def _line(one: Series, across: Scale, up: Scale) -> str:
    places = [(across(x), up(y)) for x, y in one.points]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    drawn = element("path", d=path, cls=f"l-{one.colour}", fill="none", stroke_dasharray=one.dashes)
    drawn += "".join(element("circle", cx=round(x, 1), cy=round(y, 1), r=2.2, cls=f"f-{one.colour}") for x, y in places)
    if one.marked is not None:
        x, y = across(one.marked), up(between(one.points, one.marked))
        drawn += element("circle", cx=round(x, 1), cy=round(y, 1), r=5.5, cls=f"l-{one.colour}", fill="none")
    return drawn


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of the line through the points; beyond its ends, that of the end."""
    ordered = sorted(points)
    for (x0, y0), (x1, y1) in itertools.pairwise(ordered):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / ((x1 - x0) or 1)
    return ordered[0][1] if x < ordered[0][0] else ordered[-1][1]


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts from the bottom up: (colour, value)."""

    label: str
    parts: tuple[tuple[str, float], ...]
    told: str = ""
    low: float | None = None
    high: float | None = None
    """The interval of its top, where there is one."""


def bars(panel: Panel, groups: Mapping[str, Sequence[Bar]], *, least: float = 0.0, line: float | None = None) -> str:
    """Bars in groups, from `least` up; what is lower is not seen. `line`: a value that is drawn across."""
    every = [bar for found in groups.values() for bar in found]
    tops = [max(sum(value for _, value in bar.parts), bar.high or 0.0) for bar in every]
    bottom, right = panel.y + panel.height - BOTTOM, panel.x + panel.width - 10
    up = Scale(least, max(tops) * 1.08, bottom, panel.y + TOP)
    drawn = _frame(panel, up)
    each = (right - panel.x - LEFT) / max(1, len(groups))
    for number, (name, found) in enumerate(groups.items()):
        begin = panel.x + LEFT + number * each
        wide = min(34.0, (each - 12) / max(1, len(found)))
        start = begin + (each - wide * len(found)) / 2
        for place, bar in enumerate(found):
            drawn += _bar(bar, start + place * wide, wide, up)
        drawn += text(begin + each / 2, bottom + 27, name, "small", text_anchor="middle")
    if line is not None:
        drawn += element("line", x1=panel.x + LEFT, x2=right, y1=round(up(line), 1), y2=round(up(line), 1), cls="one")
    return drawn


def _bar(bar: Bar, x: float, wide: float, up: Scale) -> str:
    drawn, below = "", up.low
    total = 0.0
    for colour, value in bar.parts:
        total += value
        top = max(total, below)
        high = up(below) - up(top)
        if high > 0.05:
            size = round(wide - 2, 1), round(high, 1)
            y = round(up(top), 1)
            drawn += element("rect", cls=f"f-{colour}", x=round(x + 1, 1), y=y, width=size[0], height=size[1])
        below = top
    if bar.low is not None and bar.high is not None and bar.high - bar.low > 1e-9:
        middle = round(x + wide / 2, 1)
        drawn += element("line", x1=middle, x2=middle, y1=round(up(bar.low), 1), y2=round(up(bar.high), 1), cls="one")
    if bar.told:
        drawn += text(x + wide / 2, up(max(below, bar.high or 0.0)) - 3, bar.told, "small", text_anchor="middle")
    return drawn + text(x + wide / 2, up.begin + 13, bar.label, "small", text_anchor="middle")


def _frame(panel: Panel, up: Scale) -> str:
    drawn = text(panel.x + 6, panel.y + 16, panel.title, "title")
    right, bottom = panel.x + panel.width - 10, panel.y + panel.height - BOTTOM
    for value in powers(up.low, up.high) if up.logarithmic else steps(up.low, up.high, 4):
        y = round(up(value), 1)
        drawn += element("line", x1=panel.x + LEFT, x2=right, y1=y, y2=y, cls="grid")
        drawn += text(panel.x + LEFT - 5, y + 4, f"{value:g}", "small", text_anchor="end")
    drawn += element("line", x1=panel.x + LEFT, x2=right, y1=bottom, y2=bottom, cls="axis")
    if panel.across:
        drawn += text((panel.x + LEFT + right) / 2, bottom + 27, panel.across, "small", text_anchor="middle")
    return drawn + text(right, panel.y + 16, panel.up, "small", text_anchor="end")


@dataclass(frozen=True, slots=True)
class Key:
    """What a colour stands for."""

    name: str
    colour: str
    dashes: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels and, below them, what colours stand for, and notes."""

    width: float
    height: float
    body: str
    keys: Sequence[Key] = ()
    notes: Sequence[str] = ()
    lined: bool = field(default=False)
    """Whether the colours are those of lines."""

    def svg(self, theme: str) -> str:
        drawn, y = self.body, self.height + 14
        x = 12.0
        for key in self.keys:
            wide = 30 + 6.6 * len(key.name)
            if x + wide > self.width:
                x, y = 12.0, y + 18
            drawn += self._key(key, x, y) + text(x + 22, y + 4, key.name, "small")
            x += wide
        y += 20 if self.keys else 0
        for note in self.notes:
            drawn += text(12, y + 2, note, "small")
            y += 16
        page = element("rect", width=self.width, height=round(y), cls="page")
        view = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {self.width:.0f} {y:.0f}"}
        return element("svg", element("style", painted(STYLE + _colours(drawn), theme)) + page + drawn, **view) + "\n"

    def _key(self, key: Key, x: float, y: float) -> str:
        if not self.lined:
            return element("rect", x=x + 4, y=y - 6, width=11, height=11, rx=2, cls=f"f-{key.colour}")
        return element("line", cls=f"l-{key.colour}", x1=x, x2=x + 18, y1=y, y2=y, stroke_dasharray=key.dashes)


def _colours(drawn: str) -> str:
    """Rules for the colours that are used."""
    names = ["accent", "edge", "ink", "dim", "chunking", "embedding", "ingestion", "searching", "reranking"]
    names += ["prefilling", "decoding", "tool", "queue"]
    used = [name for name in names if f"f-{name}" in drawn or f"l-{name}" in drawn]
    return "".join(
        f".f-{name} {{ fill: {name.upper()} }} .l-{name} {{ stroke: {name.upper()}; stroke-width: 1.6 }}\n"
        for name in used
    )
