"""Checks the invariants of the two schedulers after every event where `TEOLA_VALIDATE_STATE` is set, as tests do."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Protocol

from teola_plugin.errors import TeolaError
from teola_plugin.graph import Batching, EngineProfile
from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Running
from teola_plugin.scheduling.live_query import LiveQuery, Status

VALIDATE = bool(os.environ.get("TEOLA_VALIDATE_STATE"))
VIOLATIONS: list[str] = []
"""All violations so far in this process: an exception in a callback of a loop reaches nobody."""
_ALWAYS_CHECKED_SIZE = 64
"""Number of items up to which a state is checked after every event; one that is n times as large after every n-th."""


class InvalidState(TeolaError):
    """A scheduler broke a rule of its own: a bug of this package."""


class EngineState(Protocol):
    """The state of an engine scheduler."""

    profile: EngineProfile
    replicas: list[str]
    queue: list[QueuedPrimitive]
    running: Running


class GraphState(Protocol):
    """The state of a graph scheduler."""

    queries: dict[str, LiveQuery]


class CheckInterval:
    """Counts a scheduler's events and says after which of them its state is checked: the larger, the more rarely.

    Each scheduler makes one. It is consulted at every event of a process that validates (`VALIDATE`).
    """

    def __init__(self) -> None:
        self._event_count = 0

    def is_due(self, item_count: int) -> bool:
        """Count an event and return True if the state, which has that many items, is to be checked after it."""
        self._event_count += 1
        return self._event_count % (1 + item_count // _ALWAYS_CHECKED_SIZE) == 0


def validate_engine_scheduler(scheduler: EngineState) -> None:
    """Raise `InvalidState` if slots are overrun, a request exists twice or a count of running requests is wrong."""
    queued = [request.id for q in scheduler.queue for request in q.requests]
    _check(all(q.requests for q in scheduler.queue), "a primitive without requests is queued")
    arrived = [q.arrival_number for q in scheduler.queue]
    _check(arrived == sorted(set(arrived)), f"the queue is out of order: {arrived}")
    duplicates = [name for name, count in Counter([*queued, *scheduler.running.by_id]).items() if count > 1]
    _check(not duplicates, f"requests are there twice: {duplicates}")
    _check(len(set(scheduler.replicas)) == len(scheduler.replicas), f"a replica is twice: {scheduler.replicas}")
    _validate_running(scheduler)


def _validate_running(scheduler: EngineState) -> None:
    """Raise `InvalidState` if a replica miscounts its running requests or runs more than its engine takes."""
    running, profile = scheduler.running, scheduler.profile
    max_static_batch = max(profile.max_efficient_batch, profile.max_batch)
    count = 0
    for replica in {r.replica for r in running.by_id.values()}:
        on_replica = running.at(replica)
        count += len(on_replica.requests)
        prefilling = [r for r in on_replica.requests.values() if r.prefilling]
        _check(
            on_replica.prefilling == len(prefilling),
            f"replica {replica} counts {on_replica.prefilling} that prefill",
        )
        units = sum(r.size for r in prefilling)
        _check(
            math.isclose(on_replica.units, units, abs_tol=1e-6),
            f"replica {replica} counts {on_replica.units} of {units}",
        )
        limit = max(1, max_static_batch) if profile.batching is Batching.STATIC else profile.max_requests
        _check(
            len(on_replica.requests) <= limit,
            f"replica {replica} runs {len(on_replica.requests)} requests of {limit}",
        )
        if profile.batching is Batching.CONTINUOUS:
            _check(len(prefilling) <= 1 or units <= profile.max_batch + 1e-6, f"replica {replica} prefills {units}")
    _check(count == len(running.by_id), "the requests of the replicas are not those that run")


def validate_graph_scheduler(scheduler: GraphState, query: str | None = None) -> None:
    """Raise `InvalidState` if a primitive waits for nothing or for one that has ended, or if an ended query is kept."""
    for name, live in scheduler.queries.items():
        _check(not live.has_ended and live.id == name, f"query {name} has ended and is kept")
    selected = [scheduler.queries[query]] if query in scheduler.queries else []
    for live_query in selected if query is not None else scheduler.queries.values():
        _validate_query(live_query)


def _validate_query(query: LiveQuery) -> None:
    """Raise `InvalidState` if a primitive waits for nothing or an ended one, or an answered query goes on."""
    for live in query:
        if live.status is Status.WAITING:
            _check(bool(live.waits), f"{live.id} of query {query.id} waits for nothing")
        if live.status in (Status.WAITING, Status.EXPANDING):
            ended_producers = [
                name for name in live.waits if (producer := query.get(name)) is not None and producer.status.has_ended
            ]
            _check(not ended_producers, f"{live.id} of query {query.id} waits for {ended_producers}, which ended")
    output = query.get(query.output.producer)
    has_ended = not query.original_runs and output is not None and output.status.has_ended
    _check(not has_ended, f"query {query.id} has its output and goes on")


def _check(holds: bool, violation: str) -> None:
    """Record a violation and raise InvalidState if a condition does not hold.

    The list `VIOLATIONS` is kept as well, since an exception in a callback of a loop reaches nobody.
    """
    if not holds:
        VIOLATIONS.append(violation)
        raise InvalidState(f"a scheduler is not in order: {violation}.", hint="report it, with what led here")
