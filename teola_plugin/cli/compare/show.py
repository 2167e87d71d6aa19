"""What `teola compare` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from teola_plugin.cli.compare.figures import by_way
from teola_plugin.cli.compare.intervals import FEWEST
from teola_plugin.observe.text import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from teola_plugin.cli.compare.measure import Run

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = ("median", "p90", "p99", "min", "max")
_SAID = {
    "equal": "equal: every accelerated answer is the plain object's",
    "different": "DIFFERENT where the plain object agrees with itself: this is a bug, please report it",
    "undecided": "undecided: the plain object does not give the same answer every time, so a difference of the "
    "accelerated one proves nothing. Try temperature 0, a seed, or other inputs",
}
_SHOWN = 10


def show(console: Console, found: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Verdicts, latencies as table and picture, time to first token, where the time went, waste, advice."""
    console.rule("Answers")
    _answers(console, found["equality"])
    for error in found["errors"]:
        console.print(f"raised: {error}", markup=False, highlight=False)
    console.rule("Latency")
    console.print(f"sync and async: {found['entries']} of a {found['kind']}", markup=False, highlight=False)
    console.print(_table(found["latency_s"]))
    _line(console, strips(runs, max(20, min(console.width, 110) - 40)))
    console.rule("How many times faster")
    _line(console, "\n".join(_ratios(found)))
    if found["time_to_first_token_s"]:
        console.rule("Time to first token")
        console.print(_table(found["time_to_first_token_s"]))
        if found["first_token_speedup"] is not None:
            _line(console, f"plain over accelerated: {_ratio(found['first_token_speedup'])}")
    if found["where_the_time_went"]:
        console.rule("Where the time of the accelerated calls went")
        _line(console, _bars(found["where_the_time_went"]))
        _line(console, _waste(found["wasted"]))
    if found["advice"] or found["bindings"]:
        console.rule("What would help")
        _line(console, "\n".join(f"* {line}" for line in found["advice"]))
    if found["bindings"]:
        _line(console, '* Engines can serve your models: --engines auto tries it, accelerate(..., engines="auto") or')
        lines = "\n".join(f"    {line}" for line in found["bindings"])
        console.print(lines, markup=False, highlight=False, soft_wrap=True)


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _answers(console: Console, equality: Mapping[str, Any]) -> None:
    console.print(_SAID[equality["state"]], style="bold", highlight=False)
    rows = equality["inputs"]
    odd = [row for row in rows if row["state"] != "equal"]
    _line(console, f"{len(rows) - len(odd)} of {len(rows)} inputs: equal")
    for row in odd[:_SHOWN]:
        _line(console, f"line {row['line']}: {row['state']}: {row['detail']}")
    if len(odd) > _SHOWN:
        _line(console, f"... and {len(odd) - _SHOWN} more (--json has all)")


def _table(latency: Mapping[str, Mapping[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    failed = any(figures["failed"] for figures in latency.values())
    table = Table("way", *_COLUMNS, "runs", *(["failed"] if failed else []), box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.no_wrap, column.justify = True, "right" if column.header != "way" else "left"
    for way, figures in latency.items():
        times = ("-" if figures[name] is None else duration(figures[name]) for name in _COLUMNS)
        table.add_row(way, *times, str(figures["n"]), *([str(figures["failed"] or "")] if failed else []))
    return table


def strips(runs: Sequence[Run], width: int) -> str:
    """How often calls took how long: one line a way, all on one scale, the darkest place where most calls are."""
    times = {way: [r.seconds for r in found if not r.raised] for way, found in by_way(runs).items()}
    every = [seconds for found in times.values() for seconds in found]
    if not every:
        return ""
    low, high = min(every), max(every)
    step = (high - low) / width or 1.0
    lines = []
    for way, found in times.items():
        counts = [0] * width
        for seconds in found:
            counts[min(width - 1, int((seconds - low) / step))] += 1
        most = max(counts) or 1
        lines.append(f"{way:24}|{''.join(_BLOCKS[-(-n * 8 // most)] for n in counts)}|")
    scale = f"{duration(low)}{duration(high):>{width - len(duration(low))}}"
    return "\n".join([*lines, f"{'':25}{scale}"])


def _ratios(found: Mapping[str, Any]) -> Iterator[str]:
    """The verdict, every plain way over every accelerated one, and the control."""
    best = found["speedup"]
    if best is None:
        yield "No ratio: one of the two never ended well."
        return
    yield f"{_verdict(best)} (the better plain way, {best['plain']}, over {best['accelerated']})"
    for fast, over in found["over_each_plain"].items():
        for plain, ratio in over.items():
            yield f"{plain:12} over {fast:18} {'-' if ratio is None else _ratio(ratio)}"
    if found["control"] is not None:
        yield f"plain over itself: {_ratio(found['control'])}, which is what noise looks like"


def _verdict(best: Mapping[str, Any]) -> str:
    saved = duration(abs(best["saved_s"]))
    if best["verdict"] == "faster":
        return f"Faster: {_ratio(best)}, {saved} saved per call"
    if best["verdict"] == "slower":
        return f"Slower: {_ratio(best)}, {saved} lost per call"
    if best["pairs"] < FEWEST:
        return f"Cannot tell: {best['pairs']} pairs of runs say nothing, {FEWEST} are needed: raise --repeats"
    if best["low"] <= 1.0 <= best["high"]:
        return f"Cannot tell: {_ratio(best)}, and the interval holds 1"
    return f"Cannot tell: {_ratio(best)}, and the plain object differs as much from itself"


def _ratio(ratio: Mapping[str, Any]) -> str:
    if ratio["pairs"] < FEWEST:
        return f"{ratio['ratio']:.2f} ({ratio['pairs']} pairs, too few)"
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}, {ratio['pairs']} pairs)"


def _bars(shares: Mapping[str, float]) -> str:
    wide = max(map(len, shares))
    return "\n".join(
        f"{name:{wide}} {share:6.1%} {'█' * round(40 * min(1.0, share))}" for name, share in shares.items()
    )


def _waste(wasted: Mapping[str, Any]) -> str:
    return (
        f"Begun and not used by anybody: {wasted['primitives']} primitives, {wasted['tokens']} tokens "
        f"in {wasted['calls']} calls."
    )
