"""The report of `teola compare`: printed text, and the latencies as a picture in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from teola_plugin.cli.compare.figures import FEWEST_PAIRS, group_by_variant
from teola_plugin.observe.svg import element, text, tick_label, ticks
from teola_plugin.observe.text import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from teola_plugin.cli.compare.measure import TimedRun

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = ("median", "p90", "p99", "min", "max")
_EQUALITY_TEXTS = {
    "equal": "equal: every accelerated answer is the original's",
    "different": "DIFFERENT where the original agrees with itself: this is a bug, please report it",
    "undecided": "undecided: the original does not give the same answer every time, so differences may "
    "be its own. Try temperature 0, a seed, or other inputs",
}
_MAX_LISTED = 10
"""The inputs with different answers that are listed one by one."""


def print_report(console: Console, summary: Mapping[str, Any], runs: Sequence[TimedRun]) -> None:
    """Print equality, latencies as table and picture, speed-ups, time to first token, shares of the time, advice."""
    console.rule("Answers")
    _print_equality(console, summary["equality"])
    for error in summary["errors"]:
        _print_line(console, f"raised: {error}")
    console.rule("Latency")
    _print_line(console, f"sync and async: {summary['entries']} of a {summary['kind']}")
    console.print(_latency_table(summary["latency_s"]))
    _print_line(console, latency_strips(runs, max(20, min(console.width, 110) - 40)))
    console.rule("How many times faster")
    _print_line(console, "\n".join(_ratio_lines(summary)))
    if summary["time_to_first_token_s"]:
        console.rule("Time to first token")
        console.print(_latency_table(summary["time_to_first_token_s"]))
        if summary["first_token_speedup"] is not None:
            _print_line(console, f"plain over accelerated: {_ratio_text(summary['first_token_speedup'])}")
    if shares := summary["where_the_time_went"]:
        console.rule("Where the time of the accelerated calls went")
        width, wasted = max(map(len, shares)), summary["wasted"]
        for name, share in shares.items():
            _print_line(console, f"{name:{width}} {share:6.1%} {'█' * round(40 * min(1.0, share))}")
        _print_line(
            console,
            f"Begun and not used by anybody: {wasted['primitives']} primitives, {wasted['tokens']} tokens "
            f"in {wasted['calls']} calls.",
        )
    if any(figures["calls"] for figures in summary["cost_per_query"].values()):
        console.rule("Calls of models, tokens and cost per query")
        _print_line(console, "\n".join(_cost_lines(summary["cost_per_query"])))
    if summary["advice"] or summary["bindings"]:
        console.rule("What would help")
        _print_line(console, "\n".join(f"* {line}" for line in summary["advice"]))
    if summary["bindings"]:
        _print_line(
            console, '* Engines can serve your models: --engines auto tries it, accelerate(..., engines="auto") or'
        )
        lines = "\n".join(f"    {line}" for line in summary["bindings"])
        console.print(lines, markup=False, highlight=False, soft_wrap=True)


def _cost_lines(cost: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the calls, tokens and dollars of a query: plain, and accelerated."""
    for name, figures in cost.items():
        dollars = "" if figures["dollars"] is None else f"   ${figures['dollars']:.6f}"
        tokens = f"{figures['tokens_in']:9,.1f} tokens in {figures['tokens_out']:9,.1f} out"
        yield f"{name:12} {figures['calls']:6,.1f} calls {tokens}{dollars}"
    unknown = sum(figures["calls_without_tokens"] for figures in cost.values())
    if unknown:
        texts = (f"{figures['calls_without_tokens']:,.1f} {name}" for name, figures in cost.items())
        yield f"Without the tokens of calls that reported none: {', '.join(texts)}."
    yield "All calls that were made count, also those that were prefetched and not used, or made again."


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _print_equality(console: Console, equality: Mapping[str, Any]) -> None:
    """Print the verdict on the answers, and the first inputs whose answers are not equal."""
    console.print(_EQUALITY_TEXTS[equality["state"]], style="bold", highlight=False)
    rows = equality["inputs"]
    unequal = [row for row in rows if row["state"] != "equal"]
    _print_line(console, f"{len(rows) - len(unequal)} of {len(rows)} inputs: equal")
    for row in unequal[:_MAX_LISTED]:
        _print_line(console, f"line {row['line']}: {row['state']}: {row['detail']}")
    if len(unequal) > _MAX_LISTED:
        _print_line(console, f"... and {len(unequal) - _MAX_LISTED} more (--json has all)")


def _latency_table(latency: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of latencies: a row for each variant, with the number of its runs."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    has_failures = any(figures["failed"] for figures in latency.values())
    table = Table("way", *_COLUMNS, "runs", *(["failed"] if has_failures else []), box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.no_wrap, column.justify = True, "right" if column.header != "way" else "left"
    for variant, figures in latency.items():
        times = ("-" if figures[name] is None else duration(figures[name]) for name in _COLUMNS)
        failures = [str(figures["failed"] or "")] if has_failures else []
        table.add_row(variant, *times, str(figures["n"]), *failures)
    return table


def latency_strips(runs: Sequence[TimedRun], width: int) -> str:
    """Return one line of characters a variant, all on one time scale; the darker a character, the more calls took that.

    The last line is the scale. Return an empty text if no run succeeded.
    """
    times = {
        variant: [run.seconds for run in group if not run.error] for variant, group in group_by_variant(runs).items()
    }
    all_times = [seconds for values in times.values() for seconds in values]
    if not all_times:
        return ""
    low, high = min(all_times), max(all_times)
    step = (high - low) / width or 1.0
    lines = []
    for variant, values in times.items():
        counts = [0] * width
        for seconds in values:
            counts[min(width - 1, int((seconds - low) / step))] += 1
        highest = max(counts) or 1
        lines.append(f"{variant:24}|{''.join(_BLOCKS[-(-n * 8 // highest)] for n in counts)}|")
    scale = f"{duration(low)}{duration(high):>{width - len(duration(low))}}"
    return "\n".join([*lines, f"{'':25}{scale}"])


def _ratio_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the verdict, every variant of the original over every accelerated one, and the control."""
    best = summary["speedup"]
    if best is None:
        yield "No ratio: one of the two failed every time."
        return
    yield f"{_verdict_text(best)} (the better plain way, {best['plain']}, over {best['accelerated']})"
    for fast, ratios in summary["over_each_plain"].items():
        for plain, ratio in ratios.items():
            yield f"{plain:12} over {fast:18} {'-' if ratio is None else _ratio_text(ratio)}"
    if summary["control"] is not None:
        yield f"plain over itself: {_ratio_text(summary['control'])}, which is what noise looks like"


def _verdict_text(best: Mapping[str, Any]) -> str:
    """Return the verdict on the best speed-up in words: faster, slower, or why one cannot tell."""
    saved = duration(abs(best["saved_s"]))
    if best["verdict"] == "faster":
        return f"Faster: {_ratio_text(best)}, {saved} saved per call"
    if best["verdict"] == "slower":
        return f"Slower: {_ratio_text(best)}, {saved} lost per call"
    if best["pairs"] < FEWEST_PAIRS:
        return f"Cannot tell: {best['pairs']} pairs of runs are too few, {FEWEST_PAIRS} are needed: raise --repeats"
    if best["low"] <= 1.0 <= best["high"]:
        return f"Cannot tell: {_ratio_text(best)}, and the interval holds 1"
    return f"Cannot tell: {_ratio_text(best)}, and the original differs as much from itself"


def _ratio_text(ratio: Mapping[str, Any]) -> str:
    """Return a ratio of times with the ends of its interval and the number of pairs that it was computed from.

    With fewer than `FEWEST_PAIRS` pairs there is no interval: the text then says that they are too few.
    """
    if ratio["pairs"] < FEWEST_PAIRS:
        return f"{ratio['ratio']:.2f} ({ratio['pairs']} pairs, too few)"
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}, {ratio['pairs']} pairs)"


# ------------------------------------------------------------ the picture

_WIDTH, _HEIGHT = 600.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 20.0, 24.0, 120.0
_CURVES = {
    "plain, sync": "sync",
    "plain, async": "async",
    "plain again, async": "again",
    "accelerated, sync": "fast-sync",
    "accelerated, async": "fast-async",
}
"""CSS classes by variant."""
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


def write_plot(path: str, runs: Sequence[TimedRun], title: str) -> None:
    """Write the latencies as SVG, or as an HTML page, by the ending of `path`. Raise `OSError`.

    The file loads nothing else. Each curve is the share of a variant's calls that took no longer than a time.
    """
    picture = _draw_ecdf(runs, title)
    if path.endswith(".html"):
        picture = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head><body>{picture}</body></html>\n"
        )
    Path(path).write_text(picture, encoding="utf-8")


def _draw_ecdf(runs: Sequence[TimedRun], title: str) -> str:
    """Draw a step curve for each variant that succeeded at least once."""
    groups = group_by_variant(runs).items()
    times = {variant: sorted(run.seconds for run in group if not run.error) for variant, group in groups}
    times = {variant: values for variant, values in times.items() if values}
    longest = max((values[-1] for values in times.values()), default=1.0)
    body = [
        element("style", _STYLE),
        element("rect", x=0, y=0, width=_WIDTH, height=_HEIGHT, cls="page"),
        text(_LEFT, 16.0, title),
        _draw_grid(longest),
        *(_draw_curve(variant, values, longest) for variant, values in times.items()),
        *(_draw_label(variant, values, row) for row, (variant, values) in enumerate(times.items())),
    ]
    size = {"viewBox": f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", "width": _WIDTH, "height": _HEIGHT}
    return element("svg", "".join(body), xmlns="http://www.w3.org/2000/svg", role="img", aria_label=title, **size)


def _x(seconds: float, longest: float) -> float:
    return _LEFT + seconds / longest * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _draw_grid(longest: float) -> str:
    """Draw the grid with its labels: seconds from left to right, shares of calls from the bottom to the top."""
    parts = []
    for seconds in ticks(longest, 6):
        x = _x(seconds, longest)
        parts.append(element("line", x1=x, x2=x, y1=_y(0.0), y2=_y(1.0), cls="grid"))
        parts.append(text(x, _y(0.0) + 16, tick_label(seconds, longest), "dim", text_anchor="middle"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=_y(share), y2=_y(share), cls="grid"))
        parts.append(text(_LEFT - 8, _y(share) + 4, f"{share:.0%}", "dim", text_anchor="end"))
    return "".join(parts)


def _draw_curve(variant: str, ordered: Sequence[float], longest: float) -> str:
    """Draw the share of a variant's calls that had ended by each time, as steps. `ordered`: seconds, ascending."""
    points = [f"M{_x(0.0, longest):.1f} {_y(0.0):.1f}"]
    for number, seconds in enumerate(ordered, 1):
        points.append(f"H{_x(seconds, longest):.1f}V{_y(number / len(ordered)):.1f}")
    points.append(f"H{_x(longest, longest):.1f}")
    return element("path", d="".join(points), cls=f"curve {_CURVES.get(variant, '')}".rstrip())


def _draw_label(variant: str, times: Sequence[float], row: int) -> str:
    """Draw a line of the legend: the mark of a variant, and its median."""
    y = _HEIGHT - _BOTTOM + 40 + 15 * row
    css_class = f"mark {_CURVES.get(variant, '')}".rstrip()
    mark = element("line", x1=_LEFT, x2=_LEFT + 24, y1=y - 4, y2=y - 4, cls=css_class)
    return mark + text(_LEFT + 32, y, f"{variant}: median {duration(median(times))} of {len(times)}")
