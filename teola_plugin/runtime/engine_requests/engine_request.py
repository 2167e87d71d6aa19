"""Requests to engines: what is requested, how far it is, its result, and the calls that wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from teola_plugin.errors import EngineError
from teola_plugin.graph import RequestContext
from teola_plugin.requests.payloads import CallTool, Generate, Version
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.claims import Caller, Claims
from teola_plugin.runtime.engine_requests.keys import RequestKey
from teola_plugin.runtime.engine_requests.stream import ResultStream
from teola_plugin.runtime.handles import PieceLog

_numbers = itertools.count(1)
NO_CONTEXT = RequestContext()


class RequestState(Enum):
    """The stages of a request to an engine."""

    EXPECTED = "expected"
    """Not sent yet. A write that the planner waits for stays so until the original sends it."""
    QUEUED = "queued"
    RUNNING = "running"
    """It has left the queue of its engine."""
    ENDED = "ended"

    __hash__ = object.__hash__


@dataclass(slots=True)
class SearchCheck:
    """The facts that tell whether the result of a search is still true when it is claimed."""

    version: Version | None = None
    """Version of the collection, in the search's own snapshot."""
    writes: int = -1
    """Number of writes of this process to the collection, when the search was requested."""
    open_checks: int = 0
    """Number of calls that have claimed the search and are checking it before they take its value."""
    is_outdated: bool = False
    """True once the collection was seen to have changed: nobody may claim the search any more."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request to an engine of the pool: expected, under way or done. An entry of a `ClaimTable`."""

    request: Request
    engine: str
    key: RequestKey | None
    """None for a request that nobody else may claim."""
    primitive: str
    """The primitive that it is queued, run and traced as."""
    claims: Claims = field(default_factory=Claims)
    terms: RequestContext = NO_CONTEXT
    """Those of its most urgent caller; they hold on a retry, too."""
    state: RequestState = RequestState.QUEUED
    is_cancelled: bool = False
    is_forgotten: bool = False
    """True once nobody can claim it any more."""
    value: Any = None
    error: BaseException | None = None
    pending_calls: list[PendingCall] = field(default_factory=list)
    """Calls of the original that wait for it."""
    search: SearchCheck = field(default_factory=SearchCheck)
    attempts: int = 0
    """Number of retries."""
    queued_depth: int = 0
    queued_gang: str = ""
    """Depth and gang as its engine knows them."""
    stream: ResultStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = ResultStream(self.request.id, self.engine)

    # ------------------------------------------------------------ lifecycle

    @property
    def is_expected(self) -> bool:
        """See `Claimable`."""
        return self.state is RequestState.EXPECTED

    @property
    def has_begun(self) -> bool:
        """True once it has left the queue of its engine."""
        return self.state in (RequestState.RUNNING, RequestState.ENDED)

    @property
    def has_ended(self) -> bool:
        """True once it has a value or an error."""
        return self.state is RequestState.ENDED

    def note_sent(self) -> None:
        """Note that it is sent to its engine."""
        if self.state is RequestState.EXPECTED:
            self.state = RequestState.QUEUED

    def started(self) -> None:
        """Note that it has left the queue of its engine."""
        if self.state is not RequestState.ENDED:
            self.state = RequestState.RUNNING

    def retry(self) -> None:
        """Note that it is sent once more: what was streamed before will come again."""
        self.attempts += 1
        self.stream.restart()

    def new_part(self, piece: Piece) -> Piece:
        """See `ResultStream.new_part`."""
        return self.stream.new_part(piece)

    def check_result(self, value: object) -> None:
        """Make sure that the result of a retry begins with what was delivered. Raises `EngineError`."""
        if self.attempts:
            self.stream.take_text_of_retry(value)

    def resolve(self, value: Any, error: BaseException | None) -> None:
        """End the request for its readers and for the calls that wait for it."""
        if self.has_ended:
            return
        self.state, self.value, self.error = RequestState.ENDED, value, error
        calls, self.pending_calls = self.pending_calls, []  # no circle of references: large values are freed at once
        self.stream.add_rest(value)
        for call in calls:
            call.request_ended(self)
        self.stream.close()

    def read_into(self, reader: PieceLog) -> None:
        """Let a reader get every piece, from the first one on."""
        self.stream.replay(reader)
        if self.has_ended:
            reader.close()
        else:
            self.stream.readers.append(reader)

    @property
    def has_failed(self) -> bool:
        """True if it has ended with an error."""
        return self.error is not None

    @property
    def has_failed_in_passing(self) -> bool:
        """True if it has failed in a way that says nothing of another attempt."""
        return self.error is not None and not (isinstance(self.error, EngineError) and self.error.is_final)

    @property
    def can_be_repeated(self) -> bool:
        """True if doing it again gives the same.

        A sampled text of which a part was delivered cannot be repeated, nor can a tool that may change something.
        """
        payload = self.request.payload
        if isinstance(payload, CallTool) and not payload.read_only:
            return False
        is_sampled = isinstance(payload, Generate) and not payload.sampling.greedy and payload.sampling.seed is None
        return not self.is_cancelled and not (is_sampled and self.stream.text and self.stream.is_seen)

    @property
    def goes_on(self) -> bool:
        """True for a request of the user's own client that is under way, and that others may come for.

        It is not stopped before its query ends: the server would get it a second time.
        """
        payload = self.request.payload
        is_carried = isinstance(payload, Generate) and payload.prompt.carried
        return is_carried and self.has_begun and self.claims.is_for_later_graph

    # ------------------------------------------------------------ claims

    @property
    def is_claimable(self) -> bool:
        """See `Claimable`."""
        return not (self.is_cancelled or self.has_failed_in_passing or self.search.is_outdated)

    def subscribe(self, caller: Caller, terms: RequestContext) -> None:
        """Note that a caller waits for the result, on these terms."""
        self.claims.add(caller)
        self.take_terms(terms)

    def take_terms(self, terms: RequestContext) -> None:
        """Make the request as urgent as these terms require."""
        if terms is not self.terms:
            self.terms = more_urgent(self.terms, terms)

    def forget(self) -> None:
        """Let the result go, once the calls that check it have taken it."""
        self.is_forgotten = True
        if self.search.open_checks:
            return
        self.value = None
        self.stream.clear()

    def checked(self) -> None:
        """Note that a call has checked a search, and has taken its value or not."""
        self.search.open_checks -= 1
        if self.is_forgotten:
            self.forget()


def placed(terms: RequestContext, depth: int, gang: str) -> RequestContext:
    """Return the same terms at another place of the query. (`dataclasses.replace` takes several times as long.)"""
    if terms.depth == depth and terms.gang == gang:
        return terms
    return RequestContext(terms.tenant, terms.app, terms.deadline, terms.goal, terms.weight, depth, terms.session, gang)


def more_urgent(one: RequestContext, other: RequestContext) -> RequestContext:
    """Return the terms of a request that two callers want: the earlier deadline and goal, greater weight and depth."""
    if one == other:
        return one
    first = other if other.depth > one.depth else one
    if (one.deadline, one.goal, one.weight) == (other.deadline, other.goal, other.weight):
        return first
    deadlines = [terms.deadline for terms in (one, other) if terms.deadline is not None]
    goals = [terms.goal for terms in (one, other) if terms.goal is not None]
    return replace(
        first,
        deadline=min(deadlines, default=None),
        goal=min(goals, default=None),
        weight=max(one.weight, other.weight),
    )


def request_id(query: str) -> str:
    """Return a new id for a request of a query."""
    return f"{query}-{next(_numbers)}"


Deliver = Callable[[Future[list[Any]], list[Any]], None]
"""(future, values): hands the values of a call over."""


class PendingCall:
    """A call of the original: resolved when all of its requests have ended, or one has failed."""

    def __init__(
        self,
        requests: list[EngineRequest],
        future: Future[list[Any]],
        deliver: Deliver = Future.set_result,
        *,
        replace_failed: Callable[[EngineRequest], EngineRequest | None] = lambda _: None,
    ) -> None:
        """`replace_failed`: returns another request for one that has failed, or None if the call has to fail, too."""
        self._requests, self._deliver, self._replace_failed = list(requests), deliver, replace_failed
        self._values: dict[int, Any] = {}
        """Values by identity of the request, taken when it ends: one that nobody else can claim forgets its value."""
        self.future = future
        distinct = {id(request): request for request in requests}.values()
        self._remaining = len(distinct)
        for request in distinct:
            self._wait_for(request)
        if not requests:
            self._deliver(future, [])

    def _wait_for(self, request: EngineRequest) -> None:
        if request.has_ended:
            self.request_ended(request)
        else:
            request.pending_calls.append(self)

    def request_ended(self, request: EngineRequest) -> None:
        """Take the value of a request, or make another request if it has failed."""
        if self.future.done():
            return
        if request.error is not None:
            other = self._replace_failed(request)
            if other is None:
                self.future.set_exception(request.error)
            else:
                self._requests = [other if one is request else one for one in self._requests]
                self._wait_for(other)
            return
        self._remaining -= 1
        self._values[id(request)] = request.value
        if not self._remaining:
            requests, values, self._requests, self._values = self._requests, self._values, [], {}
            self._deliver(self.future, [values[id(one)] for one in requests])
