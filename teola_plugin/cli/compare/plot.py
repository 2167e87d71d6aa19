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

_WIDTH, _HEIGHT = 600.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 20.0, 24.0, 120.0
_CURVES = {
    "plain, sync": "sync",
    "plain, async": "async",
    "plain again, async": "again",
    "accelerated, sync": "fast-sync",
    "accelerated, async": "fast-async",
}
_STYLE = """
text { font: 13px system-ui, 'Segoe UI', Arial, sans-serif; fill: #1c1f23 } .dim { fill: #6a717b }
.page { fill: #ffffff } .grid { stroke: #e3e4e6 } .curve { fill: none; stroke-width: 2; stroke: #6a717b }
.mark { stroke-width: 3; stroke: #6a717b } .again { stroke: #a9b0ba } .curve.again { stroke-dasharray: 5 3 }
.async { stroke: #1c1f23 } .fast-sync { stroke: #c77f22 } .fast-async { stroke: #dc3a20 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e8ea } .dim { fill: #949ca7 } .page { fill: #131518 } .grid { stroke: #31363c }
.async { stroke: #e6e8ea } .again { stroke: #606973 } .fast-sync { stroke: #e7a45c } .fast-async { stroke: #ff6a4d }
}
"""
_PAGE_STYLE = (
    ":root { color-scheme: light dark } body { margin: 12px; background: light-dark(#fff, #131518) }"
    " svg { display: block; width: 100%; max-width: 860px; height: auto; margin: 0 auto }"
)


def write(path: str, runs: Sequence[Run], title: str) -> None:
    """Write the picture as SVG, or as an HTML page, by the ending of `path`. Raises `OSError`."""
    picture = ecdf_svg(runs, title)
    if path.endswith(".html"):
        picture = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head><body>{picture}</body></html>\n"
        )
    Path(path).write_text(picture, encoding="utf-8")


def ecdf_svg(runs: Sequence[Run], title: str) -> str:
    """A step curve for each way that ended well at least once."""
    times = {way: sorted(r.seconds for r in found if not r.raised) for way, found in by_way(runs).items()}
    times = {way: found for way, found in times.items() if found}
    longest = max((found[-1] for found in times.values()), default=1.0)
    body = [
        element("style", _STYLE),
        element("rect", x=0, y=0, width=_WIDTH, height=_HEIGHT, cls="page"),
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
    for seconds in ticks(longest, 6):
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
    return element("path", d="".join(points), cls=f"curve {_CURVES.get(way, '')}".rstrip())


def _label(way: str, found: Sequence[float], row: int) -> str:
    y = _HEIGHT - _BOTTOM + 40 + 15 * row
    mark = element("line", x1=_LEFT, x2=_LEFT + 24, y1=y - 4, y2=y - 4, cls=f"mark {_CURVES.get(way, '')}".rstrip())
    return mark + text(_LEFT + 32, y, f"{way}: median {duration(median(found))} of {len(found)}")
