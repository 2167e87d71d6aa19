"""The requests of one query by content: whoever comes first starts one, the other claims it.

Two parties ask for the same work: the e-graph, ahead of time, and the plain object, in its own order. Only what the
plain object claims can become visible, so early work never changes an answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.base import Piece, Request
from teola_plugin.engines.payloads import Generate, SearchVector, Version
from teola_plugin.runtime.handles import PieceLog

_numbers = itertools.count(1)


Deliver = Callable[[Future[list[Any]], list[Any]], None]
"""(future, values): what happens with the values of a call."""


class PendingCall:
    """A call of the plain object: resolved when all of its requests have ended, or one has failed."""

    def __init__(
        self, entries: list[RequestEntry], future: Future[list[Any]], deliver: Deliver = Future.set_result
    ) -> None:
        self._entries, self._deliver = entries, deliver
        self.future = future
        self._left = sum(not entry.ended for entry in entries)
        for entry in entries:
            if not entry.ended:
                entry.waiting.append(self)
        failed = next((entry for entry in entries if entry.failed), None)
        if failed is not None:
            self.future.set_exception(failed.error)
        elif not self._left:
            self._finish()

    def one_ended(self, entry: RequestEntry) -> None:
        self._left -= 1
        if self.future.done():
            return
        if entry.error is not None:
            self.future.set_exception(entry.error)
        elif not self._left:
            self._finish()

    def _finish(self) -> None:
        self._deliver(self.future, [entry.value for entry in self._entries])


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One request under way: what is asked, who wants it, where the result will be."""

    request: Request
    engine: str
    key: Hashable | None
    primitive: str
    """The primitive it is queued, run and traced as."""
    ended: bool = False
    value: Any = None
    error: BaseException | None = None
    waiting: list[PendingCall] = field(default_factory=list)
    """Calls of the plain object that wait for it."""
    pieces: list[Piece] = field(default_factory=list)
    """All so far, for readers that come late."""
    logs: list[PieceLog] = field(default_factory=list)
    """Readers of the pieces."""
    by_graph: bool = False
    by_plain: int = 0
    """Calls of the plain object that wait for it or took it."""
    spare: bool = False
    """Made for a part that is yet to be chosen: its own graph, once there, may claim it."""
    found_version: Version | None = None
    """SEARCHING: of the collection, as its store said with the hits; None from a store that cannot tell."""
    version: int = -1
    """SEARCHING: write count of its collection when it was asked."""
    attempts: int = 0
    text: str = ""
    """Streamed so far."""
    prefilled: bool = False
    repeated: int = 0
    """Characters of `text` that a retry has yet to say again."""
    cancelled: bool = False

    def add_piece(self, piece: Piece) -> None:
        self.pieces.append(piece)
        for log in self.logs:
            log.append(piece)

    def fresh(self, piece: Piece) -> Piece:
        """What is new in it: a retry says again what was passed on before."""
        if self.repeated:
            known = min(self.repeated, len(piece.text))
            self.repeated -= known
            piece = replace(piece, text=piece.text[known:])
        if piece.text:
            self.text += piece.text
        return piece

    def read_into(self, log: PieceLog) -> None:
        """From now on, and from the start, `log` gets every piece."""
        for piece in self.pieces:
            log.append(piece)
        if self.ended:
            log.close()
        else:
            self.logs.append(log)

    def resolve(self, value: Any, error: BaseException | None) -> None:
        """It ended: readers and waiters learn of it."""
        if self.ended:
            return
        self.ended, self.value, self.error = True, value, error
        waiting, self.waiting = self.waiting, []  # no circle of references: large values are freed at once
        for call in waiting:
            call.one_ended(self)
        for log in self.logs:
            log.close()

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def repeatable(self) -> bool:
        """Whether doing it again gives the same: a sampled text that was partly passed on cannot be repeated."""
        payload = self.request.payload
        sampled = isinstance(payload, Generate) and not payload.sampling.greedy and payload.sampling.seed is None
        return not self.cancelled and not (sampled and self.text)

    @property
    def wanted(self) -> bool:
        return self.by_graph or self.by_plain > 0


def request_id(query: str) -> str:
    return f"{query}-{next(_numbers)}"


class RequestTable:
    """All requests of one query. Deterministic work is shared freely; a generation serves each party once."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, list[RequestEntry]] = {}
        self._unkeyed: list[RequestEntry] = []

    def __iter__(self) -> Iterator[RequestEntry]:
        return itertools.chain(self._unkeyed, *self._by_key.values())

    def add(self, entry: RequestEntry) -> None:
        if entry.key is None:
            self._unkeyed.append(entry)
        else:
            self._by_key.setdefault(entry.key, []).append(entry)

    def clear(self) -> None:
        """The query is over: whoever still waits for a request holds it by itself."""
        self._by_key.clear()
        self._unkeyed.clear()

    def find(self, key: Hashable | None, *, plain: bool, version: int = -1) -> RequestEntry | None:
        """An entry that can serve this party: not failed, not cancelled, not stale, not taken."""
        if key is None:
            return None
        for entry in self._by_key.get(key, ()):
            if entry.cancelled or entry.failed:
                continue
            payload = entry.request.payload
            if isinstance(payload, Generate) and (entry.by_plain if plain else entry.by_graph and not entry.spare):
                continue  # two calls of one party stay two calls
            if isinstance(payload, SearchVector) and entry.version != version:
                continue
            return entry
        return None
