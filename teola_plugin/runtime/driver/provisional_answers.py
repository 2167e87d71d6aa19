"""Answers begun on a guess at their prompt: what they may write, who claims them, what is left of the others.

A guess is nobody's call. The graph's own prefilling, or the plain object, claims it where its prompt is the same; else
it is stopped, and its text is the draft of the real answer. Nobody hears of one that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.graph import InstancePath, Primitive, PrimitiveKind
from teola_plugin.passes.estimate import ANSWER_TOKENS
from teola_plugin.requests.payloads import Generate, Generation, Sampling, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.claims import Caller, Claims
from teola_plugin.runtime.driver.enqueue_events import enqueue_event
from teola_plugin.runtime.driver.protocol import Driver
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest, GuessRole, placed, request_id
from teola_plugin.runtime.engine_requests.keys import RequestKey, rule_of
from teola_plugin.runtime.engine_requests.table import RequestTable
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.primitive_requests import all_drafts
from teola_plugin.runtime.query_run import Guess, QueryRun
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue
from teola_plugin.scheduling.graph_events import Dispatch, Unused
from teola_plugin.scheduling.objectives import Objective

_K = PrimitiveKind
SHARE = 0.25
"""Of the tokens that a query is expected to write, those that may be written on guesses nobody has come for."""

Identify = Callable[[Port, str, Any], RequestKey | None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked for on a guess: the answer, or that its prompt is read."""

    payload: Generate | Warmup
    kind: PrimitiveKind
    expected: int
    """Tokens of the real answer."""


class ProvisionalAnswers:
    """Of all live queries of one runtime."""

    def __init__(self, driver: Driver, entries: RequestTable, identify: Identify) -> None:
        self._driver, self._works, self._identify = driver, entries, identify

    # ------------------------------------------------------------ begin

    def begin(self, run: QueryRun, order: Dispatch, payload: Any) -> None:
        """The guessed prompt is there. Nothing comes of it where that is of no use: the primitive is dropped."""
        p = order.primitive
        place, port = InstancePath(p.id).settled, self._driver.ports[p.engine]
        asked = _asked(payload, port)
        known = self._identify(port, run.query.tenant, asked.payload) if asked is not None else None
        if asked is None or known is None or place in run.primitives:
            self._unused(run, p.id)
        elif self._works.has(run.id, known):
            self._share(run, p.id, place, known)
        elif asked.expected and _left(run, asked.expected) < 1:
            self._unused(run, p.id)
        else:
            self._send(run, order, asked, known, place, port)

    def _share(self, run: QueryRun, name: str, place: str, known: RequestKey) -> None:
        """Another part has guessed the same."""
        guess = next((one for one in run.guesses.values() if one.entry.key == known), None)
        if guess is not None:
            guess.places.add(place)
            run.guesses[place] = guess
        self._unused(run, name)

    def _send(self, run: QueryRun, order: Dispatch, asked: _Asked, known: RequestKey, place: str, port: Port) -> None:
        p, query = order.primitive.with_(kind=asked.kind), run.query
        warm = asked.kind is _K.PARTIAL_PREFILLING
        named = request_id(run.id)
        request = Request(
            named,
            p.kind,
            asked.payload,
            run.id,
            query.tenant,
            stream=True,
            background=warm,
            app=query.app,
            drafts=all_drafts(port.engine.profile, asked.payload),
        )
        claims, terms = Claims(rule_of(asked.payload), Caller.PLANNER), placed(query.terms, 0, "")
        entry = EngineRequest(request, port.name, known, place, claims, terms)
        guess = run.guesses[place] = Guess(p.id, entry, asked.expected, {place})
        run.expected += asked.expected
        self._works.offer(run.id, known, entry)
        self._driver.trace.guessed(run, p, asked.payload)
        event = enqueue_event(self._driver.now(), run, p.with_(id=place), 0, None)
        port.enqueue([entry], replace(event, objective=Objective.PROVISIONAL, gang=""))
        if guess.over:  # refused
            run.guesses.pop(place, None)

    # ------------------------------------------------------------ what its port reports

    def started(self, run: QueryRun, entry: EngineRequest, instance: str, batch: int) -> None:
        guess = _of(run, entry)
        if guess is not None:
            self._driver.trace.started(run, guess.primitive, instance, batch)

    def piece(self, run: QueryRun, entry: EngineRequest, piece: Piece) -> None:
        """It is stopped where it has written as much as it may: its text remains, as a draft."""
        guess = _of(run, entry)
        if guess is None or guess.over:
            return
        self._driver.trace.first(run, guess.primitive)
        guess.tokens += piece.tokens
        run.guessed += piece.tokens
        if guess.expected and _left(run) <= 0:
            self._stop(run, guess)

    def ended(self, run: QueryRun, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """Its port is done with it. One that ended well may still be claimed."""
        guess = _of(run, entry)
        if guess is None or guess.over:
            return
        if error is None and isinstance(value, Generation):
            run.guessed += value.completion_tokens - guess.tokens
            guess.tokens, guess.text = value.completion_tokens, value.text
        self._over(run, guess, "done" if error is None else "wasted", value)

    def again(self, run: QueryRun, entry: EngineRequest) -> bool:
        """A claimed one has failed: an engine elsewhere may have stopped it before the claim came there. Whether it is
        asked for once more, as the call that it is by now."""
        if entry.guess_role is not GuessRole.CLAIMED or entry.is_cancelled:
            return False
        entry.guess_role = GuessRole.NONE
        entry.retry()
        depth, query = entry.queued_depth, run.query
        event = Enqueue(
            self._driver.now(), run.id, entry.primitive, entry.request.kind, (), depth, query.app, query.weight
        )
        self._driver.ports[entry.engine].enqueue([entry], event)
        return True

    # ------------------------------------------------------------ ends

    def claimed(self, run: QueryRun, entry: EngineRequest, caller: Caller, name: str, depth: int) -> None:
        """Somebody asks for the same: from now on it is that party's, by that name, and as urgent as any."""
        entry.guess_role = GuessRole.CLAIMED
        guess = _of(run, entry)
        if guess is None:
            return
        if not entry.has_ended:
            wanted = {entry.primitive: (Objective.LATENCY, "")}
            news = DepthChanged(self._driver.now(), run.id, {entry.primitive: depth}, wanted)
            self._driver.ports[entry.engine].depths(news)
        entry.primitive, entry.claims.made_by, entry.queued_depth = name, caller, depth
        run.guessed -= guess.tokens
        for place in guess.places:
            run.guesses.pop(place, None)
        run.expected -= guess.expected
        self._driver.trace.guess_ended(run, guess, "claimed")
        if caller is Caller.ORIGINAL:
            self._driver.trace.called(run, name, [entry], depth)
            if entry.has_begun:
                self._driver.trace.started(run, name)
        self._unused(run, guess.primitive)

    def drafts(self, run: QueryRun, p: Primitive, payload: Any, known: RequestKey | None) -> tuple[str, ...]:
        """The prompt is there, and asks for this. Where it was guessed, that remains to be claimed; a wrong guess is
        stopped, and its text may be repeated."""
        guess = run.guesses.get(p.id)
        if guess is None:
            return ()
        entry, asked = guess.entry, guess.entry.request.payload
        if entry.key == known and not (entry.is_cancelled or entry.has_failed):
            return ()
        self._leave(run, guess, p.id, read=isinstance(asked, Warmup) and asked.prompt == payload.prompt)
        return (guess.text,) if guess.text else ()

    def give_up(self, run: QueryRun, name: str) -> bool:
        """The graph does not want it any more, by the id of its primitive. Whether it was a guess."""
        place = InstancePath(name).settled
        guess = run.guesses.get(place) if place != name else None
        if guess is not None:
            self._leave(run, guess, place)
        return guess is not None

    def settle(self, run: QueryRun, part: str = "") -> None:
        """The query is over, or a part of it: what nobody has claimed is stopped, and forgotten."""
        for place, guess in list(run.guesses.items()):
            if not part or InstancePath(place).inside(part) is not None:
                self._leave(run, guess, place)

    def _leave(self, run: QueryRun, guess: Guess, place: str, *, read: bool = False) -> None:
        """`read`: it was to read a prompt that is the right one, and has, as far as it came."""
        guess.places.discard(place)
        run.guesses.pop(place, None)
        if not guess.places:
            self._stop(run, guess)
            self._driver.trace.guess_ended(run, guess, "claimed" if read else "wasted")
            self._works.withdraw(guess.entry)
            run.expected -= guess.expected

    def _stop(self, run: QueryRun, guess: Guess) -> None:
        if guess.over:
            return
        self._over(run, guess, "wasted")
        port = self._driver.ports[guess.entry.engine]
        if port.holds(guess.entry):
            port.cancel([guess.entry])

    def _over(self, run: QueryRun, guess: Guess, outcome: str, value: Any = None) -> None:
        guess.over, guess.text = True, guess.text or guess.entry.stream.text
        self._driver.trace.guess_ended(run, guess, outcome, value)
        self._unused(run, guess.primitive)

    def _unused(self, run: QueryRun, name: str) -> None:
        self._driver.post(Unused(self._driver.now(), run.id, name))


def _asked(payload: Any, port: Port) -> _Asked | None:
    """The answer itself, if it comes out the same whenever it is written. Of a sampled one the prompt alone: whether it
    is kept would hang on how soon it ended, and short answers would become likelier than they are."""
    profile = port.engine.profile
    if not isinstance(payload, Generate) or not profile.dedicated:
        return None
    if repeatable(payload.sampling):
        return _Asked(payload, _K.PREFILLING, min(payload.sampling.max_tokens, ANSWER_TOKENS))
    return _Asked(Warmup(payload.prompt), _K.PARTIAL_PREFILLING, 0) if profile.prefix_caching else None


def repeatable(sampling: Sampling) -> bool:
    """Whether the text is the same each time."""
    return sampling.greedy or sampling.seed is not None


def _left(run: QueryRun, more: int = 0) -> float:
    """Tokens that may still be written on guesses, if `more` are expected besides."""
    return SHARE * (run.wrote + run.expected + more) - run.guessed


def _of(run: QueryRun, entry: EngineRequest) -> Guess | None:
    return next((guess for guess in run.guesses.values() if guess.entry is entry), None)
