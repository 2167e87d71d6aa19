"""Traces as one self-contained HTML page: graph, timeline and critical path, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from teola_plugin.observe.path_table import path_section
from teola_plugin.observe.runs import Runs, grouped
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.svg import element, facts, family, family_label, step_facts, words
from teola_plugin.observe.svg_graph import graph_svg
from teola_plugin.observe.svg_timeline import timeline_svg
from teola_plugin.observe.text import duration

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_SHARED_MARKS = """<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 .8 7 4 0 7.2z" class="head"/></marker>
<marker id="head-critical" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" orient="auto">
<path d="M0 .8 7 4 0 7.2z" class="head critical"/></marker>
<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line x1="0" y1="0" x2="0" y2="6" class="hatch"/></pattern></defs></svg>"""


def html_page(
    traces: Iterable[QueryTrace],
    title: str = "Query trace",
    *,
    labels: Sequence[str] = (),
    seconds: Sequence[float] = (),
    more: Sequence[tuple[str, str]] = (),
) -> str:
    """One page for `traces`, which share one time scale. `labels` names them; else their apps or query ids do.

    Traces of one label are runs of one thing: the page tells their median, and how many they are, and draws the run
    nearest to it. With several labels the first is what the others are compared to: give the plain runs first.
    `seconds`: how long each run took, where that was measured outside. `more`: sections that come behind the others, a
    title in plain text and HTML that is safe. Raises `ValueError` for too few labels or seconds.
    """
    found = list(traces)
    runs = grouped(found, labels, seconds)
    longest = max((one.shown.seconds for one in runs), default=0.0)
    timelines = "".join(_timeline(one, i, runs[0], longest) for i, one in enumerate(runs))
    parts = [
        _SHARED_MARKS,
        element("header", element("h1", escape(title)) + _subtitle(found)),
        _comparison(runs) if len(runs) > 1 else "".join(_tiles(one) for one in runs),
        element("section", element("h2", "Timeline") + timelines + _timeline_legend(runs), cls="panel")
        if runs
        else "<p>No traces.</p>",
        *(_sections(one.shown, i, one.name if len(runs) > 1 else "") for i, one in enumerate(runs)),
        *(element("section", element("h2", escape(name)) + html, cls="panel") for name, html in more),
        '<div id="tip" hidden></div>',
        f'<script type="application/json" id="facts">{_safe_json(_facts([one.shown for one in runs]))}</script>',
        f"<script>{_asset('page.js')}</script>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


def _asset(name: str) -> str:
    from importlib import resources

    return resources.files("teola_plugin.observe").joinpath(name).read_text(encoding="utf-8")


def _safe_json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _facts(traces: Sequence[QueryTrace]) -> dict[str, list[tuple[str, str]]]:
    """Tooltips: by span (`trace/number`) and step (`trace/s1`) for the timeline, by primitive (`trace:id`) for graph
    and table."""
    found: dict[str, list[tuple[str, str]]] = {}
    for i, trace in enumerate(traces):
        steps = {step.id: step for step in trace.steps}
        for name, kind, engine, depth, _ in trace.view().nodes:
            about = [
                ("kind", words(kind)),
                ("engine", engine or "client"),
                ("depth", str(depth)),
                ("outcome", "not run"),
            ]
            found[f"{i}:{name}"] = [("", name), *about]
        for number, span in enumerate(trace.spans):
            lines = [("", span.primitive), *facts(span, trace.started, steps.get(span.step))]
            keys = (f"{i}/{number}", *(f"{i}:{name}" for name in (*span.also, span.primitive)))
            found |= dict.fromkeys(keys, lines)
        for step in trace.steps:
            around = steps[step.parent].label if step.parent in steps else ""
            found[f"{i}/s{step.id}"] = [("", step.name), *step_facts(step, around, trace.started)]
    return found


def _subtitle(traces: Sequence[QueryTrace]) -> str:
    apps = list(dict.fromkeys(t.app for t in traces if t.app))
    ids = [t.query_id for t in traces]
    return element("p", escape(" · ".join([*apps, *ids[:3], *(["…"] if len(ids) > 3 else [])])), cls="sub")


def _tiles(runs: Runs) -> str:
    trace = runs.shown
    figures, waited = trace.summary(), trace.waited_for()
    lost = f", {trace.left_out} more left out" if trace.left_out else ""
    engines = sum(seconds for engine, seconds in waited.items() if engine not in ("queued", "code"))
    tiles = [
        ("total", duration(runs.seconds), runs.told or trace.outcome),
        ("waiting for engines", duration(engines), _share(engines, trace)),
        ("in their queues", duration(waited["queued"]), _share(waited["queued"], trace)),
        ("your code", duration(waited["code"]), _share(waited["code"], trace)),
        ("primitives", str(figures["primitives"]), f"{figures['critical_primitives']} on the critical path{lost}"),
        (
            "work of engines",
            duration(figures["work_seconds"]),
            f"{_ratio(figures['work_seconds'], trace.seconds)} the time taken",
        ),
    ]
    if figures["tokens"]:
        tiles.append(("tokens", f"{figures['tokens']:,}", f"{figures['cached_tokens']:,} cached"))
    if figures["drafted_tokens"]:
        tiles.append(("drafted tokens", f"{figures['drafted_tokens']:,}", f"{figures['accepted_tokens']:,} accepted"))
    if figures["wasted_primitives"]:
        tiles.append(("unused", str(figures["wasted_primitives"]), f"{figures['wasted_tokens']:,} tokens"))
    cells = (
        element("div", element("dt", k) + element("dd", escape(v)) + element("p", escape(note))) for k, v, note in tiles
    )
    return element("dl", "".join(cells), cls="tiles")


def _share(seconds: float, trace: QueryTrace) -> str:
    return f"{100 * seconds / trace.seconds:.0f} % of the answer's time" if trace.seconds else ""


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}×" if whole else "–"


def _comparison(found: Sequence[Runs]) -> str:
    """A bar for each, with how much faster than the first it was."""
    longest = max(runs.seconds for runs in found) or 1.0
    rows = []
    for i, runs in enumerate(found):
        bar = element("i", " ", style=f"width:{100 * runs.seconds / longest:.2f}%")
        told = element("small", runs.told) if runs.told else ""
        cells = element("th", escape(runs.name) + told) + element("td", bar, cls="bar")
        cells += element("td", duration(runs.seconds), cls="n")
        rows.append(element("tr", cells + element("td", _faster(runs, found[0]) if i else "", cls="ratio")))
    return element("table", "".join(rows), cls="compare")


def _faster(runs: Runs, base: Runs) -> str:
    if not (runs.seconds and base.seconds):
        return ""
    ratio = base.seconds / runs.seconds
    return f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"


def _timeline(runs: Runs, index: int, base: Runs, longest: float) -> str:
    trace = runs.shown
    mark = element("span", _faster(runs, base), cls="badge") if index else ""
    which = f", the run nearest to the median of {len(runs.times)}" if runs.told else ""
    total = element("span", f"{duration(trace.seconds)}{which}", cls="total")
    head = element("h3", escape(runs.name) + total + mark)
    return head + element("div", timeline_svg(trace, index, longest), cls="scroll")


def _timeline_legend(found: Sequence[Runs]) -> str:
    traces = [runs.shown for runs in found]
    spans = [s for t in traces for s in t.spans]
    items = [_swatch(name) for name in dict.fromkeys(family(s.kind) for s in spans)]
    items.append('<li><svg class="sample"><rect class="wait" y="4" width="22" height="6"/></svg>in a queue</li>')
    if any(s.first is not None for s in spans):
        items.append(
            '<li><svg class="sample"><line class="first" x1="11" x2="11" y1="0" y2="14"/></svg>first piece</li>'
        )
    items.append(
        '<li><svg class="sample"><rect class="key" x="1" y="1" width="20" height="12"/></svg>critical path</li>'
    )
    if any(t.steps for t in traces):
        items.append('<li><svg class="sample step"><rect class="run" width="22" height="14"/></svg>steps, tools</li>')
    if any(s.unused for s in spans):
        items.append(
            '<li><svg class="sample k-control unused"><rect class="run" width="22" height="14"/></svg>unused</li>'
        )
    return element("ul", "".join(items), cls="legend")


def _swatch(name: str) -> str:
    return f'<li><i class="dot k-{name}"></i>{family_label(name)}</li>'


def _sections(trace: QueryTrace, index: int, name: str) -> str:
    """Graph, critical path, passes and texts of one trace."""
    suffix = element("span", escape(name), cls="of") if name else ""
    graph = element("h2", f"Graph{suffix}") + element("div", graph_svg(trace, index), cls="scroll")
    path = element("h2", f"What the answer waited for{suffix}") + path_section(trace, index)
    blocks = [element("section", graph + _graph_legend(trace), cls="panel")] if trace.view().nodes else []
    blocks.append(element("section", path, cls="panel"))
    if trace.passes or (trace.view().nodes and (trace.graph_text or trace.pgraph_text)):
        blocks.append(element("section", element("h2", f"Plan{suffix}") + _plan(trace), cls="panel"))
    return "".join(blocks)


def _graph_legend(trace: QueryTrace) -> str:
    view = trace.view()
    items = [_swatch(name) for name in dict.fromkeys(family(node[1]) for node in view.nodes)]
    line = '<li><svg class="sample"><line class="edge {0}" x2="22" y1="7" y2="7"/></svg>{1}</li>'
    items.append(line.format("data", "data"))
    if any(kind == "order" for _, _, kind in view.edges):
        items.append(line.format("order", "order only"))
    if any(node[4] for node in view.nodes):
        items.append(line.format("tentative", "tentative"))
    return element("ul", "".join([*items, line.format("critical", "critical path")]), cls="legend")


def _plan(trace: QueryTrace) -> str:
    chips = "".join(
        element(
            "li", f"{escape(name)}<b>{duration(seconds) if fired else 'nothing to do'}</b>", cls="on" if fired else ""
        )
        for name, fired, seconds in trace.passes
    )
    texts = [("e-graph", trace.graph_text), ("p-graph, before the passes", trace.pgraph_text)]
    folds = "".join(f"<details><summary>{k}</summary><pre>{escape(v)}</pre></details>" for k, v in texts if v)
    return (element("ul", chips, cls="passes") if chips else "") + folds
