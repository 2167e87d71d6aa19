"""Pass 3: prefill the parts of a prompt that are ready before the rest (causal prefilling)."""

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
from teola_plugin.passes.estimate import has_known_duration, ready_times, tokens

_K = PrimitiveKind
CARRIED_READY_S = 1.0
"""Assumed seconds after the start of an instance at which the value carried into it is ready."""
MIN_GAP_S = 0.001
"""Seconds. A prefix that is ready less than this before the rest is not worth a request of its own."""


@dataclass(frozen=True, slots=True)
class PrefillingSplit:
    """Split `x` into `x.partial#0`, `x.partial#1`, ... and the FULL_PREFILLING `x`.

    Each partial prefilling covers a longer prefix of the prompt than the one before it. The order of the parts never
    changes: a part counts as ready when all parts before it are ready. A prompt whose next part is built from a list
    that is processed while it grows may be prefilled while it grows, too.
    """

    name: ClassVar[str] = "prefilling-split"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        """Split prompts whose beginning is known early, and mark those that grow with a list; else return the same
        graph."""
        candidates = [p for p in graph if p.kind is _K.PREFILLING and _is_splittable(p, context)]
        growing = list(_growing_prompts(graph, context))
        if not candidates and not growing:
            return graph
        edit = GraphEdit(graph)
        for p, map_id in growing:
            edit.replace(p.with_(attributes=p.attributes.with_(grows_with=map_id)))
        estimates = _Estimates(graph, context)
        for p in candidates:
            ends = _split_points(p, estimates)
            if ends:
                _split(edit, edit[p.id], ends, _expects_pause(p, estimates))
        return edit.freeze()


def _growing_prompts(graph: Graph, context: PassContext) -> Iterator[tuple[Primitive, str]]:
    """Yield prefillings whose prompt grows with the results of a MAP, with that MAP's id.

    Only on engines that can prefill while they decode. The results of the MAP must come one after the other: it
    processes a list that is still being generated, or its instances generate text themselves.
    """
    maps = [
        m.id for m in graph if m.kind is _K.MAP and (m.speculative_refs or m.attributes.grow or _decodes(m.fragment))
    ]
    for p in graph if maps else ():
        if p.kind not in LLM_PREFILLS or p.speculative or p.attributes.grows_with:
            continue
        profile = context.profile(p.engine)
        if profile is not None and profile.prefix_caching and not profile.takes_turns:
            map_id = next((m for m in maps if growth(graph, p, m) is not None), None)
            if map_id is not None:
                yield p, map_id


def _decodes(body: Fragment | None) -> bool:
    """Return True if the fragment generates text."""
    return body is not None and any(p.decodes for p in body.graph)


def _occupies(p: Primitive, engine: str) -> bool:
    """Return True if `p`, or a primitive of its fragments, runs on the engine."""
    if p.on_engine:
        return p.engine == engine
    return any(
        _occupies(inner, engine) for body in (p.fragment, p.otherwise) if body is not None for inner in body.graph
    )


class _Estimates:
    """Ready times and engine use of one graph. Sets of primitives are bit masks over their positions in it."""

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self.graph = graph
        self.context = context
        self.ready = dict.fromkeys(context.late, CARRIED_READY_S) | ready_times(graph, context)
        self.engines: dict[str, int] = {}
        """Mask of the primitives on each engine."""
        self._busy: dict[str, dict[str, float]] = {}
        self.unmeasured = 0
        self._free = 0
        """Mask of the primitives that take no time: what waits for them waits for their parents."""
        for p in graph:
            if p.kind is _K.CALL:
                self._free |= graph.bits[p.id]
            if p.on_engine:
                bit = graph.bits[p.id]
                self.engines[p.engine] = self.engines.get(p.engine, 0) | bit
                if not has_known_duration(p, context):
                    self.unmeasured |= bit

    def busy(self, engine: str) -> dict[str, float]:
        """Return, for each primitive, when the last of its ancestors on the engine is expected to end, in seconds."""
        busy = self._busy.get(engine)
        if busy is None:
            busy = self._busy[engine] = {}
            until: dict[str, float] = {}
            for p in self.graph:
                latest = 0.0
                for name in self.graph.parents(p.id):  # a loop, as in `ready_times`
                    if until[name] > latest:
                        latest = until[name]
                busy[p.id] = latest
                until[p.id] = max(latest, self.ready[p.id]) if _occupies(p, engine) else latest
        return busy

    def ancestors(self, p: Primitive, start: int, end: int) -> int:
        """Return the mask of the primitives that parts `start` to `end` of the prompt wait for, without pure code."""
        variables = {part.variable for part in p.prompt[start:end]}
        mask = 0
        for key, ref in p.inputs:
            if key in variables and not ref.external:
                mask |= self.graph.ancestor_masks[ref.producer] | self.graph.bits[ref.producer]
        return mask & ~self._free


def _is_splittable(p: Primitive, context: PassContext) -> bool:
    """Return True if the engine caches prefixes and some value of the prompt is not known from the start."""
    profile = context.profile(p.engine)
    if profile is None or not profile.prefix_caching or len(p.prompt) < 2:
        return False
    return any(not ref.external or ref.producer in context.late for _, ref in p.inputs)


def _split_points(p: Primitive, estimates: _Estimates) -> list[int]:
    """Return the indices of the prompt parts before which partial prefillings end, ascending."""
    profile = estimates.context.profiles[p.engine]
    times = list(_ready_times_of_parts(p, estimates.ready))
    ends: list[int] = []
    for end in range(1, len(times)):
        # A run ends where the next part is ready noticeably later; a run that is too short joins the next one.
        waits = times[end] - times[end - 1] > MIN_GAP_S
        if waits and _is_long_enough(p, ends[-1] if ends else 0, end, profile) and _has_gain(p, end, estimates):
            ends.append(end)
    return ends


def _ready_times_of_parts(p: Primitive, ready: dict[str, float]) -> Iterator[float]:
    """Yield, for each part of the prompt, when the prompt up to its end is expected to be known, in seconds."""
    latest = 0.0
    inputs = dict(p.inputs)
    for part in p.prompt:
        if part.variable:
            ref = inputs.get(part.variable)
            latest = max(latest, float("inf") if ref is None else ready.get(ref.producer, 0.0))
        yield latest


def _is_long_enough(p: Primitive, start: int, end: int, profile: EngineProfile) -> bool:
    """Return True if the run adds enough tokens, or is not the first and has a variable of unknown length.

    `start` and `end` are positions in the primitive's prompt parts; `min_split_tokens` of the engine's profile is the
    least number of tokens.
    """
    run = p.prompt[start:end]
    if tokens(run) >= profile.min_split_tokens:
        return True
    return start > 0 and any(part.variable and not part.tokens for part in run)


def _has_gain(p: Primitive, end: int, estimates: _Estimates) -> bool:
    """Return True if the engine has time for the prefix while the values of the rest are computed."""
    run, rest = estimates.ancestors(p, 0, end), estimates.ancestors(p, end, len(p.prompt))
    busy = [engine for engine, mask in estimates.engines.items() if mask & rest & ~run]
    if busy and not any(engine == p.engine or estimates.context.overlap(engine, p.engine) for engine in busy):
        return False
    # Without measurements only the structure decides: the rest must wait for all that the run waits for, and more.
    return (run != rest and run & rest == run) or not (run | rest) & estimates.unmeasured


def _expects_pause(p: Primitive, estimates: _Estimates) -> bool:
    """Return True if the engine is expected to be idle before `p`, long enough to prefill the prefix in that time."""
    graph, ready = estimates.graph, estimates.ready
    start = max([ready[name] for name in graph.parents(p.id)], default=0.0)
    idle_since = estimates.busy(p.engine)[p.id]
    profile = estimates.context.profiles[p.engine]
    return start - idle_since >= max(MIN_GAP_S, 0.5 * profile.seconds(_K.PREFILLING, tokens(p.prompt)))


def _split(edit: GraphEdit, p: Primitive, ends: list[int], when_idle: bool) -> None:
    """Replace a prefilling by partial ones that end before the parts `ends`, and a full one after them.

    `when_idle`: the partial ones wait for a pause of the engine.
    """
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
            attributes=p.attributes.with_(when="idle") if when_idle else p.attributes,
        )
        edit.add(partial)
        before = (partial.id,)
    edit.replace(p.with_(kind=_K.FULL_PREFILLING, after=p.after + before))
