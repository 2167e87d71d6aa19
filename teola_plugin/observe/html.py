"""Traces as one self-contained HTML page: graph, timeline and critical path, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from teola_plugin.observe.spans import PathStep, QueryTrace
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


def html_page(traces: Iterable[QueryTrace], title: str = "Query trace", *, labels: Sequence[str] = ()) -> str:
    """One page for `traces`, which share one time scale. `labels` names them; else their apps or query ids do.

    With several traces the first is what the others are compared to: give the plain run first.
    """
    found = list(traces)
    names = [*labels[: len(found)], *_names(found)[len(labels) :]]
    longest = max((t.seconds for t in found), default=0.0)
    timelines = "".join(_timeline(t, i, names[i], found[0], longest) for i, t in enumerate(found))
    parts = [
        _SHARED_MARKS,
        element("header", element("h1", escape(title)) + _subtitle(found)),
        _comparison(found, names) if len(found) > 1 else "".join(_tiles(t) for t in found),
        element("section", element("h2", "Timeline") + timelines + _timeline_legend(found), cls="panel")
        if found
        else "<p>No traces.</p>",
        *(_sections(t, i, names[i] if len(found) > 1 else "") for i, t in enumerate(found)),
        '<div id="tip" hidden></div>',
        f'<script type="application/json" id="facts">{_safe_json(_facts(found))}</script>',
        f"<script>{_asset('page.js')}</script>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
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


def _names(traces: Sequence[QueryTrace]) -> list[str]:
    apps = [t.app for t in traces]
    return apps if all(apps) and len(set(apps)) == len(apps) else [t.query_id for t in traces]


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
            found[f"{i}/{number}"] = found[f"{i}:{span.primitive}"] = lines
        for step in trace.steps:
            around = steps[step.parent].label if step.parent in steps else ""
            found[f"{i}/s{step.id}"] = [("", step.name), *step_facts(step, around, trace.started)]
    return found


def _subtitle(traces: Sequence[QueryTrace]) -> str:
    apps = list(dict.fromkeys(t.app for t in traces if t.app))
    ids = [t.query_id for t in traces]
    return element("p", escape(" · ".join([*apps, *ids[:3], *(["…"] if len(ids) > 3 else [])])), cls="sub")


def _tiles(trace: QueryTrace) -> str:
    figures = trace.summary()
    waited = figures["critical_waited"]
    lost = f", {trace.left_out} more left out" if trace.left_out else ""
    tiles = [
        ("total", duration(trace.seconds), trace.outcome),
        ("primitives", str(figures["primitives"]), f"{figures['critical_primitives']} on the critical path{lost}"),
        (
            "work",
            duration(figures["work_seconds"]),
            f"{_ratio(figures['work_seconds'], trace.seconds)} the time taken",
        ),
        ("waiting", duration(waited), "on the critical path"),
    ]
    if figures["tokens"]:
        tiles.append(("tokens", f"{figures['tokens']:,}", f"{figures['cached_tokens']:,} cached"))
    if figures["wasted_primitives"]:
        tiles.append(("unused", str(figures["wasted_primitives"]), f"{figures['wasted_tokens']:,} tokens"))
    cells = (
        element("div", element("dt", k) + element("dd", escape(v)) + element("p", escape(note))) for k, v, note in tiles
    )
    return element("dl", "".join(cells), cls="tiles")


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}×" if whole else "–"


def _comparison(traces: Sequence[QueryTrace], names: Sequence[str]) -> str:
    """A bar for each trace, with how much sooner than the first it ended."""
    longest = max(t.seconds for t in traces) or 1.0
    rows = []
    for i, (trace, name) in enumerate(zip(traces, names, strict=True)):
        bar = element("i", " ", style=f"width:{100 * trace.seconds / longest:.2f}%")
        cells = element("th", escape(name)) + element("td", bar, cls="bar")
        cells += element("td", duration(trace.seconds), cls="n")
        rows.append(element("tr", cells + element("td", _sooner(trace, traces[0]) if i else "", cls="ratio")))
    return element("table", "".join(rows), cls="compare")


def _sooner(trace: QueryTrace, base: QueryTrace) -> str:
    if not (trace.seconds and base.seconds):
        return ""
    ratio = base.seconds / trace.seconds
    return f"{ratio:.2f}× sooner" if ratio >= 1 else f"{1 / ratio:.2f}× later"


def _timeline(trace: QueryTrace, index: int, name: str, base: QueryTrace, longest: float) -> str:
    mark = element("span", _sooner(trace, base), cls="badge") if index else ""
    head = element("h3", escape(name) + element("span", duration(trace.seconds), cls="total") + mark)
    return head + element("div", timeline_svg(trace, index, longest), cls="scroll")


def _timeline_legend(traces: Sequence[QueryTrace]) -> str:
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
    path = element("h2", f"Critical path{suffix}") + element("div", _path_table(trace, index), cls="scroll")
    blocks = [element("section", graph + _graph_legend(trace), cls="panel")] if trace.view().nodes else []
    blocks.append(element("section", path, cls="panel"))
    if trace.passes or trace.graph_text or trace.pgraph_text:
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


def _path_table(trace: QueryTrace, index: int) -> str:
    path = trace.critical_path()
    head = "".join(element("th", name) for name in ("", "Primitive", "Kind", "Engine", "Waited", "Ran", "Share", ""))
    rows = [_path_row(step, number, trace, index) for number, step in enumerate(path, start=1)]
    after = max(0.0, trace.seconds - sum(step.total for step in path))
    if after > 0.001 * trace.seconds:
        cells = "<td></td><td>after the last primitive</td><td></td><td></td><td></td>"
        rows.append(element("tr", cells + _figures(after, after, trace), cls="rest"))
    foot = f"<tr><td></td><td>total</td><td></td><td></td>{_seconds(sum(s.idle + s.waited for s in path))}"
    foot += f'{_seconds(sum(s.seconds for s in path) + after)}<td class="n">100 %</td><td></td></tr>'
    return (
        f'<table class="path"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody><tfoot>{foot}</tfoot></table>'
    )


def _path_row(step: PathStep, number: int, trace: QueryTrace, index: int) -> str:
    span, tone = step.span, f"k-{family(step.span.kind)}"
    dot = f'<i class="dot {tone}"></i>'
    cells = f'<td class="n dim">{number}</td><td class="id">{dot}{escape(span.primitive)}</td>'
    cells += f"<td>{escape(words(span.kind))}</td><td>{escape(span.engine or 'client')}</td>"
    cells += _seconds(step.idle + step.waited) + _figures(step.seconds, step.total, trace)
    where = f"{index}:{span.primitive}"
    return element("tr", cells, cls=tone, data_p=where, data_k=where)


def _figures(seconds: float, total: float, trace: QueryTrace) -> str:
    share = 100 * total / trace.seconds if trace.seconds else 0.0
    ran = share * seconds / total if total else 0.0
    bar = element("i", " ", cls="lead", style=f"width:{share - ran:.1f}%") if share - ran > 0.05 else ""
    bar += element("i", " ", style=f"width:{ran:.1f}%")
    return f'{_seconds(seconds)}<td class="n">{share:.0f} %</td><td class="bar">{bar}</td>'


def _seconds(value: float) -> str:
    return f'<td class="n">{duration(value) if value > 1e-9 else "–"}</td>'


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
