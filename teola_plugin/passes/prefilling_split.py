"""Pass 3: the parts of a prompt that are ready early are prefilled early (causal prefilling)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import (
    LLM_PREFILLS,
    EngineProfile,
    Fragment,
    Graph,
    GraphEdit,
    InstancePath,
    Primitive,
    PrimitiveKind,
    growth,
)
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.estimate import measured, ready_times, tokens

_K = PrimitiveKind
LATE = 1.0
"""Seconds after its instance at which a carried value is taken to be ready."""
MIN_GAP = 0.001
"""Seconds. A prefix that is ready less than this before the rest is not worth a request of its own."""


@dataclass(frozen=True, slots=True)
class PrefillingSplit:
    """`x` becomes `x.partial#0`, `x.partial#1`, ... (each a longer prefix of the prompt) and the FULL_PREFILLING `x`.

    The order of the parts never changes: a part counts as ready when all parts before it are. A prompt whose next part
    is made of a list that is worked on as it grows may be prefilled as it grows, too.
    """

    name: ClassVar[str] = "prefilling-split"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        found = [p for p in graph if p.kind is _K.PREFILLING and _candidate(p, context)]
        growing = list(_growing(graph, context))
        if not found and not growing:
            return graph
        edit = GraphEdit(graph)
        for p, holder in growing:
            edit.replace(p.with_(attributes=p.attributes.with_(grows_with=holder)))
        estimates = _Estimates(graph, context)
        for p in found:
            ends = _ends(p, estimates)
            if ends:
                _split(edit, edit[p.id], ends, _pauses(p, estimates))
        return edit.freeze()


def _growing(graph: Graph, context: PassContext) -> Iterator[tuple[Primitive, str]]:
    """Prefillings whose prompt grows with a list that is being made, on engines that can prefill beside decoding."""
    holders = [m.id for m in graph if m.kind is _K.MAP and (m.early or m.attributes.grow or _decodes(m.fragment))]
    for p in graph if holders else ():
        if p.kind not in LLM_PREFILLS or p.tentative or p.attributes.grows_with:
            continue
        profile = context.profile(p.engine)
        if profile is not None and profile.prefix_caching and not profile.takes_turns:
            found = next((m for m in holders if growth(graph, p, m) is not None), None)
            if found is not None:
                yield p, found


def _decodes(body: Fragment | None) -> bool:
    """Whether the outputs of its instances are written, so that they come one after the other."""
    return body is not None and any(p.decodes for p in body.graph)


def _occupies(p: Primitive, engine: str) -> bool:
    """Whether it runs on the engine, or holds what does."""
    if p.on_engine:
        return p.engine == engine
    return any(
        _occupies(inner, engine) for body in (p.fragment, p.otherwise) if body is not None for inner in body.graph
    )


class _Estimates:
    """What the cuts depend on, for one graph. Sets of primitives are bit masks over their places in it."""

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self.graph = graph
        self.context = context
        self.ready = dict.fromkeys(context.late, LATE) | ready_times(graph, context)
        self.engines: dict[str, int] = {}
        """What runs on each engine."""
        self._busy: dict[str, dict[str, float]] = {}
        self.unmeasured = 0
        for p in graph:
            if p.on_engine:
                bit = graph.bits[p.id]
                self.engines[p.engine] = self.engines.get(p.engine, 0) | bit
                if not measured(p, context):
                    self.unmeasured |= bit

    def busy(self, engine: str) -> dict[str, float]:
        """For each primitive, when the last of the engine's that it waits for, directly or not, is expected to end."""
        found = self._busy.get(engine)
        if found is None:
            found = self._busy[engine] = {}
            until: dict[str, float] = {}
            for p in self.graph:
                latest = 0.0
                for name in self.graph.parents(p.id):  # a loop, as in `ready_times`
                    if until[name] > latest:
                        latest = until[name]
                found[p.id] = latest
                until[p.id] = max(latest, self.ready[p.id]) if _occupies(p, engine) else latest
        return found

    def above(self, p: Primitive, start: int, end: int) -> int:
        """What parts `start` to `end` of the prompt wait for."""
        variables = {part.variable for part in p.prompt[start:end]}
        mask = 0
        for key, ref in p.inputs:
            if key in variables and not ref.external:
                mask |= self.graph.above[ref.producer] | self.graph.bits[ref.producer]
        return mask


def _candidate(p: Primitive, context: PassContext) -> bool:
    """Whether a split is possible at all: the engine keeps prefixes, and some value is not there from the start."""
    profile = context.profile(p.engine)
    if profile is None or not profile.prefix_caching or len(p.prompt) < 2:
        return False
    return any(not ref.external or ref.producer in context.late for _, ref in p.inputs)


def _ends(p: Primitive, estimates: _Estimates) -> list[int]:
    """Where in the prompt the partial prefillings end, ascending."""
    profile = estimates.context.profiles[p.engine]
    times = list(_times(p, estimates.ready))
    ends: list[int] = []
    for end in range(1, len(times)):
        # A run ends where the next part is ready noticeably later; what is too short joins the next run.
        early = times[end] - times[end - 1] > MIN_GAP
        if early and _enough(p, ends[-1] if ends else 0, end, profile) and _gains(p, end, estimates):
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


def _gains(p: Primitive, end: int, estimates: _Estimates) -> bool:
    """Whether the engine has time for the prefix while the rest is made."""
    run, rest = estimates.above(p, 0, end), estimates.above(p, end, len(p.prompt))
    waited = [engine for engine, mask in estimates.engines.items() if mask & rest & ~run]
    if waited and not any(engine == p.engine or estimates.context.overlap(engine, p.engine) for engine in waited):
        return False
    # Without measurements only the structure counts: the rest must wait for all of the run's makers, and more.
    return (run != rest and run & rest == run) or not (run | rest) & estimates.unmeasured


def _pauses(p: Primitive, estimates: _Estimates) -> bool:
    """Whether its engine is expected to pause before `p`, long enough to prefill the prefix at nobody's cost."""
    graph, ready = estimates.graph, estimates.ready
    needed = max([ready[name] for name in graph.parents(p.id)], default=0.0)
    busy = estimates.busy(p.engine)[p.id]
    profile = estimates.context.profiles[p.engine]
    return needed - busy >= max(MIN_GAP, 0.5 * profile.seconds(_K.PREFILLING, tokens(p.prompt)))


def _split(edit: GraphEdit, p: Primitive, ends: list[int], pauses: bool) -> None:
    before: tuple[str, ...] = ()
    for number, end in enumerate(ends):
        prefix = p.prompt[:end]
        variables = {part.variable for part in prefix}
        partial = p.with_(
            id=InstancePath(p.id).partial(number),
            kind=_K.PARTIAL_PREFILLING,
            inputs=tuple([(key, ref) for key, ref in p.inputs if key in variables]),
            after=before,
            effects=(),
            prompt=prefix,
            attributes=p.attributes.with_(when="idle") if pauses else p.attributes,
        )
        edit.add(partial)
        before = (partial.id,)
    edit.replace(p.with_(kind=_K.FULL_PREFILLING, after=p.after + before))
