"""Messages between clients, engine hosts and replicas. Frozen, picklable with the standard library alone.

Messages travel in parcels: lists that are pickled once. Ray sends bytes fastest, and puts parcels above 100 kB into its
shared memory by itself. References to large values (see `remote_values`) travel beside the bytes, where Ray sees them.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from teola_plugin.cluster.remote_values import collecting_refs
from teola_plugin.errors import EngineError, TeolaError
from teola_plugin.graph import EngineProfile, Primitive, PrimitiveKind
from teola_plugin.requests.payloads import Piece, Request, Version
from teola_plugin.runtime.ports.port import Follow
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue

PROTOCOL = 5
"""Raise it whenever a message changes: clients and hosts of different versions refuse each other."""


# ---------------------------------------------------------------- client -> engine host


@dataclass(frozen=True, slots=True)
class Submit:
    """Sends the requests of one primitive, and the primitives that follow it."""

    event: Enqueue
    requests: tuple[Request, ...]
    primitive: Primitive | None = None
    """Set if something follows: it says how the requests' values make the primitive's value."""
    then: tuple[Follow, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancels requests that nobody needs any more, and what follows them."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateDepths:
    event: DepthChanged


@dataclass(frozen=True, slots=True)
class Listen:
    """Says that the pieces of these requests have a reader from now on, who knows so many characters of each."""

    requests: tuple[tuple[str, int], ...]


Order = Submit | Cancel | UpdateDepths | Listen


# ---------------------------------------------------------------- engine host -> client


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request was given to a replica, in a batch with this number."""

    request: str
    replica: str
    batch: int


@dataclass(frozen=True, slots=True)
class RequestPiece:
    """A piece of a streamed request: its texts of a few milliseconds, joined."""

    request: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class RequestEnded:
    request: str
    value: Any
    error: BaseException | None = None
    version: Version | None = None
    """SEARCHING: the version of the collection that was searched (see `Done.version`)."""
    cuts: tuple[int, ...] = ()
    """See `Done.cuts`."""


RequestEvent = RequestStarted | RequestPiece | RequestEnded


# ---------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts about an engine that a client needs."""

    name: str
    kinds: frozenset[PrimitiveKind]
    profile: EngineProfile
    versions: Mapping[str, str]
    replicas: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that objects of frameworks read from an engine, e.g. the model's name."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduces a client to an engine host."""

    client: str
    protocol: int
    python: tuple[int, ...]
    package: str
    greeting: int = 1
    """Number of the client's greeting, from 1. Its messages belong to one greeting, and are void after the next."""


def not_picklable(engine: str, error: Exception) -> EngineError:
    """Return the error of a request that cannot be pickled by the client or unpickled by the host."""
    return EngineError(
        f"a request cannot be sent to engine {engine!r} of the shared pool: {type(error).__name__}: {error}.",
        engine=engine,
        hint="metadata and payloads must be plain data, or of classes that can be imported in the cluster",
    )


def not_accepted(engine: str, error: Exception) -> TeolaError:
    """Return the error of a request that a host could not even queue. Other requests are not affected."""
    if isinstance(error, TeolaError):
        return error
    return EngineError(
        f"engine {engine!r} of the shared pool cannot take a request: {type(error).__name__}: {error}.",
        engine=engine,
        hint="look at what was sent, e.g. for texts that are no valid Unicode",
    )


def sendable(engine: str, event: RequestEvent) -> RequestEvent:
    """Return the event, or an end with the reason if the event cannot be pickled."""
    try:
        pack([event])
    except Exception as error:
        return RequestEnded(event.request, None, _cannot_be_sent(engine, error))
    return event


def _cannot_be_sent(engine: str, error: Exception) -> EngineError:
    """Return the error of a request whose result cannot be pickled by the host or unpickled by the client."""
    return EngineError(
        f"an answer of engine {engine!r} cannot be sent or read: {type(error).__name__}: {error}.",
        engine=engine,
        hint="answers and metadata must be plain data, or of classes that can be imported in every app",
    )


def request_ids(order: Order) -> tuple[str, ...]:
    """Return the ids of the requests in an order."""
    return tuple(request.id for request in order.requests) if isinstance(order, Submit) else ()


# ---------------------------------------------------------------- parcels


def _pickled_by_fields(cls: type[Any]) -> None:
    """Pickle a frozen class with slots as one tuple: `dataclasses` walks its fields in Python, twice, which is slow."""
    names = [f.name for f in fields(cls)]
    read_fields = attrgetter(*names)
    copyreg.pickle(cls, lambda replica: (cls, read_fields(replica) if len(names) > 1 else (read_fields(replica),)))


for _cls in (
    Submit,
    Cancel,
    UpdateDepths,
    Listen,
    RequestStarted,
    RequestPiece,
    RequestEnded,
    Enqueue,
    DepthChanged,
    Request,
    Piece,
    Follow,
):
    _pickled_by_fields(_cls)

Parcel = bytes | tuple[bytes, list[Any]]
"""Pickled messages, and the references to Ray objects that they hold, if any."""


def pack(messages: Sequence[Any]) -> Parcel:
    """Return one parcel. Raises what `pickle` raises for values that cannot be pickled.

    A parcel is the pickled bytes alone or, if the messages hold batches in Ray's object store, a pair of the bytes and
    the references to them.
    """
    refs: list[Any] = []
    with collecting_refs(refs):
        body = pickle.dumps(list(messages), protocol=5)
    return (body, refs) if refs else body


def unpack(parcel: Parcel) -> list[Any]:
    """Return the messages of a parcel. Raise whatever `pickle` raises, such as ImportError for an unknown class."""
    body, refs = parcel if isinstance(parcel, tuple) else (parcel, [])
    with collecting_refs(refs):
        messages: list[Any] = pickle.loads(body)
    return messages


def pack_orders(orders: Sequence[Order], on_refused: Callable[[Order, Exception], None]) -> Parcel | None:
    """Return a parcel of orders that are pickled one by one, with the ids of their requests.

    An order that cannot be unpickled by the host fails alone. `on_refused` gets orders that cannot be pickled. Returns
    None if no order is left.
    """
    refs: list[Any] = []
    wrapped = []
    with collecting_refs(refs):
        for order in orders:
            try:
                wrapped.append((request_ids(order), pickle.dumps(order, protocol=5)))
            except Exception as error:  # the others must travel all the same
                on_refused(order, error)
        body = pickle.dumps(wrapped, protocol=5)
    return ((body, refs) if refs else body) if wrapped else None


def unpack_orders(parcel: Parcel) -> list[tuple[tuple[str, ...], Order | Exception]]:
    """Return the orders with the ids of their requests; the reason in place of an order that cannot be read."""
    body, refs = parcel if isinstance(parcel, tuple) else (parcel, [])
    with collecting_refs(refs):
        return [(names, _read(wrapped)) for names, wrapped in pickle.loads(body)]


def _read(wrapped: bytes) -> Order | Exception:
    """Unpickle one order; return the exception instead if that fails, so that only this order is refused."""
    try:
        order: Order = pickle.loads(wrapped)
    except Exception as error:  # e.g. of a class that only the client's script has
        return error
    return order


def size_of(parcel: Parcel) -> int:
    """Return the size of a parcel's messages, in bytes."""
    return len(parcel[0] if isinstance(parcel, tuple) else parcel)
