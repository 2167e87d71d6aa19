"""What a port knows of the requests that it was given: which its callers wait for, which batch each runs in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.runtime.engine_requests.engine_request import EngineRequest


@dataclass(slots=True, eq=False)
class OutstandingRequest:
    """A request at a port, from its queueing until its slot is free."""

    name: str
    """Its id at the scheduler and at the engine; that of the request, unless one of that id is still there."""
    entry: EngineRequest
    told: bool = False
    """Whether it has ended for its caller; the engine may have yet to let go of it."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were given to an instance together."""

    instance: str
    left: dict[str, OutstandingRequest]
    """Those that have not ended, by name."""
    task: Any = None
    over: bool = field(default=False)
    """Whether the port goes on without it: what still comes is not heard."""


class OutstandingRequests:
    """Of one port. A request is *asked* until its caller is told of its end, and *here* until its slot is free."""

    def __init__(self) -> None:
        self._here: dict[str, OutstandingRequest] = {}
        self._asked: dict[str, OutstandingRequest] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[OutstandingRequest]:
        """Those whose callers wait."""
        return iter(list(self._asked.values()))

    def add(self, entry: EngineRequest) -> OutstandingRequest:
        name = entry.request.id
        if name in self._here:  # asked again by a client that came back, before the engine had let go of the first
            name = f"{name}~{next(self._numbers)}"
        outstanding = OutstandingRequest(name, entry)
        self._here[name] = self._asked[entry.request.id] = outstanding
        return outstanding

    def named(self, name: str) -> OutstandingRequest | None:
        return self._here.get(name)

    def of(self, entry: EngineRequest) -> OutstandingRequest | None:
        """The request, if its caller still waits for it."""
        return self._asked.get(entry.request.id)

    def tell(self, outstanding: OutstandingRequest) -> bool:
        """Its caller is being told; False if that was done before."""
        if outstanding.told:
            return False
        outstanding.told = True
        if self._asked.get(outstanding.entry.request.id) is outstanding:
            del self._asked[outstanding.entry.request.id]
        return True

    def forget(self, outstanding: OutstandingRequest) -> None:
        """It is no longer at the scheduler."""
        self._here.pop(outstanding.name, None)
