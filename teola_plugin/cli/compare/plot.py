"""The latencies as a picture: what share of the calls had ended after how long. One file, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

from teola_plugin.cli.compare.figures import by_way
from teola_plugin.cli.compare.measure import Run
from teola_plugin.observe.svg import element, text, tick_label, ticks
from teola_plugin.observe.text import duration

_WIDTH, _HEIGHT = 860.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 20.0, 24.0, 120.0
_COLOURS = {"plain, sync": "#6a717b", "plain, async": "#1c1f23", "plain again, async": "#a9b0ba"}
_FAST_COLOURS = {"accelerated, sync": "#e7a45c", "accelerated, async": "#dc3a20"}
_STYLE = (
    "text { font: 12px system-ui, 'Segoe UI', Arial, sans-serif; fill: #1c1f23 } .dim { fill: #6a717b }"
    " .grid { stroke: #e3e4e6 } .curve { fill: none; stroke-width: 2 } .again { stroke-dasharray: 5 3 }"
)


def write(path: str, runs: Sequence[Run], title: str) -> None:
    """Write the picture as SVG, or as an HTML page, by the ending of `path`. Raises `OSError`."""
    picture = ecdf_svg(runs, title)
    if path.endswith(".html"):
        picture = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{escape(title)}</title></head><body>{picture}</body></html>\n"
        )
    Path(path).write_text(picture, encoding="utf-8")


def ecdf_svg(runs: Sequence[Run], title: str) -> str:
    """A step curve for each way that ended well at least once."""
    times = {way: sorted(r.seconds for r in found if not r.raised) for way, found in by_way(runs).items()}
    times = {way: found for way, found in times.items() if found}
    longest = max((found[-1] for found in times.values()), default=1.0)
    body = [
        element("style", _STYLE),
        element("rect", x=0, y=0, width=_WIDTH, height=_HEIGHT, fill="#ffffff"),
        text(_LEFT, 16.0, title),
        _grid(longest),
        *(_curve(way, found, longest) for way, found in times.items()),
        *(_label(way, found, row) for row, (way, found) in enumerate(times.items())),
    ]
    size = {"viewBox": f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", "width": _WIDTH, "height": _HEIGHT}
    return element("svg", "".join(body), xmlns="http://www.w3.org/2000/svg", role="img", aria_label=title, **size)


def _x(seconds: float, longest: float) -> float:
    return _LEFT + seconds / longest * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _grid(longest: float) -> str:
    made = []
    for seconds in ticks(longest, 8):
        x = _x(seconds, longest)
        made.append(element("line", x1=x, x2=x, y1=_y(0.0), y2=_y(1.0), cls="grid"))
        made.append(text(x, _y(0.0) + 16, tick_label(seconds, longest), "dim", text_anchor="middle"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        made.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=_y(share), y2=_y(share), cls="grid"))
        made.append(text(_LEFT - 8, _y(share) + 4, f"{share:.0%}", "dim", text_anchor="end"))
    return "".join(made)


def _curve(way: str, found: Sequence[float], longest: float) -> str:
    points = [f"M{_x(0.0, longest):.1f} {_y(0.0):.1f}"]
    for number, seconds in enumerate(found, 1):
        points.append(f"H{_x(seconds, longest):.1f}V{_y(number / len(found)):.1f}")
    points.append(f"H{_x(longest, longest):.1f}")
    return element("path", d="".join(points), stroke=_colour(way), cls="curve again" if "again" in way else "curve")


def _label(way: str, found: Sequence[float], row: int) -> str:
    y = _HEIGHT - _BOTTOM + 40 + 15 * row
    mark = element("line", x1=_LEFT, x2=_LEFT + 24, y1=y - 4, y2=y - 4, stroke=_colour(way), stroke_width=3)
    return mark + text(_LEFT + 32, y, f"{way}: median {duration(median(found))} of {len(found)}")


def _colour(way: str) -> str:
    return (_COLOURS | _FAST_COLOURS).get(way, "#6a717b")
