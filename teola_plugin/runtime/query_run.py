"""One live query at the runtime: its values, its requests, and the callables of its client."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from teola_plugin.errors import QueryTimeout
from teola_plugin.graph import (
    INPUT,
    Graph,
    Growth,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Query,
    Ref,
    growths,
    read_path,
)
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.steps import OpenStep, StepLog
from teola_plugin.observe.waits import WaitLog
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.claims import OWN_GRAPH, PlannerGraph
from teola_plugin.runtime.context import current_place
from teola_plugin.runtime.dead_parts import DeadPart
from teola_plugin.runtime.driver.generation_group import GenerationGroup
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.handles import CallHandle, PieceLog
from teola_plugin.runtime.warmups import WarmedPrefix
from teola_plugin.scheduling.objectives import in_gang


@dataclass(frozen=True, slots=True)
class Part:
    """A part that begins, and where it stands in the whole query."""

    name: str
    """It leads the ids of the part's primitives."""
    graph: Graph
    calls: Mapping[str, Callable[..., Any]]
    value: Any
    """Its input."""
    depth: int = 0
    """How far its end is from the end of the query, in primitives."""
    gang: str = ""
    """Parts of one gang run side by side, and are done with the last of them."""
    members: str = ""
    """Leads the names of those components that are in the gang; empty for all. What comes behind them is waited for."""
    lookahead: bool = False
    """Whether later parts adopt what it asks for. Nobody tells it of user code, so what waits for that never begins."""
    step: int = 0
    """The step of the plain object that it, or its `members`, belongs to; 0 where that is not known."""
    form: AnswerForm = AnswerForm.UNKNOWN
    """As `QueryRun.form`, of this part."""

    @property
    def stored(self) -> str:
        """Return the name under which the query's store has the input."""
        return f"${self.name}"

    def asks(self, since: int, at: float = 0.0) -> AskingPart:
        """Return the part as one that makes requests, from this time and this call of the original on."""
        alone = PlannerGraph(self.name, self.name, self.lookahead, since)
        return AskingPart(self, alone, replace(alone, round=self.gang) if self.gang and self.lookahead else alone, at)


@dataclass(slots=True, eq=False)
class HeldPart:
    """A part for which the next call of the plain object need not wait: it begins behind that, or soon.

    `covered`: other parts have asked for what it would ask for, if all comes as they expect. Then it begins only with a
    call that nobody has foreseen.
    """

    query: str
    part: Part
    covered: bool = False
    begun: bool = False
    over: bool = False

    def begins(self, *, foreseen: bool) -> bool:
        """Return True if the part begins now: a call was made at its place, or none for some time.

        Called on the pool's loop.
        """
        if self.begun or self.over or (self.covered and foreseen):
            return False
        self.begun = True
        return True


@dataclass(frozen=True, slots=True)
class AskingPart:
    """A live part, and the graphs that it asks as."""

    part: Part
    alone: PlannerGraph
    beside: PlannerGraph
    """For what its gang asks for, too."""
    began: float = 0.0
    """On the runtime's clock."""

    def graph_of(self, primitive: str) -> PlannerGraph:
        """The one that asks for that primitive of it."""
        return self.beside if self.beside is self.alone or self._member(primitive) else self.alone

    def step_of(self, primitive: str) -> int:
        """The step that a primitive of it belongs to."""
        return self.part.step if self.part.step and self._member(primitive) else 0

    def _member(self, primitive: str) -> bool:
        return in_gang(InstancePath(primitive).inside(self.part.name) or "", self.part.members)


FIRST_CALL = 0.005
"""Seconds that code needs for it, with some to spare."""


class Runtime(Protocol):
    """The runtime, as a query's handle needs it. Its methods may be called from any thread."""

    def begin_part(self, run: QueryRun, part: Part) -> None: ...

    def end_part(self, run: QueryRun, name: str) -> None: ...

    def turn(self, run: QueryRun, held: HeldPart | None, over: Sequence[str], *, soon: bool) -> None: ...

    def observe(self, run: QueryRun, primitive: str, value: Any) -> None: ...

    def call(
        self, kind: PrimitiveKind, engine: str, payloads: Sequence[Any], *, stream: bool = ..., run: QueryRun
    ) -> CallHandle: ...

    def close_run(self, run: QueryRun) -> None: ...

    def cancel_run(self, run: QueryRun) -> None: ...

    def time(self) -> float: ...


class QueryStore:
    """One query's intermediate values by producer, held until their last reader is done (paper, section 5.1).

    Reading again, after a failure, gives the same value.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._values: dict[str, Any] = {f"${name}": value for name, value in inputs.items()}

    def put(self, producer: str, value: Any) -> None:
        self._values[producer] = value

    def read(self, ref: Ref) -> Any:
        """Return the value under `ref`. Raises KeyError, IndexError or TypeError as the container does."""
        return read_path(self._values[ref.producer], ref.path)

    def __contains__(self, producer: str) -> bool:
        return producer in self._values

    def drop(self, producer: str) -> None:
        self._values.pop(producer, None)

    def clear(self) -> None:
        self._values.clear()


@dataclass(slots=True, eq=False)
class GrowingPrompt:
    """A prompt of a live query that may grow with a list, and how far it is known (see `incremental_prefilling`)."""

    growth: Growth
    plan: Growth
    """The same as the plan has it: what one query shows of it holds for others."""
    seen: int = 0
    """Outputs of the list that the latest text is made of."""
    ready: int = 0
    """Outputs that were there when it was looked at last, of this list:"""
    outputs: list[Ref] = field(default_factory=list)
    whole: str | None = None
    """That text; of no outputs at first."""
    text: str = ""
    """How the prompt will begin, as far as it can be guessed from the texts so far."""
    over: bool = False
    looking: bool = False
    """Whether the client's code is making the next text."""
    warmup: str = ""
    """The primitive that is prefilling what was known last; empty when there is none under way."""
    warmups: int = 0


_growths: WeakKeyDictionary[Graph, tuple[Growth, ...]] = WeakKeyDictionary()


def growing_prompts(graph: Graph, part: str = "", given: str = INPUT) -> list[GrowingPrompt]:
    """Return the prompts of a query with this e-graph that may grow, or of a part named so with the input `given`."""
    growing = _growths.get(graph)
    if growing is None:
        growing = _growths[graph] = growths(graph)
    if not part or not growing:
        return [GrowingPrompt(one, one) for one in growing]
    names = {p.id: InstancePath(part).child(p.id) for p in graph}
    return [GrowingPrompt(one.renamed(names, {INPUT: Ref(given)}), one) for one in growing]


@dataclass(slots=True, eq=False)
class LivePrimitiveRun:
    """A dispatched primitive: the requests it waits for, and the decodings that its request also serves."""

    primitive: Primitive
    depth: int
    step: int = 0
    """The step of the plain object that it belongs to, as far as known; see `Span.step`."""
    entries: list[EngineRequest] = field(default_factory=list)
    group: GenerationGroup | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """Values of the requests that have ended, by request id."""
    left: int = 0
    began: bool = False

    def wait_for(self, entry: EngineRequest) -> None:
        self.entries.append(entry)
        if entry.has_ended:
            self.values[entry.request.id] = entry.value
        else:
            self.left += 1

    def take(self, entry: EngineRequest, value: Any) -> None:
        self.values[entry.request.id] = value
        self.left -= 1

    @property
    def reads_items(self) -> bool:
        """True if items of its stream are acted on as they close."""
        return self.group is not None and self.group.lists

    @property
    def results(self) -> list[Any]:
        """The values of its requests, in order."""
        return [self.values[entry.request.id] for entry in self.entries]


@dataclass(slots=True, eq=False)
class QueryRun:
    """A live query, as adapters hold it. `observe`, `call` and `close` may be used from any thread."""

    runtime: Runtime
    """None (and never asked) for a call of no live query."""
    query: Query
    graph: Graph | None
    calls: Mapping[str, Callable[..., Any]]
    ahead: bool
    store: QueryStore
    primitives: dict[str, LivePrimitiveRun] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    dead: list[DeadPart] = field(default_factory=list)
    """Parts whose functions raised; said at the end, where the plain object has fared better."""
    plain_failed: bool = False
    """Whether the plain object raised anywhere in it: then what was planned may have had good reason to."""
    waiters: dict[str, list[str]] = field(default_factory=dict)
    """Request id -> primitives of the graph that wait for it."""
    output: Future[Any] = field(default_factory=Future)
    """The graph's output (queries that are not `ahead`)."""
    trace: Future[QueryTrace | None] = field(default_factory=Future)
    closed: bool = False
    ended: float | None = None
    """When the plain object had its answer, or gave up; None while neither is so."""
    claims: bool = True
    """Whether calls of the plain object may be served by what was asked for before; not when it is only watched."""
    due: float | None = None
    """When it should be over, on the runtime's clock: its deadline, or the goal that its caller has."""
    joins: bool = True
    """Whether parts may bring graphs of their own; from then on, calls are served."""
    form: AnswerForm = AnswerForm.UNKNOWN
    """The form in which the plain object will ask models for all answers of this graph; unknown, too, where that
    differs from call to call."""
    left_to_original: set[str] = field(default_factory=set)
    """Primitives that were not begun early, because the original may ask for their answers in another form."""
    calls_made: int = 0
    has_user_code: bool = False
    """Whether user code runs in it, as far as its graphs know."""
    code_ended: int = 0
    """Pieces of user code that have run here, for no plain object runs them."""
    preparing: set[str] = field(default_factory=set)
    """Primitives that were dispatched, and whose payloads the client's code is making."""
    last_calls: dict[tuple[str, PrimitiveKind], tuple[EngineRequest, bool]] = field(default_factory=dict)
    """The plain object's last call by engine and kind, and whether it is known for a member of a gang."""
    sent_ahead: dict[str, str] = field(default_factory=dict)
    """Primitives that were sent along with the one before them, and the names of their requests."""
    growing: list[GrowingPrompt] = field(default_factory=list)
    """Its prompts that may be prefilled as they grow."""
    parts: dict[str, AskingPart] = field(default_factory=dict)
    """Those that began later, by the name that leads the ids of their primitives."""
    steps: StepLog = field(default_factory=StepLog)
    """What the plain object told of its own steps, for the trace."""
    waits: WaitLog = field(default_factory=WaitLog)
    """Its calls, for the trace."""
    causes: dict[str, str] = field(default_factory=dict)
    """Primitive -> the one whose news let it begin, for the trace."""
    requests: dict[str, str] = field(default_factory=dict)
    """Request id -> the primitive that it is traced as, where the plain object's calls are told of by requests."""
    warmups: list[WarmedPrefix] = field(default_factory=list)
    """What was prefilled ahead, for the trace."""
    streamed: str = ""
    """The primitive whose value is wanted as it is written; see `output_stream`."""
    streamed_into: PieceLog | None = None
    """Where its text goes; None when nobody wants it, or it goes there already."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    id: str = field(init=False)
    """That of the query."""

    def __post_init__(self) -> None:
        self.id = self.query.id

    @property
    def whole(self) -> QueryRun:
        return self

    @property
    def late(self) -> QueryTimeout | None:
        """The error for calls of the original that come after the deadline: the query is over, the original goes on."""
        error = self.output.exception() if self.output.done() and not self.closed else None
        return error if isinstance(error, QueryTimeout) else None

    def calls_of(self, primitive: str) -> Mapping[str, Callable[..., Any]]:
        """The callables that the primitive's names are of."""
        part = self._part_of(primitive) if self.parts else None
        return self.calls if part is None else part.part.calls

    def graph_of(self, primitive: str) -> PlannerGraph:
        """The graph of the query that the primitive is of."""
        part = self._part_of(primitive) if self.parts else None
        return OWN_GRAPH if part is None else part.graph_of(primitive)

    def form_of(self, primitive: str) -> AnswerForm:
        """Return the form in which the plain object will ask for the primitive's answer."""
        owner = self._part_of(primitive) if self.parts else None
        return self.form if owner is None else owner.part.form

    def step_of(self, primitive: str) -> int:
        """Id of the step of the plain object that the primitive was planned for; 0 where that is not known."""
        part = self._part_of(primitive) if self.parts else None
        return 0 if part is None else part.step_of(primitive)

    def first_call_by(self, primitive: str) -> float:
        """Return the time by which the code that a lookahead part began with will have made its first call."""
        part = self._part_of(primitive) if self.parts else None
        return part.began + FIRST_CALL if part is not None and part.part.lookahead else 0.0

    @property
    def looks_ahead(self) -> bool:
        """True if parts of it run ahead of code that is yet to come."""
        return any(live.part.lookahead for live in self.parts.values())

    def _part_of(self, primitive: str) -> AskingPart | None:
        return self.parts.get(InstancePath(primitive).outermost)

    def part(
        self,
        graph: Graph,
        calls: Mapping[str, Callable[..., Any]],
        value: Any,
        *,
        depth: int | None = None,
        gang: str | None = None,
        members: str = "",
        lookahead: bool = False,
        step: OpenStep | None = None,
        held: bool = False,
        covered: bool = False,
        form: AnswerForm = AnswerForm.UNKNOWN,
    ) -> PartRun:
        """A part of the plain object begins, with this input: its e-graph runs from here, as part of the query.

        `depth` is how far its end is from the end of the query, in primitives; `gang` is what it is done with, if
        others run beside it. Not given, both are those of the code that calls (`current_place`). `members` leads the
        names of those components that are in the gang, where others come behind them. `lookahead`: it runs ahead of
        code that later parts may be begun for, too; they adopt what it has asked for, but for what their own gang has;
        nobody `observe`s user code for it. Begin the later one before closing the earlier one, so that what is under
        way goes on. `step`: that of its `members`, for the trace; not given, that of the code that calls. `held`: it
        begins later, see `HeldPart`, which belongs into the `CallPlace` of its code, and of which `turn` is to be told.
        `form`: see `Part`.
        """
        self.claims = True
        place, name = current_place.get(), f"part{next(self._numbers)}"
        depth, gang = place.depth if depth is None else depth, place.gang if gang is None else gang
        at = self.steps.id_of(step or place.step)
        part = Part(name, graph, calls, value, depth, gang, members, lookahead, at, form)
        if held:
            return PartRun(self, name, HeldPart(self.id, part, covered))
        self.runtime.begin_part(self, part)
        return PartRun(self, name)

    def turn(self, held: HeldPart | None = None, over: Sequence[PartRun] = (), *, soon: bool = True) -> None:
        """The plain object has come to a place where a part is held, and where others are over. Neither is in a hurry;
        `soon`: nothing else is asked for right now, so that it is not to be left until then."""
        waits = held is not None and not held.covered
        ended = [part.name for part in over if part.ends()]
        if waits or ended:
            self.runtime.turn(self, held if waits else None, ended, soon=soon)

    def step_began(self, kind: str, name: str, parent: OpenStep | None = None, **facts: object) -> OpenStep:
        """A step of the plain object begins, for the trace: a `superstep`, a `node`, a call of a `tool`. Its parent is
        that of the code that calls (`current_place`), unless one is given. From any thread. No prompts among `facts`.
        """
        return self.steps.began(kind, name, self.runtime.time(), parent or current_place.get().step, facts)

    def step_ended(self, step: OpenStep, outcome: str = "done", **facts: object) -> None:
        """Note that a step ends, and what more is known of it. Only the first call counts."""
        self.steps.ended(step, self.runtime.time(), outcome, facts)

    def over(self) -> None:
        """Let everything go: the query has ended."""
        self.store.clear()
        held = (self.primitives, self.waiters, self.preparing, self.last_calls, self.parts, self.causes, self.requests)
        for one in (*held, self.warmups):
            one.clear()

    def observe(self, primitive: str, value: Any) -> None:
        """The plain object has computed the value of an opaque primitive."""
        self.runtime.observe(self, primitive, value)

    def call(self, kind: PrimitiveKind, engine: str, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle:
        """Make a call of the original: claim what the graph has requested already, and request the rest."""
        return self.runtime.call(kind, engine, payloads, stream=stream, run=self)

    def close(self) -> None:
        """End the query: the original has its answer, or gave up. What nobody claimed is dropped."""
        self.runtime.close_run(self)

    def cancel(self) -> None:
        """Cancel the query: its caller gave up."""
        self.runtime.cancel_run(self)


@dataclass(frozen=True, slots=True)
class PartRun:
    """A part of a live query that began later, as adapters hold it. May be used from any thread."""

    whole: QueryRun
    name: str
    held: HeldPart | None = None
    """None for one that has begun with its place."""

    @property
    def begun(self) -> bool:
        return self.held is None or self.held.begun

    @property
    def id(self) -> str:
        return self.whole.id

    @property
    def claims(self) -> bool:
        return self.whole.claims

    @property
    def trace(self) -> Future[QueryTrace | None]:
        """The whole query's."""
        return self.whole.trace

    def observe(self, primitive: str, value: Any) -> None:
        """The plain object has computed the value of an opaque primitive of the part."""
        self.whole.observe(InstancePath(self.name).child(primitive), value)

    def close(self) -> None:
        """The plain object has the part's value, or gave it up: what nobody claimed, nor another part adopted, is
        dropped."""
        if self.ends():
            self.whole.runtime.end_part(self.whole, self.name)

    def ends(self) -> bool:
        """Keep the part from beginning. Return True if it has begun."""
        if self.held is not None:
            self.held.over = True
        return self.begun

    cancel = close
