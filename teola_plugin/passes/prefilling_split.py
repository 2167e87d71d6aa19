"""Pass 3: the parts of a prompt that are ready early are prefilled early (causal prefilling)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import EngineProfile, Graph, GraphEdit, Primitive, PrimitiveKind
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.estimate import measured, ready_times, tokens

_K = PrimitiveKind
MIN_GAP = 0.001
"""Seconds. A prefix that is ready less than this before the rest is not worth a request of its own."""


@dataclass(frozen=True, slots=True)
class PrefillingSplit:
    """`x` becomes `x.partial#0`, `x.partial#1`, ... (each a longer prefix of the prompt) and the FULL_PREFILLING `x`.

    The order of the parts never changes: a part counts as ready when all parts before it are.
    """

    name: ClassVar[str] = "prefilling-split"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        found = [p for p in graph if p.kind is _K.PREFILLING and _candidate(p, context)]
        if not found:
            return graph
        ready = ready_times(graph, context)
        edit = GraphEdit(graph)
        for p in found:
            ends = _ends(p, ready, graph, context)
            if ends:
                _split(edit, p, ends, _pauses(p, ready, graph, context))
        return edit.freeze()


def _candidate(p: Primitive, context: PassContext) -> bool:
    """Whether a split is possible at all: the engine keeps prefixes, and some value is not there from the start."""
    profile = context.profile(p.engine)
    if profile is None or not profile.prefix_caching or len(p.prompt) < 2:
        return False
    return any(not ref.external for _, ref in p.inputs)


def _ends(p: Primitive, ready: dict[str, float], graph: Graph, context: PassContext) -> list[int]:
    """Where in the prompt the partial prefillings end, ascending."""
    profile = context.profiles[p.engine]
    times = list(_times(p, ready))
    ends: list[int] = []
    for end in range(1, len(times)):
        # A run ends where the next part is ready noticeably later; what is too short joins the next run.
        early = times[end] - times[end - 1] > MIN_GAP
        if early and _enough(p, ends[-1] if ends else 0, end, profile) and _gains(p, end, graph, context):
            ends.append(end)
    return ends


def _times(p: Primitive, ready: dict[str, float]) -> Iterator[float]:
    """For each part, when the prompt up to its end is expected to be known."""
    latest = 0.0
    inputs = dict(p.inputs)
    for part in p.prompt:
        if part.variable:
            ref = inputs.get(part.variable)
            latest = max(latest, float("inf") if ref is None else ready.get(ref.producer, 0.0))
        yield latest


def _enough(p: Primitive, start: int, end: int, profile: EngineProfile) -> bool:
    """Whether the run adds enough tokens. A later run may also rest on a variable whose length nobody knows."""
    run = p.prompt[start:end]
    if tokens(run) >= profile.min_split_tokens:
        return True
    return start > 0 and any(part.variable and not part.tokens for part in run)


def _gains(p: Primitive, end: int, graph: Graph, context: PassContext) -> bool:
    """Whether the engine has time for the prefix while the rest is made."""
    run, rest = _ancestors(p, 0, end, graph), _ancestors(p, end, len(p.prompt), graph)
    waited = [q for name in rest - run if (q := graph[name]).on_engine]
    if waited and all(q.engine != p.engine and not context.overlap(q.engine, p.engine) for q in waited):
        return False
    # Without measurements only the structure counts: the rest must wait for all of the run's makers, and more.
    return run < rest or all(measured(graph[name], context) for name in rest | run)


def _ancestors(p: Primitive, start: int, end: int, graph: Graph) -> frozenset[str]:
    variables = {part.variable for part in p.prompt[start:end] if part.variable}
    made = {ref.producer for key, ref in p.inputs if key in variables and not ref.external}
    return frozenset(made).union(*(graph.ancestors[name] for name in made))


def _pauses(p: Primitive, ready: dict[str, float], graph: Graph, context: PassContext) -> bool:
    """Whether its engine is expected to pause before `p`, long enough to prefill the prefix at nobody's cost."""
    above = graph.ancestors[p.id]
    needed = max((ready[name] for name in above), default=0.0)
    busy = max((ready[name] for name in above if graph[name].engine == p.engine), default=0.0)
    profile = context.profiles[p.engine]
    return needed - busy >= max(MIN_GAP, 0.5 * profile.seconds(_K.PREFILLING, tokens(p.prompt)))


def _split(edit: GraphEdit, p: Primitive, ends: list[int], pauses: bool) -> None:
    before: tuple[str, ...] = ()
    for number, end in enumerate(ends):
        prefix = p.prompt[:end]
        variables = {part.variable for part in prefix}
        partial = p.with_(
            id=f"{p.id}.partial#{number}",
            kind=_K.PARTIAL_PREFILLING,
            inputs=tuple((key, ref) for key, ref in p.inputs if key in variables),
            after=before,
            effects=(),
            prompt=prefix,
            options=(*p.options, ("when", "idle")) if pauses else p.options,
        )
        edit.add(partial)
        before = (partial.id,)
    edit.replace(p.with_(kind=_K.FULL_PREFILLING, after=p.after + before))
