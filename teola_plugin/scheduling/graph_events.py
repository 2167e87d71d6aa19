"""Events and instructions of the graph scheduler: queries, their primitives, their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from teola_plugin.graph import Graph, Primitive, Ref
from teola_plugin.scheduling.events import Event, Instruction, Tick

# ---------------------------------------------------------------- in


@dataclass(frozen=True, slots=True)
class QueryEvent(Event):
    query: str


@dataclass(frozen=True, slots=True)
class Admit(QueryEvent):
    """A query with its e-graph. With `ahead`, another party (the plain object) ends the query by `Close`."""

    graph: Graph
    deadline: float | None = None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class PrimitiveEvent(QueryEvent):
    primitive: str


@dataclass(frozen=True, slots=True)
class Started(PrimitiveEvent):
    """Its first request left the queue of the engine."""


@dataclass(frozen=True, slots=True)
class Finished(PrimitiveEvent):
    """Its value is in the query's store."""


@dataclass(frozen=True, slots=True)
class Unused(PrimitiveEvent):
    """It will have no value and needs none: a partial decoding beyond the last item, a cancelled warm-up."""


@dataclass(frozen=True, slots=True)
class PrimitiveFailed(PrimitiveEvent):
    """It failed for good: what can be retried was retried request by request before."""


@dataclass(frozen=True, slots=True)
class Expanded(PrimitiveEvent):
    """Answer to `Expand`: the number of items (MAP, FOLD), 1 or 0 for another round or arm (LOOP, BRANCH).

    `matches[i]` is the prediction that equals item i, or None (MAP).
    """

    count: int
    matches: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemClosed(PrimitiveEvent):
    """A splittable decoding without planned parts closed an item; its value is stored under `value`."""

    index: int
    value: str


@dataclass(frozen=True, slots=True)
class PartBegun(QueryEvent):
    """The plain object begins a part that could not be planned before: its e-graph joins the query's."""

    name: str
    graph: Graph
    value: str
    """Where its input is stored."""
    depth: int = 0
    """How far its end is from the end of the query: all of it is deeper by that much."""
    gang: str = ""
    """What its value is put together with that of other parts for; empty if somebody waits for it alone."""
    members: str = ""
    """Leads the names of those primitives that are in the gang; empty for all."""
    told: bool = True
    """Whether anybody says what its user code gives; otherwise that code, and what waits for it, is left out."""


@dataclass(frozen=True, slots=True)
class PartEnded(QueryEvent):
    """The plain object has the part's value: whatever is left of its primitives is dropped."""

    name: str


@dataclass(frozen=True, slots=True)
class CancelQuery(QueryEvent):
    """The caller gave up."""


@dataclass(frozen=True, slots=True)
class Close(QueryEvent):
    """The plain object has its answer: whatever is left of an `ahead` query is dropped."""


# ---------------------------------------------------------------- out


@dataclass(frozen=True, slots=True)
class QueryInstruction(Instruction):
    query: str


@dataclass(frozen=True, slots=True)
class Dispatch(QueryInstruction):
    """Hand the primitive to its engine's scheduler. `group` are the decodings that its request also serves."""

    primitive: Primitive
    depth: int
    group: tuple[Primitive, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCall(QueryInstruction):
    """Run client code that is pure (CALL, AGGREGATE, CHUNKING, CONDITION, VERIFY) and store its value."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class Await(QueryInstruction):
    """User code whose turn it is (OPAQUE, TOOL): run it, or wait until the plain object has run it."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class Expand(QueryInstruction):
    """Read what decides how a fragment is instantiated, and answer with `Expanded`."""

    primitive: Primitive
    reads: Ref
    predicted: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True)
class Collect(QueryInstruction):
    """Store the value of a fragment's holder: the list of `refs` (MAP) or the single one of them (others)."""

    primitive: str
    refs: tuple[Ref, ...]
    single: bool = False


@dataclass(frozen=True, slots=True)
class Release(QueryInstruction):
    """Nobody reads this value any more."""

    producer: str


@dataclass(frozen=True, slots=True)
class Cancel(QueryInstruction):
    """Stop work on a dispatched primitive; nobody needs it."""

    primitive: str


@dataclass(frozen=True, slots=True)
class Reprioritise(QueryInstruction):
    """Depths of dispatched primitives that have changed."""

    depths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class End(QueryInstruction):
    """The query is over: `done`, `failed` (by `primitive`), `cancelled`, `timeout` or `closed`."""

    outcome: str
    output: Ref | None = None
    primitive: str = ""


GraphEvent = QueryEvent | Tick
