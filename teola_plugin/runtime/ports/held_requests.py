"""What a port knows of the requests that it was given: which its callers wait for, which batch each runs in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.runtime.works.work import Work


@dataclass(slots=True, eq=False)
class Held:
    """A request at a port, from its queueing until its slot is free."""

    name: str
    """Its id at the scheduler and at the engine; that of the request, unless one of that id is still held there."""
    entry: Work
    told: bool = False
    """Whether it has ended for its caller; the engine may have yet to let go of it."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were given to an instance together."""

    instance: str
    left: dict[str, Held]
    """Those that have not ended, by name."""
    task: Any = None
    over: bool = field(default=False)
    """Whether the port goes on without it: what still comes is not heard."""


class HeldRequests:
    """Of one port. A request is *asked* until its caller is told of its end, and *here* until its slot is free."""

    def __init__(self) -> None:
        self._here: dict[str, Held] = {}
        self._asked: dict[str, Held] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[Held]:
        """Those whose callers wait."""
        return iter(list(self._asked.values()))

    def add(self, entry: Work) -> Held:
        name = entry.request.id
        if name in self._here:  # asked again by a client that came back, before the engine had let go of the first
            name = f"{name}~{next(self._numbers)}"
        held = Held(name, entry)
        self._here[name] = self._asked[entry.request.id] = held
        return held

    def named(self, name: str) -> Held | None:
        return self._here.get(name)

    def of(self, entry: Work) -> Held | None:
        """The request, if its caller still waits for it."""
        return self._asked.get(entry.request.id)

    def tell(self, held: Held) -> bool:
        """Its caller is being told; False if that was done before."""
        if held.told:
            return False
        held.told = True
        if self._asked.get(held.entry.request.id) is held:
            del self._asked[held.entry.request.id]
        return True

    def forget(self, held: Held) -> None:
        """It is no longer at the scheduler."""
        self._here.pop(held.name, None)
