"""One request of a client, from being taken to its end: the query that it belongs to, on which terms, at what cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from teola_plugin.adapters.calls import joined
from teola_plugin.errors import QueryCancelled
from teola_plugin.runtime.context import CallPlace, current_place, during
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.server.access.terms import Caller
from teola_plugin.server.live_queries import LiveQuery


@dataclass(frozen=True, slots=True)
class Kept:
    """A submitted query: what of it outlives the process."""

    id: str
    """Also the name of its thread, in graphs with checkpoints."""
    goes_on: Literal["", "checkpoint", "told"] = ""
    """Empty: it begins. From its last `checkpoint`; or from there, `told` what it has asked somebody for."""
    value: Any = None
    """What it is told."""


@dataclass(slots=True, eq=False)
class Visit:
    """Has a place in the queue until `end`. Handed to models, which work within it."""

    request_id: str
    caller: Caller
    query: LiveQuery
    place: CallPlace
    on_end: Callable[[Visit, str], None]
    tokens: int = 0
    """That it has cost so far."""
    elsewhere: int = 0
    """Those of them that models outside the pool have taken: no trace tells of these."""
    ended: bool = False
    kept: Kept | None = None
    """None for a request that waits for its answer."""

    @property
    def run(self) -> QueryRun:
        """Raises `QueryCancelled` where the query was ended meanwhile, by a request of its own."""
        if self.query.run is None:
            raise QueryCancelled("the query is over.", query_id=self.query.id, hint="begin another one")
        return self.query.run

    @contextmanager
    def placed(self) -> Iterator[QueryRun]:
        """Calls in the body are made where the request says that it stands in its query."""
        with during(current_place, self.place):
            yield self.run

    @contextmanager
    def inside(self) -> Iterator[QueryRun]:
        """Code in the body belongs to the query: whatever it calls of the pool joins it."""
        with self.placed() as run, joined(run):
            yield run

    def cost(self, tokens: int, *, elsewhere: int = 0) -> None:
        """`elsewhere`: those of `tokens` that models outside the pool have taken."""
        self.tokens += tokens
        self.elsewhere += elsewhere

    def end(self, outcome: str) -> None:
        """done, failed or cancelled. Idempotent."""
        if not self.ended:
            self.ended = True
            self.on_end(self, outcome)

    def about(self) -> dict[str, Any]:
        """For the log: ids and figures, no content."""
        return {"query": self.query.id, "app": self.query.app, "key": self.caller.key.name, "tokens": self.tokens}
