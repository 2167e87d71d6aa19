"""One live query at the runtime, with its subplans: its values, its requests, and the callables of its client.

Context variables hold the query of running code, the calls of pool-backed objects that join it, and their position in
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from teola_plugin.errors import QueryTimeout
from teola_plugin.graph import (
    Graph,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Query,
    Ref,
    RequestContext,
    read_path,
)
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.steps import OpenStep, StepLog, TracedCall, WaitLog
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.claims import OWN_GRAPH, PlannerGraph
from teola_plugin.runtime.driver.generation_group import GenerationGroup
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.loop_thread import CallHandle, PieceLog
from teola_plugin.runtime.prefetch_outcomes import FailedPrefetch, WarmedPrefix
from teola_plugin.runtime.threads import in_child
from teola_plugin.scheduling.live_query import in_gang

if TYPE_CHECKING:
    from teola_plugin.runtime.primitive_requests import GrowingPrompt
    from teola_plugin.runtime.usage import QueryUsage


current_run: ContextVar[QueryRun | None] = ContextVar("teola_current_run", default=None)

in_child(lambda: current_run.set(None))  # the query goes on in the parent, and only there

current_request_context: ContextVar[RequestContext | None] = ContextVar("teola_current_request_context", default=None)
"""The request context of calls that belong to no live query, also where planning fell back."""


@dataclass(frozen=True, slots=True)
class CallPosition:
    """The place of running code in its query, for unplanned calls that it makes and for subplans that begin there."""

    depth: int = 0
    """Distance from the end of the code to the end of the query, in primitives."""
    gang: str = ""
    """Calls of one gang belong to branches that run side by side: the query goes on when the last one has ended."""
    step: OpenStep | None = None
    """The result of `QueryRun.step_began` for the node or the tool that runs, for traces."""
    deferred: DeferredSubplan | None = None
    """A subplan that begins when a call is made here that no subplan has made."""
    form: AnswerForm = AnswerForm.UNKNOWN
    """The form in which code here asks models for answers, unless it says otherwise."""


NOWHERE = CallPosition()

current_position: ContextVar[CallPosition] = ContextVar("teola_current_position", default=NOWHERE)

current_call: ContextVar[TracedCall | None] = ContextVar("teola_current_call", default=None)
"""The call of one of the user's own objects that runs here, for traces: an engine may serve it."""


class during(AbstractContextManager[None]):
    """A context in which a context variable has a value. A class, since a generator takes three times as long."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[Any], value: Any) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        """Give the variable its earlier value back, unless the body ended in another context."""
        try:
            self._variable.reset(self._token)
        except ValueError:  # a generator may be closed in another context than it began in
            pass


@dataclass(frozen=True, slots=True)
class Subplan:
    """A part of a query that begins later than the query, with an e-graph of its own, and its position in the query."""

    name: str
    """The ids of its primitives begin with it."""
    graph: Graph
    calls: Mapping[str, Callable[..., Any]]
    value: Any
    """Its input."""
    depth: int = 0
    """Distance from its end to the end of the query, in primitives."""
    gang: str = ""
    """Subplans of one gang run side by side, and the query goes on when the last of them has ended."""
    members: str = ""
    """Names of the components in the gang begin with it; empty for all. The original waits for those after them."""
    lookahead: bool = False
    """True if later subplans claim its requests. It does not hear of user code: what waits for that never begins."""
    step: int = 0
    """Id of the original's step to which it, or its `members`, belongs; 0 if that is not known."""
    form: AnswerForm = AnswerForm.UNKNOWN
    """As `QueryRun.form`, for this subplan."""

    @property
    def input_name(self) -> str:
        """The name under which the query's store has the input."""
        return f"${self.name}"

    def begin(self, since: int, at: float = 0.0) -> LiveSubplan:
        """Return the subplan as one that makes requests, from this time and this call of the original on."""
        own_graph = PlannerGraph(self.name, self.name, self.lookahead, since)
        gang_graph = replace(own_graph, round=self.gang) if self.gang and self.lookahead else own_graph
        return LiveSubplan(self, own_graph, gang_graph, at)


@dataclass(slots=True, eq=False)
class DeferredSubplan:
    """A subplan for which the original's next call does not wait: it begins right after it, or a little later."""

    query: str
    """Id of the query."""
    subplan: Subplan
    covering: str = ""
    """Name of a subplan that has probably made all of its requests. If there is one, it begins only with an unforeseen
    call."""
    has_begun: bool = False
    is_over: bool = False

    def begin(self, *, is_foreseen: bool) -> bool:
        """Note that a call was made at its place, or none for some time. Return True if the subplan begins now.

        Called on the pool's loop. `is_foreseen`: the call, if any, was prefetched.
        """
        if self.has_begun or self.is_over or (self.covering and is_foreseen):
            return False
        self.has_begun = True
        return True


@dataclass(frozen=True, slots=True)
class LiveSubplan:
    """A subplan that has begun, and the planner's graphs for which it makes requests."""

    subplan: Subplan
    own_graph: PlannerGraph
    gang_graph: PlannerGraph
    """The graph for requests that others of its gang make, too; `own_graph` if there is no gang."""
    began: float = 0.0
    """Time at which it began, on the runtime's clock."""

    def graph_of(self, primitive: str) -> PlannerGraph:
        """Return the graph for which a primitive of it makes requests."""
        is_in_gang = self.gang_graph is self.own_graph or self._is_member(primitive)
        return self.gang_graph if is_in_gang else self.own_graph

    def step_of(self, primitive: str) -> int:
        """Return the id of the original's step to which a primitive of it belongs; 0 if that is not known."""
        return self.subplan.step if self.subplan.step and self._is_member(primitive) else 0

    def _is_member(self, primitive: str) -> bool:
        return in_gang(InstancePath(primitive).inside(self.subplan.name) or "", self.subplan.members)


FIRST_CALL_S = 0.005
"""Time within which code makes its first call, with some to spare."""


class Runtime(Protocol):
    """The runtime, as a live query needs it. Its methods may be called from any thread."""

    def begin_subplan(self, run: QueryRun, subplan: Subplan) -> None: ...

    def end_subplan(self, run: QueryRun, name: str) -> None: ...

    def schedule_subplans(
        self, run: QueryRun, deferred: DeferredSubplan | None, finished: Sequence[str], *, soon: bool
    ) -> None: ...

    def begin_unforeseen(self, run: QueryRun, deferred: DeferredSubplan) -> None: ...

    def observe(self, run: QueryRun, primitive: str, value: Any) -> None: ...

    def observe_ends(self, run: QueryRun, primitives: Sequence[str]) -> None: ...

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
class LivePrimitiveRun:
    """A dispatched primitive: the requests that it waits for, and the decodings that its request also serves."""

    primitive: Primitive
    depth: int
    step: int = 0
    """Id of the original's step to which it belongs, as far as known; see `Span.step`."""
    entries: list[EngineRequest] = field(default_factory=list)
    group: GenerationGroup | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """Values of the requests that have ended, by request id."""
    left: int = 0
    """Number of its requests that have not ended."""
    began: bool = False

    def wait_for(self, entry: EngineRequest) -> None:
        """Add a request to those that it waits for."""
        self.entries.append(entry)
        if entry.has_ended:
            self.values[entry.request.id] = entry.value
        else:
            self.left += 1

    def take(self, entry: EngineRequest, value: Any) -> None:
        """Take the value of a request that has ended."""
        self.values[entry.request.id] = value
        self.left -= 1

    @property
    def reads_items(self) -> bool:
        """True if other primitives start from items of its stream as they are complete."""
        return self.group is not None and self.group.reads_items

    @property
    def results(self) -> list[Any]:
        """The values of its requests, in order."""
        return [self.values[entry.request.id] for entry in self.entries]


class Claiming(Enum):
    """The rule that says whether calls of the original may claim what graphs have requested."""

    ALLOWED = "allowed"
    WITH_SUBPLAN = "with subplan"
    """Not before the first subplan begins: until then the query is only traced."""
    NEVER = "never"
    """The query is only traced, and has no subplans."""

    __hash__ = object.__hash__


@dataclass(slots=True, eq=False)
class QueryRun:
    """A live query, as adapters hold it. `observe`, `call` and `close` may be used from any thread."""

    runtime: Runtime
    """None for a call that is made outside any live query. Such a run does not use it."""
    query: Query
    graph: Graph | None
    calls: Mapping[str, Callable[..., Any]]
    has_original: bool
    """True if an original runs, makes calls of its own, and ends the query. Otherwise the graph gives the answer."""
    store: QueryStore
    primitives: dict[str, LivePrimitiveRun] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    failed_prefetches: list[FailedPrefetch] = field(default_factory=list)
    """Primitives whose functions raised; logged at the end, if the original succeeded."""
    original_failed: bool = False
    """True if the original raised anywhere in the query: then the plan's functions may have had good reason to."""
    waiters: dict[str, list[str]] = field(default_factory=dict)
    """Request id -> primitives of the graph that wait for it."""
    output: Future[Any] = field(default_factory=Future)
    """The graph's output, of a query without an original."""
    trace: Future[QueryTrace | None] = field(default_factory=Future)
    closed: bool = False
    """True once the original has its answer, or gave up."""
    ended_at: float | None = None
    """Time at which it was closed, on the runtime's clock."""
    claiming: Claiming = Claiming.ALLOWED
    due: float | None = None
    """Time by which it should be over, on the runtime's clock: its deadline, or its caller's goal."""
    form: AnswerForm = AnswerForm.UNKNOWN
    """The form in which the original will ask models for all answers of this graph; UNKNOWN if it differs from call to
    call, too."""
    left_to_original: set[str] = field(default_factory=set)
    """Primitives that were not begun early, because the original may ask for their answers in another form."""
    calls_made: int = 0
    has_user_code: bool = False
    """True if user code runs in it, as far as its graphs know."""
    code_ended: int = 0
    """Number of pieces of user code that have run here, because no original runs them."""
    preparing: set[str] = field(default_factory=set)
    """Primitives that were dispatched, and whose payloads the client's code is making."""
    last_calls: dict[tuple[str, PrimitiveKind], tuple[EngineRequest, bool]] = field(default_factory=dict)
    """The original's last call by engine and kind, and whether it is known to belong to a gang."""
    sent_followers: dict[str, str] = field(default_factory=dict)
    """Primitives that were sent along with the one before them -> the names of their requests."""
    growing: list[GrowingPrompt] = field(default_factory=list)
    """Its prompts that may be prefilled as they grow."""
    subplans: dict[str, LiveSubplan] = field(default_factory=dict)
    """Its subplans that have begun, by name."""
    steps: StepLog = field(default_factory=StepLog)
    """Steps of the original, for the trace."""
    waits: WaitLog = field(default_factory=WaitLog)
    """Calls of the original, for the trace."""
    causes: dict[str, str] = field(default_factory=dict)
    """Primitive -> the one whose event let it begin, for the trace."""
    requests: dict[str, str] = field(default_factory=dict)
    """Request id -> the primitive that it is traced as."""
    warmups: list[WarmedPrefix] = field(default_factory=list)
    """Prefixes that were prefilled, for the trace."""
    usage: QueryUsage | None = None
    """Its calls of models, if its app has prices."""
    streamed: str = ""
    """The primitive whose value is read as it is written; see `output_stream`."""
    streamed_into: PieceLog | None = None
    """The log to which its text has yet to be attached; None if nobody reads it, or it is attached."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    id: str = field(init=False)
    """Id of the query."""

    def __post_init__(self) -> None:
        self.id = self.query.id

    @property
    def query_run(self) -> QueryRun:
        """The run itself, as `SubplanRun.query_run`."""
        return self

    @property
    def late(self) -> QueryTimeout | None:
        """The error for calls of the original that come after the deadline: the query is over, the original goes on.

        None if the query has not ended, has ended otherwise, or was closed.
        """
        error = self.output.exception() if self.output.done() and not self.closed else None
        return error if isinstance(error, QueryTimeout) else None

    def calls_of(self, primitive: str) -> Mapping[str, Callable[..., Any]]:
        """Return the callables to which the primitive's `call` refers."""
        owner = self._subplan_of(primitive) if self.subplans else None
        return self.calls if owner is None else owner.subplan.calls

    def graph_of(self, primitive: str) -> PlannerGraph:
        """Return the planner's graph for which the primitive makes requests."""
        owner = self._subplan_of(primitive) if self.subplans else None
        return OWN_GRAPH if owner is None else owner.graph_of(primitive)

    def form_of(self, primitive: str) -> AnswerForm:
        """Return the form in which the original will ask for the primitive's answer."""
        owner = self._subplan_of(primitive) if self.subplans else None
        return self.form if owner is None else owner.subplan.form

    def step_of(self, primitive: str) -> int:
        """Return the id of the original's step for which the primitive was planned; 0 if that is not known."""
        owner = self._subplan_of(primitive) if self.subplans else None
        return 0 if owner is None else owner.step_of(primitive)

    def first_call_by(self, primitive: str) -> float:
        """Return the time by which the code that began with a lookahead subplan will have made its first call.

        Return 0.0 if the primitive belongs to no such subplan. Seconds on the runtime's clock: warm-ups wait until
        then, so that prompts for which somebody waits go first.
        """
        owner = self._subplan_of(primitive) if self.subplans else None
        return owner.began + FIRST_CALL_S if owner is not None and owner.subplan.lookahead else 0.0

    @property
    def is_lookahead(self) -> bool:
        """True if subplans of it make requests for code that is yet to come."""
        return any(live.subplan.lookahead for live in self.subplans.values())

    def _subplan_of(self, primitive: str) -> LiveSubplan | None:
        return self.subplans.get(InstancePath(primitive).outermost)

    def begin_subplan(
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
        is_deferred: bool = False,
        covering: str = "",
        form: AnswerForm = AnswerForm.UNKNOWN,
    ) -> SubplanRun:
        """Begin a part of the original, with this input: its e-graph runs from now on, within the query.

        A later lookahead subplan claims the requests of an earlier one, but not those of its own gang. Begin the later
        one before you close the earlier one, so that requests under way go on. Nobody `observe`s user code for them.

        Args:
            graph: The e-graph.
            calls: The client's callables.
            value: The input.
            depth: Distance from its end to the end of the query, in primitives; by default that of the calling code.
            gang: The gang with which it ends, if others run side by side; by default that of the calling code.
            members: Beginning of the names of the components in the gang, if other components come after them.
            lookahead: True if it makes requests for code for which later subplans may be begun, too.
            step: The original's step to which its `members` belong, for the trace; by default the one that runs here.
            is_deferred: True if it begins later. Then put its `deferred` into the `CallPosition` of its code, and call
                `schedule_subplans`.
            covering: See `DeferredSubplan`.
            form: See `Subplan`.
        """
        self.claiming = Claiming.ALLOWED
        caller, name = current_position.get(), f"part{next(self._numbers)}"
        depth, gang = caller.depth if depth is None else depth, caller.gang if gang is None else gang
        step_id = self.steps.id_of(step or caller.step)
        subplan = Subplan(name, graph, calls, value, depth, gang, members, lookahead, step_id, form)
        if is_deferred:
            return SubplanRun(self, name, DeferredSubplan(self.id, subplan, covering))
        self.runtime.begin_subplan(self, subplan)
        return SubplanRun(self, name)

    def schedule_subplans(
        self, deferred: DeferredSubplan | None = None, finished: Sequence[SubplanRun] = (), *, soon: bool = True
    ) -> None:
        """Begin a deferred subplan and end finished ones, both in a moment: the original has come to their place.

        `soon`: False if the caller is about to make another request, with which this can travel.
        """
        waits = deferred is not None and not deferred.covering
        names = [subplan.name for subplan in finished if subplan.mark_over()]
        if waits or names:
            self.runtime.schedule_subplans(self, deferred if waits else None, names, soon=soon)

    def note_unforeseen_call(self) -> None:
        """Begin the deferred subplan at this place, where an unforeseen call came, if the one that covers it failed."""
        deferred = current_position.get().deferred
        if deferred is not None and deferred.query == self.id and not deferred.has_begun:
            self.runtime.begin_unforeseen(self, deferred)

    def step_began(self, kind: str, name: str, parent: OpenStep | None = None, **facts: object) -> OpenStep:
        """Note that a step of the original begins, for the trace: a `superstep`, a `node`, a call of a `tool`.

        May be called from any thread. `parent`: by default the step that runs here. `facts` hold no prompts.
        """
        return self.steps.begin(kind, name, self.runtime.time(), parent or current_position.get().step, facts)

    def step_ended(self, step: OpenStep, outcome: str = "done", **facts: object) -> None:
        """Note that a step ends, with more facts about it. Only the first call counts."""
        self.steps.end(step, self.runtime.time(), outcome, facts)

    def clear(self) -> None:
        """Forget everything: the query has ended."""
        self.store.clear()
        self.primitives.clear()
        self.waiters.clear()
        self.preparing.clear()
        self.last_calls.clear()
        self.subplans.clear()
        self.causes.clear()
        self.requests.clear()
        self.warmups.clear()

    def observe(self, primitive: str, value: Any) -> None:
        """Note the value of an opaque primitive, which the original has computed."""
        self.runtime.observe(self, primitive, value)

    def observe_ends(self, primitives: Sequence[str]) -> None:
        """Note that opaque primitives have ended, whose values are not known."""
        self.runtime.observe_ends(self, primitives)

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
class SubplanRun:
    """A subplan of a live query, as adapters hold it. May be used from any thread."""

    query_run: QueryRun
    name: str
    deferred: DeferredSubplan | None = None
    """None for a subplan that has begun at once."""

    @property
    def has_begun(self) -> bool:
        """True once its e-graph runs."""
        return self.deferred is None or self.deferred.has_begun

    @property
    def id(self) -> str:
        """Id of the query."""
        return self.query_run.id

    @property
    def claiming(self) -> Claiming:
        """See `QueryRun.claiming`."""
        return self.query_run.claiming

    @property
    def trace(self) -> Future[QueryTrace | None]:
        """The trace of the query."""
        return self.query_run.trace

    def observe(self, primitive: str, value: Any) -> None:
        """Note the value of an opaque primitive of the subplan, which the original has computed."""
        self.query_run.observe(InstancePath(self.name).child(primitive), value)

    def close(self) -> None:
        """End the subplan: the original has its value, or gave up. Requests that nobody claimed are dropped."""
        if self.mark_over():
            self.query_run.runtime.end_subplan(self.query_run, self.name)

    def mark_over(self) -> bool:
        """Keep the subplan from beginning. Return True if it has begun."""
        if self.deferred is not None:
            self.deferred.is_over = True
        return self.has_begun

    cancel = close
