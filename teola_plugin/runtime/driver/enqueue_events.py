"""How primitives and calls of the plain object are queued at their engine, and what becomes known of them later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from teola_plugin.graph import Primitive, PrimitiveKind
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.works.work import Work
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue
from teola_plugin.scheduling.live_primitive import LivePrimitive
from teola_plugin.scheduling.objectives import WARM_UP, Objective, Wanted


def enqueue_event(at: float, run: QueryRun, p: Primitive, depth: int, live: LivePrimitive | None) -> Enqueue:
    """`live` is None for a prefix that has grown: it is not in the graph."""
    query, wanted = run.query, live.wanted if live is not None else WARM_UP
    session = f"{run.id}/{p.call}" if p.prompt else ""
    idle = p.attributes.when == "idle"
    terms = query.app, query.weight, session, idle, _gang(run, wanted), wanted.objective
    return Enqueue(at, run.id, p.id, p.kind, (), depth, *terms)


def gang_changed(at: float, run: QueryRun, live: LivePrimitive | None, claimed: Iterable[Work]) -> DepthChanged | None:
    """The plain object called before the graph came to it. If the graph knows that call for a member of a gang, the
    call's engine is told; otherwise None."""
    if live is None or live.wanted.objective is not Objective.THROUGHPUT:
        return None
    calls = {entry.primitive for entry in claimed if not entry.ended and not entry.prefilled}
    wanted = live.wanted.objective, _gang(run, live.wanted)
    return DepthChanged(at, run.id, {}, dict.fromkeys(calls, wanted)) if calls else None


def call_enqueue_event(
    at: float, run: QueryRun, kind: PrimitiveKind, name: str, depth: int, fresh: Sequence[Work]
) -> tuple[Enqueue, DepthChanged | None]:
    """For a call of the plain object, which no graph says anything of, and what it tells of the call before.

    Who calls again before the first token of an alike call waits for both: they are a gang. A call whose pieces are
    read as they come is waited for.
    """
    query, key = run.query, (fresh[0].engine, kind)
    before, known = run.last_calls.get(key, (None, False))
    streamed = any(entry.read for entry in fresh)
    beside = before is not None and not streamed and not (before.ended or before.prefilled)
    member = beside or (len(fresh) > 1 and not streamed)
    wanted = (Objective.THROUGHPUT, f"{run.id}/{key[0]}.calls") if member else (Objective.LATENCY, "")
    if not streamed:
        run.last_calls[key] = fresh[-1], member
    event = Enqueue(at, run.id, name, kind, (), depth, query.app, query.weight, objective=wanted[0], gang=wanted[1])
    news = DepthChanged(at, run.id, {}, {before.primitive: wanted}) if before and beside and not known else None
    return event, news


def _gang(run: QueryRun, wanted: Wanted) -> str:
    return f"{run.id}/{wanted.gang}" if wanted.gang else ""
