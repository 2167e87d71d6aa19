"""A fake store that keeps its history, and the results of a search in each of its states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from teola_plugin.engines.fake import FakeStore
from teola_plugin.requests.payloads import Chunk, Hit, IngestRow, Request

Row = tuple[Chunk, tuple[float, ...]]
State = Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Commit:
    """A change of the store: what was written, and what was there afterwards."""

    at: int
    row: IngestRow | None
    state: State


@dataclass(slots=True)
class History:
    """One order of everything that happens: commits, and starts and ends of calls."""

    commits: list[Commit] = field(default_factory=lambda: [Commit(0, None, {})])
    now: int = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def put(self, row: IngestRow, *, overtaken: bool = False) -> None:
        """Record a row. `overtaken`: a later write or deletion has already been committed, so nobody sees the row."""
        before = self.commits[-1].state
        self._commit(row, before if overtaken else {**before, row.chunk.id: stored(row.chunk, row.vector)})

    def delete(self, ids: Sequence[str] | None) -> None:
        """Record a deletion of these ids, or of all rows for None."""
        before = self.commits[-1].state
        self._commit(None, {} if ids is None else {id: row for id, row in before.items() if id not in ids})

    def _commit(self, row: IngestRow | None, state: State) -> None:
        self.commits.append(Commit(self.tick(), row, state))

    def states(self, begun: int, ended: int) -> list[State]:
        """Return all states of the store between two moments."""
        first = max(i for i, commit in enumerate(self.commits) if commit.at <= begun)
        return [commit.state for commit in self.commits[first:] if commit.at <= ended]


class HistoricStore(FakeStore):
    """Tells its history of every change, whoever makes it. Of one collection."""

    history: History

    def _commit(self, request: Request, value: Any) -> Any:
        result = super()._commit(request, value)
        if isinstance(request.payload, IngestRow):
            self.history.put(request.payload, overtaken=not self._holds(request.payload))
        return result

    def _holds(self, row: IngestRow) -> bool:
        """Return True if the row is stored, and False if a later write of the same row came first."""
        held = self._rows(row.collection).get(row.chunk.id)
        return held is not None and held[0].text == row.chunk.text

    async def delete(self, collection: str, ids: Sequence[str]) -> int:
        gone = await super().delete(collection, ids)
        self.history.delete(ids)
        return gone

    async def delete_collection(self, collection: str) -> None:
        await super().delete_collection(collection)
        self.history.delete(None)


def stored(chunk: Chunk, vector: Sequence[float]) -> Row:
    return chunk, _unit(vector)


def nearest(state: State, needle: Sequence[float], k: int) -> tuple[Hit, ...]:
    """Return the result of an exact search."""
    wanted = _unit(needle)
    scored = [(sum(map(mul, wanted, vector)), chunk) for chunk, vector in state.values()]
    scored.sort(key=lambda found: (-found[0], found[1].id))
    return tuple(Hit(chunk.id, chunk.text, chunk.metadata, score) for score, chunk in scored[:k])


def alike(found: Sequence[Hit], wanted: Sequence[Hit]) -> bool:
    """Return True if the rows and distances are equal. Rows at the same distance may come in any order."""
    if [round(hit.score, 5) for hit in found] != [round(hit.score, 5) for hit in wanted]:
        return False
    key: Callable[[Hit], Any] = lambda hit: (-round(hit.score, 5), hit.id, hit.text, str(dict(hit.metadata)))  # noqa: E731
    return sorted(map(key, found)) == sorted(map(key, wanted))


def _unit(vector: Sequence[float]) -> tuple[float, ...]:
    norm = math.hypot(*vector) or 1.0
    return tuple(x / norm for x in vector)
