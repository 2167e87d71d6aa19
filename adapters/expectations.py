"""What an accelerated call is worth. Only what was measured becomes a figure.

An estimate from engines' profiles is none: how long answers get is not known before, and a ratio is mostly that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from teola_plugin.adapters.early_words import NO_FORMS, AnswerForms, OwnCalls, asks, component_of, listed
from teola_plugin.graph import LLM_KINDS, Graph, InstancePath, Primitive, PrimitiveKind, is_impure
from teola_plugin.observe.spans import PROVISIONAL, QueryTrace, Span
from teola_plugin.observe.text import duration
from teola_plugin.passes import Optimised, PassContext
from teola_plugin.passes.decoding_pipelining import held

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
