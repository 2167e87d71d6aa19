"""Traces as one self-contained HTML page: graph, timeline and critical path, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from teola_plugin.observe.critical_path import PathStep
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.svg import element, facts, family, family_label, graph_svg, step_facts, timeline_svg, words
from teola_plugin.observe.text import duration


@dataclass(frozen=True, slots=True)
class Runs:
    """At least one run of one thing, each with the seconds that it took."""

    name: str
    traces: tuple[QueryTrace, ...]
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the runs."""
        return median(self.times)

    @property
    def typical_trace(self) -> QueryTrace:
        """The trace of the run nearest to the median, the earlier one of two that are equally near."""
        middle = self.seconds
        return min(zip(self.times, self.traces, strict=True), key=lambda run: abs(run[0] - middle))[1]

    @property
    def description(self) -> str:
        """The number of runs and their range of seconds, in words; empty for a single run."""
        if len(self.times) == 1:
            return ""
        shortest, longest = duration(min(self.times)), duration(max(self.times))
        spread = f", {shortest} to {longest}" if shortest != longest else ""
        return f"median of {len(self.times)} runs{spread}"


def grouped(traces: Sequence[QueryTrace], labels: Sequence[str], seconds: Sequence[float]) -> list[Runs]:
    """Group the traces of one label as runs of one thing. One without a label is on its own, named after app or id.

    `seconds`: durations of the runs, if they were measured outside. Raises `ValueError` for too few of them.
    """
    if seconds and len(seconds) != len(traces):
        raise ValueError(f"{len(seconds)} seconds were given for {len(traces)} traces. Next: give one for each trace")
    times = [*seconds] or [trace.seconds for trace in traces]
    names = [*labels[: len(traces)], *_names(traces)[len(labels) :]]
    groups: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        groups.setdefault(name, []).append(number)
    return [
        Runs(name, tuple(traces[number] for number in group), tuple(times[number] for number in group))
        for name, group in groups.items()
    ]


def _names(traces: Sequence[QueryTrace]) -> list[str]:
    """Return different names for traces without labels.

    They are the names of the apps if all have different ones, else the ids of the queries, else numbered names.
    """
    for names in ([t.app for t in traces], [t.query_id for t in traces]):
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{t.app or t.query_id or 'query'} #{number}" for number, t in enumerate(traces, start=1)]


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
    """Return one page for `traces`, which share one time scale.

    Traces of one label are runs of one thing: the page has their median and their number, and draws the run nearest to
    the median. With several labels, the others are compared to the first: give the runs of the original first. Raises
    `ValueError` for too few labels or seconds.

    Args:
        traces: The traces.
        title: Title of the page.
        labels: Names of the traces; by default their apps or query ids.
        seconds: Durations of the runs, if they were measured outside.
        more: Further sections at the end: a title in plain text, and HTML that is safe.
    """
    traces = list(traces)
    groups = grouped(traces, labels, seconds)
    longest = max((runs.typical_trace.seconds for runs in groups), default=0.0)
    timelines = "".join(_timeline(runs, i, groups[0], longest) for i, runs in enumerate(groups))
    tooltips = _safe_json(_tooltips([runs.typical_trace for runs in groups]))
    parts = [
        _SHARED_MARKS,
        element("header", element("h1", escape(title)) + _subtitle(traces)),
        _comparison(groups) if len(groups) > 1 else "".join(_tiles(runs) for runs in groups),
        element("section", element("h2", "Timeline") + timelines + _timeline_legend(groups), cls="panel")
        if groups
        else "<p>No traces.</p>",
        *(_sections(runs.typical_trace, i, runs.name if len(groups) > 1 else "") for i, runs in enumerate(groups)),
        *(element("section", element("h2", escape(name)) + html, cls="panel") for name, html in more),
        '<div id="tip" hidden></div>',
        f'<script type="application/json" id="facts">{tooltips}</script>',
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
    """Return JSON that cannot end the script element in which it stands."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _tooltips(traces: Sequence[QueryTrace]) -> dict[str, list[tuple[str, str]]]:
    """Return the lines of tooltips: by span (`trace/number`) and step (`trace/s1`) for the timeline, by primitive
    (`trace:id`) for graph and table."""
    tooltips: dict[str, list[tuple[str, str]]] = {}
    for i, trace in enumerate(traces):
        steps = {step.id: step for step in trace.steps}
        for name, kind, engine, depth, _ in trace.view().nodes:
            tooltips[f"{i}:{name}"] = [
                ("", name),
                ("kind", words(kind)),
                ("engine", engine or "client"),
                ("depth", str(depth)),
                ("outcome", "not run"),
            ]
        for number, span in enumerate(trace.spans):
            lines = [("", span.primitive), *facts(span, trace.started, steps.get(span.step))]
            keys = (f"{i}/{number}", *(f"{i}:{name}" for name in (*span.also, span.primitive)))
            tooltips |= dict.fromkeys(keys, lines)
        for step in trace.steps:
            outer = steps[step.parent].label if step.parent in steps else ""
            tooltips[f"{i}/s{step.id}"] = [("", step.name), *step_facts(step, outer, trace.started)]
    return tooltips


def _subtitle(traces: Sequence[QueryTrace]) -> str:
    apps = list(dict.fromkeys(t.app for t in traces if t.app))
    ids = [t.query_id for t in traces]
    return element("p", escape(" · ".join([*apps, *ids[:3], *(["…"] if len(ids) > 3 else [])])), cls="sub")


def _tiles(runs: Runs) -> str:
    """Return the key figures of runs as tiles: times, primitives, tokens, and work that nobody used."""
    trace = runs.typical_trace
    figures, waited = trace.summary(), trace.waited_for()
    left_out = f", {trace.left_out} more left out" if trace.left_out else ""
    engines = sum(seconds for engine, seconds in waited.items() if engine not in ("queued", "code"))
    tiles = [
        ("total", duration(runs.seconds), runs.description or trace.outcome),
        ("waiting for engines", duration(engines), _share(engines, trace)),
        ("in their queues", duration(waited["queued"]), _share(waited["queued"], trace)),
        ("your code", duration(waited["code"]), _share(waited["code"], trace)),
        ("primitives", str(figures["primitives"]), f"{figures['critical_primitives']} on the critical path{left_out}"),
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


def _ratio(part: float, total: float) -> str:
    return f"{part / total:.2f}×" if total else "–"


def _comparison(groups: Sequence[Runs]) -> str:
    """Draw a bar for each label, with its speed compared to that of the first."""
    longest = max(runs.seconds for runs in groups) or 1.0
    rows = []
    for i, runs in enumerate(groups):
        bar = element("i", " ", style=f"width:{100 * runs.seconds / longest:.2f}%")
        description = element("small", runs.description) if runs.description else ""
        cells = element("th", escape(runs.name) + description) + element("td", bar, cls="bar")
        cells += element("td", duration(runs.seconds), cls="n")
        rows.append(element("tr", cells + element("td", _faster(runs, groups[0]) if i else "", cls="ratio")))
    return element("table", "".join(rows), cls="compare")


def _faster(runs: Runs, base: Runs) -> str:
    """Return how many times faster, or slower, runs were than the first ones; empty if a time is 0."""
    if not (runs.seconds and base.seconds):
        return ""
    ratio = base.seconds / runs.seconds
    return f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"


def _timeline(runs: Runs, index: int, base: Runs, longest: float) -> str:
    """Draw the timeline of the typical run, under a heading with its time. `longest`: seconds of the common scale."""
    trace = runs.typical_trace
    mark = element("span", _faster(runs, base), cls="badge") if index else ""
    which = f", the run nearest to the median of {len(runs.times)}" if runs.description else ""
    total = element("span", f"{duration(trace.seconds)}{which}", cls="total")
    head = element("h3", escape(runs.name) + total + mark)
    return head + element("div", timeline_svg(trace, index, longest), cls="scroll")


def _timeline_legend(groups: Sequence[Runs]) -> str:
    """Return the legend of the timelines, with the marks that occur in them."""
    traces = [runs.typical_trace for runs in groups]
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
    """Return graph, critical path, passes and texts of one trace."""
    suffix = element("span", escape(name), cls="of") if name else ""
    graph = element("h2", f"Graph{suffix}") + element("div", graph_svg(trace, index), cls="scroll")
    path = element("h2", f"What the answer waited for{suffix}") + path_section(trace, index)
    blocks = [element("section", graph + _graph_legend(trace), cls="panel")] if trace.view().nodes else []
    blocks.append(element("section", path, cls="panel"))
    if trace.passes or (trace.view().nodes and (trace.graph_text or trace.pgraph_text)):
        blocks.append(element("section", element("h2", f"Plan{suffix}") + _plan(trace), cls="panel"))
    return "".join(blocks)


def _graph_legend(trace: QueryTrace) -> str:
    """Return the legend of the graph, with the colours and lines that occur in it."""
    view = trace.view()
    items = [_swatch(name) for name in dict.fromkeys(family(node[1]) for node in view.nodes)]
    line = '<li><svg class="sample"><line class="edge {0}" x2="22" y1="7" y2="7"/></svg>{1}</li>'
    items.append(line.format("data", "data"))
    if any(kind == "order" for _, _, kind in view.edges):
        items.append(line.format("order", "order only"))
    if any(node[4] for node in view.nodes):
        items.append(line.format("speculative", "speculative"))
    return element("ul", "".join([*items, line.format("critical", "critical path")]), cls="legend")


def _plan(trace: QueryTrace) -> str:
    """Return the passes, each with its time if it changed the graph, and the texts of the graphs, folded."""
    chips = "".join(
        element(
            "li", f"{escape(name)}<b>{duration(seconds) if fired else 'nothing to do'}</b>", cls="on" if fired else ""
        )
        for name, fired, seconds in trace.passes
    )
    texts = [("e-graph", trace.graph_text), ("p-graph, before the passes", trace.pgraph_text)]
    folds = "".join(f"<details><summary>{k}</summary><pre>{escape(v)}</pre></details>" for k, v in texts if v)
    return (element("ul", chips, cls="passes") if chips else "") + folds


_MIN_SHARE = 0.005
"""Steps with a smaller share of the time are shown together."""
_HEADS = ("", "What", "Kind", "Engine", "Waited", "Ran", "Share", "")


def path_section(trace: QueryTrace, index: int) -> str:
    """Return the shares as one bar, and the steps as a table; both add up to the seconds of the query."""
    return _shares_bar(trace) + element("div", _table(trace, index), cls="scroll")


# ------------------------------------------------------------ shares


def shares(trace: QueryTrace) -> list[tuple[str, str, float]]:
    """Return (description, colour family, seconds) for the parts of the critical path, largest first."""
    by_part: dict[tuple[str, str], float] = {}
    for step in trace.critical_path():
        part = ("your code", "tool") if step.is_code else (_label(step), family(step.span.kind))
        by_part[part] = by_part.get(part, 0.0) + step.seconds + step.idle
        if step.waited:
            by_part["in queues", "queue"] = by_part.get(("in queues", "queue"), 0.0) + step.waited
    return sorted(((*part, seconds) for part, seconds in by_part.items()), key=lambda share: -share[2])


def _label(step: PathStep) -> str:
    """Return the description, in the bar of shares, of a critical path's step that is not user code.

    It names the kind of work of an engine. A step without an engine is the plan's own work between requests.
    """
    if not step.span.engine:
        return "glue of the plan"
    name = family(step.span.kind)
    return name if name != "control" else words(step.span.kind)


def _shares_bar(trace: QueryTrace) -> str:
    """Draw one bar of the parts of the critical path, and its legend with the seconds of each part."""
    if not trace.seconds:
        return ""
    parts, items = "", ""
    for description, look, seconds in shares(trace):
        share = 100 * seconds / trace.seconds
        parts += element("i", " ", cls=f"k-{look}", style=f"width:{share:.2f}%")
        if share >= 100 * _MIN_SHARE:
            text = f"{escape(description)}<b>{duration(seconds)}</b>{share:.0f} %"
            items += element("li", f'<i class="dot k-{look}"></i>{text}')
    return element("div", parts, cls="shares") + element("ul", items, cls="legend wide")


# ------------------------------------------------------------ steps


def _table(trace: QueryTrace, index: int) -> str:
    """Return the critical path as a table, with small steps in one row and the sums at the end."""
    path, total = trace.critical_path(), trace.seconds
    head = "".join(element("th", name) for name in _HEADS)
    large = [step for step in path if step.total >= _MIN_SHARE * total]
    rows = [_row(step, number, trace, index) for number, step in enumerate(large, start=1)]
    rest = [step for step in path if step.total < _MIN_SHARE * total]
    if rest:
        rows.append(_rest(rest, trace))
    sums = _seconds(sum(s.idle + s.waited for s in path), "waited") + _seconds(sum(s.seconds for s in path), "ran")
    foot = f'<tr><td class="n"></td><td class="id">total</td><td class="of"></td><td class="of"></td>{sums}'
    foot += '<td class="n share">100 %</td><td class="bar"></td></tr>'
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody><tfoot>{foot}</tfoot>"
    return element("table", body, cls="path")


def _row(step: PathStep, number: int, trace: QueryTrace, index: int) -> str:
    """Return a row of the table: one step of the critical path, its number, and its times."""
    span, tone = step.span, f"k-{family(step.span.kind)}"
    kind, engine = ("code", "") if step.is_code else (words(span.kind), span.engine or "client")
    cells = f'<td class="n dim">{number}</td><td class="id"><i class="dot {tone}"></i>{escape(span.primitive)}</td>'
    cells += f'<td class="of">{escape(kind)}</td><td class="of">{escape(engine)}</td>'
    cells += "".join(_figures(step.idle + step.waited, step.seconds, trace))
    where = f"{index}:{span.primitive}"
    return element("tr", cells, cls=tone, data_p=where, data_k=where)


def _rest(steps: list[PathStep], trace: QueryTrace) -> str:
    """Return one row for all steps that are too small for a row of their own."""
    name = f"{len(steps)} more, of less than {100 * _MIN_SHARE:g} % each"
    cells = f'<td class="n"></td><td class="id">{name}</td><td class="of"></td><td class="of"></td>'
    figures = _figures(sum(s.idle + s.waited for s in steps), sum(s.seconds for s in steps), trace)
    return element("tr", cells + "".join(figures), cls="rest")


def _figures(waited: float, ran: float, trace: QueryTrace) -> Iterator[str]:
    """Yield the cells for the time it waited, the time it ran, their share, and the bar of the share."""
    of = 100 / trace.seconds if trace.seconds else 0.0
    lead = element("i", " ", cls="lead", style=f"width:{waited * of:.1f}%") if waited * of > 0.05 else ""
    yield _seconds(waited, "waited")
    yield _seconds(ran, "ran")
    yield f'<td class="n share">{(waited + ran) * of:.0f} %</td>'
    yield element("td", lead + element("i", " ", style=f"width:{ran * of:.1f}%"), cls="bar")


def _seconds(value: float, label: str) -> str:
    is_positive = value > 1e-9
    return element("td", duration(value) if is_positive else "–", cls="n" if is_positive else "n none", data_l=label)
