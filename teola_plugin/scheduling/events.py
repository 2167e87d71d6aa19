"""Events that go into both schedulers, instructions that come out, and those of the graph scheduler.

All are frozen and hold plain data. Schedulers do no I/O and read no clock: every event carries the time (`at`, seconds
on the runtime's clock), and `WakeAt` requests a later call. A driver carries instructions out and feeds the outcomes
back as events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from teola_plugin.graph import Graph, Primitive, Ref


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `at`."""

    at: float


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something the driver has to do."""


@dataclass(frozen=True, slots=True)
class WakeAt(Instruction):
    """Send a `Tick` at this time (or later)."""

    at: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Only time has passed."""


Instructions = list[Instruction]


# ---------------------------------------------------------------- in


@dataclass(frozen=True, slots=True)
class QueryEvent(Event):
    query: str


@dataclass(frozen=True, slots=True)
class Admit(QueryEvent):
    """A query arrives with its e-graph."""

    graph: Graph
    deadline: float | None = None
    original_runs: bool = False
    """True if the original app runs too: then it ends the query by `Close`."""


@dataclass(frozen=True, slots=True)
class PrimitiveEvent(QueryEvent):
    primitive: str


@dataclass(frozen=True, slots=True)
class Started(PrimitiveEvent):
    """The first request of a primitive left the queue of its engine."""


@dataclass(frozen=True, slots=True)
class Finished(PrimitiveEvent):
    """The value of a primitive is in the query's store."""


@dataclass(frozen=True, slots=True)
class Unused(PrimitiveEvent):
    """A primitive needs no value and will have none: a partial decoding beyond the last item, a cancelled warm-up."""


@dataclass(frozen=True, slots=True)
class PrimitiveFailed(PrimitiveEvent):
    """A primitive failed for good: requests that can be retried were retried before."""


@dataclass(frozen=True, slots=True)
class Expanded(PrimitiveEvent):
    """The answer to `Expand`.

    `count` is the number of items (MAP, FOLD), or 1 or 0: another round or not (LOOP), the first arm or the other
    (BRANCH). `matches[i]` is the prediction that equals item i, or None (MAP).
    """

    count: int
    matches: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemClosed(PrimitiveEvent):
    """A splittable decoding without planned parts completed an item, whose value is stored under `value`."""

    index: int
    value: str


@dataclass(frozen=True, slots=True)
class SubplanBegun(QueryEvent):
    """The original begins a part that could not be planned before: the part's e-graph joins the query's."""

    name: str
    graph: Graph
    value: str
    """Name under which its input is stored."""
    depth: int = 0
    """Distance from its end to the end of the query: all of it is deeper by that much."""
    gang: str = ""
    """Name of the gang that the part's value belongs to; empty if the original waits for this value alone."""
    members: str = ""
    """Component of the part whose primitives belong to the gang; empty for all of it."""
    reports_results: bool = True
    """True if the results of its user code are reported; otherwise that code, and what waits for it, is left out."""


@dataclass(frozen=True, slots=True)
class SubplanEnded(QueryEvent):
    """The original has the part's value: primitives of the part that have not ended are dropped."""

    name: str


@dataclass(frozen=True, slots=True)
class CancelQuery(QueryEvent):
    """The caller cancelled the query."""


@dataclass(frozen=True, slots=True)
class Close(QueryEvent):
    """The original has its answer: primitives of an `original_runs` query that have not ended are dropped."""


# ---------------------------------------------------------------- out


@dataclass(frozen=True, slots=True)
class QueryInstruction(Instruction):
    query: str


@dataclass(frozen=True, slots=True)
class Dispatch(QueryInstruction):
    """Hand a primitive to its engine's scheduler. Its request also serves the decodings in `group`."""

    primitive: Primitive
    depth: int
    group: tuple[Primitive, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCall(QueryInstruction):
    """Run client code that is pure (CALL, AGGREGATE, CHUNKING, CONDITION, VERIFY) and store its value."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class Await(QueryInstruction):
    """User code is due (OPAQUE, TOOL): run it, or wait until the original has run it."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class Expand(QueryInstruction):
    """Read what decides how a fragment is instantiated, and answer with `Expanded`."""

    primitive: Primitive
    reads: Ref
    predicted: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True)
class Collect(QueryInstruction):
    """Store the value of a fragment's holder: the list of `refs` (MAP) or its single item (other kinds)."""

    primitive: str
    refs: tuple[Ref, ...]
    single: bool = False


@dataclass(frozen=True, slots=True)
class Release(QueryInstruction):
    """Delete a value that nobody reads any more."""

    producer: str


@dataclass(frozen=True, slots=True)
class Cancel(QueryInstruction):
    """Stop work on a dispatched primitive whose value nobody needs."""

    primitive: str


@dataclass(frozen=True, slots=True)
class Reprioritise(QueryInstruction):
    """Tell engines that dispatched primitives got other depths."""

    depths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class End(QueryInstruction):
    """End the query: `done`, `failed` (by `primitive`), `cancelled`, `timeout` or `closed`."""

    outcome: str
    output: Ref | None = None
    primitive: str = ""


GraphEvent = QueryEvent | Tick
