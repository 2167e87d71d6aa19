"""`fast.explain()`: three lines, for every framework; all that is known with `details=True`. Nothing runs for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from teola_plugin.adapters.early_words import (
    AnswerForms,
    OwnCalls,
    begins_early,
    component_of,
    listed,
    provisional,
)
from teola_plugin.adapters.expectations import expected, unplanned
from teola_plugin.graph import Graph, PrimitiveKind
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.passes import Optimised, PassContext, ready_times
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.report import WORDS, TraceReport

_K = PrimitiveKind
Section = tuple[str, str]
"""A title, and what stands below it."""
_LEGEND = (
    "(optimized: may run ahead; shared: your code, its calls of engines belong to the query; unchanged: as always)"
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain()` says."""

    report: TraceReport
    """Of the object's parts."""
    early: tuple[str, ...]
    """What begins before its place, a phrase each; empty where nothing is known to."""
    expect: str
    """What that is worth, and why it is not more. No figure that was not measured."""
    advice: tuple[str, ...] = ()
    """What the author could change for more, most important first."""
    sections: tuple[Section, ...] = ()
    """Everything else: titles, and what stands below them."""
    served: str = ""
    """What `engines=` has bound, and what it left alone."""

    def text(self, *, details: bool = False) -> str:
        """Three lines; with `details`, sections below them, each with a title."""
        change = f"; change first: {self.advice[0]}" if self.advice else ""
        lines = "\n".join(
            (
                f"Understood:    {_understood(self.report)}",
                f"Starts early:  {'; '.join(self.early) or 'nothing'}",
                f"Expect:        {self.expect}{change}",
            )
        )
        understood = ("What was understood", f"{self.report}\n{_LEGEND}")
        advice = ("Advice", "\n".join(self.advice))
        told = f"{lines}\n\n{in_sections((understood, *self.sections, advice))}" if details else lines
        return told + self.served


def explain(
    traced: TraceResult,
    optimised: Optimised | None,
    pool: EnginePool | None,
    *,
    trace: QueryTrace | None = None,
    own: OwnCalls | None = None,
    more: Sequence[str] = (),
    left: Sequence[str] = (),
) -> Explanation:
    """Of an object that is planned as a whole. `trace`: of its last call, where there was one; `own`: how it asks
    objects of the user's own; `more`: phrases for what begins early by no plan; `left`: what the last call left in its
    place, see `left_for_form`.
    """
    if optimised is None or pool is None:
        return Explanation(traced.report, tuple(more), unplanned(more, trace))
    context = PassContext(pool.profiles)
    forms = AnswerForms.of(optimised.graph, pool)
    early = (*begins_early(optimised, own, forms), *more)
    advice = tuple(dict.fromkeys(_advice(optimised.graph, context)))
    sections = (
        ("p-graph (the workflow as written)", str(optimised.source)),
        ("e-graph (what runs)", str(optimised.graph)),
        ("Passes", _passes(optimised)),
        ("Provisional answers", "\n".join(provisional(optimised.graph))),
        ("Drafts", "\n".join(_drafts(optimised.graph, context))),
    )
    return Explanation(
        traced.report, early, expected(optimised, early, context, trace, own, forms, left), advice, sections
    )


def _understood(report: TraceReport) -> str:
    """E.g. `5 parts: 4 optimized, 1 unchanged (RunnableLambda)`."""
    told, parts = [], dict.fromkeys((row.path, row.class_name, row.level) for row in report)
    for level, word in WORDS.items():
        names = [name for _, name, at in parts if at == level]
        which = "" if level == "lowered" else f" ({listed(list(dict.fromkeys(names)))})"
        told += [f"{len(names)} {word}{which}"] if names else []
    return f"{len(parts)} part{'' if len(parts) == 1 else 's'}: {', '.join(told)}" if told else "no parts"


def in_sections(sections: Iterable[Section]) -> str:
    """Titles, and what stands below them; without those that have nothing below them."""
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in sections if body)


def _passes(optimised: Optimised) -> str:
    if not optimised.reports:
        return "none"
    names = dict.fromkeys(r.pass_name for r in optimised.reports)
    return "\n".join(f"{name:24} {'fired' if name in optimised.fired else 'nothing to do'}" for name in names)


def _drafts(graph: Graph, context: PassContext) -> Iterator[str]:
    """Where those of each answer come from, likeliest first."""
    for p in graph:
        profile = context.profile(p.engine)
        answers = p.kind in (_K.PREFILLING, _K.FULL_PREFILLING) and not p.attributes.provisional
        if not answers or profile is None or not profile.drafts:
            continue
        named = p.attributes.drafts
        given = [f"{one.variable}, {one.what}" if one.variable else one.what for one in named]
        given = list(dict.fromkeys(given))
        sources = "; ".join([*given, "its own prompt and text", "recent outputs of the app and tenant"])
        yield f"{component_of(p.id)} (up to {profile.drafts} tokens at a time, if it is greedy): {sources}"


def _advice(graph: Graph, context: PassContext) -> Iterator[str]:
    """What the author of the chain could change for more; never done for them, since it changes the prompts."""
    ready = ready_times(graph, context)
    for p in graph:
        profile = context.profile(p.engine)
        answers = p.kind in (_K.PREFILLING, _K.FULL_PREFILLING) and not p.attributes.provisional
        if not answers or not p.prompt or profile is None:
            continue
        times = [_part_time(p.input(part.variable), ready) if part.variable else 0.0 for part in p.prompt]
        late = next((i for i, t in enumerate(times) if t > 0.0 and t >= max(times)), None)
        behind = [part.variable for part, t in zip(p.prompt, times, strict=True) if part.variable and t < max(times)]
        behind = [name for name in behind if late is not None and _place(p.prompt, name) > late]
        if behind and profile.prefix_caching:
            early = sum(part.tokens for part in p.prompt[:late])
            yield (
                f"in the prompt of {component_of(p.id)}, {listed(behind)} stand{'' if len(behind) > 1 else 's'} behind "
                f"{p.prompt[late or 0].variable}, which is known last: only about {early} tokens can be prefilled early"
            )
    for p in graph:
        if p.kind is _K.OPAQUE:
            yield f"{p.id} is user code: what depends on it starts when it has run"


def _part_time(ref: object, ready: dict[str, float]) -> float:
    producer = getattr(ref, "producer", "")
    return ready.get(producer, 0.0)


def _place(prompt: tuple[object, ...], variable: str) -> int:
    return next(i for i, part in enumerate(prompt) if getattr(part, "variable", "") == variable)
