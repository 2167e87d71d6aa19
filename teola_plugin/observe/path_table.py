"""The critical path on the page: which share of the time the answer waited for what, and step by step."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from teola_plugin.observe.critical_path import PathStep
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.svg import element, family, words
from teola_plugin.observe.text import duration

_LEAST = 0.005
"""Steps with a smaller share of the time are put together."""
_HEADS = ("", "What", "Kind", "Engine", "Waited", "Ran", "Share", "")


def path_section(trace: QueryTrace, index: int) -> str:
    """The shares as one bar, and the steps as a table; both add up to the seconds of the query."""
    return _bar(trace) + element("div", _table(trace, index), cls="scroll")


# ------------------------------------------------------------ shares


def shares(trace: QueryTrace) -> list[tuple[str, str, float]]:
    """Return (description, colour family, seconds) for the parts of the critical path, largest first."""
    found: dict[tuple[str, str], float] = {}
    for step in trace.critical_path():
        what = ("your code", "tool") if step.is_code else (_label(step), family(step.span.kind))
        found[what] = found.get(what, 0.0) + step.seconds + step.idle
        if step.waited:
            found["in queues", "queue"] = found.get(("in queues", "queue"), 0.0) + step.waited
    return sorted(((*what, seconds) for what, seconds in found.items()), key=lambda one: -one[2])


def _label(step: PathStep) -> str:
    if not step.span.engine:
        return "glue of the plan"
    name = family(step.span.kind)
    return name if name != "control" else words(step.span.kind)


def _bar(trace: QueryTrace) -> str:
    if not trace.seconds:
        return ""
    parts, items = "", ""
    for what, look, seconds in shares(trace):
        share = 100 * seconds / trace.seconds
        parts += element("i", " ", cls=f"k-{look}", style=f"width:{share:.2f}%")
        if share >= 100 * _LEAST:
            told = f"{escape(what)}<b>{duration(seconds)}</b>{share:.0f} %"
            items += element("li", f'<i class="dot k-{look}"></i>{told}')
    return element("div", parts, cls="shares") + element("ul", items, cls="legend wide")


# ------------------------------------------------------------ steps


def _table(trace: QueryTrace, index: int) -> str:
    path, total = trace.critical_path(), trace.seconds
    head = "".join(element("th", name) for name in _HEADS)
    shown = [step for step in path if step.total >= _LEAST * total]
    rows = [_row(step, number, trace, index) for number, step in enumerate(shown, start=1)]
    rest = [step for step in path if step.total < _LEAST * total]
    if rest:
        rows.append(_rest(rest, trace))
    sums = _seconds(sum(s.idle + s.waited for s in path), "waited") + _seconds(sum(s.seconds for s in path), "ran")
    foot = f'<tr><td class="n"></td><td class="id">total</td><td class="of"></td><td class="of"></td>{sums}'
    foot += '<td class="n share">100 %</td><td class="bar"></td></tr>'
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody><tfoot>{foot}</tfoot>"
    return element("table", body, cls="path")


def _row(step: PathStep, number: int, trace: QueryTrace, index: int) -> str:
    span, tone = step.span, f"k-{family(step.span.kind)}"
    kind, engine = ("code", "") if step.is_code else (words(span.kind), span.engine or "client")
    cells = f'<td class="n dim">{number}</td><td class="id"><i class="dot {tone}"></i>{escape(span.primitive)}</td>'
    cells += f'<td class="of">{escape(kind)}</td><td class="of">{escape(engine)}</td>'
    cells += "".join(_figures(step.idle + step.waited, step.seconds, trace))
    where = f"{index}:{span.primitive}"
    return element("tr", cells, cls=tone, data_p=where, data_k=where)


def _rest(steps: list[PathStep], trace: QueryTrace) -> str:
    name = f"{len(steps)} more, of less than {100 * _LEAST:g} % each"
    cells = f'<td class="n"></td><td class="id">{name}</td><td class="of"></td><td class="of"></td>'
    figures = _figures(sum(s.idle + s.waited for s in steps), sum(s.seconds for s in steps), trace)
    return element("tr", cells + "".join(figures), cls="rest")


def _figures(waited: float, ran: float, trace: QueryTrace) -> Iterator[str]:
    """The cells of what it waited and ran, of its share, and the bar of that."""
    of = 100 / trace.seconds if trace.seconds else 0.0
    lead = element("i", " ", cls="lead", style=f"width:{waited * of:.1f}%") if waited * of > 0.05 else ""
    yield _seconds(waited, "waited")
    yield _seconds(ran, "ran")
    yield f'<td class="n share">{(waited + ran) * of:.0f} %</td>'
    yield element("td", lead + element("i", " ", style=f"width:{ran * of:.1f}%"), cls="bar")


def _seconds(value: float, what: str) -> str:
    some = value > 1e-9
    return element("td", duration(value) if some else "–", cls="n" if some else "n none", data_l=what)
