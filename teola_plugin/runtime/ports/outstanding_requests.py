"""The requests at a port: those whose callers wait, those whose slots are taken, the batch in which each runs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.requests.results import Piece
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.failures import copied_error
from teola_plugin.runtime.ports.port import PortListener


@dataclass(slots=True, eq=False)
class OutstandingRequest:
    """A request at a port, from its queueing until its slot is free."""

    name: str
    """Id at the scheduler and at the engine: that of the request, unless one with that id is still there."""
    entry: EngineRequest
    has_ended: bool = False
    """True once it has ended for its caller. It may still run at the engine."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were given to an instance together."""

    instance: str
    left: dict[str, OutstandingRequest]
    """Requests that have not ended, by name."""
    task: Any = None
    is_over: bool = field(default=False)
    """True once the port goes on without the batch: results that still come are ignored."""


class OutstandingRequests:
    """The requests of one port. Their callers wait for the *pending* ones; *present* ones have yet to free a slot."""

    def __init__(self) -> None:
        self._present: dict[str, OutstandingRequest] = {}
        """By name."""
        self._pending: dict[str, OutstandingRequest] = {}
        """By id of the request."""
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[OutstandingRequest]:
        """Iterate over the requests whose callers wait."""
        return iter(list(self._pending.values()))

    def add(self, entry: EngineRequest) -> OutstandingRequest:
        """Add a request that is queued."""
        name = entry.request.id
        if name in self._present:  # a client that came back sent it again, before the engine has ended the first
            name = f"{name}~{next(self._numbers)}"
        outstanding = OutstandingRequest(name, entry)
        self._present[name] = self._pending[entry.request.id] = outstanding
        return outstanding

    def get(self, name: str) -> OutstandingRequest | None:
        """Return the request with this name that has yet to free its slot."""
        return self._present.get(name)

    def of(self, entry: EngineRequest) -> OutstandingRequest | None:
        """Return the request, if its caller still waits for it."""
        return self._pending.get(entry.request.id)

    def note_end(self, outstanding: OutstandingRequest) -> bool:
        """Note that a request ends for its caller. Return False if it has ended before."""
        if outstanding.has_ended:
            return False
        outstanding.has_ended = True
        if self._pending.get(outstanding.entry.request.id) is outstanding:
            del self._pending[outstanding.entry.request.id]
        return True

    def remove(self, outstanding: OutstandingRequest) -> None:
        """Remove a request that has freed its slot."""
        self._present.pop(outstanding.name, None)


log = logging.getLogger("teola_plugin")


class Callers:
    """The callers of a port's requests, reached through its listener. They hear of each end once.

    A listener that raises disturbs nobody else.
    """

    def __init__(self, engine: str, listener: PortListener, outstanding: OutstandingRequests) -> None:
        self._engine, self._listener, self._outstanding = engine, listener, outstanding

    def started(self, entry: EngineRequest, instance: str, batch: int) -> None:
        self._call("start", self._listener.on_start, entry, instance, batch)

    def piece(self, entry: EngineRequest, piece: Piece) -> None:
        self._call("pieces", self._listener.on_piece, entry, piece)

    def end(self, outstanding: OutstandingRequest, value: Any, error: BaseException | None) -> None:
        """End a request for its caller, unless that was done before: it was cancelled, or the pool was closed."""
        if self._outstanding.note_end(outstanding):
            self.end_unqueued(outstanding.entry, value, error)

    def end_unqueued(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request that the port has not queued. The caller gets a copy of the error."""
        self.end_directly(entry, value, None if error is None else copied_error(error))

    def end_directly(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request that the port has not queued, with an error that nobody changes: no copy is made."""
        if not self._call("end", self._listener.on_end, entry, value, error):
            entry.resolve(value, error)  # so that nobody waits for ever

    def _call(self, event: str, listener: Callable[..., None], *args: Any) -> bool:
        try:
            listener(*args)
        except (Exception, SystemExit):
            log.exception("engine %s: what listens to the %s of a request raised", self._engine, event)
            return False
        return True
