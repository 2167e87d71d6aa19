"""An engine as the runtime uses it, wherever its scheduler and its instances are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from teola_plugin.graph import Primitive
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue


@dataclass(frozen=True, slots=True)
class PortListener:
    """Whom a port tells what happened to requests. Called on the pool's loop; what it raises is logged."""

    started: Callable[[EngineRequest, str, int], None]
    """(entry, instance, batch)"""
    piece: Callable[[EngineRequest, Piece], None]
    ended: Callable[[EngineRequest, Any, BaseException | None], None]
    """(entry, value, error)"""


class Port(Protocol):
    """An engine as the runtime uses it, wherever its scheduler and its instances are."""

    name: str

    @property
    def engine(self) -> Any:
        """What there is to know of the engine: name, kinds, profile, versions."""
        ...

    def enqueue(self, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        """Queue the requests of one primitive; `event.requests` need not be filled in. One that cannot be queued fails
        alone, at once."""
        ...

    def holds(self, entry: EngineRequest) -> bool:
        """Whether the request is queued or running here, and has not ended for its caller."""
        ...

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        """They end at once for their caller, whenever the engine lets go of them."""
        ...

    def depths(self, event: DepthChanged) -> None: ...

    @property
    def listens(self) -> bool:
        """Whether requests that nobody reads yet may be sent without `stream`."""
        ...

    def listen(self, entries: Sequence[EngineRequest]) -> None:
        """They were sent without `stream`, and have a reader now: their requests say so already."""
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
    """A primitive to be queued as soon as another has ended well. For its requests' names see `follower_request`."""

    primitive: Primitive
    name: str
    inputs: Mapping[str, Any]
    """Values that are known already, by input name."""
    pending: tuple[tuple[str, tuple[Any, ...]], ...]
    """Inputs to be filled with what lies under a path in the value of the primitive before."""
    event: Enqueue
    tenant: str
    then: tuple[Follow, ...] = ()
    keep_remote: bool = False
    """Whether its value may stay where it is made."""


def follower_request(name: str, number: int) -> str:
    """Of the follower of that name, its request of that number: both sides know it without telling each other."""
    return f"{name}.{number}"


def follower_of(request: str) -> str:
    """The name of the follower whose request this is, if it is one's."""
    return request.rpartition(".")[0]


class ForwardingPort(Port, ABC):
    """A `Port` of an engine elsewhere: what follows a primitive can be sent along with it (see `prescheduling`)."""

    @abstractmethod
    def enqueue(
        self,
        entries: Sequence[EngineRequest],
        event: Enqueue,
        primitive: Primitive | None = None,
        then: tuple[Follow, ...] = (),
    ) -> None:
        """Send the requests of one primitive, and what follows it."""

    @abstractmethod
    def expect(self, name: str, event: Enqueue) -> None:
        """A follower of that name is announced, to be queued like this."""

    @abstractmethod
    def adopt(self, name: str, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        """The graph has dispatched the follower: its requests are these entries, in order."""

    @abstractmethod
    def disown(self, name: str, count: int = 0) -> None:
        """The follower is not wanted, or its `count` requests are made otherwise."""
