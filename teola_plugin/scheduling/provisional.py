"""What is done on a guess, at one engine: it begins where nobody else runs; answers make room for whoever comes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from teola_plugin.graph import LLM_KINDS, PrimitiveKind
from teola_plugin.scheduling.engine_events import CancelRunning, DepthChanged
from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Running
from teola_plugin.scheduling.events import Instructions
from teola_plugin.scheduling.objectives import Objective

RECENTLY = 5.0
"""Seconds: how fast it is forgotten that an engine was busy."""
BUSY = 0.5
"""Share of the time lately, from which on what finds contexts for guesses does not begin."""


class ProvisionalRequests:
    """Those of one engine that wait until it is idle, apart from its queue. One that is claimed is like any other."""

    def __init__(self) -> None:
        self.waiting: list[QueuedPrimitive] = []
        self._begun: set[str] = set()
        """Requests that have left; some of them may be over."""
        self._busy = self._at = 0.0

    def passed(self, at: float, *, busy: bool) -> None:
        """Since the last call, the engine had something to do, or not."""
        kept = math.exp((self._at - at) / RECENTLY) if at > self._at else 1.0
        self._busy, self._at = self._busy * kept + busy * (1 - kept), max(at, self._at)

    def wait(self, queued: QueuedPrimitive) -> None:
        if queued.requests:
            self.waiting.append(queued)

    def next(self, queue: Sequence[QueuedPrimitive], running: Running) -> QueuedPrimitive | None:
        """The first that may begin: nothing of another query waits or runs here, nor of its own but warm-ups. What
        cannot be stopped begins only where that is so most of the time: whoever comes next waits for it."""
        may = (one for one in self.waiting if one.kind in LLM_KINDS or self._busy < BUSY)
        found = next((one for one in may if _alone(one, queue, running)), None)
        if found is not None:
            self.waiting.remove(found)
            self._begun.update(request.id for request in found.requests)
        return found

    def put_back(self, queue: list[QueuedPrimitive]) -> bool:
        """What found no slot waits on. Whether there is any."""
        left = [one for one in queue if one.objective is Objective.PROVISIONAL]
        for one in left:
            queue.remove(one)
            self.wait(one)
        return bool(left)

    def make_room(self, coming: QueuedPrimitive, running: Running) -> Instructions:
        """Somebody else comes: answers that run on a guess are stopped, unless it is a warm-up of the same query. What
        finds their contexts is let end: a batch of an embedder or a reranker takes as long without one of its texts."""
        self._begun.intersection_update(running.by_id)
        lost: dict[str, list[str]] = {}
        for request in sorted(self._begun):
            found = running.by_id[request]
            guess = found.source.objective is Objective.PROVISIONAL and found.source.kind in LLM_KINDS
            if guess and not _beside(coming, found.query):
                lost.setdefault(found.instance, []).append(request)
        return [CancelRunning(instance, tuple(requests)) for instance, requests in lost.items()]

    def cancelled(self, unwanted: set[str]) -> list[str]:
        """Those of them that waited here."""
        gone = [request.id for one in self.waiting for request in one.requests if request.id in unwanted]
        for one in self.waiting if gone else ():
            one.requests = type(one.requests)(r for r in one.requests if r.id not in unwanted)
        self.waiting = [one for one in self.waiting if one.requests]
        return gone

    def claimed(self, event: DepthChanged) -> list[QueuedPrimitive]:
        """Those that somebody waits for from now on."""
        found = [one for one in self.waiting if one.query == event.query and one.primitive in event.wanted]
        self.waiting = [one for one in self.waiting if one not in found] if found else self.waiting
        return found


def _alone(queued: QueuedPrimitive, queue: Sequence[QueuedPrimitive], running: Running) -> bool:
    if any(not _beside(one, queued.query) for one in queue):
        return False
    return all(
        _beside(one.source, queued.query) or _sibling(one.source, queued.query) for one in running.by_id.values()
    )


def _sibling(other: QueuedPrimitive, query: str) -> bool:
    """Another guess of the same query."""
    return other.query == query and other.objective is Objective.PROVISIONAL


def _beside(other: QueuedPrimitive, query: str) -> bool:
    """Whether it is a warm-up of the query, which is in nobody's way."""
    return other.query == query and other.kind is PrimitiveKind.PARTIAL_PREFILLING
