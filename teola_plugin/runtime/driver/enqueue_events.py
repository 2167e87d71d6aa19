"""How primitives and calls of the plain object are queued at their engine, and what becomes known of them later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from teola_plugin.graph import InstancePath, Primitive, PrimitiveKind
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest, placed
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue
from teola_plugin.scheduling.live_primitive import LivePrimitive
from teola_plugin.scheduling.objectives import WARM_UP, Objective, Wanted


def enqueue_event(
    at: float, run: QueryRun, p: Primitive, depth: int, live: LivePrimitive | None, remaining: float = 0.0
) -> Enqueue:
    """`live` is None for a prefix that has grown: it is not in the graph."""
    query, wanted = run.query, live.wanted if live is not None else WARM_UP
    # Instances for several items have one `call`: each is a session, or all would go to one instance of the engine.
    session = f"{run.id}/{p.call}{InstancePath(p.id).items}" if p.prompt else ""
    idle = p.attributes.when == "idle"
    terms = query.app, query.weight, session, idle, _gang(run, wanted), wanted.objective
    return Enqueue(at, run.id, p.id, p.kind, (), depth, *terms, remaining, _left(at, run))


def gang_changed(
    at: float, run: QueryRun, live: LivePrimitive | None, claimed: Iterable[EngineRequest]
) -> DepthChanged | None:
    """Others had asked before the graph came to it. Their engine is told, if the graph knows a call of the plain object
    for a member of a gang, or waits alone for what a gang had asked for; otherwise None."""
    if live is None or live.wanted.objective is Objective.BACKGROUND:
        return None
    wanted, gang = live.wanted.objective, _gang(run, live.wanted)
    member = wanted is Objective.THROUGHPUT
    found = [work for work in claimed if not (work.has_ended or work.stream.is_prefilled) and work.queued_gang != gang]
    changed = [work for work in found if not member or work.claims.made_by is Caller.ORIGINAL]
    for work in changed:
        work.queued_gang = gang
    calls = {work.primitive for work in changed}
    return DepthChanged(at, run.id, {}, dict.fromkeys(calls, (wanted, gang))) if calls else None


def call_enqueue_event(
    at: float,
    run: QueryRun,
    kind: PrimitiveKind,
    name: str,
    depth: int,
    gang: str,
    fresh: Sequence[EngineRequest],
    remaining: float = 0.0,
) -> tuple[Enqueue, DepthChanged | None]:
    """For a call of the plain object, which no graph says anything of, and what it tells of the call before.

    Calls from branches that run side by side are the `gang` of their place. Of others, who calls again before the first
    token of an alike call waits for both: they are a gang. A call whose pieces are read as they come is waited for.
    """
    query, engine = run.query, fresh[0].engine
    before, known = (None, True) if gang else run.last_calls.get((engine, kind), (None, False))
    streamed = any(entry.stream.is_read for entry in fresh)
    beside = before is not None and not streamed and not (before.has_ended or before.stream.is_prefilled)
    member = not streamed and (bool(gang) or beside or len(fresh) > 1)
    wanted = (Objective.THROUGHPUT, f"{run.id}/{gang or engine + '.calls'}") if member else (Objective.LATENCY, "")
    for work in fresh:
        work.queued_gang = wanted[1]
    if not (streamed or gang):
        run.last_calls[engine, kind] = fresh[-1], member
    terms = query.app, query.weight, "", False, wanted[1], wanted[0]
    event = Enqueue(at, run.id, name, kind, (), depth, *terms, remaining, _left(at, run))
    news = None
    if before is not None and beside and not known:
        before.queued_gang = wanted[1]
        news = DepthChanged(at, run.id, {}, {before.primitive: wanted})
    return event, news


def deeper(run: QueryRun, depths: Mapping[str, int]) -> dict[str, int]:
    """Depths of dispatched primitives have changed: what engines have to be told, who know works by the primitive that
    asked first, and go by the deepest that waits."""
    told = dict(depths)
    for name, depth in depths.items():
        live = run.primitives.get(name)
        for work in live.works if live is not None else ():
            work.terms = placed(work.terms, max(depth, work.terms.depth), work.terms.gang)
            work.queued_depth = work.terms.depth
            told[work.primitive] = max(work.queued_depth, told.get(work.primitive, 0))
    return told


def _left(at: float, run: QueryRun) -> float | None:
    """Seconds until it should be over."""
    return None if run.due is None else run.due - at


def _gang(run: QueryRun, wanted: Wanted) -> str:
    return f"{run.id}/{wanted.gang}" if wanted.gang else ""
