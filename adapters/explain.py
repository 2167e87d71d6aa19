"""`fast.explain()`: three lines, for every framework; all that is known with `details=True`. Nothing runs for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.adapters.early_words import (
    NO_FORMS,
    AnswerForms,
    OwnCalls,
    asks,
    begins_early,
    component_of,
    listed,
    provisional,
)
from teola_plugin.graph import LLM_KINDS, Graph, InstancePath, Primitive, PrimitiveKind, is_impure
from teola_plugin.observe.spans import PROVISIONAL, QueryTrace, Span
from teola_plugin.observe.text import duration
from teola_plugin.passes import Optimised, PassContext, ready_times
from teola_plugin.passes.decoding_pipelining import held
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.report import WORDS, TraceReport

_K = PrimitiveKind
_SOON = 5.0
"""Seconds in which the trace of a call that is over is complete."""
_LLM = frozenset({PROVISIONAL, *(kind.name for kind in LLM_KINDS)})
NO_POOL = "no part of it can start before its place, and none is served by an engine"
COMPARE = "`teola compare` measures it"
_OWN = "not estimated, as your own models are not measured"


def ended_trace(last: Sequence[Any]) -> QueryTrace | None:
    """The trace of the last call, if there was one and it is over. `last`: the run, or nothing."""
    if not last or not (last[0].trace.done() or last[0].whole.closed):
        return None
    found: QueryTrace | None = last[0].trace.result(_SOON)
    return found


def left_for_form(last: Sequence[Any]) -> tuple[str, ...]:
    """Return the calls that the last query did not begin early, because their answers were streamed, by name."""
    ids = sorted(last[0].whole.left_to_original) if last else ()
    return tuple(dict.fromkeys(map(component_of, ids)))


def only_whole(names: Iterable[str]) -> str:
    """Say where calls begin in their place whose requests differ for whole and for streamed answers."""
    return (
        f"{listed(sorted(names))} start in their place where answers are streamed (stream, astream, events, a handler "
        "that streams), as no request is sent in both forms"
    )


def unplanned(early: Sequence[str], trace: QueryTrace | None = None) -> str:
    """For an object without a plan. `trace`: of its last call, where there was one."""
    if not early:
        return f"no gain: {NO_POOL}"
    if trace is not None and trace.outcome in ("done", "closed"):
        return f"faster; {_measured(None, trace)}"
    return f"faster; {_OWN}: {COMPARE}"


def expected(
    optimised: Optimised,
    early: Sequence[str],
    context: PassContext,
    trace: QueryTrace | None,
    own: OwnCalls | None = None,
    forms: AnswerForms = NO_FORMS,
    left: Sequence[str] = (),
) -> str:
    """For a plan: what the last call shows, else why there is no figure yet, or no gain.

    `left`: see `left_for_form`.
    """
    source = optimised.source
    waits = {} if own is None else own.one_by_one
    if source is None or not early:
        in_place = only_whole(forms.unknown) if forms.unknown else ""
        return f"no gain: {_one_by_one(waits) or in_place or _why_none(source)}"
    if left and trace is not None:
        return f"the last call took {duration(trace.seconds)}; {only_whole(left)}: {COMPARE}"
    text = _with_early_calls(optimised, source, context, trace, waits)
    return f"{text}; {only_whole(forms.whole)}" if forms.whole else text


def _with_early_calls(
    optimised: Optimised, source: Graph, context: PassContext, trace: QueryTrace | None, waits: Mapping[str, Any]
) -> str:
    if trace is not None and trace.outcome in ("done", "closed"):
        return _measured(None if waits else source, trace)
    if any(one.on_engine and one.engine not in context.profiles for p in source for one in held(p)):
        return f"faster; {_OWN}: {COMPARE}"
    return f"faster; not estimated before the first call, as the length of answers is not known: {COMPARE}"


def _why_none(source: Graph | None) -> str:
    """Why nothing begins early."""
    names = [] if source is None else list(dict.fromkeys(component_of(p.id) for p in source if asks(p)))
    code = [] if source is None else list(dict.fromkeys(component_of(p.id) for p in source if is_impure(p)))
    if not names:
        return "it asks no engine, model or retriever that is known before it runs"
    if len(names) == 1:
        return f"its only call ({names[0]}) has nothing to run beside"
    if code:
        return f"its calls ({listed(names)}) wait for each other or for your code ({listed(code)})"
    return f"each of its {len(names)} calls needs what the one before gives"


def _one_by_one(waits: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(type(obj).__name__ for obj in waits.values()))
    if not names:
        return ""
    verb, whose, them = ("answer", "their", "them") if len(names) > 1 else ("answers", "its", "it")
    return (
        f"{listed(names)} {verb} one call at a time, without async code of {whose} own; if several threads may call "
        f"{them} at once, say so: accelerate(..., concurrent=[{', '.join(names)}])"
    )


def _measured(source: Graph | None, trace: QueryTrace) -> str:
    """The last call, and how long its calls take in the order in which they are written (`source`, if that tells)."""
    took, plain = trace.seconds, None if source is None else as_written(source, trace.spans)
    if plain is None or not took:
        return f"the last call took {duration(took)}; {COMPARE}"
    return (
        f"{plain / took:.2f} times faster in the last call: {duration(took)}, its calls as written {duration(plain)} "
        f"(less where calls made at once slow each other down): {COMPARE}"
    )


# ------------------------------------------------------------ the calls of a trace, as they are written


def as_written(source: Graph, spans: Iterable[Span]) -> float | None:
    """Seconds that the measured calls take in the order of the p-graph; None where the trace does not tell.

    A call takes as long as its spans together, early beginnings of prompts too; the longest way through the p-graph
    counts. With user code, which has no spans, and with what the plain object asks for by itself (rows that it writes),
    the trace does not tell.
    """
    if any(is_impure(one) for p in source for one in held(p)):
        return None
    done = [s for s in spans if s.engine and s.done is not None and not (s.kind == PROVISIONAL and s.unused)]
    known = {component_of(one.id) for p in source for one in held(p) if one.on_engine}
    if any(component_of(s.primitive) not in known for s in done):
        return None
    seconds = {p.id: _seconds(p, done) for p in _lasts(source)}
    ready: dict[str, float] = {}
    for p in source:
        start = max((ready[name] for name in source.parents(p.id)), default=0.0)
        ready[p.id] = start + seconds.get(p.id, 0.0)
    return max(ready.values(), default=0.0) or None


def _lasts(source: Graph) -> list[Primitive]:
    """The last primitive of each component that asks for something: it stands for all of it."""
    return list({component_of(p.id): p for p in source if asks(p)}.values())


def _seconds(p: Primitive, spans: Sequence[Span]) -> float:
    if not p.holds_fragment:
        name = component_of(p.id)
        return _by_component(s for s in spans if "/" not in s.primitive and component_of(s.primitive) == name)
    inside: dict[str, list[Span]] = {}
    for span in spans:
        place = InstancePath(InstancePath(span.primitive).settled)
        outer = place.outermost
        if place.in_instance_of(p.id) or outer in _arms(p):
            inside.setdefault(outer, []).append(span)
    each = [_by_component(found) for found in inside.values()]
    at_once = p.kind is _K.MAP and not p.attributes.beside
    return max(each, default=0.0) if at_once else sum(each)


def _arms(p: Primitive) -> tuple[str, str]:
    return InstancePath(p.id).arm(True), InstancePath(p.id).arm(False)


def _by_component(spans: Iterable[Span]) -> float:
    """One component after the other, and of each what it does on one kind of engine after the other."""
    found: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        kind = "LLM" if span.kind in _LLM else span.kind  # a prefilling and its decodings are one request
        found.setdefault((component_of(span.primitive), kind), []).append(span)
    return sum(map(_together, found.values()))


def _together(spans: Iterable[Span]) -> float:
    """Seconds during which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for begin, done in sorted((s.begin, s.done) for s in spans if s.done is not None):
        total += max(0.0, done - max(begin, until))
        until = max(until, done)
    return total


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
