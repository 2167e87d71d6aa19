"""Which plan of a node holds for a state: one for each way that conditions on the state have gone.

A plan is made for the answers to the conditions that were asked while it was made, in their order. Whoever comes with
another state goes the same way as far as its answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from teola_plugin.tracer.functions.deciding import Condition, Decide

T = TypeVar("T")
Make = Callable[[Decide | None], T]
"""Makes a plan; without `Decide` both ways of each condition are open."""
MOST = 16
"""Plans for one node; for a state beyond, that in which nothing is decided."""


@dataclass(slots=True)
class _Fork(Generic[T]):
    """A condition that was asked, and where each answer leads; without one, the plan."""

    condition: Condition | None = None
    plan: T | None = None
    answers: dict[bool | None, _Fork[T]] = field(default_factory=dict)


class Decided(Generic[T]):
    """Plans of one node, by the answers of conditions on the state."""

    def __init__(self, make: Make[T]) -> None:
        self._make = make
        self._first: _Fork[T] | None = None
        self._open: T | None = None
        self._count = 0

    def plan(self, value: Any) -> T | None:
        """For a template's input. Makes it when it is wanted first; raises what `make` raises."""
        fork = self._first
        while fork is not None:
            if fork.condition is None:
                return fork.plan
            fork = fork.answers.get(fork.condition.holds(value))
        return self._made(value) if self._count < MOST else self._undecided()

    def _made(self, value: Any) -> T:
        asked: list[tuple[Condition, bool | None]] = []

        def decide(condition: Condition) -> bool | None:
            answer = condition.holds(value)
            asked.append((condition, answer))
            return answer

        made = self._make(decide)
        self._count += 1
        fork = self._first = self._first or _Fork()
        for condition, answer in asked:
            fork.condition = fork.condition or condition
            fork = fork.answers.setdefault(answer, _Fork())
        fork.plan = made
        return made

    def _undecided(self) -> T:
        if self._open is None:
            self._open = self._make(None)
        return self._open
