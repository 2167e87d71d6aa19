"""`fast.explain()`: three lines, for every framework; all that is known with `details=True`. Nothing runs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.adapters.plan_report import CallRow, Explanation, OwnCalls, PlanReport, Reason, Status, leaves_of
from teola_plugin.adapters.plan_summary import (
    NO_FORMS,
    AnswerForms,
    asks,
    component_of,
    describe_gains,
    listed,
    lookahead_starts,
    prefetch_starts,
    runs_user_code,
    speculative_names,
)
from teola_plugin.graph import LLM_KINDS, Graph, InstancePath, Primitive, PrimitiveKind, Role, is_impure
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.observe.steps import PROVIDER
from teola_plugin.observe.text import duration
from teola_plugin.passes import Optimised, PassContext, ready_times
from teola_plugin.passes.decoding_pipelining import leaf_primitives
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.draft import CreatedModel, TraceResult
from teola_plugin.tracer.leaf import is_user_code

_K = PrimitiveKind
_TRACE_TIMEOUT_S = 5.0
"""Timeout, in seconds, for the trace of an ended call to become complete."""
_LLM = frozenset(kind.name for kind in LLM_KINDS)
NO_POOL = "no part of it can start sooner or is served by an engine"
COMPARE = "`teola compare` measures it"
NOT_MEASURED = "not known yet: your own models have not been measured"


def ended_trace(last: Sequence[Any]) -> QueryTrace | None:
    """Return the trace of the last call, if there was one and it has ended well. `last`: the run, or nothing.

    None for a call that still runs, was cancelled or failed. It waits for at most `_TRACE_TIMEOUT_S` seconds, since the
    trace of a call that was closed a moment ago may still be put together.
    """
    if not last or not (last[0].trace.done() or last[0].query_run.closed):
        return None
    trace: QueryTrace | None = last[0].trace.result(_TRACE_TIMEOUT_S)
    return trace if trace is not None and trace.outcome in ("done", "closed") else None


def left_for_form(last: Sequence[Any]) -> tuple[str, ...]:
    """Return the calls that the last query did not begin early, because their answers were streamed, by name."""
    ids = sorted(last[0].query_run.left_to_original) if last else ()
    return tuple(dict.fromkeys(map(component_of, ids)))


def only_whole(names: Iterable[str]) -> str:
    """Say where calls begin in their place whose requests differ for whole and for streamed answers."""
    return (
        f"{listed(sorted(names))} start in their place where answers are streamed (stream, astream, events, a handler "
        "that streams), as no request is sent in both forms"
    )


def unplanned(prefetched: Sequence[str], trace: QueryTrace | None = None) -> str:
    """Return the expected gain of an object without a plan. `trace`: of its last call, if there was one."""
    if not prefetched:
        return f"no gain: {NO_POOL}"
    if trace is not None:
        return describe_measured_gain(trace)
    return f"{NOT_MEASURED}: {COMPARE}"


def expected(
    optimised: Optimised,
    prefetched: Sequence[str],
    context: PassContext,
    trace: QueryTrace | None,
    own_calls: OwnCalls | None = None,
    forms: AnswerForms = NO_FORMS,
    left: Sequence[str] = (),
) -> str:
    """Return the expected gain of a plan: what the last call shows, else why there is no figure yet, or no gain.

    `left`: see `left_for_form`.
    """
    source = optimised.source
    waits = {} if own_calls is None else own_calls.one_by_one
    if source is None or not prefetched:
        unprefetched_s = only_whole(forms.unknown) if forms.unknown else ""
        reasons = [] if own_calls is None else list(map(str, own_calls.explanations.values()))
        return f"no gain: {next(iter(reasons), '') or _one_by_one(waits) or unprefetched_s or _why_none(source)}"
    if left and trace is not None:
        return f"the last call took {duration(trace.seconds)}; {only_whole(left)}: {COMPARE}"
    text = _with_prefetched_calls(optimised, source, context, trace, waits)
    return f"{text}; {only_whole(forms.whole_only)}" if forms.whole_only else text


def _with_prefetched_calls(
    optimised: Optimised, source: Graph, context: PassContext, trace: QueryTrace | None, waits: Mapping[str, Any]
) -> str:
    """Return the expected gain of a plan in which calls start before their place.

    With a trace, it is the gain that the last call showed. Without one, the text says why there is no figure yet.
    `waits` holds objects that answer one call at a time; where there are any, the time in the app's own order is not
    estimated.
    """
    if trace is not None:
        return describe_measured_gain(trace, None if waits else source)
    if any(one.on_engine and one.engine not in context.profiles for p in source for one in leaf_primitives(p)):
        return f"{NOT_MEASURED}: {COMPARE}"
    return f"known after the first call, as the length of answers is not known: {COMPARE}"


def _why_none(source: Graph | None) -> str:
    """Say why nothing begins early."""
    names = [] if source is None else list(dict.fromkeys(component_of(p.id) for p in source if asks(p)))
    code = [] if source is None else list(dict.fromkeys(component_of(p.id) for p in source if runs_user_code(p)))
    if not names:
        return "it asks no engine, model or retriever that is known before it runs"
    if len(names) == 1:
        return f"its only call ({names[0]}) has nothing to run beside"
    if code:
        return f"its calls ({listed(names)}) wait for each other or for your code ({listed(code)})"
    return f"each of its {len(names)} calls needs what the one before gives"


def _one_by_one(waits: Mapping[str, Any]) -> str:
    """Return the advice to name objects in `concurrent=`, if these keep calls in their place.

    They answer one call at a time. The result is empty if there are no such objects. `waits`: the objects, by the name
    of the call.
    """
    names = list(dict.fromkeys(type(obj).__name__ for obj in waits.values()))
    if not names:
        return ""
    verb, whose, them = ("answer", "their", "them") if len(names) > 1 else ("answers", "its", "it")
    return (
        f"{listed(names)} {verb} one call at a time, without async code of {whose} own; if several threads may call "
        f"{them} at once, say so: accelerate(..., concurrent=[{', '.join(names)}])"
    )


def describe_measured_gain(trace: QueryTrace, source: Graph | None = None) -> str:
    """Say what the last call gained, as far as its trace tells.

    `source`: the p-graph, where the duration of its calls in their order is comparable.
    """
    took, saved = trace.seconds, seconds_saved(trace, source)
    if saved is None or not took:
        return f"unknown, as the trace of the last call ({duration(took)}) does not tell: {COMPARE}"
    if abs(saved) < _LEAST_GAIN * took:
        return f"no gain in the last call ({duration(took)}): calls that started sooner ended at the same time"
    unprefetched_s = took + saved
    ratio, how = (unprefetched_s / took, "faster") if saved > 0 else (took / unprefetched_s, "slower")
    return (
        f"{ratio:.2f} times {how} in the last call: {duration(took)}, about {duration(unprefetched_s)} with each call "
        f"in its place (less where calls made at once slow each other down): {COMPARE}"
    )


_LEAST_GAIN = 0.02
"""The share of the duration from which on time that was saved is called a gain."""


def seconds_saved(trace: QueryTrace, source: Graph | None = None) -> float | None:
    """Return how much longer the last call would have taken with each call in its place; None if its trace does not
    tell. Negative if it would have been sooner done.

    With `source`, the p-graph, the calls of the trace are put in their order; the time in which no call ran stays as it
    is. Else the time counts by which the original waited less for its calls than they took. That holds for calls of
    the user's own models that the original makes one after the other.
    """
    in_order = None if source is None else as_written(source, trace.spans)
    if in_order is not None:
        return in_order - _busy_s(span for span in trace.spans if span.engine)
    spans, saved, until = trace.finished(), 0.0, trace.started
    for wait in sorted(trace.waits or (), key=lambda wait: wait.began):
        calls = [spans[name] for name in wait.spans if name in spans]
        if not calls or wait.began < until or any(call.engine != PROVIDER for call in calls):
            return None
        until = wait.answered
        saved += max(0.0, max(call.seconds for call in calls) - (wait.answered - wait.began))
    return saved if trace.waits else None


# ------------------------------------------------------------ the calls of a trace, as they are written


def as_written(source: Graph, spans: Iterable[Span]) -> float | None:
    """Return the seconds that the measured calls take in the order of the p-graph; None if the trace does not tell.

    A call takes as long as its spans together, early beginnings of prompts too; the longest way through the p-graph
    counts. With user code, which has no spans, and with what the original asks for by itself (rows that it writes),
    the trace does not tell.
    """
    if any(is_impure(one) for p in source for one in leaf_primitives(p)):
        return None
    done = [s for s in spans if s.engine and s.done is not None]
    components = {component_of(one.id) for p in source for one in leaf_primitives(p) if one.on_engine}
    if any(component_of(s.primitive) not in components for s in done):
        return None
    last_primitives = {component_of(p.id): p for p in source if asks(p)}.values()  # each stands for its component
    seconds = {p.id: _seconds(p, done) for p in last_primitives}
    ready: dict[str, float] = {}
    for p in source:
        start = max((ready[name] for name in source.parents(p.id)), default=0.0)
        ready[p.id] = start + seconds.get(p.id, 0.0)
    return max(ready.values(), default=0.0) or None


def _seconds(p: Primitive, spans: Sequence[Span]) -> float:
    """Return how many seconds a primitive of the p-graph takes in the app's own order, by the measured spans.

    The times of the instances of a branch or a loop are added up; where the app itself processes items at once, the
    longest counts.
    """
    if not p.holds_fragment:
        name = component_of(p.id)
        return _by_component(s for s in spans if "/" not in s.primitive and component_of(s.primitive) == name)
    arms = InstancePath(p.id).arm(True), InstancePath(p.id).arm(False)
    inside: dict[str, list[Span]] = {}
    for span in spans:
        path = InstancePath(span.primitive)
        outer = path.outermost
        if path.in_instance_of(p.id) or outer in arms:
            inside.setdefault(outer, []).append(span)
    durations = [_by_component(spans_of_instance) for spans_of_instance in inside.values()]
    at_once = p.kind is _K.MAP and not p.attributes.is_parallel
    return max(durations, default=0.0) if at_once else sum(durations)


def _by_component(spans: Iterable[Span]) -> float:
    """Return the seconds of components one after the other, and of each its kinds of engines one after the other."""
    spans_by_part: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        kind = "LLM" if span.kind in _LLM else span.kind  # a prefilling and its decodings are one request
        spans_by_part.setdefault((component_of(span.primitive), kind), []).append(span)
    return sum(map(_busy_s, spans_by_part.values()))


def _busy_s(spans: Iterable[Span]) -> float:
    """Return the seconds during which at least one span ran."""
    total, until = 0.0, float("-inf")
    for begin, done in sorted((s.begin, s.done) for s in spans if s.done is not None):
        total += max(0.0, done - max(begin, until))
        until = max(until, done)
    return total


def explain(
    traced: TraceResult,
    optimised: Optimised | None,
    pool: EnginePool | None,
    *,
    trace: QueryTrace | None = None,
    own_calls: OwnCalls | None = None,
    more: Sequence[str] = (),
    left: Sequence[str] = (),
    calls: Sequence[CallRow] | None = None,
    if_dedicated: PlanIfDedicated | None = None,
) -> PlanReport:
    """Return the report of an object that is planned as a whole.

    `trace`: of its last call, if there was one; `own_calls`: the calls of the user's own objects; `more`: phrases for
    calls that begin early without a plan; `left`: calls that the last call left in their place, see `left_for_form`;
    `calls`: the rows of all calls, where the plan has not all of them; `if_dedicated`: see `call_rows`.
    """
    waits = own_calls is not None and own_calls.one_by_one
    source = None if optimised is None or waits else optimised.source
    figures: Any = {} if trace is None else {"seconds": trace.seconds, "seconds_saved": seconds_saved(trace, source)}
    if optimised is None or pool is None:
        return PlanReport(traced.report, tuple(more), unplanned(more, trace), tuple(calls or ()), **figures)
    context = PassContext(pool.profiles)
    forms = AnswerForms.of(optimised.graph, pool)
    prefetched = (*describe_gains(optimised, own_calls, forms), *more)
    advice = tuple(dict.fromkeys(_advice(optimised.graph, context)))
    sections = (
        ("p-graph (the workflow as written)", str(optimised.source)),
        ("e-graph (what runs)", str(optimised.graph)),
        ("Passes", _passes(optimised)),
        ("Drafts", "\n".join(_drafts(optimised.graph, context))),
    )
    return PlanReport(
        traced.report,
        prefetched,
        expected(optimised, prefetched, context, trace, own_calls, forms, left),
        tuple(call_rows(traced, optimised, own_calls, forms, if_dedicated) if calls is None else calls),
        advice,
        sections,
        **figures,
    )


@dataclass(frozen=True, slots=True)
class PlanIfDedicated:
    """The plan of an object as it would be if more engines of its pool were declared dedicated."""

    pool: EnginePool
    plan: Callable[[frozenset[str]], Optimised]
    """Returns the plan with these engines declared dedicated."""

    def explain(self, name: str, own_calls: OwnCalls | None) -> Explanation | None:
        """Return which engines keep a call in its place by not being dedicated; None if that is not the reason."""

        def is_prefetched(engines: frozenset[str]) -> bool:
            planned = self.plan(engines)
            return name in _starts(planned, own_calls, AnswerForms.of(planned.graph, self.pool))

        return explain_undedicated(self.pool, is_prefetched)


def explain_undedicated(pool: EnginePool, is_prefetched: Callable[[frozenset[str]], bool]) -> Explanation | None:
    """Return which engines keep a call in its place by not being dedicated; None if that is not the reason.

    `is_prefetched`: returns True if the call starts early with these engines declared dedicated.
    """
    names = [name for name, profile in pool.profiles.items() if not profile.dedicated]
    required = frozenset(names)
    if not required or not is_prefetched(required):
        return None
    for name in names:
        if is_prefetched(required - {name}):
            required -= {name}
    classes = {name: type(pool.engine(name)) for name in names if name in required}
    shared_names = tuple(name for name, cls in classes.items() if cls.__module__.startswith("teola_plugin.cluster"))
    if shared_names:
        return Explanation(Reason.NOT_DEDICATED_SHARED, shared_names)
    return Explanation(Reason.NOT_DEDICATED, tuple(dict.fromkeys(cls.__name__ for cls in classes.values())))


def _starts(optimised: Optimised, own_calls: OwnCalls | None, forms: AnswerForms) -> dict[str, str]:
    return lookahead_starts(optimised.graph, forms) | prefetch_starts(optimised, own_calls, forms)


def call_rows(
    traced: TraceResult,
    optimised: Optimised,
    own_calls: OwnCalls | None = None,
    forms: AnswerForms = NO_FORMS,
    if_dedicated: PlanIfDedicated | None = None,
) -> Iterator[CallRow]:
    """Yield a row for each place in a plan that makes calls, and for each function whose calls are not seen.

    `if_dedicated`: the plan with more dedicated engines, which says if they are the reason that a call is in its place.
    """
    starts, speculative = _starts(optimised, own_calls, forms), speculative_names(optimised.graph)
    own_calls = own_calls or OwnCalls()
    paths = {name: node.path for node in traced.report for name in node.components}
    names: list[str] = []
    for component in traced.template.components:
        for leaf in leaves_of(component):
            key, name = leaf.attributes.wrapped, component_of(leaf.name)
            site, explanation = own_calls.sites.get(key), own_calls.explanations.get(key)
            is_kept = explanation is not None or (site is not None and key not in own_calls.prefetchable)
            start = "" if is_kept else starts.get(name, "")
            if not start and explanation is None and if_dedicated is not None:
                explanation = if_dedicated.explain(name, own_calls)
            if not start and explanation is None:
                explanation = _explain_in_place(name, key, optimised, own_calls, forms)
            if explanation is not None and explanation.reason in (Reason.BEHIND_CODE, Reason.PROMPT_AT_RUN_TIME):
                explanation = replace(explanation, source=_source_of(explanation.names[-1], traced.sources))
            prefetch_status = Status.SPECULATIVE if name in speculative else Status.PREFETCHED
            names.append(leaf.name)
            yield CallRow(
                leaf.name,
                prefetch_status if start else Status.IN_PLACE,
                leaf.engine or leaf.embedder if site is None else type(getattr(site, "provider", site.target)).__name__,
                traced.sources.get(leaf.name) or paths.get(leaf.name, "" if key == leaf.name else key),
                start,
                explanation,
                name in forms.whole_only,
                counts=None if site is None else site.counts,
            )
    for component in traced.template.components:
        path, is_seen = paths.get(component.name, ""), any(one.startswith(f"{component.name}.") for one in names)
        creates_model = any(one.startswith(f"{component.name.removesuffix('.code')}:") for one in traced.created_models)
        is_code = component.role is Role.OPAQUE and is_user_code(component)
        is_unseen = is_code and path not in own_calls.left and not is_seen
        if is_unseen and not creates_model:
            class_name = next((node.class_name for node in traced.report if node.path == path), "")
            source = _source_of(component.name, traced.sources) or path
            yield CallRow(
                component.name, Status.NOT_SEEN, class_name, source, explanation=Explanation(Reason.UNKNOWN_CODE)
            )
    yield from left_rows({**own_calls.left, **created_models(traced.created_models)}, traced.sources)


def _source_of(name: str, sources: Mapping[str, str]) -> str:
    """Return `file:line` of the code that a component stands for; of a function, of its code that is not understood."""
    return sources.get(f"{name}.code") or sources.get(name, "")


def created_models(models: Mapping[str, CreatedModel]) -> dict[str, tuple[str, Explanation]]:
    """Return models that functions create as objects of which nothing is prefetched; see `OwnCalls.left`."""
    return {
        location: (
            model.name,
            Explanation(Reason.MODEL_OF_SETTINGS if model.has_settings else Reason.MODEL_INSIDE, (model.name,)),
        )
        for location, model in models.items()
    }


def left_rows(left: Mapping[str, tuple[str, Explanation]], sources: Mapping[str, str]) -> Iterator[CallRow]:
    """Yield a row for each object of which nothing is prefetched. `left`: its class and the reason, by path.

    `sources`: `file:line` by the location of a call in a function, with which such a path begins.
    """
    for path, (class_name, explanation) in left.items():
        locations = (one for one in sources if ":" in one and path.startswith(one))
        location = path if path in sources else next(locations, path)
        status = Status.NOT_SEEN if explanation.reason is Reason.NO_SOURCE else Status.IN_PLACE
        yield CallRow(location, status, class_name, sources.get(location, ""), explanation=explanation)


def _explain_in_place(
    name: str, key: str, optimised: Optimised, own_calls: OwnCalls, forms: AnswerForms
) -> Explanation:
    """Return why a call of a plan does not start before its place."""
    source = optimised.source or optimised.graph
    if name in forms.unknown:
        return Explanation(Reason.STREAMED)
    own_names = {component_of(p.id) for p in source if name in {component_of(one.id) for one in leaf_primitives(p)}} | {
        name
    }
    ids = [p.id for p in source if component_of(p.id) in own_names]
    earlier = {id_ for one in ids for id_ in source.ancestors[one]}
    waits = [p for p in source if p.id in earlier and component_of(p.id) not in own_names and (asks(p) or is_impure(p))]
    target = own_calls.one_by_one.get(key)
    is_listed = any(source[one].holds_fragment for one in ids)
    shared = {
        component_of(p.id)
        for p in waits
        for one in leaf_primitives(p)
        if one.attributes.wrapped in own_calls.one_by_one
    }
    if target is not None and (is_listed or (waits and shared == {component_of(p.id) for p in waits})):
        return Explanation(Reason.ONE_AT_A_TIME, (type(target).__name__,))
    direct = [p for p in waits if not any(p.id in source.ancestors[q.id] for q in waits)]
    names = tuple(dict.fromkeys(component_of(p.id) for p in direct))
    if key and key not in own_calls.prefetchable and name in prefetch_starts(optimised, forms=forms):
        return Explanation(Reason.NOT_SOONER)
    if not names:
        return Explanation(Reason.FIRST)
    code = [p for p in direct if is_impure(p)]
    if code and not any(map(runs_user_code, code)):
        return Explanation(Reason.PROMPT_AT_RUN_TIME, tuple(dict.fromkeys(component_of(p.id) for p in code)))
    return Explanation(Reason.BEHIND_CODE if code else Reason.NEEDS_RESULTS, names)


def _passes(optimised: Optimised) -> str:
    """Return the section of `explain()` that lists the passes, and says for each if it changed the graph."""
    if not optimised.reports:
        return "none"
    names = dict.fromkeys(r.pass_name for r in optimised.reports)
    return "\n".join(f"{name:24} {'fired' if name in optimised.fired else 'nothing to do'}" for name in names)


def _drafts(graph: Graph, context: PassContext) -> Iterator[str]:
    """Yield a line on where the drafts of each answer come from, likeliest first."""
    for p in graph:
        profile = context.profile(p.engine)
        answers = p.kind in (_K.PREFILLING, _K.FULL_PREFILLING)
        if not answers or profile is None or not profile.drafts:
            continue
        drafts = p.attributes.drafts
        texts = [f"{one.variable}, {one.description}" if one.variable else one.description for one in drafts]
        texts = list(dict.fromkeys(texts))
        sources = "; ".join([*texts, "its own prompt and text", "recent outputs of the app and tenant"])
        yield f"{component_of(p.id)} (up to {profile.drafts} tokens at a time, if it is greedy): {sources}"


def _advice(graph: Graph, context: PassContext) -> Iterator[str]:
    """Yield changes by which the author would gain more; nobody makes them for the author, as they change prompts."""
    ready = ready_times(graph, context)
    for p in graph:
        profile = context.profile(p.engine)
        answers = p.kind in (_K.PREFILLING, _K.FULL_PREFILLING)
        if not answers or not p.prompt or profile is None:
            continue
        producers = [getattr(p.input(part.variable), "producer", "") if part.variable else "" for part in p.prompt]
        times = [ready.get(producer, 0.0) for producer in producers]
        late = next((i for i, t in enumerate(times) if t > 0.0 and t >= max(times)), None)
        later_variables = [
            part.variable for part, t in zip(p.prompt, times, strict=True) if part.variable and t < max(times)
        ]
        variables = [part.variable for part in p.prompt]
        names = [name for name in later_variables if late is not None and variables.index(name) > late]
        if names and profile.prefix_caching:
            prefilled_tokens = sum(part.tokens for part in p.prompt[:late])
            yield (
                f"in the prompt of {component_of(p.id)}, {listed(names)} stand{'' if len(names) > 1 else 's'} behind "
                f"{p.prompt[late or 0].variable}, which is known last: only about {prefilled_tokens} tokens can be "
                "prefilled early"
            )
    prefetched_names = [p.id for p in graph if p.on_engine or p.holds_fragment]
    for p in graph:
        is_read = any(name.startswith(f"{p.id}.") for name in prefetched_names)  # calls of this code are in the graph
        if p.kind is _K.OPAQUE and runs_user_code(p) and not is_read:
            yield f"{p.id} is user code: what depends on it starts when it has run"
