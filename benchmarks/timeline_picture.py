"""Draws docs/images/timeline.svg, and timeline-dark.svg: one query of the benchmark's advanced RAG, plain and
accelerated, on one scale.

The first case of `benchmarks.single_query`: engines are fakes that take as long as RTX 3090s, in wall-clock time.

    python -m benchmarks.timeline_picture docs/images/timeline.svg
"""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.rag import apps
from benchmarks.themes import MONO, SANS, THEMES, colours, painted, themed
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.observe import QueryTrace
from teola_plugin.observe.svg import element, family, family_label, text, timeline_svg
from teola_plugin.observe.text import duration

WIDTH, EDGE, HEAD = 1240, 16, 30
ANSWER_TOKENS = 10
STYLE = f"""
text {{ fill: INK; font: 12px {SANS} }} .title {{ font-weight: 600; font-size: 15px }}
.tick, .note {{ font-size: 10.5px; fill: DIM }} .engine {{ font-weight: 600 }} .accent {{ fill: ACCENT }}
.inside, .beside {{ font: 10.5px {MONO} }} .inside {{ fill: ON }}
.page {{ fill: PANEL }} .band {{ fill: BAND }} .wait {{ fill: LINE }} .gap {{ fill: LINE }}
.grid {{ stroke: LINE }} .end {{ stroke: DIM; stroke-dasharray: 3 3 }} .first {{ stroke: INK; stroke-width: 1.4 }}
.critical .run {{ stroke: ACCENT; stroke-width: 1.8 }} .unused .run {{ fill-opacity: .25 }}
.unused .inside {{ fill: INK }}
"""


async def both() -> tuple[QueryTrace, QueryTrace]:
    """Traces of the plain and of the accelerated chain, of each the median of three; their answers are equal."""
    bench = apps.fake_pool(profiles.rtx3090())
    given = {"question": apps.QUESTION, "document": apps.document()}
    runs: dict[str, list[QueryTrace | None]] = {"plain": [], "accelerated": []}
    async with bench.pool as pool:
        chain = apps.advanced_rag(bench, ANSWER_TOKENS)
        fast = accelerate(chain, app="accelerated")
        await fast.ainvoke({**given, "document": apps.document(chunks=16)})  # imports and first-use costs
        for _ in range(3):
            await asyncio.to_thread(bench.fresh)
            with pool.watching("plain") as watched:
                expected = await chain.ainvoke(given)
            runs["plain"].append(watched.trace.result(10))
            await asyncio.to_thread(bench.fresh)
            if await fast.ainvoke(given) != expected:
                raise SystemExit("the answers differ")
            runs["accelerated"].append(fast.last_trace())
    return in_order(middle(runs["plain"])), engines_only(middle(runs["accelerated"]))


def middle(traces: list[QueryTrace | None]) -> QueryTrace:
    """The one of median duration."""
    found = sorted((trace for trace in traces if trace is not None), key=lambda trace: trace.seconds)
    return found[len(found) // 2]


def in_order(trace: QueryTrace) -> QueryTrace:
    """The plain chain does one thing after the other: each call waited for all that had ended before it."""
    spans = [replace(s, parents=ended_before(trace, s.queued)) for s in trace.spans]
    return replace(trace, spans=tuple(spans))


def ended_before(trace: QueryTrace, at: float) -> tuple[str, ...]:
    return tuple(s.primitive for s in trace.spans if s.done is not None and s.done <= at)


def engines_only(trace: QueryTrace) -> QueryTrace:
    """Without what runs at the client and takes no time; whoever waited for it waited for what it waited for."""
    parents = {s.primitive: s.parents for s in trace.spans}
    client = {s.primitive for s in trace.spans if not s.engine}

    def engines(names: tuple[str, ...]) -> tuple[str, ...]:
        found = [(name,) if name not in client else engines(parents[name]) for name in names]
        return tuple(dict.fromkeys(name for some in found for name in some))

    kept = [replace(s, parents=engines(s.parents)) for s in trace.spans if s.primitive not in client]
    return replace(trace, spans=tuple(kept))


def picture(plain: QueryTrace, sooner: QueryTrace, theme: str) -> str:
    known, style = colours(theme), painted(STYLE, theme)
    kinds = list(dict.fromkeys(family(s.kind) for t in (plain, sooner) for s in t.spans))
    style += "".join(f".k-{kind} .run {{ fill: {known[kind]} }}\n" for kind in kinds)
    ratio = f"{plain.seconds / sooner.seconds:.2f} times faster, the same answer"
    titles = (f"plain: {duration(plain.seconds)}", f"accelerated: {duration(sooner.seconds)}, {ratio}")
    body, top = "", float(EDGE)
    for index, (trace, title) in enumerate(zip((plain, sooner), titles, strict=True)):
        drawn, height = placed(timeline_svg(trace, index, plain.seconds), top + HEAD - 8)
        body += text(8, top + 16, title, "title") + drawn
        top += HEAD + height
    body += legend(kinds, top + 6)
    whole: dict[str, Any] = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {top + 30:.0f}"}
    page = element("rect", width=WIDTH, height=top + 30, cls="page")
    return element("svg", element("style", style) + page + body, **whole) + "\n"


def placed(drawn: str, top: float) -> tuple[str, float]:
    """A drawing as a part of another one, and its height."""
    height = float(re.search(r'viewBox="0 0 \d+ (\d+)"', drawn)[1])  # type: ignore[index]
    drawn = re.sub(r' data-[pk]="[^"]*"', "", drawn)
    return drawn.replace("<svg ", f'<svg x="0" y="{top:.0f}" width="{WIDTH}" height="{height:.0f}" ', 1), height


def legend(kinds: list[str], top: float) -> str:
    parts, x = "", 140.0
    for kind in kinds:
        dot = element("rect", x=x, y=top, width=10, height=10, rx=2.5, cls="run")
        parts += element("g", dot, cls=f"k-{kind}") + text(x + 15, top + 9.5, family_label(kind), "tick")
        x += 40 + 6.5 * len(family_label(kind))
    return parts


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "timeline.svg")
    target.parent.mkdir(parents=True, exist_ok=True)
    traces = asyncio.run(both())
    for one in THEMES:
        themed(target, one).write_text(picture(*traces, one), encoding="utf-8")
