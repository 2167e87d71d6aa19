"""Calls of the user's own models and retrievers: where they stand, what was asked, what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from teola_plugin.adapters.langchain.own_models.gates import Gate
from teola_plugin.adapters.langchain.own_models.replay import EventLog


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A leaf of the user's own at its place in the chain."""

    key: str
    leaf: Runnable[Any, Any]
    kwargs: Mapping[str, Any]
    """Arguments bound to it there."""
    config: RunnableConfig
    """What the bindings around it add to its config."""
    gate: Gate | None
    """Of the object: one call at a time, unless it is known to be safe."""
    mapped: bool = False
    """Called once for each item of a list, so maybe with what an item is predicted to be."""
    within: str = ""
    """Path of the user's object that holds it, where that is planned with an equivalent chain."""

    @property
    def tags(self) -> list[str]:
        return list(getattr(self.leaf, "tags", None) or [])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave; the user's own exception is a value here."""

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class State(Enum):
    WAITING = "waiting"
    """The graph wants it; nobody has made it yet."""
    EARLY = "early"
    PLAIN = "plain"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class LeafCall:
    """One call of a leaf, made or to be made."""

    site: Site
    input: Any
    state: State
    for_graph: bool = False
    for_plain: bool = False
    outcome: Future[Outcome] = field(default_factory=Future)
    log: EventLog = field(default_factory=EventLog)
    stop: Callable[[], object] = bool
    """Gives an early call up, where that is possible."""

    def end(self, outcome: Outcome) -> None:
        with contextlib.suppress(Exception):  # given up before
            self.outcome.set_result(outcome)


def same(one: Any, other: Any) -> bool:
    """Whether two inputs of a leaf are equal, as far as that can be told."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # values that cannot be compared are not known to be the same
        return False


def outcome_of(make: Callable[[], Any]) -> Outcome:
    """What the call gives or raises."""
    try:
        return Outcome(make())
    except BaseException as error:
        return Outcome(error=error)


async def aoutcome_of(made: Awaitable[Any]) -> Outcome:
    """`outcome_of` in a loop; being cancelled is an outcome too."""
    try:
        return Outcome(await made)
    except BaseException as error:
        return Outcome(error=error)
