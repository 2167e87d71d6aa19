"""Helpers of all drawings: elements, colours by kind, labels that fit."""

from __future__ import annotations

import math
from html import escape

from teola_plugin.observe.spans import Span
from teola_plugin.observe.steps import Step
from teola_plugin.observe.text import duration, shortened

MONO = 0.61
"""Width of a character of the monospaced font, as a share of the font size."""

_FAMILIES = {
    "CHUNKING": "chunking",
    "EMBEDDING": "embedding",
    "INGESTION": "ingestion",
    "SEARCHING": "searching",
    "RERANKING": "reranking",
    "PREFILLING": "prefilling",
    "PARTIAL_PREFILLING": "prefilling",
    "FULL_PREFILLING": "prefilling",
    "DECODING": "decoding",
    "PARTIAL_DECODING": "decoding",
    "GENERATION": "generation",
    "TOOL": "tool",
    "OPAQUE": "tool",
    "CODE": "tool",
}


def family(kind: str) -> str:
    """Return the colour family of a kind; `control` for everything that only steers or reshapes."""
    return _FAMILIES.get(kind, "control")


def family_label(name: str) -> str:
    return {"tool": "tools, user code", "control": "control, glue"}.get(name, name)


def words(kind: str) -> str:
    return kind.lower().replace("_", " ")


def element(tag: str, body: str = "", **attributes: object) -> str:
    """Return an element. Attribute names have `_` for `-`, and `cls` for `class`. `body` is markup."""
    pairs = "".join(
        f' {"class" if name == "cls" else name.replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None and value != ""
    )
    return (
        f"<{tag}{pairs}>{body}</{tag}>" if body or tag not in ("rect", "path", "line", "circle") else f"<{tag}{pairs}/>"
    )


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value), quote=True)


def text(x: float, y: float, content: str, cls: str = "", **attributes: object) -> str:
    return element("text", escape(content), x=x, y=y, cls=cls, **attributes)


def fitted(label: str, width: float, size: float) -> str:
    """Return `label` cut to `width` pixels of monospaced text; empty if too little of it would be left."""
    room = int(width / (size * MONO))
    return "" if room < min(9, len(label)) else shortened(label, room)


def ticks(total: float, max_ticks: int) -> list[float]:
    """Return round values from 0 to `total`, in at most `max_ticks` steps."""
    if total <= 0:
        return [0.0]
    rough = total / max(1, max_ticks)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    return [i * step for i in range(int(total / step * 1.0001) + 1)]


def tick_label(value: float, total: float) -> str:
    factor, unit = (1.0, "s") if total >= 1 else (1e3, "ms") if total >= 1e-3 else (1e6, "µs")
    return f"{value * factor:g} {unit}" if value else "0"


def step_facts(step: Step, outer: str, origin: float) -> list[tuple[str, str]]:
    """Return the lines of the tooltip for a step inside the step `outer`."""
    lines = [("kind", step.kind)]
    for key, value in step.facts:
        lines.append((key, ("yes" if value else "no") if isinstance(value, bool) else str(value)))
    lines.append(("ran", duration(step.seconds) if step.ended is not None else "did not end"))
    lines.append(("from", f"{duration(max(0.0, step.began - origin))} on"))
    return [*lines, *([("in", outer)] if outer else []), ("outcome", step.outcome)]


def facts(span: Span, origin: float, step: Step | None = None) -> list[tuple[str, str]]:
    """Return the lines of the tooltip for a span of `step`, with times from the query's start."""
    lines = [
        ("kind", words(span.kind)),
        ("engine", " / ".join(filter(None, (span.engine or "client", span.instance)))),
        ("waited", duration(max(0.0, span.begin - span.queued))),
        ("ran", duration(span.seconds) if span.done is not None else "did not finish"),
        ("from", f"{duration(max(0.0, span.begin - origin))} on"),
    ]
    if span.first is not None:
        lines.append(("first piece", f"after {duration(max(0.0, span.first - span.begin))}"))
    if span.size != 1:
        lines.append(("requests", str(span.size)))
    if span.tokens:
        lines.append(("tokens", f"{span.tokens}, {span.cached} cached" if span.cached else str(span.tokens)))
    if span.written:
        lines.append(("tokens written", str(span.written)))
    if span.drafted:
        lines.append(("tokens drafted", f"{span.drafted}, {span.accepted} accepted"))
    if span.also:
        lines.append(("also", ", ".join(span.also)))
    if span.batch >= 0:
        lines.append(("batch", str(span.batch)))
    lines.append(("depth", str(span.depth)))
    if span.scope:
        lines.append(("scope", " / ".join(span.scope)))
    if step is not None:
        lines.append(("step", step.label))
    lines.append(("outcome", span.outcome + (", tentative" if span.tentative else "")))
    return lines + list(span.detail)
