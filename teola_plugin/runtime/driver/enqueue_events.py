"""Events that tell an engine how primitives and calls of the original are queued, and what changes of that later.

They also carry how long the query still takes, by the profiles of idle engines, for batch policies that look at
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from teola_plugin.graph import EngineProfile, Graph, InstancePath, Primitive, PrimitiveKind
from teola_plugin.passes import PassContext
from teola_plugin.passes.estimate import remaining_times, seconds
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest, placed
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling import LiveQuery
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue
from teola_plugin.scheduling.live_query import LivePrimitive
from teola_plugin.scheduling.objectives import WARM_UP, GangObjective, Objective


def enqueue_event(
    at: float, run: QueryRun, p: Primitive, depth: int, live: LivePrimitive | None, remaining: float = 0.0
) -> Enqueue:
    """Return the event with which a primitive is queued. `live` is None for a prefix that has grown.

    Such a prefix is not in the graph.
    """
    query, gang_objective = run.query, live.gang_objective if live is not None else WARM_UP
    # Instances for several items have one `call`: each is a session, or all would go to one instance of the engine.
    session = f"{run.id}/{p.call}{InstancePath(p.id).items}" if p.prompt else ""
    is_for_idle_engine = p.attributes.when == "idle"
    terms = query.app, query.weight, session, is_for_idle_engine, _gang(run, gang_objective), gang_objective.objective
    return Enqueue(at, run.id, p.id, p.kind, (), depth, *terms, remaining, _remaining_s(at, run))


def gang_changed(
    at: float, run: QueryRun, live: LivePrimitive | None, claimed: Iterable[EngineRequest]
) -> DepthChanged | None:
    """Return the event that tells an engine of the gang of requests that were made before the graph came to them.

    None if nothing changes for them. It does if the graph knows a call of the original to be a member of a gang, or
    waits alone for what a gang had requested.
    """
    if live is None or live.gang_objective.objective is Objective.BACKGROUND:
        return None
    objective, gang = live.gang_objective.objective, _gang(run, live.gang_objective)
    is_member = objective is Objective.THROUGHPUT
    changed = [
        entry
        for entry in claimed
        if not (entry.has_ended or entry.stream.is_prefilled)
        and entry.queued_gang != gang
        and (not is_member or entry.claims.made_by is Caller.ORIGINAL)
    ]
    for entry in changed:
        entry.queued_gang = gang
    primitives = {entry.primitive for entry in changed}
    return DepthChanged(at, run.id, {}, dict.fromkeys(primitives, (objective, gang))) if primitives else None


def call_enqueue_event(
    at: float,
    run: QueryRun,
    kind: PrimitiveKind,
    name: str,
    depth: int,
    gang: str,
    new: Sequence[EngineRequest],
    remaining: float = 0.0,
) -> tuple[Enqueue, DepthChanged | None]:
    """Return the event with which a call of the original is queued, and an event about the call before, if any.

    Calls from branches that run side by side are the `gang` of their place. Other calls are a gang if the second one
    is made before the first token of the first: the original waits for both. A call whose pieces are read as they come
    is in no gang.
    """
    query, engine = run.query, new[0].engine
    before, is_known_member = (None, True) if gang else run.last_calls.get((engine, kind), (None, False))
    is_streamed = any(entry.stream.is_read for entry in new)
    overlaps = before is not None and not is_streamed and not (before.has_ended or before.stream.is_prefilled)
    is_member = not is_streamed and (bool(gang) or overlaps or len(new) > 1)
    urgency = (Objective.THROUGHPUT, f"{run.id}/{gang or engine + '.calls'}") if is_member else (Objective.LATENCY, "")
    for entry in new:
        entry.queued_gang = urgency[1]
    if not (is_streamed or gang):
        run.last_calls[engine, kind] = new[-1], is_member
    terms = query.app, query.weight, "", False, urgency[1], urgency[0]
    event = Enqueue(at, run.id, name, kind, (), depth, *terms, remaining, _remaining_s(at, run))
    change = None
    if before is not None and overlaps and not is_known_member:
        before.queued_gang = urgency[1]
        change = DepthChanged(at, run.id, {}, {before.primitive: urgency})
    return event, change


def changed_depths(run: QueryRun, depths: Mapping[str, int]) -> dict[str, int]:
    """Return the depths to tell engines of, when those of dispatched primitives have changed.

    Engines know a request by the primitive that made it, and go by the deepest one that waits for it.
    """
    changed = dict(depths)
    for name, depth in depths.items():
        live = run.primitives.get(name)
        for entry in live.entries if live is not None else ():
            entry.terms = placed(entry.terms, max(depth, entry.terms.depth), entry.terms.gang)
            entry.queued_depth = entry.terms.depth
            changed[entry.primitive] = max(entry.queued_depth, changed.get(entry.primitive, 0))
    return changed


def _remaining_s(at: float, run: QueryRun) -> float | None:
    """Return the seconds until the query should be over; None if nothing says that."""
    return None if run.due is None else run.due - at


def _gang(run: QueryRun, gang_objective: GangObjective) -> str:
    return f"{run.id}/{gang_objective.gang}" if gang_objective.gang else ""


UNKNOWN_PRIMITIVE_S = 0.1
"""Assumed duration of a primitive of which only its depth is known."""


class RemainingTimes:
    """The times that the queries of one runtime still take, by the profiles of idle engines.

    They are kept with each planned graph, which serves many queries. From a primitive that was spliced in, its children
    are followed to where they meet the plan. Beyond the end of a subplan only the number of primitives is known.
    `profiles` are read when a graph is met for the first time.
    """

    def __init__(self, profiles: Callable[[], Mapping[str, EngineProfile]]) -> None:
        self._profiles = profiles
        self._by_graph: WeakKeyDictionary[Graph, Mapping[str, float]] = WeakKeyDictionary()

    def of(self, query: LiveQuery | None, p: Primitive, depth: int) -> float:
        """Return the expected seconds from the beginning of `p` to the end of its query."""
        if query is None:
            return 0.0
        planned = self._planned(query.graph).get(p.id)
        if planned is not None:
            return planned
        live = query.get(p.id)
        return depth * UNKNOWN_PRIMITIVE_S if live is None else self._of_spliced(query, live)

    def call(self, query: LiveQuery | None, depth: int) -> float:
        """Return the seconds for a call of the original that no graph knows: nothing of its query is more urgent."""
        if query is None:
            return 0.0
        planned = self._planned(query.graph)
        return max(
            [planned.get(live.id, 0.0) for live in query if not live.status.has_ended],
            default=depth * UNKNOWN_PRIMITIVE_S,
        )

    def _planned(self, graph: Graph) -> Mapping[str, float]:
        times = self._by_graph.get(graph)
        if times is None:
            times = self._by_graph[graph] = remaining_times(graph, PassContext(self._profiles()))
        return times

    def _of_spliced(self, query: LiveQuery, live: LivePrimitive) -> float:
        """Return the seconds for a primitive that was spliced in.

        Goes depth first, with a stack instead of recursion: a chain may be thousands of primitives long.
        """
        planned, context = self._planned(query.graph), PassContext(self._profiles())
        remaining_s: dict[str, float] = {}
        stack = [live]
        while stack:
            current = stack[-1]
            children = query.children(current.id)
            for child in children:
                if child.id in planned:
                    remaining_s.setdefault(child.id, planned[child.id])
            missing = [child for child in children if child.id not in remaining_s]
            if missing:
                stack += missing
                continue
            stack.pop()
            after_s = max(
                [remaining_s[child.id] for child in children], default=current.base_depth * UNKNOWN_PRIMITIVE_S
            )
            remaining_s[current.id] = seconds(current.primitive, context) + after_s
        return remaining_s[live.id]
