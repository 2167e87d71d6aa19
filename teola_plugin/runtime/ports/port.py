"""An engine as the runtime uses it, wherever its scheduler and its replicas are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from teola_plugin.graph import Primitive
from teola_plugin.requests.payloads import Piece
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue


@dataclass(frozen=True, slots=True)
class PortListener:
    """The callbacks of a port, about its requests. Called on the pool's loop; errors that they raise are logged."""

    on_start: Callable[[EngineRequest, str, int], None]
    """(entry, replica, batch)"""
    on_piece: Callable[[EngineRequest, Piece], None]
    on_end: Callable[[EngineRequest, Any, BaseException | None], None]
    """(entry, value, error)"""


class Port(Protocol):
    """An engine as the runtime uses it, wherever its scheduler and its replicas are."""

    name: str

    @property
    def engine(self) -> Any:
        """The engine, or a description of it: name, kinds, profile, versions."""
        ...

    def enqueue(self, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        """Queue the requests of one primitive; `event.requests` need not be filled in. One that cannot be queued fails
        alone, at once."""
        ...

    def holds(self, entry: EngineRequest) -> bool:
        """Return True if the request is queued or running here, and has not ended for its caller."""
        ...

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        """End requests at once for their callers, whenever the engine stops working on them."""
        ...

    def depths(self, event: DepthChanged) -> None:
        """Pass changed depths and gangs of queued requests to the engine's scheduler."""
        ...

    @property
    def takes_late_readers(self) -> bool:
        """True if requests that nobody reads yet may be sent without `stream`."""
        ...

    def announce_reader(self, entries: Sequence[EngineRequest]) -> None:
        """Have pieces of these requests streamed: they were sent without `stream`, and have a reader now."""
        ...

    async def close(self) -> None:
        """Stop what runs. Requests that are left fail as unavailable."""
        ...


class DirectPort(Port, ABC):
    """A `Port` without a queue: requests start as they come, so it needs no event that says how urgent they are.

    No other caller claims its requests.
    """

    @abstractmethod
    def enqueue(self, entries: Sequence[EngineRequest], event: Enqueue | None = None) -> None:
        """Start the requests of one primitive."""


@dataclass(frozen=True, slots=True)
class Follow:
    """A primitive to be queued as soon as another has ended well. `follower_request` names its requests."""

    primitive: Primitive
    name: str
    inputs: Mapping[str, Any]
    """Values that are known when it is sent, by input name."""
    pending: tuple[tuple[str, tuple[Any, ...]], ...]
    """Inputs to be filled with what lies under a path in the value of the primitive before."""
    event: Enqueue
    tenant: str
    followers: tuple[Follow, ...] = ()
    """Primitives to be queued as soon as this one has ended well."""
    keep_remote: bool = False
    """True if its value may stay where it is made."""


def follower_request(name: str, number: int) -> str:
    """Return the id of a follower's request. Both sides derive it, so that none has to send it."""
    return f"{name}.{number}"


def follower_of(request: str) -> str:
    """Return the name of the follower whose request this is, if it is one's."""
    return request.rpartition(".")[0]


class ForwardingPort(Port, ABC):
    """A `Port` of an engine elsewhere, to which followers can be sent with a primitive (see `prescheduling`)."""

    @abstractmethod
    def enqueue(
        self,
        entries: Sequence[EngineRequest],
        event: Enqueue,
        primitive: Primitive | None = None,
        followers: tuple[Follow, ...] = (),
    ) -> None:
        """Send the requests of one primitive, and its followers."""

    @abstractmethod
    def expect(self, name: str, event: Enqueue) -> None:
        """Announce a follower of that name, and the event with which it is queued."""

    @abstractmethod
    def adopt(self, name: str, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        """Take these entries, in order, for the requests of a follower that the graph has dispatched now."""

    @abstractmethod
    def disown(self, name: str, count: int = 0) -> None:
        """Give up a follower that is not needed, or whose `count` requests are made otherwise."""
