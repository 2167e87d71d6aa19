"""Parts of a live query: they begin later than the query, and have e-graphs of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.graph import Graph, InstancePath
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.claims import PlannerGraph
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
