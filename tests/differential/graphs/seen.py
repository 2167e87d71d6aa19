"""Records one run of a graph with everything observable, and compares two of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pprint import pformat
from typing import Any

from differential.graphs.plain import Names, plain, unnamed
from differential.graphs.recorder import Recorder
from differential.graphs.ways import GRAPH, RUNNABLE, is_async
from langgraph.pregel import Pregel
from support.graphs import Case, Kit, Turn
from support.graphs.kit import Stop
from support.request_counts import RequestCounts

THREAD = {"configurable": {"thread_id": "thread"}}


@dataclass(frozen=True)
class Seen:
    """Everything observable about a run, as plain data whose ids are named."""

    results: Any
    state: Any
    """The last state, with those of subgraphs, and its history."""
    saved: Any
    """Checkpoints: values, versions, metadata, parents, pending writes."""
    remembered: Any
    """What is in the store and in the node cache."""
    events: Any
    side_effects: Counter[str]
    """What user code did."""
    original_requests: Counter[str]
    """By the plain object, of the pool."""
    counts: RequestCounts
    raced: bool


def see(kit: Kit, case: Case, way: str, counts: RequestCounts, graphs: Sequence[Any] | None = None) -> Seen:
    """Run the turns of a case with `graphs` in turn, all made from this kit. Return everything observable."""
    counts.clear()
    recorder = Recorder()
    graphs = graphs or [case.build(kit)]
    results = [_called(graphs[i % len(graphs)], turn, way, recorder) for i, turn in enumerate(case.turns)]
    raced = case.races or "batch" in way
    names = Names(raced=raced)
    in_order = _sorted if raced else tuple
    events = recorder.events
    return Seen(
        results=_results(names(tuple(results)), case, way, raced=raced),
        state=names(_state(graphs[-1])) if case.is_graph else None,
        saved=in_order(names(saved(kit))),
        remembered=in_order(names(_remembered(kit))),
        events=Counter(map(repr, names(tuple(events)))) if raced else names(tuple(events)),
        side_effects=kit.side_effects.copy(),
        original_requests=Counter({names(key): n for key, n in counts.original_requests.items()}),
        counts=counts.copy(),
        raced=raced,
    )


def _called(graph: Any, turn: Turn, way: str, recorder: Recorder) -> Any:
    config = {
        **copy.deepcopy(THREAD),
        "callbacks": [recorder],
        "tags": ["mine"],
        "metadata": {"user": 7},
        **turn.config,
    }
    given = turn.given(graph, THREAD) if callable(turn.given) else copy.deepcopy(turn.given)
    try:
        return plain(GRAPH[way](graph, given, config, **_fitting(graph, turn, way)))
    except (Exception, Stop) as error:
        return plain(error)


def _fitting(graph: Any, turn: Turn, way: str) -> dict[str, Any]:
    """Return the options that this way of calling takes."""
    return {key: one for key, one in turn.options.items() if not (key == "stream_mode" and "stream" in way)}


def _results(results: tuple[Any, ...], case: Case, way: str, *, raced: bool) -> Any:
    """Return results that can be compared: chunks of parallel nodes in any order, results of a batch in order."""
    if "stream" in way and case.fails:  # how many chunks came before the failure is a race
        results = tuple(one[-1:] if isinstance(one, tuple) else one for one in results)
    if "stream" not in way or not raced:
        return results
    return tuple(("any order", *_sorted(one)) if isinstance(one, tuple) else one for one in results)


def _sorted(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(parts, key=repr))


def _state(graph: Any) -> Any:
    if not isinstance(graph, Pregel) or not graph.checkpointer:
        return None
    try:
        return states(graph, THREAD)
    except Exception as error:
        return plain(error)


def states(graph: Any, config: Any) -> Any:
    """Return the last state with those of subgraphs, and all earlier states."""
    return plain([graph.get_state(config, subgraphs=True), *graph.get_state_history(config)])


def saved(kit: Kit) -> Any:
    """Return all checkpoints, thread by thread, oldest first."""
    raw = [part for _, part in kit.saver.blobs.values()]
    raw += [
        part
        for ns in kit.saver.storage.values()
        for known in ns.values()
        for one in known.values()
        for _, part in one[:2]
    ]
    assert not any(b"teola_plugin" in part for part in raw)
    found = sorted(
        kit.saver.list(None), key=lambda one: (one.config["configurable"]["thread_id"], one.checkpoint["id"])
    )
    return tuple(
        plain([one.config, one.checkpoint, one.metadata, one.parent_config, unnamed(plain(one.pending_writes))])
        for one in found
    )


def _remembered(kit: Kit) -> Any:
    items = [[item.namespace, item.key, item.value] for item in kit.memory.search(())]
    cached = [[namespace, *entries] for namespace, entries in kit.cache._cache.items()]
    return plain([*items, *cached])


_COMPARED = ("results", "state", "saved", "remembered", "events", "side_effects", "original_requests")
"""Fields of `Seen` that must be equal."""


def differences(before: Seen, after: Seen, case: Case) -> list[str]:
    """Return the differences of two runs. After a failure with parallel nodes only the results count."""
    found = []
    for what in ("results",) if case.fails else _COMPARED:
        one, other = getattr(before, what), getattr(after, what)
        if one != other:
            found.append(f"{what}:\n{first_difference(one, other)}")
    if not case.fails and (missing := before.counts.missing(after.counts)):
        found.append(f"engines were not asked: {missing}")
    return found


def first_difference(one: Any, other: Any, path: str = "") -> str:
    """Return the path at which two values differ, and both values there."""
    if isinstance(one, tuple) and isinstance(other, tuple) and one[:1] == other[:1] == ("any order",):
        one, other = Counter(map(repr, one)), Counter(map(repr, other))
    if isinstance(one, Counter) and isinstance(other, Counter):
        return f"missing {pformat(one - other)}\nmore {pformat(other - one)}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(first_difference(one[k], other[k], f"{path}.{k}") for k in one if one[k] != other[k])
    if isinstance(one, tuple) and isinstance(other, tuple):
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            if a != b:
                return first_difference(a, b, f"{path}[{i}]")
        if len(one) != len(other):
            rest = one[len(other) :] or other[len(one) :]
            return f"{path}: {len(one)} and {len(other)} parts; more: {pformat(rest[:3])}"
    return f"{path}:\n  {pformat(one)}\n  then\n  {pformat(other)}"


def ways_of(case: Case) -> list[str]:
    known = [way for way in (GRAPH if case.is_graph else RUNNABLE) if not case.not_by or case.not_by not in way]
    return [way for way in known if not case.only or is_async(way) == (case.only == "async")]
