"""What must hold of the two schedulers after every event. Checked where `TEOLA_VALIDATE_STATE` is set, as tests do."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Protocol

from teola_plugin.errors import TeolaError
from teola_plugin.graph import Batching, EngineProfile
from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Running
from teola_plugin.scheduling.live_primitive import LivePrimitive, Status
from teola_plugin.scheduling.live_query import LiveQuery

VALIDATE = bool(os.environ.get("TEOLA_VALIDATE_STATE"))
VIOLATIONS: list[str] = []
"""All so far in this process: who raises in a callback of a loop is heard by nobody."""
_SMALL = 64
"""Things in a state that is checked after every event; of one n times as large, every n-th event is."""


class InvalidState(TeolaError):
    """A scheduler broke a rule of its own: a bug of this package."""


class EngineState(Protocol):
    """What an engine scheduler keeps."""

    profile: EngineProfile
    instances: list[str]
    queue: list[QueuedPrimitive]
    running: Running


class GraphState(Protocol):
    """What a graph scheduler keeps."""

    queries: dict[str, LiveQuery]


class StateCheck:
    """When to check. One per scheduler."""

    def __init__(self) -> None:
        self._events = 0

    def due(self, things: int) -> bool:
        self._events += 1
        return self._events % (1 + things // _SMALL) == 0


def validate_engine_scheduler(scheduler: EngineState) -> None:
    """Raises `InvalidState`: slots are not overrun, no request is there twice, counts are those of what runs."""
    queued = [request.id for q in scheduler.queue for request in q.requests]
    _check(all(q.requests for q in scheduler.queue), "a primitive without requests is queued")
    arrived = [q.arrived for q in scheduler.queue]
    _check(arrived == sorted(set(arrived)), f"the queue is out of order: {arrived}")
    twice = [name for name, count in Counter([*queued, *scheduler.running.by_id]).items() if count > 1]
    _check(not twice, f"requests are there twice: {twice}")
    _check(len(set(scheduler.instances)) == len(scheduler.instances), f"an instance is twice: {scheduler.instances}")
    _validate_running(scheduler)


def _validate_running(scheduler: EngineState) -> None:
    running, profile = scheduler.running, scheduler.profile
    most = max(profile.max_efficient_batch, profile.max_batch)
    count = 0
    for instance in {r.instance for r in running.by_id.values()}:
        here = running.at(instance)
        count += len(here.requests)
        prefilling = [r for r in here.requests.values() if r.prefilling]
        _check(here.prefilling == len(prefilling), f"instance {instance} counts {here.prefilling} that prefill")
        units = sum(r.size for r in prefilling)
        _check(math.isclose(here.units, units, abs_tol=1e-6), f"instance {instance} counts {here.units} of {units}")
        limit = max(1, most) if profile.batching is Batching.STATIC else profile.max_requests
        _check(len(here.requests) <= limit, f"instance {instance} runs {len(here.requests)} requests of {limit}")
        if profile.batching is Batching.CONTINUOUS:
            _check(len(prefilling) <= 1 or units <= profile.max_batch + 1e-6, f"instance {instance} prefills {units}")
    _check(count == len(running.by_id), "the requests of the instances are not those that run")


def validate_graph_scheduler(scheduler: GraphState, query: str | None = None) -> None:
    """Raises `InvalidState`: no primitive waits for nothing, or for what has ended; ended queries are forgotten."""
    for name, live in scheduler.queries.items():
        _check(not live.ended and live.id == name, f"query {name} is over and still there")
    found = [scheduler.queries[query]] if query in scheduler.queries else []
    for one in found if query is not None else scheduler.queries.values():
        _validate_query(one)


def _validate_query(query: LiveQuery) -> None:
    for live in query:
        _validate_primitive(query, live)
    output = query.get(query.output.producer)
    over = not query.ahead and output is not None and output.status.ended
    _check(not over, f"query {query.id} has its output and goes on")


def _validate_primitive(query: LiveQuery, live: LivePrimitive) -> None:
    if live.status is Status.WAITING:
        _check(bool(live.waits), f"{live.id} of query {query.id} waits for nothing")
    if live.status in (Status.WAITING, Status.EXPANDING):
        gone = [name for name in live.waits if (made := query.get(name)) is not None and made.status.ended]
        _check(not gone, f"{live.id} of query {query.id} waits for {gone}, which ended")


def _check(holds: bool, what: str) -> None:
    if not holds:
        VIOLATIONS.append(what)
        raise InvalidState(f"a scheduler is not in order: {what}.", hint="report it, with what led here")
