"""The requests of a client that have not ended, with what is known of them now: a host that is new hears that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue


@dataclass(slots=True)
class _Queued:
    """How a primitive is queued, and which of its requests have not ended."""

    event: Enqueue
    requests: set[str] = field(default_factory=set)


class UnfinishedRequests:
    """By the requests' ids."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[EngineRequest, _Queued]] = {}
        self._queued: dict[tuple[str, str], _Queued] = {}
        """By query and primitive."""

    def __contains__(self, request: str) -> bool:
        return request in self._entries

    def __iter__(self) -> Iterator[tuple[EngineRequest, Enqueue]]:
        return iter([(entry, queued.event) for entry, queued in self._entries.values()])

    def add(self, entry: EngineRequest, event: Enqueue) -> None:
        key = event.query, event.primitive
        queued = self._queued.get(key)
        if queued is None:
            queued = self._queued[key] = _Queued(event)
        queued.event = event
        queued.requests.add(entry.request.id)
        self._entries[entry.request.id] = entry, queued

    def get(self, request: str) -> tuple[EngineRequest, Enqueue] | None:
        found = self._entries.get(request)
        return (found[0], found[1].event) if found is not None else None

    def end(self, request: str) -> None:
        found = self._entries.pop(request, None)
        if found is None:
            return
        queued = found[1]
        queued.requests.discard(request)
        if not queued.requests:
            self._queued.pop((queued.event.query, queued.event.primitive), None)

    def changed(self, news: DepthChanged) -> None:
        """Depths, objectives and gangs that have become known after they were queued."""
        for primitive, depth in news.depths.items():
            if (queued := self._queued.get((news.query, primitive))) is not None:
                queued.event = replace(queued.event, depth=depth)
        for primitive, (objective, gang) in news.objectives.items():
            if (queued := self._queued.get((news.query, primitive))) is not None:
                queued.event = replace(queued.event, objective=objective, gang=gang)
