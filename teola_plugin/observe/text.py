"""Traces for a terminal: plain characters, one line for each primitive."""

from __future__ import annotations

from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.observe.steps import Step, nested

LEGEND = ". waiting  # running  + first piece  x unused  * critical"
STEPS_LEGEND = "= a step of the object itself: a superstep, a node, a tool"


def duration(seconds: float) -> str:
    """Return a duration with three figures and a unit: `1.84 s`, `182 ms`, `41 µs`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        value = seconds * factor
        if abs(value) >= 0.9995:
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"


def shortened(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, cut in the middle, since ids differ at their ends."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :] if width > 1 else "…"[:width]


def timeline_text(trace: QueryTrace, width: int = 100) -> str:
    """Return the timeline of `trace`: a bar with its seconds for each primitive, in the order in which they began.

    Above them is a bar for each step of the original, if it reported any. No line is longer than `width` characters (60
    at least).
    """
    width = max(60, width)
    critical = {step.span for step in trace.critical_path()}
    spans = sorted(trace.spans, key=lambda s: (s.begin, s.queued))
    steps = [(_step_name(level, step), step) for level, step in nested(trace.steps)]
    longest = [*(len(s.primitive) for s in spans), *(len(name) for name, _ in steps)]
    names = min(max(longest, default=9) + 2, width // 3)
    kinds = [*(len(s.engine or "client") for s in spans), *(len(step.kind) for _, step in steps)]
    engines = min(max(kinds, default=6), width // 8)
    room = width - names - engines - 14
    total = duration(trace.seconds)
    lines = [_headline(trace), f"{'primitive':{names}} {'engine':{engines}}  0{total:>{room - 1}}"]

    def row(name: str, engine: str, bar: str, took: str) -> None:
        lines.append(f"{name:{names}} {shortened(engine, engines):{engines}} |{bar}| {shortened(took, 9):>9}")

    for name, step in steps:
        took = duration(step.seconds) if step.ended is not None else step.outcome
        row(shortened(name, names - 2), step.kind, _step_bar(step, trace, room), took)
    for span in spans:
        name = shortened(span.primitive, names - 2) + (" *" if span in critical else "")
        took = duration(span.seconds) if span.done is not None else span.outcome
        row(name, span.engine or "client", _bar(span, trace, room), took)
    return "\n".join([*lines, LEGEND, *([STEPS_LEGEND] if steps else [])])


def _step_name(level: int, step: Step) -> str:
    return "  " * min(level, 6) + step.name + (" (early)" if step.is_prefetched else "")


def _headline(trace: QueryTrace) -> str:
    """Return the first line about a trace: app and query, outcome, seconds, and what was left out."""
    name = shortened(f"{trace.app} {trace.query_id}".strip(), 32)
    left_out = f" ({trace.left_out} primitives left out)" if trace.left_out else ""
    left_out += f" ({trace.steps_left_out} steps left out)" if trace.steps_left_out else ""
    return f"{name}: {trace.outcome} in {duration(trace.seconds)}{left_out}"


def _cell(at: float, trace: QueryTrace, room: int) -> int:
    share = (at - trace.started) / trace.seconds if trace.seconds else 0.0
    return min(room - 1, max(0, int(share * room)))


def _step_bar(step: Step, trace: QueryTrace, room: int) -> str:
    """Return the characters of a step's bar; `room` is the width of the query in characters."""
    end = trace.ended if step.ended is None else step.ended
    begin = _cell(step.began, trace, room)
    until = room if end >= trace.ended else _cell(end, trace, room)
    return f"{' ' * begin}{'=' * max(1, until - begin)}".ljust(room)[:room]


def _bar(span: Span, trace: QueryTrace, room: int) -> str:
    """Return the characters of a primitive's bar: waiting, running, first piece. `room`: the query's width."""
    end = trace.ended if span.done is None else span.done
    queued = _cell(span.queued, trace, room)
    begin = _cell(span.begin if span.started is not None else end, trace, room)
    until = room if end >= trace.ended else _cell(end, trace, room)
    bar = [" "] * room
    bar[queued:begin] = "." * (begin - queued)
    until = max(until, begin + 1)
    bar[begin:until] = ("x" if span.unused else "#") * (until - begin)
    if span.first is not None:
        bar[_cell(span.first, trace, room)] = "+"
    return "".join(bar[:room])


def format_summary(trace: QueryTrace) -> str:
    """Return the figures of `trace` in a few lines."""
    s = trace.summary()
    lines = [
        _headline(trace),
        f"  primitives  {s['primitives']} ({s['critical_primitives']} on the critical path)",
        f"  critical    {duration(s['critical_seconds'])} running, {duration(s['critical_waited'])} waiting, "
        f"{duration(s['critical_code'])} your code",
        f"  work        {duration(s['work_seconds'])} of engines, {_times(s['work_seconds'], trace.seconds)} the total",
    ]
    if s["tokens"]:
        lines.append(f"  tokens      {s['tokens']}, {s['cached_tokens']} of them cached")
    if s["drafted_tokens"]:
        lines.append(f"  drafts      {s['drafted_tokens']} tokens, {s['accepted_tokens']} of them accepted")
    if s["wasted_primitives"]:
        lines.append(f"  unused      {s['wasted_primitives']} primitives, {s['wasted_tokens']} tokens")
    if trace.cost is not None:
        first, *more_lines = trace.cost.text().split("\n")
        lines += [f"  cost        {first}", *(f"{'':14}{line}" for line in more_lines)]
    for engine, busy in s["busy"].items():
        lines.append(f"  {shortened(engine, 10):11} busy {duration(busy)}, {_percent(busy, trace.seconds)}")
    if trace.passes:
        lines.append(f"  passes      {', '.join(s['passes']) or 'none fired'}")
    return "\n".join(lines)


def _times(part: float, total: float) -> str:
    return f"{part / total:.2f}x" if total else "no time"


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.0f} %" if total else "0 %"
