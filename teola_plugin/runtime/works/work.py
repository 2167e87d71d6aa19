"""What is asked of engines: a request under way or done is a `Work`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.errors import EngineError
from teola_plugin.graph import Terms
from teola_plugin.requests.payloads import CallTool, Generate, Generation, Version
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.claims import Caller, Claims
from teola_plugin.runtime.handles import PieceLog
from teola_plugin.runtime.works.identities import Identity

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Hints:
    """What may help an engine and never changes a result."""

    drafts: tuple[str, ...] = ()
    """Texts that the answer may repeat."""
    expected_tokens: int | None = None


NO_HINTS, NO_TERMS = Hints(), Terms()


@dataclass(slots=True, eq=False)
class Work:
    """One request, under way or done: what is asked, who wants it, where the result will be."""

    request: Request
    engine: str
    identity: Identity | None
    """None for what is never shared."""
    primitive: str
    """The primitive it is queued, run and traced as."""
    claims: Claims = field(default_factory=Claims)
    terms: Terms = NO_TERMS
    """Of its most urgent subscriber; they hold on a retry, too."""
    hints: Hints = NO_HINTS
    made: bool = True
    """Whether it was sent to its engine; a write that the graph waits for is sent by the plain object."""
    ended: bool = False
    value: Any = None
    error: BaseException | None = None
    waiting: list[PendingCall] = field(default_factory=list)
    """Calls of the plain object that wait for it."""
    pieces: list[Piece] = field(default_factory=list)
    """All so far, for readers that come late."""
    came: int = 0
    """How many came, also of those that are forgotten."""
    begun_with: int = 0
    """Characters of the first."""
    begun_tokens: int = 0
    """Its tokens."""
    coarse: bool = False
    """Whether it was sent as one whose pieces nobody reads: they need not add up to its text."""
    cuts: tuple[int, ...] = ()
    """Then: characters of the pieces that it would have come in, once it has ended."""
    logs: list[PieceLog] = field(default_factory=list)
    """Readers of the pieces."""
    provisional: bool = False
    """Made on a guess, and nobody has come for it: no party has it, and whoever comes first makes it theirs."""
    guessed: bool = False
    """Whether it was made on a guess, and has not been asked for anew."""
    for_guess: bool = False
    """Only a guess at a prompt needs it so far: it waits until its engine is idle."""
    queued_depth: int = 0
    queued_gang: str = ""
    """As its engine was told."""
    stale: bool = False
    """What it found is no longer so: nobody may claim it any more."""
    found_version: Version | None = None
    """SEARCHING: of the collection, in the search's own snapshot."""
    writes_seen: int = -1
    """SEARCHING: how many writes of this process its collection had when it was asked."""
    attempts: int = 0
    began: bool = False
    """Whether it has left the queue of its engine."""
    text: str = ""
    """Streamed so far."""
    prefilled: bool = False
    repeated: int = 0
    """Characters of `text` that a retry has yet to say again."""
    passed_on: bool = False
    """Whether its pieces go where they cannot be taken back, beside its readers: into items, to another process."""
    cancelled: bool = False
    checking: int = 0
    """SEARCHING: calls that have claimed it, and look whether it is still so before they take its value."""
    forgotten: bool = False

    # ------------------------------------------------------------ pieces

    def add_piece(self, piece: Piece) -> None:
        if not self.came:
            self.begun_with, self.begun_tokens = len(piece.text), piece.tokens
        self.came += 1
        self.pieces.append(piece)
        for log in self.logs:
            log.append(piece)

    def again(self) -> None:
        """It is to be done again: what was said before will be said once more."""
        self.attempts += 1
        self.prefilled, self.repeated = False, len(self.text)

    def fresh(self, piece: Piece) -> Piece:
        """What is new in it: a retry says again what was passed on before. If it says something else, that counts
        where nobody has seen the first; otherwise raises `EngineError`."""
        if self.repeated:
            at = len(self.text) - self.repeated
            known = self.text[at : at + len(piece.text)]
            if piece.text.startswith(known):
                self.repeated -= len(known)
                piece = replace(piece, text=piece.text[len(known) :])
            else:
                self._take_back(at)
        if piece.text:
            self.text += piece.text
        return piece

    def agree(self, value: Any) -> None:
        """The value of a retry must begin with what was passed on. Raises `EngineError` as `fresh` does."""
        if self.attempts and self.text and isinstance(value, Generation) and not value.text.startswith(self.text):
            self._take_back(0)
            self.pieces = [Piece(self.request.id, value.text, value.completion_tokens)]
            self.text = value.text

    def _take_back(self, at: int) -> None:
        """Forget what was said from this character on."""
        if self.seen:
            raise EngineError(
                f"request {self.request.id} was done again, and its text is another one than that which was passed on.",
                engine=self.engine,
                hint="ask again; for equal texts, sample greedily or with a seed, on instances of one kind",
            )
        for log in self.logs:
            log.close()
        self.logs = []
        self.text, self.repeated = self.text[:at], 0
        self.pieces = [Piece(self.request.id, self.text)] if self.text else []

    def _say_rest(self, text: str) -> None:
        """What no piece has said of its text, for readers that come late."""
        said = "".join(piece.text for piece in self.pieces)
        for rest in _cut(text, self.cuts, len(said)) if text.startswith(said) else ():
            self.pieces.append(Piece(self.request.id, rest))
            for log in self.logs:
                log.append(self.pieces[-1])

    def read_into(self, log: PieceLog) -> None:
        """From now on, and from the start, `log` gets every piece."""
        for piece in self.pieces:
            log.append(piece)
        if self.ended:
            log.close()
        else:
            self.logs.append(log)

    # ------------------------------------------------------------ ends

    def resolve(self, value: Any, error: BaseException | None) -> None:
        """It ended: readers and waiters learn of it."""
        if self.ended:
            return
        self.ended, self.value, self.error = True, value, error
        if self.coarse and isinstance(value, Generation):
            self._say_rest(value.text)
        waiting, self.waiting = self.waiting, []  # no circle of references: large values are freed at once
        for call in waiting:
            call.one_ended(self)
        for log in self.logs:
            log.close()

    def forget(self) -> None:
        """Nobody can claim it any more: its result is let go, once those who have claimed it have taken it."""
        self.forgotten = True
        if self.checking:
            return
        self.value = None
        self.pieces, self.logs, self.text = [], [], ""

    def checked(self) -> None:
        """A call has looked, and has taken its value or not."""
        self.checking -= 1
        if self.forgotten:
            self.forget()

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def lost(self) -> bool:
        """Return True if it has failed in a way that says nothing of another attempt: nobody may claim it."""
        return self.error is not None and not (isinstance(self.error, EngineError) and self.error.is_final)

    @property
    def repeatable(self) -> bool:
        """Whether doing it again gives the same: a sampled text that was partly passed on cannot be repeated, nor can a
        tool that may change something. What was begun on a guess is not worth it."""
        payload = self.request.payload
        if isinstance(payload, CallTool) and not payload.read_only:
            return False
        sampled = isinstance(payload, Generate) and not payload.sampling.greedy and payload.sampling.seed is None
        return not (self.cancelled or self.provisional or self.for_guess) and not (sampled and self.text and self.seen)

    @property
    def seen(self) -> bool:
        """Whether somebody may have acted on what was said so far."""
        return self.passed_on or self.read

    @property
    def read(self) -> bool:
        """Whether somebody takes its pieces for the result as they come."""
        return any(not log.tentative for log in self.logs)

    # ------------------------------------------------------------ subscribers

    def subscribe(self, caller: Caller, terms: Terms) -> None:
        """Note that a caller waits for the result, on these terms."""
        self.claims.add(caller)
        self.take_terms(terms)

    def take_terms(self, terms: Terms) -> None:
        """Make the request as urgent as these terms require."""
        if terms is not self.terms:
            self.terms = more_urgent(self.terms, terms)

    @property
    def is_claimable(self) -> bool:
        """See `Claimable`."""
        return not (self.cancelled or self.lost or self.stale)

    @property
    def is_expected(self) -> bool:
        """See `Claimable`."""
        return not self.made

    @property
    def goes_on(self) -> bool:
        """Return True for a request of the user's own client that is under way, and that others may come for.

        It is not stopped before its query ends: the server would get it a second time.
        """
        payload = self.request.payload
        return (
            self.began and self.claims.is_for_later_graph and isinstance(payload, Generate) and payload.prompt.carried
        )


def _cut(text: str, cuts: Iterable[int], begin: int) -> Iterator[str]:
    """The text from there on, in pieces that end where the cuts say."""
    for end in (*itertools.accumulate(cuts), len(text)):
        if begin < end <= len(text):
            yield text[begin:end]
            begin = end


def placed(terms: Terms, depth: int, gang: str) -> Terms:
    """The same terms at another place of the query. (`dataclasses.replace` takes several times as long.)"""
    if terms.depth == depth and terms.gang == gang:
        return terms
    return Terms(terms.tenant, terms.app, terms.deadline, terms.goal, terms.weight, depth, terms.session, gang)


def more_urgent(one: Terms, other: Terms) -> Terms:
    """The terms under which a work goes that both want: the earlier deadline and goal, the greater weight and depth."""
    if one == other:
        return one
    first = other if other.depth > one.depth else one
    if (one.deadline, one.goal, one.weight) == (other.deadline, other.goal, other.weight):
        return first
    deadlines = [t.deadline for t in (one, other) if t.deadline is not None]
    goals = [t.goal for t in (one, other) if t.goal is not None]
    return replace(
        first,
        deadline=min(deadlines, default=None),
        goal=min(goals, default=None),
        weight=max(one.weight, other.weight),
    )


def request_id(query: str) -> str:
    return f"{query}-{next(_numbers)}"


Deliver = Callable[[Future[list[Any]], list[Any]], None]
"""(future, values): what happens with the values of a call."""


class PendingCall:
    """A call of the plain object: resolved when all of its works have ended, or one has failed.

    `again` may give another work for one that failed.
    """

    def __init__(
        self,
        works: list[Work],
        future: Future[list[Any]],
        deliver: Deliver = Future.set_result,
        *,
        again: Callable[[Work], Work | None] = lambda _: None,
    ) -> None:
        self._works, self._deliver, self._again = list(works), deliver, again
        self._values: dict[int, Any] = {}
        """Taken at once: a work that nobody else can claim forgets its value."""
        self.future = future
        distinct = {id(work): work for work in works}.values()
        self._left = len(distinct)
        for work in distinct:
            self._wait_for(work)
        if not works:
            self._deliver(future, [])

    def _wait_for(self, work: Work) -> None:
        if work.ended:
            self.one_ended(work)
        else:
            work.waiting.append(self)

    def one_ended(self, work: Work) -> None:
        if self.future.done():
            return
        if work.error is not None:
            other = self._again(work)
            if other is None:
                self.future.set_exception(work.error)
            else:
                self._works = [other if one is work else one for one in self._works]
                self._wait_for(other)
            return
        self._left -= 1
        self._values[id(work)] = work.value
        if not self._left:
            works, values, self._works, self._values = self._works, self._values, [], {}
            self._deliver(self.future, [values[id(one)] for one in works])
