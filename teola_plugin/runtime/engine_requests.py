"""Requests to engines: payload, progress, result, the calls that wait for it, and the table of a pool's requests.

The pieces of one result are delivered to readers as they come, and kept for retries, which must repeat what was read.
The table holds requests by query, and counts how often collections have been written to.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from teola_plugin.errors import EngineError
from teola_plugin.graph import RequestContext
from teola_plugin.requests.payloads import (
    CallTool,
    Generate,
    Generation,
    IngestRow,
    Piece,
    Request,
    SearchVector,
    Version,
)
from teola_plugin.runtime.claims import MAX_REMEMBERED, OWN_GRAPH, Caller, Claims, ClaimTable, PlannerGraph, RequestKey
from teola_plugin.runtime.loop_thread import PieceLog


@dataclass(slots=True, eq=False)
class ResultStream:
    """The pieces of the result of one request, and their readers."""

    request_id: str
    engine: str
    is_coarse: bool = False
    """True if the request was sent as one whose pieces nobody reads: they need not add up to its text."""
    is_passed_on: bool = False
    """True if its pieces go where they cannot be taken back, besides its readers: into items, to another process."""
    is_prefilled: bool = False
    """True once the prompt is computed."""
    cuts: tuple[int, ...] = ()
    """Lengths of the pieces in which a coarse text would have come, in characters. Known at its end."""
    pieces: list[Piece] = field(default_factory=list)
    """All pieces so far, for readers that come late."""
    piece_count: int = 0
    """Number of pieces that came, including those of earlier attempts."""
    first_characters: int = 0
    first_tokens: int = 0
    """Length of the first piece."""
    text: str = ""
    """What was streamed so far."""
    unrepeated: int = 0
    """Number of characters at the end of `text` that a retry has yet to repeat."""
    readers: list[PieceLog] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Add a piece for all readers."""
        if not self.piece_count:
            self.first_characters, self.first_tokens = len(piece.text), piece.tokens
        self.piece_count += 1
        self._append(piece)

    def _append(self, piece: Piece) -> None:
        self.pieces.append(piece)
        for reader in self.readers:
            reader.append(piece)

    def restart(self) -> None:
        """Expect everything that came so far once more, from a retry."""
        self.is_prefilled, self.unrepeated = False, len(self.text)

    def new_part(self, piece: Piece) -> Piece:
        """Return the part of a piece that was not delivered before the retry.

        If the retry produces different text, what came before is forgotten. Raises `EngineError` if somebody may have
        acted on that.
        """
        if self.unrepeated:
            position = len(self.text) - self.unrepeated
            repeated = self.text[position : position + len(piece.text)]
            if piece.text.startswith(repeated):
                self.unrepeated -= len(repeated)
                piece = replace(piece, text=piece.text[len(repeated) :])
            else:
                self._forget_from(position)
        if piece.text:
            self.text += piece.text
        return piece

    def take_text_of_retry(self, value: object) -> None:
        """Make sure that the result of a retry begins with what was delivered. Raises as `new_part` does."""
        if self.text and isinstance(value, Generation) and not value.text.startswith(self.text):
            self._forget_from(0)
            self.pieces = [Piece(self.request_id, value.text, value.completion_tokens)]
            self.text = value.text

    def _forget_from(self, position: int) -> None:
        """Drop what was streamed from this character on, since a retry differs there. Only predictions have read it.

        Raise `EngineError` if somebody may have acted on it.
        """
        if self.is_seen:
            raise EngineError(
                f"request {self.request_id} was done again, and its text is another one than that which was passed on.",
                engine=self.engine,
                hint="ask again; for equal texts, sample greedily or with a seed, on replicas of one kind",
            )
        self.close()
        self.readers = []
        self.text, self.unrepeated = self.text[:position], 0
        self.pieces = [Piece(self.request_id, self.text)] if self.text else []

    def replay(self, reader: PieceLog) -> None:
        """Give a reader all pieces so far."""
        for piece in self.pieces:
            reader.append(piece)

    def add_rest(self, value: object) -> None:
        """Give readers the rest of a coarse text, which has ended."""
        if self.is_coarse and isinstance(value, Generation):
            streamed = "".join(piece.text for piece in self.pieces)
            if value.text.startswith(streamed):
                for rest in self._cut(value.text, len(streamed)):
                    self._append(Piece(self.request_id, rest))

    def _cut(self, text: str, start: int) -> Iterator[str]:
        """Yield the text from `start` on in pieces that end where the cuts say."""
        for end in (*itertools.accumulate(self.cuts), len(text)):
            if start < end <= len(text):
                yield text[start:end]
                start = end

    def close(self) -> None:
        """End the stream for all readers."""
        for reader in self.readers:
            reader.close()

    def clear(self) -> None:
        """Let everything go."""
        self.pieces, self.readers, self.text = [], [], ""

    @property
    def is_seen(self) -> bool:
        """True if somebody may have acted on what came so far."""
        return self.is_passed_on or self.is_read

    @property
    def is_read(self) -> bool:
        """True if somebody takes the pieces for the result as they come."""
        return any(not reader.speculative for reader in self.readers)


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
    request_context: RequestContext = NO_CONTEXT
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

    def subscribe(self, caller: Caller, request_context: RequestContext) -> None:
        """Note that a caller with this context waits for the result."""
        self.claims.add(caller)
        self.raise_urgency(request_context)

    def raise_urgency(self, request_context: RequestContext) -> None:
        """Make the request as urgent as this context requires.

        A request that several callers share is as urgent as the most urgent of them requires.
        """
        if request_context is not self.request_context:
            self.request_context = more_urgent(self.request_context, request_context)

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


def placed(request_context: RequestContext, depth: int, gang: str) -> RequestContext:
    """Return the same context at another depth and gang. (`dataclasses.replace` takes several times as long.)"""
    if request_context.depth == depth and request_context.gang == gang:
        return request_context
    return RequestContext(
        request_context.tenant,
        request_context.app,
        request_context.deadline,
        request_context.goal,
        request_context.weight,
        depth,
        request_context.session,
        gang,
    )


def more_urgent(one: RequestContext, other: RequestContext) -> RequestContext:
    """Return the context of a request of two callers: the earlier deadline and goal, the greater weight and depth."""
    if one == other:
        return one
    first = other if other.depth > one.depth else one
    if (one.deadline, one.goal, one.weight) == (other.deadline, other.goal, other.weight):
        return first
    deadlines = [request_context.deadline for request_context in (one, other) if request_context.deadline is not None]
    goals = [request_context.goal for request_context in (one, other) if request_context.goal is not None]
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
        """Have a request report its end to this call; take its value at once if it has ended."""
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


class _QueryRequests:
    """The requests of one query."""

    def __init__(self, max_remembered: int) -> None:
        self.claims = ClaimTable[EngineRequest](max_remembered)
        self.open: dict[str, EngineRequest] = {}
        """Those that have not ended, by id."""
        self.prefetched: dict[str, EngineRequest] = {}
        """Those that the planner made, by id, until their graphs are over."""

    def add(self, request: EngineRequest) -> EngineRequest:
        """Add a new request to those that are open, and to the prefetched ones if the planner made it."""
        self.open[request.request.id] = request
        if request.claims.made_by is Caller.PLANNER:
            self.prefetched[request.request.id] = request
        return request


class RequestTable:
    """The table of all requests of a pool to its engines. Queries share nothing: each has claims of its own."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._queries: dict[str, _QueryRequests] = {}
        self._max_remembered = max_remembered

    def join(
        self,
        query: str,
        key: RequestKey | None,
        caller: Caller,
        request_context: RequestContext,
        make: Callable[[], EngineRequest],
        graph: PlannerGraph = OWN_GRAPH,
    ) -> EngineRequest:
        """Return the request that `caller` gets for a key: an earlier one that it may claim, or else a new one.

        Whoever gets a request that `is_expected` has to send it, unless it is a write that the planner waits for.
        `graph`: the graph that asks, if the caller is the planner.
        """
        requests = self._of(query)
        request = requests.claims.claim_or_add(key, caller, lambda: requests.add(make()), graph)
        request.raise_urgency(request_context)
        return request

    def end(self, request: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request for everybody who waits for it. Forget it if nobody can claim it any more.

        Args:
            value: The result; None for a failed request.
            error: What went wrong; None for a request that succeeded.
        """
        requests = self._queries.get(request.request.query)
        request.resolve(value, error)
        if requests is not None and requests.open.pop(request.request.id, None) is not None:
            requests.claims.end(request)

    def drop_writes(self, engine: str, collection: str) -> None:
        """Forget the rows that the original has written to a collection: it writes or deletes there again."""

        def is_there(request: EngineRequest) -> bool:
            return request.engine == engine and request.request.payload.collection == collection

        for requests in self._queries.values():
            requests.claims.drop_writes(is_there)

    def release(self, query: str, ended_requests: Iterable[EngineRequest]) -> None:
        """Forget ended requests of subplans that are over, unless a later subplan may claim them."""
        requests = self._queries.get(query)
        if requests is None:
            return
        for request in ended_requests:
            if request.has_ended and requests.prefetched.pop(request.request.id, None) is not None:
                requests.claims.release(request)

    def of(self, query: str) -> Iterator[EngineRequest]:
        """Iterate over the requests of a query that are under way, and over those that the planner made."""
        requests = self._queries.get(query)
        if requests is not None:
            yield from (requests.prefetched | requests.open).values()

    def forget(self, query: str) -> None:
        """End a query. Whoever still waits for a request has it."""
        self._queries.pop(query, None)

    def __len__(self) -> int:
        return len(self._queries)

    def _of(self, query: str) -> _QueryRequests:
        """Return the requests of a query, none yet if it is new."""
        requests = self._queries.get(query)
        if requests is None:
            requests = self._queries[query] = _QueryRequests(self._max_remembered)
        return requests


class Writes:
    """The numbers of writes of this process, ingestions and deletions, by engine and collection.

    A search made before a write is not used after it.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note_end(self, engine: str, payload: Any) -> None:
        """Count a request that has ended, well or not."""
        if isinstance(payload, IngestRow):
            self._counts[engine, payload.collection] += 1

    def note_call(self, engine: str, method: str, args: Sequence[Any]) -> bool:
        """Count a call of an engine's method, with the collection first. Return True if it may have written.

        A method writes if its name begins with `delete` or `forget` and its first argument is a text.
        """
        writes = method.startswith(("delete", "forget")) and bool(args) and isinstance(args[0], str)
        if writes:
            self._counts[engine, args[0]] += 1
        return writes

    def version(self, engine: str, payload: Any) -> int:
        """Return the number of writes to the collection of a search; -1 for any other request."""
        return self._counts[engine, payload.collection] if isinstance(payload, SearchVector) else -1
