"""What clients, engine hosts and instances say to one another. Frozen, picklable with the standard library alone.

Messages travel in parcels: a list of them, pickled once. Ray sends bytes fastest, and puts parcels above 100 kB into
its shared memory by itself. References to large values (see `remote_values`) go beside the bytes, where Ray sees them.
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
from teola_plugin.requests.payloads import Version
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.ports.port import Follow
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue

PROTOCOL = 5
"""Raise it whenever a message changes: clients and hosts of different versions refuse each other."""


# ---------------------------------------------------------------- client -> engine host


@dataclass(frozen=True, slots=True)
class Submit:
    """The requests of one primitive, and what follows it."""

    event: Enqueue
    requests: tuple[Request, ...]
    primitive: Primitive | None = None
    """Given when something follows: it says how the requests' values make its value."""
    then: tuple[Follow, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants these requests any more, nor what follows them."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateDepths:
    event: DepthChanged


@dataclass(frozen=True, slots=True)
class Listen:
    """Somebody reads the pieces of these requests from now on, and has heard so many characters of each."""

    requests: tuple[tuple[str, int], ...]


Order = Submit | Cancel | UpdateDepths | Listen


# ---------------------------------------------------------------- engine host -> client


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request was given to an instance, in a batch with this number."""

    request: str
    instance: str
    batch: int


@dataclass(frozen=True, slots=True)
class RequestPiece:
    """A piece of a streamed request, of texts put together over a few milliseconds."""

    request: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class RequestEnded:
    request: str
    value: Any
    error: BaseException | None = None
    version: Version | None = None
    """SEARCHING: what it was true for (see `Done.version`)."""
    cuts: tuple[int, ...] = ()
    """See `Done.cuts`."""


RequestEvent = RequestStarted | RequestPiece | RequestEnded


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
    greeting: int = 1
    """How often it has greeted: what it says belongs to one greeting, and is void after the next."""


def not_picklable(engine: str, error: Exception) -> EngineError:
    return EngineError(
        f"a request cannot be sent to engine {engine!r} of the shared pool: {type(error).__name__}: {error}.",
        engine=engine,
        hint="metadata and payloads must be plain data, or of classes that can be imported in the cluster",
    )


def not_accepted(engine: str, error: Exception) -> TeolaError:
    """Why a host could not even queue a request: its own trouble, and nobody else's."""
    if isinstance(error, TeolaError):
        return error
    return EngineError(
        f"engine {engine!r} of the shared pool cannot take a request: {type(error).__name__}: {error}.",
        engine=engine,
        hint="look at what was sent, e.g. for texts that are no valid Unicode",
    )


def sendable(engine: str, news: RequestEvent) -> RequestEvent:
    """The news, or an end that says why it cannot travel."""
    try:
        pack([news])
    except Exception as error:
        return RequestEnded(news.request, None, _cannot_be_sent(engine, error))
    return news


def _cannot_be_sent(engine: str, error: Exception) -> EngineError:
    return EngineError(
        f"an answer of engine {engine!r} cannot be sent or read: {type(error).__name__}: {error}.",
        engine=engine,
        hint="answers and metadata must be plain data, or of classes that can be imported in every app",
    )


def request_ids(order: Order) -> tuple[str, ...]:
    """The requests that an order brings."""
    return tuple(request.id for request in order.requests) if isinstance(order, Submit) else ()


# ---------------------------------------------------------------- parcels


def _pickled_by_fields(cls: type[Any]) -> None:
    """Frozen data with slots pickles slowly (`dataclasses` walks its fields in Python, twice): say it in one tuple."""
    names = [known.name for known in fields(cls)]
    read = attrgetter(*names)
    copyreg.pickle(cls, lambda one: (cls, read(one) if len(names) > 1 else (read(one),)))


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
    """One parcel. Raises what `pickle` raises for values that cannot travel."""
    refs: list[Any] = []
    with collecting_refs(refs):
        body = pickle.dumps(list(messages), protocol=5)
    return (body, refs) if refs else body


def unpack(parcel: Parcel) -> list[Any]:
    body, refs = parcel if isinstance(parcel, tuple) else (parcel, [])
    with collecting_refs(refs):
        found: list[Any] = pickle.loads(body)
    return found


def pack_orders(orders: Sequence[Order], refused: Callable[[Order, Exception], None]) -> Parcel | None:
    """A parcel whose orders are pickled one by one, with the names of their requests: one that cannot be read over
    there fails alone. `refused` is told of those that cannot be written; None when there is no other."""
    refs: list[Any] = []
    wrapped = []
    with collecting_refs(refs):
        for order in orders:
            try:
                wrapped.append((request_ids(order), pickle.dumps(order, protocol=5)))
            except Exception as error:  # something in it cannot travel: the others must
                refused(order, error)
        body = pickle.dumps(wrapped, protocol=5)
    return ((body, refs) if refs else body) if wrapped else None


def unpack_orders(parcel: Parcel) -> list[tuple[tuple[str, ...], Order | Exception]]:
    """The orders with the names of their requests; the reason for one that cannot be read."""
    body, refs = parcel if isinstance(parcel, tuple) else (parcel, [])
    with collecting_refs(refs):
        return [(names, _read(wrapped)) for names, wrapped in pickle.loads(body)]


def _read(wrapped: bytes) -> Order | Exception:
    try:
        order: Order = pickle.loads(wrapped)
    except Exception as error:  # e.g. of a class that only the client's script has
        return error
    return order


def size_of(parcel: Parcel) -> int:
    """Bytes of its messages."""
    return len(parcel[0] if isinstance(parcel, tuple) else parcel)
