"""What clients, engine hosts and instances say to one another. Frozen, picklable with the standard library alone.

Messages travel in parcels: a list of them, pickled once. Ray sends bytes fastest, and puts parcels above 100 kB into
its shared memory by itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.engines.base import Request
from teola_plugin.errors import EngineError
from teola_plugin.graph import EngineProfile, Primitive, PrimitiveKind
from teola_plugin.runtime.prescheduling import Follow
from teola_plugin.scheduling.events import DepthChanged, Enqueue

PROTOCOL = 1
"""Raise it whenever a message changes: clients and hosts of different versions refuse each other."""


# ---------------------------------------------------------------- client -> engine host


@dataclass(frozen=True, slots=True)
class Queue:
    """The requests of one primitive, and what follows it."""

    event: Enqueue
    requests: tuple[Request, ...]
    primitive: Primitive | None = None
    """Given when something follows: it says how the requests' values make its value."""
    then: tuple[Follow, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants these requests any more, nor what follows them."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Depths:
    event: DepthChanged


Order = Queue | Cancelled | Depths


# ---------------------------------------------------------------- engine host -> client


@dataclass(frozen=True, slots=True)
class Began:
    """A request was given to an instance, in a batch with this number."""

    request: str
    instance: str
    batch: int


@dataclass(frozen=True, slots=True)
class Said:
    """Text of a streamed request, put together over a few milliseconds."""

    request: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    request: str
    value: Any
    error: BaseException | None = None


News = Began | Said | Ended


# ---------------------------------------------------------------- what there is


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a client needs to know of an engine."""

    name: str
    kinds: frozenset[PrimitiveKind]
    profile: EngineProfile
    versions: Mapping[str, str]
    instances: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What objects of frameworks ask of an engine, e.g. the model's name."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A client introduces itself."""

    client: str
    protocol: int
    python: tuple[int, ...]
    package: str


def cannot_travel(engine: str, error: Exception) -> EngineError:
    return EngineError(
        f"a request cannot be sent to engine {engine!r} of the shared pool: {type(error).__name__}: {error}.",
        engine=engine,
        hint="metadata and payloads must be plain data, or of classes that can be imported in the cluster",
    )


def pack(messages: Sequence[Any]) -> bytes:
    """One parcel. Raises what `pickle` raises for values that cannot travel."""
    return pickle.dumps(list(messages), protocol=5)


def asked(order: Order) -> tuple[str, ...]:
    """The requests that an order brings."""
    return tuple(request.id for request in order.requests) if isinstance(order, Queue) else ()


def wrap(order: Order) -> tuple[tuple[str, ...], bytes]:
    """Pickled by itself, with the names of its requests: one that cannot be read over there fails alone."""
    return asked(order), pickle.dumps(order, protocol=5)


def unpack(parcel: bytes) -> list[Any]:
    found: list[Any] = pickle.loads(parcel)
    return found
