"""`fast.explain()`: what was understood, what it became, and what to expect. Before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from teola_plugin.graph import Graph, PrimitiveKind
from teola_plugin.passes import Optimised, PassContext, ready_times
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.draft import Traced

_K = PrimitiveKind


def explain(traced: Traced, optimised: Optimised | None, pool: EnginePool | None) -> str:
    """Plain text in sections; golden-testable for a given pool."""
    sections = [("What was understood", str(traced.report))]
    if optimised is None or pool is None:
        note = "No pool-backed object was found and none was bound: the original runs as it always did."
        return in_sections([*sections, ("Plan", note)])
    context = PassContext(pool.profiles)
    sections.append(("p-graph (the workflow as written)", str(optimised.source)))
    sections.append(("e-graph (what runs)", str(optimised.graph)))
    sections.append(("Passes", _passes(optimised)))
    sections.append(("Expected, engines idle", _gain(optimised, context)))
    advice = list(_advice(optimised.graph, context))
    if advice:
        sections.append(("Advice", "\n".join(advice)))
    return in_sections(sections)


def in_sections(sections: list[tuple[str, str]]) -> str:
    """Titles, and what stands below them."""
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in sections)


def _passes(optimised: Optimised) -> str:
    if not optimised.reports:
        return "none"
    names = dict.fromkeys(r.pass_name for r in optimised.reports)
    return "\n".join(f"{name:24} {'fired' if name in optimised.fired else 'nothing to do'}" for name in names)


def _gain(optimised: Optimised, context: PassContext) -> str:
    before, after = (_span(g, context) for g in (optimised.source, optimised.graph))
    if not before or not after:
        return "no estimate: the engines have no latency profile"
    return f"as written {before:.3f} s, now {after:.3f} s, ratio {before / after:.2f} (by the engines' profiles)"


def _span(graph: Graph | None, context: PassContext) -> float:
    return max(ready_times(graph, context).values(), default=0.0) if graph is not None else 0.0


def _advice(graph: Graph, context: PassContext) -> Iterator[str]:
    """What the author of the chain could change for more; never done for them, since it changes the prompts."""
    ready = ready_times(graph, context)
    for p in graph:
        profile = context.profile(p.engine)
        if p.kind not in (_K.PREFILLING, _K.FULL_PREFILLING) or not p.prompt or profile is None:
            continue
        times = [_part_time(p.input(part.variable), ready) if part.variable else 0.0 for part in p.prompt]
        late = next((i for i, t in enumerate(times) if t > 0.0 and t >= max(times)), None)
        behind = [part.variable for part, t in zip(p.prompt, times, strict=True) if part.variable and t < max(times)]
        behind = [name for name in behind if late is not None and _place(p.prompt, name) > late]
        if behind and profile.prefix_caching:
            early = sum(part.tokens for part in p.prompt[:late])
            yield (
                f"{p.id}: {', '.join(behind)} stand behind {p.prompt[late or 0].variable!r}, which is known last; "
                f"only about {early} tokens of this prompt can be prefilled early."
            )
    for p in graph:
        if p.kind is _K.OPAQUE:
            yield f"{p.id}: user code; what depends on it starts when it has run."


def _part_time(ref: object, ready: dict[str, float]) -> float:
    producer = getattr(ref, "producer", "")
    return ready.get(producer, 0.0)


def _place(prompt: tuple[object, ...], variable: str) -> int:
    return next(i for i, part in enumerate(prompt) if getattr(part, "variable", "") == variable)
